"""RMSNorm and the gated MLP that dense layers and shared experts use.

MLP(x) = act(x W_gate^T, x W_up^T) W_down^T,   act = SiTU-GLU in K3, SwiGLU in Kimi Linear
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from k3lite.config import K3Config
from k3lite.ops.experts import Activation
from k3lite.ops.pointwise import rms_norm, situ_glu, swiglu


class RMSNorm(nn.Module):
    """`ops.pointwise.rms_norm` with its weight."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def linear(d_in: int, d_out: int) -> nn.Linear:
    """Every Linear of K3 is without bias; weight stored [out, in]."""
    return nn.Linear(d_in, d_out, bias=False)


def activation(config: K3Config) -> Activation:
    """The gated activation that `hidden_act` names."""
    if config.hidden_act == "situ":
        return partial(situ_glu, beta=config.activation_situ_beta, linear_beta=config.activation_situ_linear_beta)
    return swiglu


class GatedMLP(nn.Module):
    """[..., hidden_size] -> [..., hidden_size] through `width`."""

    def __init__(self, config: K3Config, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, width)
        self.up_proj = linear(config.hidden_size, width)
        self.down_proj = linear(width, config.hidden_size)
        self.act = activation(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
