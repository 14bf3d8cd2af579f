"""Softmax attention in its plain form: a key and a value for every token and every head, and the weights to look at.

    weight of token j for query t = e^(q_t . k_j s) / sum over the tokens i that t may see of e^(q_t . k_i s)
    o_t                           = sum over j of weight_j v_j                                 s = K^-1/2

The reference of chapter 02 and the measure of its siblings: MLA makes k and v from one latent a token
(ops/latent_attention.py), linear attention leaves the exponential out (ops/linear_attention.py). Which tokens may be
seen is decided in one place for softmax attention of both kinds. No position enters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3lite.ops.latent_attention import visible
from k3lite.ops.pointwise import check_cu_seqlens, upcast


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """T new queries over L >= T keys, the new tokens last: (o [B,T,H,V], weights [B,H,T,L]).

    q: [B,T,H,K].   k: [B,L,H,K].   v: [B,L,H,V].   scale: factor on the scores, K^-1/2 by default.
    key_mask: [B,L], False where a token is padding.   cu_seqlens: starts of packed sequences, then B = 1 and L = T.
    A query that may see nothing gets zeros, and asks for nothing in the gradient. All T L weights are made at once.
    Scores and softmax are fp32 (fp64 for fp64); o has v's dtype. Raises ValueError for shapes outside this contract.
    """
    _check(q, k, v, key_mask, cu_seqlens)
    T, L = q.shape[1], k.shape[1]
    q, keys, values = (upcast(x).transpose(1, 2) for x in (q, k, v))  # [B,H,.,.]
    scores = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = visible(0, T, T, L, key_mask, cu_seqlens, q.device)  # the last query sees all L keys, the one before L - 1
    # The smallest number and not -inf: a row with nothing to see stays finite, and is zeroed by the second mask.
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
    return (weights @ values).transpose(1, 2).to(v.dtype), weights


def _check(q, k, v, key_mask, cu_seqlens) -> None:
    if q.dim() != 4:
        raise ValueError(f"q: got shape {tuple(q.shape)}, wanted [B, T, H, K]")
    B, T, H, K = q.shape
    L = k.shape[1] if k.dim() == 4 else None
    if L is None or tuple(k.shape) != (B, L, H, K) or L < T:
        raise ValueError(f"k: got shape {tuple(k.shape)}, wanted ({B}, L, {H}, {K}) with L of {T} or more")
    if v.dim() != 4 or tuple(v.shape[:3]) != (B, L, H):
        raise ValueError(f"v: got shape {tuple(v.shape)}, wanted ({B}, {L}, {H}, V)")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not x.is_floating_point() or (x.dtype, x.device) != (q.dtype, q.device):
            wanted = f"{q.dtype} on {q.device}, as q is" if name != "q" else "floats"
            raise ValueError(f"{name}: got {x.dtype} on {x.device}, wanted {wanted}")
    if key_mask is not None and (tuple(key_mask.shape) != (B, L) or key_mask.dtype != torch.bool):
        raise ValueError(f"key_mask: got {key_mask.dtype} {tuple(key_mask.shape)}, wanted bool ({B}, {L})")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
        if L != T:
            raise ValueError(f"k: got {L} keys for {T} packed queries, wanted as many")
