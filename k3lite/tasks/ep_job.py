"""Expert parallelism tried on a training: several ranks, then one, on the same global batches; are the losses the same?

The model is the needle's, as a language model of bytes. Every step's batch is cut by rows, experts by rank.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3lite.checkpoint import write_text
from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.parallel import RankExperts, Ranks, Traffic, save_shared, share_experts
from k3lite.tasks.text import haystack
from k3lite.tasks.trained import fresh_model
from k3lite.train import ONE_RANK, STATE, BatchAt, OneRank, Recipe, train

PRESET = "needle"
RECIPE = Recipe(steps=150, lr=4e-3, warmup=20, task="ep-1")
RESULT = "ep.json"
# Sums in another order differ in the last digits, training amplifies that, and where two experts are nearly tied a token may go to
# the other one. In fp64 such ties are too rare to meet.
TOLERANCE = {"float32": 1e-2, "float64": 1e-9}  # nats, on the loss of every step


@dataclass(frozen=True)
class Job:
    """Options of `k3lite train ep`."""

    out: Path
    recipe: Recipe = RECIPE
    batch: int = 16  # rows of all ranks together
    length: int = 128  # bytes in a row
    dtype: str = "float64"

    def check(self) -> None:
        """Raise ValueError before any work if the job cannot be done."""
        if self.dtype not in TOLERANCE:
            raise ValueError(f"dtype: got {self.dtype!r}, wanted one of {', '.join(TOLERANCE)}")
        if self.batch < 1:
            raise ValueError(f"batch: got {self.batch} rows, wanted 1 or more")
        if self.length < 2:
            raise ValueError(f"length: got {self.length} bytes, wanted 2 or more")

    def config(self) -> K3Config:
        return dataclasses.replace(K3Config.preset(PRESET), dtype=self.dtype)

    def restart(self) -> None:
        """Let `run` train anew."""
        for folder in ("ranks", "one"):
            (self.out / folder / STATE).unlink(missing_ok=True)


def windows(text: Tensor, recipe: Recipe, rows: int, length: int) -> BatchAt:
    """Rows cut from the text at random; every byte after the first is asked for."""

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - length, (rows, 1), generator=g)
        ids = text[starts + torch.arange(length)]
        return ids, ids

    return batch_at


def train_on(ranks: OneRank, job: Job, folder: Path, progress: bool = True) -> tuple[K3ForCausalLM, list[float]]:
    """The model that `ranks` train together, its experts shared out, and the loss of every step; goes on if it can."""
    batch_at = windows(haystack("train"), job.recipe, job.batch, job.length)
    model = fresh_model(job.config(), job.recipe.seed)
    if job.dtype == "float64":
        model.double()  # gates and convolutions too, which are fp32 in a model of any dtype
    if isinstance(ranks, Ranks):
        model = share_experts(model.to(ranks.device), ranks)
    return model, train(model, batch_at, job.recipe, folder=folder, progress=progress, ranks=ranks)


def run_on_ranks(job: Job, ranks: Ranks) -> dict[str, Any]:
    """What all ranks do together: train, save the whole model, and send one batch more to look at the traffic."""
    model, losses = train_on(ranks, job, job.out / "ranks")
    save_shared(model, job.out / "model", ranks)
    ids, _ = ranks.part(windows(haystack("train"), job.recipe, job.batch, job.length)(job.recipe.steps))
    with torch.no_grad():
        model(ids)
    traffic = next(m.traffic for m in model.modules() if isinstance(m, RankExperts))
    return {"ranks": ranks.size, "losses": losses, "traffic": wire(traffic, job.config())}


def wire(traffic: Traffic, config: K3Config) -> dict[str, Any]:
    """Rows from each rank to each home in one layer's dispatch, and the bytes that leave their rank."""
    widths = {"latent": traffic.width, "full": config.hidden_size}
    sizes = {f"{n} {w}": traffic.wire_bytes(n, d) for w, d in widths.items() for n in ("fp32", "bf16", "mxfp8")}
    return {"rows": traffic.rows.tolist(), "wire_rows": traffic.wire_rows, "bytes": sizes}


def compare(job: Job, shared: dict[str, Any], progress: bool = True) -> dict[str, Any]:
    """Train on one rank too, and write ep.json with both curves. Alone: the other ranks have gone home."""
    _, losses = train_on(ONE_RANK, job, job.out / "one", progress)
    difference = max(abs(a - b) for a, b in zip(shared["losses"], losses, strict=True))
    result = {
        **shared,
        "one_rank_losses": losses,
        "difference": difference,
        "tolerance": TOLERANCE[job.dtype],
        "equal": difference <= TOLERANCE[job.dtype],
        "dtype": job.dtype,
        "recipe": dataclasses.asdict(job.recipe),
        "batch": [job.batch, job.length],
    }
    write_text(job.out / RESULT, json.dumps(result, indent=1) + "\n")
    return result


def text_table(result: dict[str, Any]) -> str:
    """Both loss curves at some steps, and what a dispatch sends."""
    shared, one = result["losses"], result["one_rank_losses"]
    R, steps = result["ranks"], len(result["losses"])
    shown = sorted({round(i * (steps - 1) / 5) for i in range(6)})
    lines = [
        f"loss in nats a byte, {result['dtype']}",
        f"{'step':>6}{f'{R} rank(s)':>14}{'1 rank':>14}{'difference':>14}",
    ]
    lines += [f"{i + 1:>6}{shared[i]:>14.9f}{one[i]:>14.9f}{abs(shared[i] - one[i]):>14.1e}" for i in shown]
    verdict = "equal" if result["equal"] else "NOT equal"
    lines.append(f"largest difference {result['difference']:.1e}, allowed {result['tolerance']:g}: {verdict}")
    traffic = result["traffic"]
    lines += ["", "one dispatch, rows from rank (down) to rank (across):"]
    lines += [f"{r:>6}" + "".join(f"{n:>8}" for n in row) for r, row in enumerate(traffic["rows"])]
    lines.append(f"{traffic['wire_rows']} rows leave their rank; in bytes:")
    lines += [f"{name:>14}{size:>12,}" for name, size in traffic["bytes"].items()]
    return "\n".join(lines)
