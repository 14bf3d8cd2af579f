"""Norm, activations and the short convolution: everything that works number by number along a token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """fp32, or fp64 where the input already is: the precision of norms, gates, softmax and states."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis.

    The mean is fp32, and the quotient returns to x's dtype before it meets the weight, as in the released
    code (k3-architecture §2).
    """
    wide = upcast(x)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def situ_glu(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """SiTU-GLU: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta).

    Near zero it is SwiGLU; far out it stays within beta * linear_beta (100 in K3). fp32 inside.
    Source: Kimi K3 report, appendix SiTU; k3-architecture §2.4.
    """
    a, u = upcast(gate), upcast(up)
    return (beta * torch.tanh(a / beta) * torch.sigmoid(a) * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up, Kimi Linear's activation. No bound."""
    return F.silu(gate) * up


def short_conv(
    x: Tensor, weight: Tensor, window: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then SiLU: y_t = silu(sum_j w[:, 0, j] * x_(t-W+1+j)); the last tap is now.

    x: [B,T,D].   weight: [D,1,W].   window: [B,W-1,D], the inputs before x (zeros by default).
    cu_seqlens: starts of packed sequences (see `ops.kda.kda`): nothing is read across them.
    Returns y [B,T,D] and the window for the next call. Source: k3-architecture §2.3. Raises ValueError for other shapes.
    """
    if x.dim() != 3 or weight.dim() != 3 or weight.shape[:2] != (x.shape[2], 1):
        raise ValueError(
            f"x, weight: got shapes {tuple(x.shape)}, {tuple(weight.shape)}, wanted [B,T,D] and [D,1,W] of one D"
        )
    (B, T, D), W = x.shape, weight.shape[2]
    if window is None:
        window = x.new_zeros(B, W - 1, D)
    elif window.shape != (B, W - 1, D):
        raise ValueError(f"window: got shape {tuple(window.shape)}, wanted {(B, W - 1, D)}")
    inputs = torch.cat([window, x], dim=1)
    if T == 1 and cu_seqlens is None:  # the loop below in one product: a third of its time while decoding
        y = (inputs * weight[:, 0].T).sum(1, keepdim=True)
        return F.silu(y).to(x.dtype), inputs[:, 1:].clone()
    taps = []
    for j in range(W):
        tap = inputs[:, j : j + T] * weight[:, 0, j]
        if cu_seqlens is not None:
            tap = tap * (position_in_sequence(cu_seqlens, T) >= W - 1 - j).unsqueeze(-1)
        taps.append(tap)
    return F.silu(sum(taps)).to(x.dtype), inputs[:, T:].clone()  # a copy: a view would keep all inputs alive


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, T: int) -> None:
    """Raise ValueError unless cu_seqlens are the starts of sequences packed into one row of T tokens."""
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens: got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}, wanted whole numbers [N+1]"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens: packed sequences need B = 1, got B = {batch}")
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != T or sorted(ends) != ends:
        raise ValueError(f"cu_seqlens: got {ends}, wanted a rising list from 0 to T = {T}")


def sequence_of_token(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T]: which packed sequence each token belongs to."""
    return torch.bucketize(torch.arange(T, device=cu_seqlens.device), cu_seqlens[1:], right=True)


def position_in_sequence(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T]: each token's place within its packed sequence."""
    return torch.arange(T, device=cu_seqlens.device) - cu_seqlens[sequence_of_token(cu_seqlens, T)]
