"""Is a folder a checkpoint in the released layout? Answered from headers and index alone. Standard library only.

`checkpoint.load_model` asks less: it also reads files without the prefix, with unpadded A_log, or in a wider dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from k3lite.config import K3Config
from k3lite.released import PREFIX, TensorSpec, VisionConfig, is_k3, tensor_list
from k3lite.shards import Stored, differences, read_shards


@dataclass
class Kind:
    """Tensors of one kind. Bytes, dtypes and files are those of the tensors that match."""

    wanted: int = 0
    matching: int = 0
    nbytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)

    def add(self, other: Kind) -> None:
        self.wanted, self.matching = self.wanted + other.wanted, self.matching + other.matching
        self.nbytes += other.nbytes
        self.dtypes |= other.dtypes
        self.files |= other.files


@dataclass
class Conformance:
    """What of a folder is as released, by kind, and what is not, one line each."""

    kinds: dict[str, Kind]
    problems: list[str]
    nbytes: int  # of all tensors that are there
    tensors: int

    @property
    def total(self) -> Kind:
        total = Kind()
        for kind in self.kinds.values():
            total.add(kind)
        return total


def conformance(folder: str | Path, config: K3Config, vision: VisionConfig | None = None) -> Conformance:
    """Compare the headers in `folder` with `released.tensor_list(config, vision)`."""
    shards = read_shards(folder)
    wanted = {spec.name: spec for spec in tensor_list(config, vision)}
    problems = list(shards.problems)
    found = shards.tensors
    if is_k3(config) and found and not any(name.startswith(PREFIX) for name in found):
        problems.append(f"no name begins with {PREFIX!r}; compared as if all did")
        found = {f"{PREFIX}{name}": tensor for name, tensor in found.items()}
        shards.explained = {f"{PREFIX}{name}" for name in shards.explained}
    problems += differences(shards, found, wanted, _unlike)
    return Conformance(_by_kind(found, wanted), problems, shards.nbytes, len(shards.tensors))


def _unlike(_name: str, stored: Stored, spec: TensorSpec) -> str | None:
    if (stored.dtype, stored.shape) == (spec.dtype, spec.shape):
        return None
    return f"{stored.dtype} {stored.shape}, wanted {spec.dtype} {spec.shape}"


def _by_kind(found: dict[str, Stored], wanted: dict[str, TensorSpec]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for name, spec in wanted.items():
        kind, stored = kinds.setdefault(spec.kind, Kind()), found.get(name)
        fits = stored is not None and _unlike(name, stored, spec) is None
        kind.add(Kind(1, 1, spec.nbytes, {spec.dtype}, {stored.file}) if fits else Kind(wanted=1))
    return kinds
