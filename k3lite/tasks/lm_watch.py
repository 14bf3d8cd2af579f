"""Watching a model while it trains: what `history.json` records and the live plot draws.

Watching changes nothing: the same run unwatched ends with the same weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3lite.model import K3ForCausalLM
from k3lite.moe import Router
from k3lite.tasks.depth import rms, watching
from k3lite.tasks.needle import make_batch
from k3lite.tasks.needle_job import right_answers
from k3lite.tasks.text import haystack
from k3lite.tasks.trained import cell_seed
from k3lite.train import BatchAt, Recipe

EXAM_START = 100_000  # where in the held-out text the rows for the loss begin
WATCH_ROWS, WATCH_LENGTH = 16, 256  # of prose, for the loss
WATCH_DOCUMENTS, WATCH_DOCUMENT = 32, 128  # for recall: how many, and their bytes


def held_out(rows: int, length: int = WATCH_LENGTH) -> Tensor:
    """[rows, length] consecutive bytes of the held-out books."""
    return haystack("heldout")[EXAM_START : EXAM_START + rows * length].view(rows, length)


@torch.no_grad()
def validation(model: K3ForCausalLM, rows: Tensor) -> float:
    """Nats per byte of rows [N, T], in eval mode."""
    was = model.training
    model.eval()
    loss = sum(float(model(part, labels=part).loss) * len(part) for part in rows.split(32)) / len(rows)
    model.train(was)
    return loss


@torch.no_grad()
def needle_recall(model: K3ForCausalLM, documents: int, length: int) -> float:
    """Share of held-out documents whose one needle is answered with all four digits. The same ones every time."""
    was = model.training
    model.eval()
    g = torch.Generator().manual_seed(cell_seed(0, 1, length))
    batch = make_batch(haystack("heldout"), documents, length, 1, g)
    share = right_answers(model, batch).double().mean().item()
    model.train(was)
    return share


def loads(model: K3ForCausalLM) -> list[dict[str, float]]:
    """For each layer of experts, over the last training batch: largest load over the mean, and experts nobody chose."""
    counts = [m.seen_counts.double() for m in model.modules() if isinstance(m, Router) and m.seen_counts is not None]
    return [{"max_over_mean": float(c.max() / c.mean()), "dead": int((c == 0).sum())} for c in counts]


def norms(model: K3ForCausalLM, gradients: bool = False) -> dict[str, float]:
    """Norm of the weights of each part, or of their gradients: of the last step, after clipping."""
    squares: dict[str, float] = defaultdict(float)
    for name, p in model.named_parameters():
        x = p.grad if gradients else p.detach()
        if p.requires_grad and x is not None:
            squares[part_of(name)] += float(x.double().square().sum())
    return {part: square**0.5 for part, square in sorted(squares.items())}


def part_of(name: str) -> str:
    """The part that a parameter belongs to, coarse enough for a plot."""
    kinds = {
        "_res_": "attn_res",
        ".self_attn.": "attention",
        ".experts.": "experts",
        "routed_expert_": "latent",
        ".shared_experts.": "shared",
        ".gate.": "router",
        ".mlp.": "dense",
        "embed_tokens": "embedding",
        "lm_head": "head",
    }
    return next((kind for mark, kind in kinds.items() if mark in name), "norms")


@torch.no_grad()
def hidden_rms(model: K3ForCausalLM, rows: Tensor) -> list[float]:
    """Size of the live sum after each sub-layer, on rows [N, T]."""
    was = model.training
    model.eval()
    with watching(model) as streams:
        model(rows)
    model.train(was)
    return [rms(x) for x in streams[0].sums]


@dataclass
class Monitor:
    """Appends a row to `history` every `every` steps of a stage, and at its last. Call it as `train`'s on_step.

    A run that goes on from a checkpoint may do again what is recorded: the row then takes the place of what came later.
    """

    model: K3ForCausalLM
    stage: str
    recipe: Recipe
    batch_at: BatchAt
    every: int = 25
    first_step: int = 0  # of this stage, in the whole run
    history: list[dict[str, Any]] = field(default_factory=list)
    on_record: Callable[[list[dict[str, Any]]], None] | None = None  # called with the history after each new row

    def __call__(self, step: int, loss: float) -> None:
        if (step + 1) % self.every and step + 1 != self.recipe.steps:
            return
        rows = held_out(WATCH_ROWS)
        row = {
            "step": self.first_step + step + 1,
            "stage": self.stage,
            "loss": loss,
            "lr": self.recipe.lr_at(step),
            "length": self.batch_at(step)[0].shape[1],
            "validation": validation(self.model, rows),
            "recall": needle_recall(self.model, WATCH_DOCUMENTS, WATCH_DOCUMENT),
            "loads": loads(self.model),
            "hidden": hidden_rms(self.model, rows[:2]),
            "gradients": norms(self.model, gradients=True),
            "weights": norms(self.model),
        }
        self.history[:] = [*(r for r in self.history if r["step"] < row["step"]), rounded(row)]
        if self.on_record:
            self.on_record(self.history)


def rounded(x: Any) -> Any:
    """Five figures are more than any of it is good for, and keep the file small."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x
