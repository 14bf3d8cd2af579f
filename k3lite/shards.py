"""Safetensors files of a checkpoint folder by their headers alone, and their index. Standard library only.

A header says each tensor's name, dtype, shape and place; with the file's size that is enough to find every tensor that
is missing, doubled or cut off, and every lie of the index, before a byte of any tensor is read. Format: 8 bytes with
the header's length (little endian), the header as JSON, then the tensors without gaps (safetensors README).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

W = TypeVar("W")


class Stored(NamedTuple):
    """A tensor as a header describes it. dtype: as safetensors spells it ("BF16")."""

    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Named(Protocol):
    """A tensor that a file is to hold, without its numbers. dtype: as safetensors spells it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def make_head(tensors: Iterable[Named]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file of these tensors, and the byte of the file at which each of them begins.

    Order and padding are the safetensors library's: wide numbers first, then by name, so that none is misaligned; blanks
    up to a multiple of 8. A test holds the two to be equal byte for byte.
    """
    header, at = {}, 0
    for t in sorted(tensors, key=lambda t: (-DTYPE_BYTES[t.dtype], t.dtype, t.name)):
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: start + e["data_offsets"][0] for n, e in header.items()}


@contextmanager
def renamed_to(path: Path) -> Iterator[str]:
    """A temporary file beside `path` that gets its name at the end, or vanishes: nobody ever sees half a file."""
    handle, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield tmp
        os.chmod(tmp, 0o644)  # mkstemp makes files that only their owner may read
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


@contextmanager
def tensor_file(path: Path, tensors: Iterable[Named]) -> Iterator[Callable[[str, Any], None]]:
    """Write a file of these tensors, which appears whole or not at all.

    Gives a function of a tensor's name and its bytes; every tensor must be put once, in any order.
    """
    head, places = make_head(tensors)
    with renamed_to(path) as tmp, open(tmp, "r+b") as f:
        f.write(head)

        def put(name: str, numbers: Any) -> None:
            f.seek(places[name])
            f.write(numbers)

        yield put


def make_index(places: Mapping[str, str], nbytes: int) -> str:
    """Text of the index. places: tensor -> file.   nbytes: of all tensors, without headers."""
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(places.items()))}, indent=2)


@dataclass
class Shards:
    """What the headers and the index of a folder say, and everything that is wrong with them."""

    folder: Path
    files: list[str] = field(default_factory=list)  # those that could be read
    tensors: dict[str, Stored] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    explained: set[str] = field(default_factory=set)  # absent tensors that a problem accounts for already
    incomplete: bool = False  # nobody knows what else there should be: no index, or no file

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def read_shards(folder: str | Path) -> Shards:
    """Headers and index of `folder`: model.safetensors, or the files that the index names."""
    shards = Shards(Path(folder))
    indexed = (shards.folder / INDEX).exists()
    index = _read_index(shards) if indexed else {"weight_map": {}}
    if index is None:
        shards.incomplete = True
        return shards
    places: dict[str, str] = index["weight_map"]
    files = sorted(set(places.values())) if indexed else [WEIGHTS]
    if indexed:
        beside = {p.name for p in shards.folder.glob("*.safetensors")} - set(files)
        shards.problems += [f"{name}: not in the index" for name in sorted(beside)]
    unread, twice = set(), set()
    for file in files:
        tensors = _read_file(shards, file)
        if tensors is None:
            unread.add(file)
            continue
        shards.files.append(file)
        for name, tensor in tensors.items():
            first = shards.tensors.setdefault(name, tensor)
            if first is not tensor:
                shards.problems.append(f"{name}: twice, in {first.file} and {file}")
                twice.add(name)
    if indexed:
        shards.explained |= {name for name, file in places.items() if file in unread}
        _compare_index(shards, places, unread, twice)
        size = (index.get("metadata") or {}).get("total_size")
        if size is not None and not unread and not twice and size != shards.nbytes:
            shards.problems.append(f"{INDEX}: total_size {size}, the tensors are {shards.nbytes} bytes")
    else:
        shards.incomplete = bool(unread)
    return shards


def differences(shards: Shards, found: Mapping[str, Stored], wanted: Mapping[str, W], wrong: Callable[[str, Stored, W], str | None]) -> list[str]:  # fmt: skip
    """Unknown, missing and unfit tensors, one line each.

    found: the shards' tensors, under the names of `wanted`.   wrong: what does not fit about a tensor, or None.
    """
    problems = []
    for name, tensor in found.items():
        if name not in wanted:
            problems.append(f"{name}: unknown")
        elif reason := wrong(name, tensor, wanted[name]):
            problems.append(f"{name}: {reason}")
    if not shards.incomplete:
        problems += [f"{n}: missing" for n in wanted if n not in found and n not in shards.explained]
    return problems


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises ValueError that says why it is not a whole safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{size} bytes, too short for its header")
        raw = json.loads(f.read(length), object_pairs_hook=_unique)
    if not isinstance(raw, dict):
        raise ValueError("its header is no JSON object")
    raw.pop("__metadata__", None)
    tensors, places = {}, []
    for name, entry in raw.items():
        tensors[name], begin, end = _described(path.name, name, entry)
        places.append((begin, end, name))
    _check_places(places, size - 8 - length)
    return tensors


def _described(file: str, name: str, entry: Any) -> tuple[Stored, int, int]:
    """One entry of a header: the tensor, where it begins and where it ends. Raises ValueError that names it."""
    try:
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        # 64.0 == 64, and a tuple with it would pass for the right shape; True == 1, too
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise TypeError
        tensor = Stored(file, tuple(shape), entry["dtype"])
        wanted = tensor.nbytes
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{name}: {entry} describes no tensor") from e
    if end - begin != wanted:
        raise ValueError(f"{name}: {end - begin} bytes for {tensor.dtype} {tensor.shape}, wanted {wanted}")
    return tensor, begin, end


def _check_places(places: list[tuple[int, int, str]], size: int) -> None:
    """Tensors lie side by side and fill the file."""
    at = 0
    for begin, end, name in sorted(places):
        if begin != at:
            raise ValueError(f"{name}: begins at byte {begin}, wanted {at}, where the one before it ends")
        at = end
    if at != size:
        raise ValueError(f"its tensors need {at} bytes, it has {size}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that is there twice would hide a tensor."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in made if names.count(n) > 1)}: twice")
    return made


def _read_file(shards: Shards, file: str) -> dict[str, Stored] | None:
    path = shards.folder / file
    if not path.is_file():
        shards.problems.append(f"{file}: no such file")
        return None
    try:
        return read_header(path)
    except (ValueError, OSError, RecursionError) as e:
        shards.problems.append(f"{file}: not a readable safetensors file ({e})")
        return None


def _read_index(shards: Shards) -> dict[str, Any] | None:
    try:
        index = json.loads((shards.folder / INDEX).read_text(), object_pairs_hook=_unique)
        places = index["weight_map"]
        bad = next((f for f in places.values() if not isinstance(f, str) or Path(f).name != f), None)
        if bad is not None:
            raise ValueError(f"{bad!r} is no file name")
        if not isinstance(index.get("metadata") or {}, dict):
            raise ValueError("metadata is no object")
        return index
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        shards.problems.append(f"{INDEX}: not a safetensors index ({e})")
        return None


def _compare_index(shards: Shards, places: Mapping[str, str], unread: set[str], twice: set[str]) -> None:
    for name, file in places.items():
        if file in unread or name in twice:
            continue
        tensor = shards.tensors.get(name)
        if tensor is None:
            shards.problems.append(f"{name}: in the index, not in {file}")
            shards.explained.add(name)
        elif tensor.file != file:
            shards.problems.append(f"{name}: in {tensor.file}, the index says {file}")
    absent = [name for name in shards.tensors if name not in places]
    shards.problems += [f"{name}: in {shards.tensors[name].file}, not in the index" for name in absent]
