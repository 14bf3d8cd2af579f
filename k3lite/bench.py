"""Speed, only ever as a ratio within one run: ours beside a peer, same tensors, same threads.

A bench is a module `k3lite.bench_NAME` with a function `cases(device)` that yields rows and remarks. `k3lite bench NAME`
prints them; `--json FILE` also writes the rows.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from tqdm.auto import tqdm

from k3lite.checkpoint import write_text

K = TypeVar("K")
BENCHES = ("kda", "decode", "moe", "mx", "generate")
PATIENCE = 8.0  # seconds after which a slow case is not repeated


@dataclass(frozen=True)
class Row:
    """One case. ratio = peer_s / ours_s: above 1, ours is the faster."""

    bench: str
    case: str
    ours_s: float
    peer: str
    peer_s: float
    ratio: float
    threads: int
    dtype: str
    device: str


def seconds(work: Callable[[], object], device: str = "cpu", repeats: int = 5) -> float:
    """Best of at most `repeats` runs after one that is not counted, or that one if it is slow. Waits for the device."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    first = once()
    if first > PATIENCE:
        return first
    best, spent = float("inf"), 0.0
    for _ in range(repeats):
        if spent > PATIENCE:
            break
        took = once()
        best, spent = min(best, took), spent + took
    return best


def turns(works: Mapping[K, Callable[[], object]], rounds: int) -> dict[K, float]:
    """Best seconds of each work. They take turns: when a shared machine slows down for a while, it slows down all.

    Every other round goes backwards, so that no work always follows the one that empties the processor's caches.
    """
    best, order = dict.fromkeys(works, float("inf")), list(works)
    for _ in range(rounds):
        for name in order:
            best[name] = min(best[name], seconds(works[name], repeats=1))
        order.reverse()
    return best


def row(bench: str, case: str, ours_s: float, peer: str, peer_s: float, dtype: torch.dtype, device: str = "cpu") -> Row:
    """Two measured times and their ratio."""
    name = str(dtype).removeprefix("torch.")
    return Row(bench, case, ours_s, peer, peer_s, peer_s / ours_s, torch.get_num_threads(), name, device)


def imported(module: str, absent: list[str]) -> ModuleType | None:
    """A part of a peer, a test-only package; None and a remark in `absent` where it cannot be imported."""
    try:
        with warnings.catch_warnings(action="ignore"):  # fla warns that there is no GPU
            return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        absent.append(f"not compared with {package}, which cannot be imported: {e} (`make .venv/.test`)")
        return None


def run(name: str, device: str = "cpu") -> tuple[list[Row], list[str]]:
    """All rows and remarks of one bench. Raises ValueError for a device that is not here."""
    if device != "cpu" and not (
        torch.accelerator.is_available() and device == torch.accelerator.current_accelerator().type
    ):
        raise ValueError(f"device: got {device!r}, which is not here; wanted 'cpu'")
    made: Iterable[Row | str] = importlib.import_module(f"k3lite.bench_{name}").cases(device)
    rows, remarks = [], []
    for item in tqdm(made, desc=f"bench {name}", unit=" cases"):
        (rows if isinstance(item, Row) else remarks).append(item)
    return rows, remarks


def table(rows: list[Row]) -> str:
    """Rows as aligned text."""
    cells = [["case", "ours s", "peer", "peer s", "ratio", "threads", "dtype", "device"]]
    for r in rows:
        cells.append(
            [r.case, f"{r.ours_s:.4f}", r.peer, f"{r.peer_s:.4f}", f"{r.ratio:.1f}", str(r.threads), r.dtype, r.device]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def write_json(rows: list[Row], path: Path) -> None:
    """Write rows as a JSON list; the file appears whole or not at all."""
    write_text(path, json.dumps([dataclasses.asdict(r) for r in rows], indent=2) + "\n")
