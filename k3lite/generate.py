"""Prefill in pieces, then one token at a time from the cache; alone, or many sequences together.

A batch shares nothing but the time: every sequence gets the tokens it gets alone, up to the rounding of sums that a
product of more rows may take in another order. Prompts of different lengths are read one by one and then decoded
together; a prefix that they share is read once and forked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from k3lite.budget import CacheBytes
from k3lite.cache import K3Cache
from k3lite.model import K3ForCausalLM

Generators = torch.Generator | Sequence[torch.Generator] | None

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
    generator: Generators = None,
    attention_mask: Tensor | None = None,
    cache: K3Cache | None = None,
    stop_ids: tuple[int, ...] = (),
) -> Iterator[Tensor]:
    """Yield the next tokens [B], one step at a time, as they are made.

    ids: [B,T] prompt; attention_mask: [B,T] with zeros for left padding.
    temperature: 0 is greedy; above 0 samples, from the top_k likeliest tokens or those that make up top_p.
    generator: one for the batch, or one for each sequence, which then draws as it would alone.
    cache: continue from one (ids are then the tokens it has not seen); it keeps growing while streaming.
    stop_ids: a sequence that made one of these repeats it; the stream ends when all have (batch order is kept).
    Raises ValueError on settings out of range.
    """
    _check(max_new_tokens, temperature, top_k, top_p)
    cache = model.new_cache(ids.shape[0]) if cache is None else cache
    logits = prefill(model, ids, cache, attention_mask)
    yield from _decode(model, logits, cache, max_new_tokens, stop_ids, temperature, top_k, top_p, generator)


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


def _decode(
    model: K3ForCausalLM, logits: Tensor, cache: K3Cache, max_new_tokens: int, stop_ids: tuple[int, ...], *how
) -> Iterator[Tensor]:
    """The steps of `stream` after the prefill, whose logits are [B,vocab]; `how` goes to `pick`."""
    stopped = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    token = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    for step in range(max_new_tokens):
        token = torch.where(stopped, token, pick(logits, *how))
        yield token
        for stop in stop_ids:
            stopped = stopped | (token == stop)
        if bool(stopped.all()) or step == max_new_tokens - 1:
            return
        logits = model(token.unsqueeze(1), cache=cache).logits[:, -1]


# ---- prompts of different lengths, and what they share


def read_batch(
    model: K3ForCausalLM, prompts: Sequence[Tensor], prefix: K3Cache | None = None
) -> tuple[Tensor, K3Cache]:
    """Read each prompt [T_i], then put all in one batch: logits after the last tokens [B,vocab], and the cache.

    prefix: a cache of one sequence that every prompt goes on from. It stays as it is; its full pages are shared.
    No padding passes through the model. Only the slots of shorter sequences are filled up, so that all are equally long.
    Raises ValueError for no prompt, a prompt without tokens or of another shape, a prefix of several sequences.
    """
    if len(prompts) == 0:
        raise ValueError("prompts: got none, wanted at least one")
    for i, prompt in enumerate(prompts):
        if prompt.dim() != 1 or prompt.numel() == 0:
            raise ValueError(f"prompts: got shape {tuple(prompt.shape)} as number {i}, wanted [T] with a token or more")
    if prefix is not None and prefix.batch != 1:
        raise ValueError(f"prefix: got a cache of {prefix.batch} sequences, wanted one that all prompts go on from")
    prefix = model.new_cache() if prefix is None else prefix
    caches = [prefix.fork(1) for _ in prompts]
    logits = [prefill(model, prompt.unsqueeze(0), cache) for prompt, cache in zip(prompts, caches, strict=True)]
    longest = max(cache.seen for cache in caches)
    for cache in caches:
        cache.pause(longest - cache.seen)
    return torch.cat(logits), K3Cache.joined(caches)


@torch.no_grad()
def generate_batch(
    model: K3ForCausalLM,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seeds: Sequence[int] | None = None,
    prefix: K3Cache | None = None,
    stop_ids: tuple[int, ...] = (),
) -> list[Tensor]:
    """Continue prompts [T_i] of any lengths together; each gets the new tokens that `generate` gives it alone.

    seeds: one for each prompt, for sampling.   prefix: as in `read_batch`.   temperature, top_k, top_p: as in `stream`.
    stop_ids: a sequence ends with the first of these that it makes; its place in the batch idles until all have ended.
    Returns for each prompt up to max_new_tokens tokens. Raises ValueError as `stream` and `read_batch` do, and for
    another number of seeds than prompts.
    """
    _check(max_new_tokens, temperature, top_k, top_p)
    if seeds is not None and len(seeds) != len(prompts):
        raise ValueError(f"seeds: got {len(seeds)}, wanted one for each of {len(prompts)} prompts")
    logits, cache = read_batch(model, prompts, prefix)
    draws = None if seeds is None else [torch.Generator(logits.device).manual_seed(seed) for seed in seeds]
    made = [[] for _ in prompts]
    for tokens in _decode(model, logits, cache, max_new_tokens, stop_ids, temperature, top_k, top_p, draws):
        for mine, token in zip(made, tokens.tolist(), strict=True):
            if not (mine and mine[-1] in stop_ids):
                mine.append(token)
    return [torch.tensor(mine, dtype=torch.long, device=logits.device) for mine in made]


# ---- the choice of a token


def _check(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if temperature < 0:
        raise ValueError(f"temperature: got {temperature:g}, wanted 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: got {top_k}, wanted 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p:g}, wanted above 0, up to 1")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, wanted 0 or more")


def pick(
    logits: Tensor, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
    generator: Generators = None,
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
    probabilities = logits.softmax(-1)
    if generator is None or isinstance(generator, torch.Generator):
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    return torch.cat([torch.multinomial(p, 1, generator=g) for p, g in zip(probabilities, generator, strict=True)])
