"""The house keeps its rules: what may be imported where, and that k3lite needs neither triton nor Jupyter to be imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "k3lite").rglob("*.py"))

# A module may import from layers to its left only (design.md: imports go one way).
ORDER = [
    "config",
    "budget",
    "shards",
    "released",
    "verify",
    "devices",
    "spell",
    "ops",
    "balance",
    "moonep",
    "minifloat",
    "mx",
    "other_formats",
    "qat",
    "pages",
    "cache",
    "attn_res",
    "mlp",
    "kda",
    "mla",
    "moe",
    "packed",
    "model",
    "checkpoint",
    "generate",
    "optim",
    "train",
    "parallel",
    "tasks",
    "bench",
    "bench_kda",
    "bench_decode",
    "bench_moe",
    "bench_mx",
    "recompute",
    "claims",
    "bench_generate",
    "cli_options",
    "cli_train",
    "cli_verify",
    "cli_paper",
    "cli_generate",
    "cli",
]


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{a.name}" for a in node.names} if node.module == "k3lite" else {node.module}
    return names


def layer(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way_and_stay_out_of_jupyter(path):
    names = imports(path)
    outside = {n.split(".")[0] for n in names}
    assert not outside & {"plotly", "ipywidgets", "IPython", "anywidget", "widgets"}
    here = layer(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if here == "__init__":
        return
    for name in names:
        if name.startswith("k3lite."):
            assert ORDER.index(layer(name)) <= ORDER.index(here), f"{here} imports {name}"


def test_budget_and_config_need_the_standard_library_only():
    for name in ("budget", "config", "shards", "released", "verify", "devices", "spell"):
        outside = {n.split(".")[0] for n in imports(ROOT / "k3lite" / f"{name}.py")} - {"k3lite"}
        assert outside <= sys.stdlib_module_names


def test_every_module_imports_where_triton_and_jupyter_do_not_exist():
    """All but the Triton kernels themselves, which are imported when they are asked for."""
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in MODULES]
    for name in ("kda_triton", "mx_triton"):
        modules.remove(f"k3lite.ops.{name}")
    blocked = ["triton", "plotly", "ipywidgets", "IPython", "anywidget"]
    code = f"import sys, importlib\nfor n in {blocked}: sys.modules[n] = None\nfor m in {modules}: importlib.import_module(m)\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
