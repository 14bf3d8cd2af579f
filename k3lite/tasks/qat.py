"""The needle model that also reads prose, for rounding: one small model in which both loss and recall can be lost.

Every other training step asks for each next byte of prose, the others for hidden facts as in `needle_job.curriculum`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from k3lite.model import K3ForCausalLM
from k3lite.qat import round_weight, set_rounding
from k3lite.tasks.needle import make_batch
from k3lite.tasks.needle_job import TRAINING_LENGTH, curriculum, right_answers
from k3lite.tasks.text import haystack
from k3lite.tasks.trained import cell_seed
from k3lite.train import BatchAt, Recipe

PROSE_LENGTH, PROSE_ROWS = 128, 16  # bytes in a row, rows in a training step
NEEDLES = (1, 4)  # in a document of the exam
PARTS = {
    "routed experts": (".experts.",),
    "attention": (".self_attn.",),
    "latent projections": (".routed_expert_down_proj.", ".routed_expert_up_proj."),
    "router": (".gate.weight",),
    "shared experts and dense MLP": (".shared_experts.", ".mlp."),
    "embedding and head": ("embed_tokens.", "lm_head."),
}


def prose_and_needles(recipe: Recipe, start: int = 0) -> BatchAt:
    """Batches of a training. start: steps that an earlier training has used."""
    text = haystack("train")
    needles = curriculum(text, dataclasses.replace(recipe, steps=max(1, recipe.steps // 2)))

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        step += start
        if step % 2:
            return needles(step // 2)
        g = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        starts = torch.randint(0, len(text) - PROSE_LENGTH, (PROSE_ROWS, 1), generator=g)
        rows = text[starts + torch.arange(PROSE_LENGTH)]
        return rows, rows

    return batch_at


@dataclass(frozen=True)
class Skill:
    """What a model can: nats per held-out byte of prose, and the share of facts found among NEEDLES."""

    loss: float
    recall: dict[str, float]


@torch.no_grad()
def skill(model: K3ForCausalLM, rows: int, documents: int) -> Skill:
    """rows: of held-out prose.   documents: for each number of needles, of the longest length that was trained."""
    text = haystack("heldout")
    prose = text[: rows * PROSE_LENGTH].view(rows, PROSE_LENGTH)
    recall = {}
    for n in NEEDLES:
        batch = make_batch(text, documents, TRAINING_LENGTH, n, torch.Generator().manual_seed(cell_seed(n)))
        recall[str(n)] = float(right_answers(model, batch).double().mean())
    return Skill(float(model(prose, labels=prose).loss), recall)


def matrices(model: nn.Module, part: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and weights of a part's matrices. "everything" has those of all parts."""
    fragments = sum(PARTS.values(), ()) if part == "everything" else PARTS[part]
    for name, w in model.named_parameters():
        if w.dim() >= 2 and "conv1d" not in name and any(f in name for f in fragments):
            yield name, w


@contextlib.contextmanager
def weights_rounded(model: nn.Module, part: str, scale_rule: str = "floor") -> Iterator[None]:
    """Within it, the matrices of a part have MXFP4 values; inputs are left alone."""
    kept = {name: w.detach().clone() for name, w in matrices(model, part)}
    with torch.no_grad():
        for _, w in matrices(model, part):
            w.copy_(round_weight(w, scale_rule))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, w in matrices(model, part):
                w.copy_(kept[name])


@contextlib.contextmanager
def experts_rounded(model: nn.Module, scale_rule: str = "floor") -> Iterator[None]:
    """Within it, routed experts compute with MXFP4 weights and MXFP8 inputs, as K3's do."""
    set_rounding(model, True, scale_rule)
    try:
        yield
    finally:
        set_rounding(model, False)
