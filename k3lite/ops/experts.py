"""Experts on groups of tokens: sort by expert, run each expert once on its group, put back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3lite.ops.pointwise import upcast

Activation = Callable[[Tensor, Tensor], Tensor]


def experts_naive(
    z: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: Activation
) -> Tensor:
    """The definition, token by token: sum over the chosen of weight * E(z). Shapes as in `grouped_experts`."""
    rows = []
    for n in range(z.shape[0]):
        total = upcast(z.new_zeros(w2.shape[1]))
        for e, p in zip(experts[n].tolist(), weights[n], strict=True):
            total = total + p * upcast(act(z[n] @ w1[e].T, z[n] @ w3[e].T) @ w2[e].T)
        rows.append(total)
    return torch.stack(rows).to(z.dtype)


def grouped_experts(
    z: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: Activation
) -> Tensor:
    """Weighted sum of the chosen experts' outputs, [N, D].

    z: [N,D] tokens.   experts: [N,k] ids.   weights: [N,k], fp32.
    w1 (gate), w3 (up): [E,I,D].   w2 (down): [E,D,I].   act(gate, up): the gated activation.
    Products run in z's dtype, the weighted sum in fp32 (k3-architecture §2.4).
    """
    # unbind, not w1[e]: its backward builds the gradient of all experts once, not once for each
    a, b, c = w1.unbind(), w3.unbind(), w2.unbind()
    return by_expert(z, experts, weights, len(a), lambda e, x: act(x @ a[e].T, x @ b[e].T) @ c[e].T)


def by_expert(
    z: Tensor, experts: Tensor, weights: Tensor, count: int, run: Callable[[int, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    """As `grouped_experts`, with run(e, x [n,D]) -> [n,D] in place of the weights of `count` experts."""
    N, k = experts.shape
    order = experts.flatten().argsort(stable=True)
    groups = z[order // k].split(experts.flatten().bincount(minlength=count).tolist())
    out = torch.cat([run(e, x) for e, x in enumerate(groups) if len(x)])
    out = out[order.argsort()].unflatten(0, (N, k))
    return (weights.unsqueeze(-1) * upcast(out)).sum(1).to(z.dtype)
