"""Ways to spread tokens over experts: three rules that move the correction bias, and the loss that they replace.

A rule is a function of what the router saw in one batch; its result is the bias for the next. q = N k / E is the load
that each of E experts should get from N tokens that choose k of them.

    quantile      b_j = (floor(q)+1)-th smallest over tokens of  r_ij = cutoff_i - s_ij       Kimi K3 (exact)
    histogram     the same, read off a histogram of r_ij                                      Kimi K3 (at scale)
    sign          b_j += rate * sign(mean load - load_j)                                      DeepSeek-V3
    auxiliary     no bias; E sum_j (load_j / N k) * (mean share of expert j in the scores)    Switch Transformer

Sources: Kimi K3 report §2.3.3 and its appendix on Quantile Balancing (k3-architecture §2.4); DeepSeek-V3 report,
arXiv 2412.19437 §2.1.2; Switch Transformer, arXiv 2101.03961 §2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantile_balanced_bias(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Quantile Balancing: the bias [E] with which each expert would have got its share of these tokens.

    scores: [N,E] fp32 of real tokens.   bias: [E], the one they were routed with.
    A token's cutoff is its (k+1)-th biased score. Expert j would be chosen where s_ij + b_j exceeds it, that is where
    r_ij = cutoff_i - s_ij < b_j; so b_j is the value that floor(q) of its r stay below. No step size, no gradient.
    """
    N, E = scores.shape
    if k >= E or N == 0:  # every expert is always chosen; nothing to learn from
        return bias
    needed = _needed(scores.detach(), bias, k)
    return _centred(needed.T.contiguous().kthvalue(N * k // E + 1).values)


def score_histogram(scores: Tensor, bias: Tensor, k: int, bins: int) -> Tensor:
    """Counts [E,bins], int64, of the r_ij of `quantile_balanced_bias`. Histograms of micro-batches and ranks add up.

    Uniform bins over [min b - 1, max b + 1]: with scores between 0 and 1 no r can be outside.
    """
    N, E = scores.shape
    counts = torch.zeros(E * bins, dtype=torch.long, device=scores.device)
    if k < E and N > 0:
        low, width = _bins(bias, bins)
        place = ((_needed(scores, bias, k) - low) / width).long().clamp_(0, bins - 1)
        place += bins * torch.arange(E, device=scores.device)
        counts += place.flatten().bincount(minlength=E * bins)
    return counts.view(E, bins)


def histogram_balanced_bias(histogram: Tensor, bias: Tensor, k: int) -> Tensor:
    """`quantile_balanced_bias` from a histogram alone: before its mean is taken off, off by less than a bin's width.

    histogram: [E,bins] of `score_histogram`, summed over whatever was routed with this bias [E].
    Within its bin the value stands where q tokens would be below it if the bin's tokens lay evenly. (The report takes the
    first bin whose cumulative count reaches q rounded up: another one only where q tokens end at a bin's edge exactly.)
    """
    E, bins = histogram.shape
    N = int(histogram[0].sum())
    if k >= E or N == 0:
        return bias
    low, width = _bins(bias, bins)
    below = histogram.cumsum(1)
    at = torch.searchsorted(below, torch.full((E, 1), N * k // E, device=bias.device), right=True)
    count = histogram.gather(1, at)
    inside = (N * k / E - (below.gather(1, at) - count).to(bias.dtype)) / count
    return _centred((low + (at + inside) * width).squeeze(1))


def sign_rule_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """DeepSeek-V3's rule: one step of `rate` up for each expert below the mean load, one down for each above.

    bias: [E] fp32.   counts: [E] whole numbers, how often each expert was chosen.
    """
    return bias + rate * (counts.sum() - counts * len(counts)).sign()  # whole numbers: no load is rounded away


def auxiliary_loss(scores: Tensor, counts: Tensor, k: int) -> Tensor:
    """Scalar, 1 when loads or scores are even, up to E / k when k experts take all.

    scores: [N,E]; the gradient goes through them.   counts: [E], how often each expert was chosen; without a gradient.
    A token's scores are divided by their sum first, as DeepSeek-V3 does with sigmoid scores.
    """
    N, E = scores.shape
    if N == 0:
        return scores.sum()  # 0, with a gradient of no tokens
    share = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).mean(0)
    return E / (N * k) * (counts.to(share.dtype) * share).sum()


def _needed(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """r [N,E]: the bias above which each expert would have been chosen by each token, k < E."""
    return (scores + bias).topk(k + 1, dim=-1).values[:, -1:] - scores


def _bins(bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Lower edge of the first bin and width of each."""
    low, high = bias.min() - 1, bias.max() + 1
    return low, (high - low) / bins


def _centred(bias: Tensor) -> Tensor:
    """Only differences between experts choose: keep the mean at zero."""
    return bias - bias.mean()
