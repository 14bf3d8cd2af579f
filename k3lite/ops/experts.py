"""Experts on groups of tokens: sort by expert, run each expert once on its group, put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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

    z: [N,D] tokens, N = 0 allowed.   experts: [N,k] ids.   weights: [N,k], fp32.
    w1 (gate), w3 (up): [E,I,D].   w2 (down): [E,D,I].   act(gate, up): the gated activation.
    Products run in z's dtype, the weighted sum in fp32 (k3-architecture §2.4).
    Time and bytes follow the experts that somebody chose, not E; only the gradients of w1, w3, w2 are as large as they.
    Raises ValueError for other shapes or dtypes and for an expert that is not there.
    """
    _check(z, experts, weights, w1, w3, w2)
    if len(z) == 1 and not torch.is_grad_enabled():
        return _one_token(z, experts, weights, w1, w3, w2, act)
    groups, order = _grouped(experts)
    _check_ids([e for e, _ in groups], len(w1))
    x = z[order // experts.shape[1]]
    hidden = act(GroupedProduct.apply(x, w1, groups), GroupedProduct.apply(x, w3, groups))
    return _weighted(GroupedProduct.apply(hidden, w2, groups), order, weights).to(z.dtype)


def _one_token(z, experts, weights, w1, w3, w2, act) -> Tensor:
    """`grouped_experts` where there is nothing to group, as while decoding: sorting would take as long as the products."""
    chosen = experts[0].tolist()
    _check_ids(chosen, len(w1))
    gate, up = (torch.cat([F.linear(z, w[e]) for e in chosen]) for w in (w1, w3))
    out = torch.cat([F.linear(x, w2[e]) for e, x in zip(chosen, act(gate, up).split(1), strict=True)])
    return (weights.unsqueeze(-1) * upcast(out)).sum(1).to(z.dtype)


def _check(z: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> None:
    if w1.dim() != 3 or experts.dim() != 2:
        raise ValueError(f"w1, experts: got shapes {tuple(w1.shape)}, {tuple(experts.shape)}, wanted [E,I,D] and [N,k]")
    (E, width, D), (N, k) = w1.shape, experts.shape
    given = {"z": (z, (N, D)), "weights": (weights, (N, k)), "w3": (w3, (E, width, D)), "w2": (w2, (E, D, width))}
    for name, (x, shape) in given.items():
        if x.shape != shape:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, wanted {shape} beside w1 {tuple(w1.shape)} and experts {(N, k)}"
            )
    if experts.is_floating_point() or experts.dtype == torch.bool:
        raise ValueError(f"experts: got {experts.dtype}, wanted whole numbers")
    for name, w in {"w1": w1, "w3": w3, "w2": w2}.items():
        if w.dtype != z.dtype:
            raise ValueError(f"{name}: got {w.dtype}, wanted {z.dtype} as z")


def _check_ids(ids: list[int], experts: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < experts:
        raise ValueError(f"experts: got ids from {min(ids)} to {max(ids)}, wanted 0 to {experts - 1}")


def by_expert(z: Tensor, experts: Tensor, weights: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """As `grouped_experts`, with run(e, x [n,D]) -> [n,D] in place of the weights of the experts."""
    groups, order = _grouped(experts)
    parts = _parts(groups, z[order // experts.shape[1]])
    return _weighted(torch.cat([z[:0], *(run(e, x) for e, x in parts)]), order, weights).to(z.dtype)


def _grouped(experts: Tensor) -> tuple[list[tuple[int, int]], Tensor]:
    """(expert, rows) of all that were chosen, and the order of choices that puts each one's rows together."""
    ids, order = experts.flatten().sort(stable=True)
    chosen, counts = ids.unique_consecutive(return_counts=True)
    return list(zip(chosen.tolist(), counts.tolist(), strict=True)), order


def _weighted(out: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Rows of experts [Nk,D], back in their places and added up."""
    out = out[order.argsort()].unflatten(0, weights.shape)
    return (weights.unsqueeze(-1) * upcast(out)).sum(1)


class GroupedProduct(torch.autograd.Function):
    """x [M,D], w [E,I,D] -> x_e w_e^T for each group of rows, [M,I].

    groups: (expert, rows) in the order of x's rows, each expert once. Every product writes its part of one result, so
    nothing is concatenated; of w and of its gradient an expert without rows costs no more than the gradient's zeros.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, groups: list[tuple[int, int]]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.groups = groups
        out = x.new_empty(len(x), w.shape[1])
        for e, x_e, out_e in _parts(groups, x, out):
            torch.mm(x_e, w[e].T, out=out_e)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        if dx is not None:
            for e, dx_e, d_out_e in _parts(ctx.groups, dx, d_out):
                torch.mm(d_out_e, w[e], out=dx_e)
        return dx, _of_weights(x, w, d_out, ctx.groups) if ctx.needs_input_grad[1] else None, None


def _of_weights(x: Tensor, w: Tensor, d_out: Tensor, groups: list[tuple[int, int]]) -> Tensor:
    """The gradient of w."""
    dw, idle = torch.empty_like(w), torch.ones(len(w), dtype=torch.bool, device=w.device)
    idle[[e for e, _ in groups]] = False
    dw[idle] = 0
    for e, x_e, d_out_e in _parts(groups, x, d_out):
        torch.mm(d_out_e.T, x_e, out=dw[e])
    return dw


def _parts(groups: list[tuple[int, int]], *tensors: Tensor) -> Iterator[tuple[int | Tensor, ...]]:
    """Each group's expert and its rows of every tensor."""
    experts, rows = [e for e, _ in groups], [n for _, n in groups]
    return zip(experts, *(t.split(rows) for t in tensors), strict=True)
