"""Block Attention Residuals: every sub-layer chooses which earlier depths to read.

A plain residual network reads one thing, the running sum. Here a sub-layer reads a softmax mix of sources:
the sealed blocks B and the live sum h of the block in progress, both of one token:

    score_i = sum_d (V_i / rms(V_i))_d (w_norm * w_proj)_d        no 1/sqrt(d)
    mix     = sum_i softmax(score)_i V_i                          the raw V_i

Every `attn_res_block_size` layers the live sum is sealed and starts again from zero. "Block size" counts decoder
layers, as in the released code; the Attention Residuals paper counts sub-layers (k3-architecture §7.7).
Nothing here looks at another token, so nothing is cached. Sources: Kimi K3 report §2.2; k3-architecture §2.5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3lite.ops.pointwise import upcast


def depth_mix(sources: list[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Softmax mix over depth. sources: n tensors [..., d]; norm_weight: [d]; proj_weight: [1, d]. fp32 inside."""
    V = upcast(torch.stack(sources))  # [n, ..., d]
    query = upcast(norm_weight) * upcast(proj_weight.squeeze(0))
    scores = (V * query).sum(-1) * torch.rsqrt(V.square().mean(-1) + eps)
    return torch.einsum("n...,n...d->...d", scores.softmax(0), V).to(sources[0].dtype)


class DepthStream:
    """The residual stream of one forward pass: sealed blocks and the live sum.

    With block_size None it is the plain residual sum, and `read` returns that sum.
    """

    def __init__(self, embedding: Tensor, block_size: int | None, eps: float) -> None:
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

    def seal_before(self, layer: int) -> None:
        """Called after layer's attention has read and before it writes: store the raw live sum, not the mix."""
        if self.block_size and layer % self.block_size == 0:
            self.blocks.append(self.live)
            self.live = torch.zeros_like(self.live)

    def add(self, output: Tensor) -> None:
        self.live = self.live + output
