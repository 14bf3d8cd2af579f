"""Speed, only ever as a ratio within one run: ours beside a peer, same tensors, same threads.

A bench is a function that yields rows. `k3lite bench NAME` prints them; `--json FILE` also writes them.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from k3lite.checkpoint import write_text
from k3lite.ops.kda import kda_chunk, kda_recurrent, l2norm


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


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Best of `repeats` runs, after one that is not counted."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def row(
    bench: str, case: str, ours: Callable[[], object], peer_name: str, peer: Callable[[], object], dtype: torch.dtype
) -> Row:
    """Time both on the CPU and compare."""
    ours_s, peer_s = seconds(ours), seconds(peer)
    name = str(dtype).removeprefix("torch.")
    return Row(bench, case, ours_s, peer_name, peer_s, peer_s / ours_s, torch.get_num_threads(), name, "cpu")


def bench_kda() -> Iterator[Row]:
    """Chunkwise KDA against the step-by-step definition, 4 heads of 64."""
    H, K = 4, 64
    for T in (1024, 4096):
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, T, H, K, generator=g) for _ in range(3))
        decay = -5 * torch.rand(1, T, H, K, generator=g) ** 3
        inputs = (l2norm(q), l2norm(k), v, decay, torch.rand(1, T, H, generator=g))

        def forward(op: Callable, inputs=inputs) -> None:
            with torch.no_grad():
                op(*inputs)

        def backward(op: Callable, inputs=inputs) -> None:
            leaves = [x.clone().requires_grad_() for x in inputs]
            o, state = op(*leaves)
            (o.sum() + state.sum()).backward()

        for what, work in (("forward", forward), ("forward+backward", backward)):
            case = f"{what} T={T} H={H} K=V={K}"
            yield row(
                "kda", case, lambda w=work: w(kda_chunk), "step by step", lambda w=work: w(kda_recurrent), v.dtype
            )


BENCHES: dict[str, Callable[[], Iterator[Row]]] = {"kda": bench_kda}


def run(name: str) -> list[Row]:
    """All rows of one bench."""
    return list(BENCHES[name]())


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
