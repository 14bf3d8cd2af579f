"""Stable LatentMoE: store many experts, touch few, and let them work in a narrower space.

    s      = sigmoid(x W_r^T)                       router scores, fp32, on the full width
    chosen = top-k of (s + b)                       the correction bias b chooses and never weighs
    p_i    = s_i / (sum over chosen of s + 1e-20) * routed_scaling_factor
    z      = x W_down^T                             once per token, before the experts
    u      = sum_i p_i E_i(z)                       E_i(z) = act(z w1^T, z w3^T) w2^T
    y      = RMSNorm(u) W_up^T + shared(x)          the norm sits after the sum

Kimi Linear: no latent (E_i on x) and no norm. Source: Kimi K3 report §2.3; k3-architecture §2.4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3lite.config import K3Config
from k3lite.mlp import GatedMLP, RMSNorm, activation, linear
from k3lite.ops.experts import grouped_experts
from k3lite.ops.pointwise import upcast


def choose(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Ids [N,k] of the k largest scores + bias; on ties the lower id (torch.topk promises no order)."""
    return (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]


def quantile_balanced_bias(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Quantile Balancing: the bias [E] with which each expert would have got its share of these tokens.

    scores: [N,E] fp32 of real tokens.   bias: [E], the one they were routed with.
    A token's cutoff is its (k+1)-th biased score; expert j would be chosen where s_ij + b_j exceeds it, so b_j
    follows from the quantile of s_ij - cutoff_i at the target load q = N k / E. No step size, no gradient.
    Source: Kimi K3 report §2.3.3; k3-architecture §2.4.
    """
    N, E = scores.shape
    if k >= E or N == 0:
        return bias
    cutoff = (scores + bias).topk(k + 1, dim=-1).values[:, -1:]
    load = N * k // E
    new = -(scores - cutoff).sort(dim=0, descending=True).values[min(load, N - 1)]
    return new - new.mean()


class Router(nn.Module):
    """[N,d] -> expert ids and weights [N,k]."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.k, self.renormalize = config.num_experts_per_token, config.moe_renormalize
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # Part of the checkpoint and of the parameter count, moved by balancing and never by a gradient.
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(config.num_experts, dtype=torch.float32), requires_grad=False
        )
        self.seen_scores: Tensor | None = None  # of the last training batch, for `balance`
        self.seen_counts: Tensor | None = None  # [E] how often each expert was chosen by real tokens

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """real: [N] bool, False for padding, which is routed but not counted."""
        scores = torch.sigmoid(F.linear(upcast(x), upcast(self.weight)))
        bias = self.e_score_correction_bias
        chosen = choose(scores.detach(), bias, self.k)
        weights = scores.gather(-1, chosen)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.training:
            rows = slice(None) if real is None else real
            self.seen_scores = scores.detach()[rows]
            self.seen_counts = chosen[rows].flatten().bincount(minlength=len(bias))
        return chosen, weights * self.scaling

    @torch.no_grad()
    def balance(self) -> None:
        """Set the bias for the next step from the batch that was just trained on."""
        if self.seen_scores is not None:
            bias = self.e_score_correction_bias
            bias.copy_(quantile_balanced_bias(self.seen_scores, bias, self.k))
            self.seen_scores = None


class Experts(nn.Module):
    """All routed experts of a layer, stacked: w1 (gate), w3 (up) [E,I,D], w2 (down) [E,D,I]."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        E, width, D = config.num_experts, config.moe_intermediate_size, config.expert_width
        self.w1, self.w3 = (nn.Parameter(torch.empty(E, width, D)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(E, D, width))
        self.act = activation(config)

    def forward(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return grouped_experts(z, chosen, weights, self.w1, self.w3, self.w2, self.act)


class LatentMoE(nn.Module):
    """[B,T,hidden_size] -> [B,T,hidden_size]; without a latent width it is Kimi Linear's plain MoE."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        d, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.experts = Experts(config)
        self.routed_expert_down_proj = linear(d, latent) if latent else nn.Identity()
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps) if config.latent_moe_use_norm else nn.Identity()
        self.routed_expert_up_proj = linear(latent, d) if latent else nn.Identity()
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = GatedMLP(config, shared) if shared else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: [B,T], False for padding."""
        tokens = x.flatten(0, 1)
        chosen, weights = self.gate(tokens, None if mask is None else mask.flatten())
        routed = self.experts(self.routed_expert_down_proj(tokens), chosen, weights)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed)).view_as(x)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)
