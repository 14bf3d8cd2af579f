"""Attention Residuals: every sub-layer chooses which earlier depths to read.

A plain residual network reads one thing, the running sum. Here a sub-layer reads a softmax mix of sources:
the sealed blocks B and the live sum h of the block in progress, both of one token:

    score_i = sum_d (V_i / rms(V_i))_d (w_norm * w_proj)_d        no 1/sqrt(d)
    mix     = sum_i softmax(score)_i V_i                          the raw V_i

Every `attn_res_block_size` layers the live sum is sealed and starts again from zero. "Block size" counts decoder
layers, as in the released code; the Attention Residuals paper counts sub-layers, of which a layer has two
(k3-architecture §7.7). So 0.5 is the paper's Full AttnRes: every sub-layer's output is a source of its own.
Nothing here looks at another token, so nothing is cached. Sources: Kimi K3 report §2.2; k3-architecture §2.5.

Between two seals the blocks do not change, and a query does not depend on what is read. So all reads of that stretch
can visit the blocks together (phase 1), and each joins its own live sum later (phase 2; Kimi K3 report §5.4.2):

    read_blocks   A_r = sum_i exp(score_ri) V_i / Z_r,   z_r = log Z_r = log sum_i exp(score_ri)      i over blocks
    join_live     mix_r = (1 - p) A_r + p h,             p = sigmoid(score_r(h) - z_r)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from k3lite.ops.pointwise import upcast


def depth_scores(V: Tensor, query: Tensor, eps: float) -> Tensor:
    """Score of each source: V [..., d] by query [d] (norm weight times projection) -> [...]."""
    return (V * query).sum(-1) * torch.rsqrt(V.square().mean(-1) + eps)


def depth_query(norm_weight: Tensor, proj_weight: Tensor) -> Tensor:
    """What a read asks for, [d], from [d] and [1, d]. Only their product matters."""
    return upcast(norm_weight) * upcast(proj_weight.squeeze(0))


def depth_mix(sources: list[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Softmax mix over depth. sources: n tensors [..., d]; norm_weight: [d]; proj_weight: [1, d]. fp32 inside."""
    V = upcast(torch.stack(sources))  # [n, ..., d]
    scores = depth_scores(V, depth_query(norm_weight, proj_weight), eps)
    return torch.einsum("n...,n...d->...d", scores.softmax(0), V).to(sources[0].dtype)


# ---- the same mix in two phases


def read_blocks(blocks: list[Tensor], queries: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Phase 1: R reads of n blocks [..., d] in one pass. queries: [R, d].

    Returns mixes of the blocks alone, [R, ..., d], and the logarithms of what their softmax was divided by, [R, ...].
    """
    V = upcast(torch.stack(blocks))  # [n, ..., d]
    unit = V * torch.rsqrt(V.square().mean(-1, keepdim=True) + eps)
    scores = torch.einsum("n...d,rd->rn...", unit, upcast(queries))
    return torch.einsum("rn...,n...d->r...d", scores.softmax(1), V), scores.logsumexp(1)


def join_live(mix: Tensor, log_sum: Tensor, live: Tensor, query: Tensor, eps: float) -> Tensor:
    """Phase 2: one more source, the live sum [..., d], joins a mix [..., d] of earlier ones (online softmax)."""
    h = upcast(live)
    share = torch.sigmoid(depth_scores(h, query, eps) - log_sum).unsqueeze(-1)  # exp(s) / (exp(s) + Z), never overflows
    return ((1 - share) * mix + share * h).to(live.dtype)


# ---- the schedule


def sources_per_read(layers: int, block_size: float) -> list[int]:
    """How many sources each read has, in order: two reads a layer and the final one. 1: nothing to choose from."""
    depths = [half / 2 for half in range(2 * layers + 1)]
    return [math.ceil(depth / block_size) + 1 for depth in depths]  # as many seals lie below, and the live sum


class DepthStream:
    """The residual stream of one forward pass: sealed blocks and the live sum.

    With block_size None it is the plain residual sum, and `read` returns that sum.
    """

    def __init__(self, embedding: Tensor, block_size: float | None, eps: float) -> None:
        self.live = embedding
        self.blocks: list[Tensor] = []
        self.block_size = block_size
        self.eps = eps

    def read(self, owner: nn.Module, name: str) -> Tensor:
        """What a sub-layer reads, chosen with owner's `{name}_norm` and `{name}_proj`.

        Before the first seal there is nothing to choose from (layer 0), and without blocks there never is.
        """
        if not self.blocks:
            return self.live
        norm, proj = getattr(owner, f"{name}_norm"), getattr(owner, f"{name}_proj")
        return depth_mix([*self.blocks, self.live], norm.weight, proj.weight, self.eps)

    def seal_before(self, depth: float) -> None:
        """Called after the sub-layer at `depth` has read and before it writes: store the raw live sum, not the mix.

        depth: layers below it; layer i's attention stands at i, its feed-forward at i + 0.5.
        """
        if self.block_size and depth % self.block_size == 0:
            self.blocks.append(self.live)
            self.live = torch.zeros_like(self.live)

    def add(self, output: Tensor) -> None:
        self.live = self.live + output
