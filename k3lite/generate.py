"""Prefill in pieces, then one token at a time from the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3lite.budget import CacheBytes
from k3lite.cache import K3Cache
from k3lite.model import K3ForCausalLM

PREFILL_PIECE = 1024  # tokens a forward pass takes at once; bounds memory, changes no result


@torch.no_grad()
def prefill(
    model: K3ForCausalLM, ids: Tensor, cache: K3Cache, attention_mask: Tensor | None = None, piece: int = PREFILL_PIECE
) -> Tensor:
    """Read ids [B,T] into the cache and return the logits after the last token, [B,vocab]."""
    if ids.shape[1] == 0:
        raise ValueError("ids: got no token, wanted at least one to go on from")
    logits = None
    for start in range(0, ids.shape[1], piece):
        part = slice(start, start + piece)
        mask = None if attention_mask is None else attention_mask[:, part]
        logits = model(ids[:, part], cache=cache, attention_mask=mask, logits_to_keep=1).logits
    return logits[:, -1]


@torch.no_grad()
def stream(
    model: K3ForCausalLM,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    attention_mask: Tensor | None = None,
    cache: K3Cache | None = None,
    stop_ids: tuple[int, ...] = (),
) -> Iterator[Tensor]:
    """Yield the next tokens [B], one step at a time, as they are made.

    ids: [B,T] prompt; attention_mask: [B,T] with zeros for left padding.
    temperature: 0 is greedy; above 0 samples, from the top_k likeliest tokens or those that make up top_p.
    cache: continue from one (ids are then the tokens it has not seen); it keeps growing while streaming.
    stop_ids: a sequence that made one of these repeats it; the stream ends when all have (batch order is kept).
    Raises ValueError on settings out of range.
    """
    if temperature < 0:
        raise ValueError(f"temperature: got {temperature:g}, wanted 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: got {top_k}, wanted 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p:g}, wanted above 0, up to 1")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, wanted 0 or more")
    cache = model.new_cache(ids.shape[0]) if cache is None else cache
    logits = prefill(model, ids, cache, attention_mask)
    stopped = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    token = ids[:, -1]
    for step in range(max_new_tokens):
        token = torch.where(stopped, token, pick(logits, temperature, top_k, top_p, generator))
        yield token
        for stop in stop_ids:
            stopped = stopped | (token == stop)
        if bool(stopped.all()) or step == max_new_tokens - 1:
            return
        logits = model(token.unsqueeze(1), cache=cache).logits[:, -1]


def generate(model: K3ForCausalLM, ids: Tensor, max_new_tokens: int, **options) -> Tensor:
    """The streamed tokens of `stream` together: [B, up to max_new_tokens]."""
    tokens = list(stream(model, ids, max_new_tokens, **options))
    return torch.stack(tokens, dim=1) if tokens else ids[:, :0]


def metered(
    model: K3ForCausalLM, ids: Tensor, max_new_tokens: int, *, cache: K3Cache | None = None, **options
) -> Iterator[tuple[Tensor, CacheBytes]]:
    """`stream` with a meter: each token [B], and the bytes of the cache that it was made from, by kind."""
    cache = model.new_cache(ids.shape[0]) if cache is None else cache
    for token in stream(model, ids, max_new_tokens, cache=cache, **options):
        yield token, cache.bytes()


def pick(
    logits: Tensor, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """One token [B] from logits [B,vocab]; settings as in `stream`."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(-1)
        outside = probability.cumsum(-1) - probability >= top_p  # the likeliest token always stays
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
