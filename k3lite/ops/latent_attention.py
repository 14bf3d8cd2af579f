"""Softmax attention over one shared latent per token, expanded or absorbed.

A token is cached as [c (rank) | k_r (rope)]. Per head, kv_b = [W_k; W_v] turns c into a key and a value:

    expanded:  k = [c W_k^T | k_r],  v = c W_v^T,  o = softmax(q k^T s) v
    absorbed:  q~ = q_n W_k,  logits = (q~ c^T + q_r k_r^T) s,  o = (softmax c) W_v^T

The second moves the small matrices from every cached token to the few new queries; it is the same sum in
another order of brackets. No position enters anywhere. Source: k3-architecture §2.2.

Latents that lie in pages come as pieces. Absorbed, they are read once, a block at a time, and each block's answer is
blended in by its share of the softmax: while decoding, nothing as long as the context is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from k3lite.ops.pointwise import sequence_of_token, upcast

Form = Literal["auto", "expanded", "absorbed"]
MAX_SCORES = 2**24  # numbers in one block of attention scores: bounds memory, changes no result
BLOCK = 2**18  # numbers in a block of latents: few enough to be in a core's cache when they are read again

Pieces = list[list[Tensor]]  # for each sequence its latents in order, as tensors [n,width], the n of any sizes


def latent_attention(
    q: Tensor,
    latents: Tensor | Pieces,
    kv_b: Tensor,
    nope_dim: int,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
) -> Tensor:
    """Causal attention of T new queries over L >= T cached tokens, the new ones last; returns [B,T,H,V].

    q: [B,T,H,nope+rope].   latents: [B,L,rank+rope], the rank part already normalised; or the same as `Pieces`.
    kv_b: [H,nope+V,rank], keys first.   key_mask: [B,L], False where a token is padding.
    cu_seqlens: starts of packed sequences, then B = 1 and L = T.
    A query that may see nothing (padding) gets zeros, with zero gradient.
    Scores and softmax are fp32 (fp64 for fp64). Raises ValueError for shapes outside this contract, or mixed dtypes.
    """
    _check(q, latents, kv_b, nope_dim)
    B, T, H, _ = q.shape
    L, rank = sum(x.shape[0] for x in latents[0]) if isinstance(latents, list) else latents.shape[1], kv_b.shape[-1]
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
    if form == "absorbed":
        q = torch.cat([torch.einsum("bthn,hnr->bthr", q[..., :nope_dim], W_k), q[..., nope_dim:]], -1)
    q = upcast(q).transpose(1, 2) * scale  # [B,H,T,.]
    in_blocks = form == "absorbed" and cu_seqlens is None and B * L * (rank + rope) > BLOCK
    if isinstance(latents, list) and not in_blocks:
        latents = join_pieces(latents)
    if isinstance(latents, list):
        masks = [None] * B if key_mask is None else key_mask
        o = torch.stack([_in_blocks(*row, rank) for row in zip(q, latents, masks, strict=True)])
    else:
        o = _at_once(q, latents, W_k, W_v, form, key_mask, cu_seqlens)
    o = o.transpose(1, 2)  # [B,T,H,V or rank]
    if form == "absorbed":
        o = torch.einsum("bthr,hvr->bthv", o, upcast(W_v))
    return o.to(kv_b.dtype)


def _check(q: Tensor, latents: Tensor | Pieces, kv_b: Tensor, nope_dim: int) -> None:
    """Of pieces, those of the first sequence are looked at: the others come from the same cache."""
    if q.dim() != 4 or not 0 <= nope_dim <= q.shape[-1] or not q.is_floating_point():
        raise ValueError(
            f"q: got {q.dtype} {tuple(q.shape)}, wanted floats [B, T, H, nope+rope] with nope = {nope_dim}"
        )
    H, rope = q.shape[2], q.shape[3] - nope_dim
    if kv_b.dim() != 3 or kv_b.shape[0] != H or kv_b.shape[1] < nope_dim:
        raise ValueError(f"kv_b: got shape {tuple(kv_b.shape)}, wanted ({H}, {nope_dim}+V, rank)")
    width = kv_b.shape[2] + rope
    given = latents[0] if isinstance(latents, list) else [latents]
    for x in given:
        if x.dim() != (2 if isinstance(latents, list) else 3) or x.shape[-1] != width:
            raise ValueError(f"latents: got shape {tuple(x.shape)}, wanted rows of rank + rope = {width} numbers")
    for name, x in (("kv_b", kv_b), *(("latents", x) for x in given)):
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise ValueError(f"{name}: got {x.dtype} on {x.device}, wanted {q.dtype} on {q.device}, as q is")


def join_pieces(pieces: Pieces) -> Tensor:
    """[B,L,width]: the pieces of every sequence in one tensor. A view where there is a single piece."""
    rows = [row[0] if len(row) == 1 else torch.cat(row) for row in pieces]
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


def _at_once(q, latents, W_k, W_v, form, key_mask, cu_seqlens) -> Tensor:
    """[B,H,T,V or rank] from scaled queries [B,H,T,.]: all keys and values made first."""
    (B, H, T, _), L, rank = q.shape, latents.shape[1], W_k.shape[-1]
    c, k_r = latents[..., :rank], latents[..., rank:]
    if form == "absorbed":
        keys, values = latents.unsqueeze(1), c.unsqueeze(1)  # [B,1,L,.]: one head serves all
    else:
        k_n = torch.einsum("blr,hnr->bhln", c, W_k)
        keys = torch.cat([k_n, k_r.unsqueeze(1).expand(-1, H, -1, -1)], -1)
        values = torch.einsum("blr,hvr->bhlv", c, W_v)
    keys, values = upcast(keys), upcast(values)
    whole = form == "expanded" and L == T and key_mask is None and cu_seqlens is None
    if whole and not (torch.is_grad_enabled() and (q.requires_grad or keys.requires_grad or values.requires_grad)):
        return _fused(q, keys, values)
    keys = keys.transpose(-1, -2)
    rows = max(1, MAX_SCORES // (B * H * L))
    outputs = []
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        reach = L - T + stop  # keys that the block's last query may see
        scores = _product(q[:, :, start:stop], keys[..., :reach])
        seen = visible(start, stop, T, L, key_mask, cu_seqlens, q.device)[..., :reach]
        # The smallest number and not -inf: a row with nothing to see stays finite and is zeroed after.
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
        if key_mask is not None:
            weights = weights * seen
        outputs.append(_product(weights, values[:, :, :reach]))
    return torch.cat(outputs, 2)


def _fused(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same by torch's own kernel, which stores no scores: a quarter of the time for 4,000 tokens on a CPU.

    All widths are made equal with zeros; where they differ, torch takes a path that is slower than ours. Not used in
    training, so that what was trained before this was here can be trained again bit for bit.
    """
    width, V = max(keys.shape[-1], values.shape[-1]), values.shape[-1]
    q, keys, values = (F.pad(x, (0, width - x.shape[-1])) for x in (q, keys, values))
    return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=1.0)[..., :V]


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x [B,H,T,a] @ y [B,H or 1,a,b]; where all heads share y, they are the rows of one product."""
    if y.shape[1] > 1:
        return x @ y
    return (x.flatten(1, 2) @ y.squeeze(1)).unflatten(1, x.shape[1:3])


def _in_blocks(q: Tensor, pieces: list[Tensor], key_mask: Tensor | None, rank: int) -> Tensor:
    """[H,T,rank] from one sequence's absorbed, scaled queries [H,T,width], its last T tokens; key_mask [L].

    `o` is the answer over the blocks so far and `lse` the logarithm of their softmax denominator. The next block's
    answer is blended in by its share of both denominators, which is exact in any order.
    """
    H, T, width = q.shape
    L = sum(x.shape[0] for x in pieces)
    rows, lowest = q.flatten(0, 1), torch.finfo(q.dtype).min  # heads are rows: one product serves all
    o, lse = rows.new_zeros(H * T, rank), rows.new_full((H * T, 1), -torch.inf)
    start = 0
    for block in _blocks(pieces, max(1, min(BLOCK // width, MAX_SCORES // (H * T)))):
        block, stop = upcast(block), start + block.shape[0]
        scores = _few_rows(rows, block)
        seen = _visible_in_block(start, stop, T, L, key_mask, q.device)
        if seen is not None:
            scores = scores.unflatten(0, (H, T)).masked_fill(~seen, lowest).flatten(0, 1)
        weights = scores.softmax(-1)
        # The largest weight is e^(largest score) / denominator.
        block_lse = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
        if key_mask is not None:  # as in `_at_once`
            weights = (weights.unflatten(0, (H, T)) * seen).flatten(0, 1)
        share = torch.sigmoid(block_lse - lse)
        o = torch.lerp(o, _few_rows(weights, block[:, :rank].T), share)
        lse, start = torch.logaddexp(lse, block_lse), stop
    return o.unflatten(0, (H, T))


def _few_rows(x: Tensor, y: Tensor) -> Tensor:
    """x [m,k] @ y [n,k]^T for an m far below n.

    Where torch comes with oneDNN, its product is taken on a CPU: with 32 rows it does 180 GFLOP/s where `@` does 95
    (an AMD EPYC, one thread, fp32). It has no gradient.
    """
    plain = x.dtype != torch.float32 or x.device.type != "cpu" or (torch.is_grad_enabled() and x.requires_grad)
    if plain or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return x @ y.T
    return torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "")


def _blocks(pieces: list[Tensor], size: int) -> Iterator[Tensor]:
    """The pieces cut or put together to blocks of `size` tokens, the last shorter. Copies only what it puts together."""
    held, room = [], size
    for piece in pieces:
        while piece.shape[0] >= room:
            held.append(piece[:room])
            yield _fetched(held)
            held, piece, room = [], piece[room:], size
        if piece.shape[0]:
            held.append(piece)
            room -= piece.shape[0]
    if held:
        yield _fetched(held)


def _fetched(parts: list[Tensor]) -> Tensor:
    """The parts as one tensor, read front to back, after which the products find it in a CPU's cache.

    They would fetch it themselves, but in an order that memory serves slowly: 11 ms for 64 MiB where a sum to bring
    it in and the products together take 9 (an AMD EPYC, one thread).
    """
    if len(parts) > 1:
        return torch.cat(parts)
    if parts[0].device.type == "cpu":
        parts[0].sum()
    return parts[0]


def _visible_in_block(start: int, stop: int, T: int, L: int, key_mask: Tensor | None, device) -> Tensor | None:
    """[T or 1, stop-start]: which of the keys start..stop the last T of L tokens may see; None if all see all."""
    seen = None
    if stop > L - T + 1:
        query = torch.arange(L - T, L, device=device).unsqueeze(-1)
        seen = torch.arange(start, stop, device=device) <= query
    if key_mask is not None:
        real = key_mask[start:stop].unsqueeze(0)
        seen = real if seen is None else seen & real
    return seen


def visible(start, stop, T, L, key_mask, cu_seqlens, device) -> Tensor:
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
