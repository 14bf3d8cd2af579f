"""Muon for matrices, AdamW for the rest, stepped as one optimizer.

Muon replaces a matrix's momentum by (nearly) the orthogonal matrix closest to it, by Newton-Schulz steps; it is torch's
own, `torch.optim.Muon`, with the learning rate scaled so that an update has AdamW's size ("Muon is Scalable for LLM
Training", arXiv 2502.16982). What "a matrix" is, is decided here:

    routed experts [E, out, in]             a matrix for each expert
    q, k, v of KDA; q and kv up of MLA      a matrix for each head: K3's per-head Muon (report §2.5)
    other projections of the layers         themselves
    AdamW                                   embeddings, head, norms, convolutions, gates, the router, depth queries

Vendor-reported: per-head Muon on Q, K, V. Not told: which small tensors AdamW takes; embeddings, head and everything
that is no matrix are the usual choice, router, b_proj and depth queries (a row or few) are ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from k3lite.kda import KimiDeltaAttention
from k3lite.mla import GatedMLA
from k3lite.moe import Experts

ADAMW_ALWAYS = ("embed_tokens.weight", "lm_head.weight", ".gate.weight", ".b_proj.weight", "res_proj.weight")


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether Muon takes the parameter `name`, whole or in parts."""
    return p.requires_grad and p.dim() >= 2 and "conv1d" not in name and not name.endswith(ADAMW_ALWAYS)


def muon_blocks(model: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Name, parameter, and into how many matrices of equal height its rows fall, for all that Muon takes."""
    parts: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, Experts):
            parts |= {id(w): len(w) for w in (module.w1, module.w3, module.w2)}
        elif isinstance(module, KimiDeltaAttention):
            parts |= {id(p.weight): module.heads for p in (module.q_proj, module.k_proj, module.v_proj)}
        elif isinstance(module, GatedMLA):
            ups = [getattr(module, name, None) for name in ("q_proj", "q_b_proj", "kv_b_proj")]
            parts |= {id(p.weight): module.heads for p in ups if p is not None}
    for name, p in model.named_parameters():
        if is_matrix(name, p):
            yield name, p, parts.get(id(p), 1)


def matrices(p: Tensor, parts: int) -> list[Tensor]:
    """`parts` two-dimensional views of p, which share its storage: [E,I,D] by expert, [H*K,d] by head."""
    return list(p.view(parts, -1, p.shape[-1]).unbind(0))


class MuonAdamW:
    """Both optimizers behind the face of one; `param_groups` and `state` are those of both, Muon's first.

    Muon's parameters are views of the model's: they share its storage, and `step` hands them views of its gradients.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float], momentum: float):
        self.owners = [(p, matrices(p.detach(), parts)) for _, p, parts in muon_blocks(model)]
        taken = {id(p) for p, _ in self.owners}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
        self.muon = torch.optim.Muon(
            [view for _, views in self.owners for view in views],
            lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=0.0)
        self.adamw.state = self.state = self.muon.state  # one for both: they share no parameter

    @property
    def param_groups(self) -> list[dict]:
        return [*self.muon.param_groups, *self.adamw.param_groups]

    def zero_grad(self) -> None:
        for p, _ in self.owners:
            p.grad = None
        self.adamw.zero_grad()

    def step(self) -> None:
        for p, views in self.owners:
            grads = [None] * len(views) if p.grad is None else matrices(p.grad, len(views))
            for view, grad in zip(views, grads, strict=True):
                view.grad = grad
        self.muon.step()
        self.adamw.step()
