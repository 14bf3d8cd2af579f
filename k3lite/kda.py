"""The KDA layer: what is written to the state, how fast it fades, and what is read from it.

    q, k, v = shortconv(x W_q^T), shortconv(x W_k^T), shortconv(x W_v^T)      q, k L2-normed per head
    beta    = sigmoid(x W_b^T)                                                one number per head
    z       = x W_fa^T W_fb^T + dt_bias
    g       = -5 sigmoid(e^A z)          K3;  Kimi Linear: -e^A softplus(z)   per key channel
    o       = KDA(q, k, v, g, beta)                                           ops/kda.py
    y       = [ RMSNorm_head(o) * sigmoid(G) ] W_o^T,   G = x W_g^T           Kimi Linear: G = x W_ga^T W_gb^T

Source: Kimi K3 report §2.1.1; k3-architecture §2.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from k3lite.cache import KdaState
from k3lite.config import K3Config
from k3lite.mlp import RMSNorm, linear
from k3lite.ops.kda import Backend, bounded_gate, kda, l2norm, softplus_gate
from k3lite.ops.pointwise import short_conv, upcast


class ShortConv(nn.Module):
    """Depthwise causal convolution with SiLU; kept in fp32 like the released tensors."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, kernel, dtype=torch.float32))

    def forward(self, x: Tensor, window: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return short_conv(x, self.weight, window, cu_seqlens)


class KimiDeltaAttention(nn.Module):
    """[B,T,hidden_size] -> [B,T,hidden_size], with a state of num_heads x head_dim x head_dim."""

    backend: Backend = "auto"

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        a, d, width = config.linear_attn_config, config.hidden_size, config.kda_width
        self.heads, self.head_dim, self.lower_bound = a.num_heads, a.head_dim, a.gate_lower_bound
        self.q_proj, self.k_proj, self.v_proj = (linear(d, width) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(width, a.short_conv_kernel_size) for _ in range(3))
        self.b_proj = linear(d, a.num_heads)
        self.f_a_proj, self.f_b_proj = linear(d, a.head_dim), linear(a.head_dim, width)
        self.A_log = nn.Parameter(torch.empty(a.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.full_rank_gate = a.use_full_rank_gate
        if self.full_rank_gate:
            self.g_proj = linear(d, width)
        else:
            self.g_a_proj, self.g_b_proj = linear(d, a.head_dim), linear(a.head_dim, width)
        self.o_norm = RMSNorm(a.head_dim, config.rms_norm_eps, dtype=torch.float32)
        self.o_proj = linear(width, d)

    def init_gates(self, generator: torch.Generator) -> None:
        """Decay rates and convolutions. Where sources differ, the report and fla (k3-architecture §2.3, §7.5).

        dt_bias is softplus^-1(dt), dt log-uniform in [1e-3, 1e-1]; with A_log = 0 the bounded gate then starts
        with half-lives from 1.5 to 139 tokens.
        """
        with torch.no_grad():
            log_dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
            dt = log_dt.exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
            if self.lower_bound is None:
                self.A_log.uniform_(1, 16, generator=generator).log_()
            else:
                self.A_log.zero_()
            for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d):
                bound = conv.weight.shape[-1] ** -0.5
                conv.weight.uniform_(-bound, bound, generator=generator)

    def log_decay(self, x: Tensor) -> Tensor:
        """g [B,T,H,K] of the layer's (normed) input x."""
        z = upcast(self.f_b_proj(self.f_a_proj(x))) + self.dt_bias
        z = z.unflatten(-1, (self.heads, self.head_dim))
        if self.lower_bound is None:
            return softplus_gate(z, self.A_log)
        return bounded_gate(z, self.A_log, self.lower_bound)

    def forward(
        self, x: Tensor, state: KdaState | None = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """x: [B,T,d].   state: updated by replacing its tensors.   mask: [B,T], False for padding."""
        B, T, _ = x.shape
        raw = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        g, beta = self.log_decay(x), torch.sigmoid(upcast(self.b_proj(x)))
        if mask is not None:  # padding is like the time before the sequence: no input, no decay, no write
            raw = [r * mask.unsqueeze(-1) for r in raw]
            g, beta = g * mask[..., None, None], beta * mask.unsqueeze(-1)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        windows = state.conv if state else (None, None, None)
        (q, k, v), windows = zip(
            *(c(r, w, cu_seqlens) for c, r, w in zip(convs, raw, windows, strict=True)), strict=True
        )

        q, k, v = (y.unflatten(-1, (self.heads, self.head_dim)) for y in (q, k, v))  # [B,T,H,K]
        o, S = kda(
            l2norm(q), l2norm(k), v, g, beta,
            initial_state=state.S if state else None, cu_seqlens=cu_seqlens, backend=self.backend,
        )  # fmt: skip
        if state:
            state.S, state.conv = S, windows

        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        y = upcast(self.o_norm(o)) * torch.sigmoid(upcast(gate)).unflatten(-1, (self.heads, self.head_dim))
        return self.o_proj(y.flatten(-2).to(x.dtype))
