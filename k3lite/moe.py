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

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3lite.balance import (
    auxiliary_loss,
    histogram_balanced_bias,
    quantile_balanced_bias,
    score_histogram,
    sign_rule_bias,
)
from k3lite.config import K3Config
from k3lite.mlp import GatedMLP, RMSNorm, activation, linear
from k3lite.ops.experts import grouped_experts
from k3lite.ops.pointwise import upcast
from k3lite.qat import round_input, round_weight, rounding_after

RULES = ("quantile", "histogram", "sign", "auxiliary", "none")
BINS = 1000  # of the histogram rule (k3-architecture §2.4)


def choose(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Ids [N,k] of the k largest scores + bias, largest first; on ties the lower id."""
    biased = scores + bias
    values, ids = biased.topk(min(k + 1, biased.shape[-1]), dim=-1)
    # topk is many times faster than a sort and promises no order on ties: sort the few rows that have one.
    tied = (values[:, 1:] == values[:, :-1]).any(-1)
    if tied.any():
        ids[tied] = biased[tied].sort(dim=-1, descending=True, stable=True).indices[:, : ids.shape[1]]
    return ids[:, :k]


def on_one_rank(statistic: Tensor) -> Tensor:
    """What `Router.reduce` and `Router.gather` are on a single rank."""
    return statistic


class Router(nn.Module):
    """[N,d] -> expert ids and weights [N,k].

    rule: how the loads are balanced, one of RULES; K3's is "quantile", "histogram" its form at scale.
    rate: step of the sign rule.   auxiliary_weight: factor of the auxiliary loss.
    reduce, gather: on several ranks, the sum of a tensor over them, and the rows of all of them.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.k, self.renormalize = config.num_experts_per_token, config.moe_renormalize
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # Part of the checkpoint and of the parameter count, moved by balancing and never by a gradient.
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(config.num_experts, dtype=torch.float32), requires_grad=False
        )
        self.rule, self.rate, self.auxiliary_weight = "quantile", 1e-3, 0.01
        self.reduce: Callable[[Tensor], Tensor] = on_one_rank
        self.gather: Callable[[Tensor], Tensor] = on_one_rank
        # Of the last training batch, for `balance`; a second forward of it, as in activation checkpointing, counts once.
        self.seen_scores: Tensor | None = None
        self.seen_counts: Tensor | None = None  # [E] how often each expert was chosen by real tokens
        self.auxiliary: Tensor | None = None  # to be added to the loss, weighted, under the auxiliary rule

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """real: [N] bool, False for padding, which is routed but not counted. Raises ValueError for NaN logits."""
        scores = torch.sigmoid(F.linear(upcast(x), upcast(self.weight)))
        chosen = choose(scores.detach(), self.e_score_correction_bias, self.k)
        weights = scores.gather(-1, chosen)
        # NaN counts as the largest score, so it is enough to look at the chosen.
        if weights.isnan().any():
            token = int(weights.isnan().any(-1).nonzero()[0])
            raise ValueError(f"router: got NaN as a logit of token {token}; wanted numbers in its input and its weight")
        if self.training:
            self._note(scores, chosen, slice(None) if real is None else real)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.scaling

    def _note(self, scores: Tensor, chosen: Tensor, rows: slice | Tensor) -> None:
        self.seen_scores = scores.detach()[rows]
        self.seen_counts = chosen[rows].flatten().bincount(minlength=scores.shape[1])
        if self.rule == "auxiliary":
            self.auxiliary = self.auxiliary_weight * auxiliary_loss(scores[rows], self.seen_counts, self.k)

    @torch.no_grad()
    def balance(self) -> None:
        """Set the bias for the next step from the batch that was just trained on. Raises ValueError for another rule."""
        if self.rule not in RULES:
            raise ValueError(f"rule: got {self.rule!r}, wanted one of {', '.join(RULES)}")
        if self.seen_scores is not None:
            self.e_score_correction_bias.copy_(self._balanced(self.seen_scores, self.seen_counts))
            self.seen_scores = self.auxiliary = None

    def _balanced(self, scores: Tensor, counts: Tensor) -> Tensor:
        bias = self.e_score_correction_bias
        if self.rule == "quantile":
            return quantile_balanced_bias(self.gather(scores), bias, self.k)
        if self.rule == "histogram":
            return histogram_balanced_bias(self.reduce(score_histogram(scores, bias, self.k, BINS)), bias, self.k)
        if self.rule == "sign":
            return sign_rule_bias(bias, self.reduce(counts), self.rate)
        return bias


class Experts(nn.Module):
    """All routed experts of a layer, stacked: w1 (gate), w3 (up) [E,I,D], w2 (down) [E,D,I]."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        E, width, D = config.num_experts, config.moe_intermediate_size, config.expert_width
        self.w1, self.w3 = (nn.Parameter(torch.empty(E, width, D)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(E, D, width))
        self.act = activation(config)
        self.rounding: str | None = None  # scale rule while training with rounding, see `qat.set_rounding`

    def forward(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """z [N,D], ids and weights [N,k] -> [N,D]."""
        return run_experts(self, z, chosen, weights)


def run_experts(layer: nn.Module, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`grouped_experts` with a layer's w1, w3, w2 and act; rounded if `layer.rounding` says how."""
    w, act, rule = (layer.w1, layer.w3, layer.w2), layer.act, layer.rounding
    if rule is not None:
        z, act = round_input(z, rule), rounding_after(act, rule)
        w = (round_weight(x, rule) for x in w)
    return grouped_experts(z, chosen, weights, *w, act)


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
