"""Independent implementations, imported so that all of them can share one process.

With `fla` importable, transformers binds KDA to fla's Triton kernels when its module is imported, and these need
a GPU. So `fla` is hidden for that one import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from tests.absent import absent

NO_DEPS = "pip install --no-deps -r tests/oracles/requirements.txt"
INSTALL = {"transformers": "pip install -e '.[test]'"}


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Make `import package` fail inside."""
    ours = {n: m for n, m in sys.modules.items() if n == package or n.startswith(f"{package}.")}
    for name in ours:
        del sys.modules[name]
    sys.modules[package] = None
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(ours)


def load(module: str) -> ModuleType:
    """Import a part of an oracle. Without it, skip on a reader's machine and fail in CI."""
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as e:
        absent(f"oracle {package} cannot be imported ({e}); {INSTALL.get(package, NO_DEPS)}")


@pytest.fixture(scope="session")
def kimi_linear() -> ModuleType:
    """transformers' Kimi Linear, on its plain PyTorch path."""
    with hidden("fla"):
        return load("transformers.models.kimi_linear.modeling_kimi_linear")


@pytest.fixture(scope="session")
def fla_kda() -> ModuleType:
    return load("fla.ops.kda.naive")


@pytest.fixture(scope="session")
def fla_gate() -> ModuleType:
    return load("fla.ops.kda.gate")


@pytest.fixture(scope="session")
def fla_attnres() -> ModuleType:
    return load("fla.ops.attnres.naive")


@pytest.fixture(scope="session")
def kimi_k3() -> ModuleType:
    """nemo-automodel's Kimi K3."""
    load("fla.ops.kda.naive")
    return load("nemo_automodel.components.models.kimi_k3.model")
