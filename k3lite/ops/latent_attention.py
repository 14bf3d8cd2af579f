"""Softmax attention over one shared latent per token, expanded or absorbed.

A token is cached as [c (rank) | k_r (rope)]. Per head, kv_b = [W_k; W_v] turns c into a key and a value:

    expanded:  k = [c W_k^T | k_r],  v = c W_v^T,  o = softmax(q k^T s) v
    absorbed:  q~ = q_n W_k,  logits = (q~ c^T + q_r k_r^T) s,  o = (softmax c) W_v^T

The second moves the small matrices from every cached token to the few new queries; it is the same sum in
another order of brackets. No position enters anywhere. Source: k3-architecture §2.2.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from k3lite.ops.pointwise import sequence_of_token, upcast

Form = Literal["auto", "expanded", "absorbed"]
MAX_SCORES = 2**24  # numbers in one block of attention scores: bounds memory, changes no result


def latent_attention(
    q: Tensor,
    latents: Tensor,
    kv_b: Tensor,
    nope_dim: int,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
) -> Tensor:
    """Causal attention of T new queries over L >= T cached tokens, the new ones last; returns [B,T,H,V].

    q: [B,T,H,nope+rope].   latents: [B,L,rank+rope], the rank part already normalised.
    kv_b: [H,nope+V,rank], keys first.   key_mask: [B,L], False where a token is padding.
    cu_seqlens: starts of packed sequences, then B = 1 and L = T.
    A query that may see nothing (padding) gets zeros, with zero gradient.
    Scores and softmax are fp32 (fp64 for fp64). Raises ValueError for shapes outside this contract.
    """
    B, T, H, _ = q.shape
    L, rank = latents.shape[1], kv_b.shape[-1]
    if L < T:
        raise ValueError(f"latents: got {L} tokens for {T} queries, wanted at least as many")
    if form not in ("auto", "expanded", "absorbed"):
        raise ValueError(f"form: got {form!r}, wanted 'auto', 'expanded' or 'absorbed'")
    rope, V = q.shape[-1] - nope_dim, kv_b.shape[1] - nope_dim
    if form == "auto":
        # multiplications per head: T L (2 rank - nope - V) more per score, against L rank (nope + V) to expand
        form = "absorbed" if T * (2 * rank - nope_dim - V) < rank * (nope_dim + V) else "expanded"
    scale = q.shape[-1] ** -0.5
    W_k, W_v = kv_b.split([nope_dim, V], dim=1)
    c, k_r = latents.split([rank, rope], dim=-1)
    if form == "absorbed":
        q = torch.cat([torch.einsum("bthn,hnr->bthr", q[..., :nope_dim], W_k), q[..., nope_dim:]], -1)
        keys, values = latents.unsqueeze(1), c.unsqueeze(1)  # [B,1,L,.]: one head serves all
    else:
        k_n = torch.einsum("blr,hnr->bhln", c, W_k)
        keys = torch.cat([k_n, k_r.unsqueeze(1).expand(-1, H, -1, -1)], -1)
        values = torch.einsum("blr,hvr->bhlv", c, W_v)

    keys, values = upcast(keys).transpose(-1, -2), upcast(values)
    q = upcast(q).transpose(1, 2) * scale  # [B,H,T,.]
    rows = max(1, MAX_SCORES // (B * H * L))
    outputs = []
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        reach = L - T + stop  # keys that the block's last query may see
        scores = q[:, :, start:stop] @ keys[..., :reach]
        seen = _visible(start, stop, T, L, key_mask, cu_seqlens, q.device)[..., :reach]
        # The smallest number and not -inf: a row with nothing to see stays finite and is zeroed after.
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
        if key_mask is not None:
            weights = weights * seen
        outputs.append(weights @ values[:, :, :reach])
    o = torch.cat(outputs, 2).transpose(1, 2)  # [B,T,H,V or rank]
    if form == "absorbed":
        o = torch.einsum("bthr,hvr->bthv", o, upcast(W_v))
    return o.to(latents.dtype)


def _visible(start, stop, T, L, key_mask, cu_seqlens, device) -> Tensor:
    """[1 or B, 1, stop-start, L]: which keys the queries start..stop may see."""
    position = torch.arange(L, device=device)
    query = position[L - T + start : L - T + stop].unsqueeze(-1)
    seen = (position <= query)[None, None]
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    if cu_seqlens is not None:
        sequence = sequence_of_token(cu_seqlens, L)
        seen = seen & (sequence == sequence[start:stop].unsqueeze(-1))
    return seen
