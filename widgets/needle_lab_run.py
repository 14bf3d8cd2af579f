"""The runs behind needle_lab: find the trained siblings, let one read a document, ask it, and erase one of its memories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from k3lite.cache import K3Cache, KdaState
from k3lite.generate import prefill
from k3lite.model import K3ForCausalLM
from k3lite.ops.attention import causal_attention
from k3lite.tasks.recall import VOCABULARY, Documents, make_documents
from k3lite.tasks.recall_exam import ASKED, Answers, answers
from k3lite.tasks.recall_job import TASK, Job, load_sibling
from k3lite.tasks.siblings import VARIANTS, ConvMLA, RotaryMLA
from k3lite.tasks.text import DATA
from k3lite.tasks.trained import CARD, read_card
from widgets.attention_map import unfold

FOLDER = DATA / "models" / "recall"
LENGTHS = Job.lengths  # tokens
ALONE = {"states": "slots", "slots": "states"}  # what answers: what is erased

# ---- siblings


def siblings(folder: Path = FOLDER) -> dict[str, Path]:
    """{name: folder} of the trained siblings under `folder`, as shipped or as `k3lite train recall` leaves them.

    Raises ValueError if there is none.
    """
    found = {}
    for card in sorted([*folder.glob(f"*/{CARD}"), *folder.glob(f"*/model/{CARD}")]):
        inside = card.parent
        found[inside.parent.name if inside.name == "model" else inside.name] = inside
    if not found:
        raise ValueError(f"siblings: none in {folder}; `k3lite train recall --out {folder}` makes them.")
    order = {name: VARIANTS.index(read_card(path, TASK)["variant"]) for name, path in found.items()}
    return {name: found[name] for name in sorted(found, key=lambda name: (order[name], name))}


@lru_cache(32)
def model_of(folder: Path) -> K3ForCausalLM:
    model = load_sibling(folder)
    if model.config.vocab_size != VOCABULARY:
        raise ValueError(f"{folder}: knows {model.config.vocab_size} tokens, wanted {VOCABULARY}; train it again.")
    return model


# ---- one run


@dataclass(frozen=True)
class Run:
    """A document, the answers, the answers with one kind of memory left, and where every MLA layer looked."""

    documents: Documents
    answers: Answers
    alone: dict[str, Answers]
    weights: dict[int, Tensor]  # by MLA layer, from 1: [H, tail, T], of the tokens behind the document


@lru_cache(4)
@torch.no_grad()
def run_of(folder: Path, length: int, facts: int, depth: float | None, options: tuple, seed: int) -> Run:
    """The document is read once; then its questions, as often as there are memories to erase."""
    model, generator = model_of(folder), torch.Generator().manual_seed(seed)
    rumours, rewritten, string = options
    try:
        d = make_documents(
            1, length, facts, generator, questions=min(facts, ASKED), depth=depth,
            rumours=rumours, rewritten=rewritten, string=string,
        )  # fmt: skip
    except ValueError as e:
        raise ValueError(f"{e}.") from e  # a sentence, as the message line wants it
    layers = {i: x.self_attn for i, x in enumerate(model.model.layers, 1) if model.config.layer_kinds[i - 1] == "mla"}
    given: dict[int, Tensor] = {}

    def keep(number: int) -> Callable:
        return lambda _, inputs: given.update({number: inputs[0]})

    cache, alone = _cache(model), {}
    if cache is not None:
        prefill(model, d.ids[:, :length], cache)
    if len(set(model.config.layer_kinds)) == 2:
        alone = {what: answers(_after(model, _erased(cache, gone)), d) for what, gone in ALONE.items()}
    # What enters this projection is what latents and queries are made of, also behind the convolution of "mla-conv".
    hooks = [mla.kv_a_proj_with_mqa.register_forward_pre_hook(keep(n)) for n, mla in layers.items()]
    try:
        got = answers(model if cache is None else _after(model, cache), d)
    finally:
        for hook in hooks:
            hook.remove()
    weights = {}
    for n, mla in layers.items():
        latents = mla.latents(given[n]) if cache is None else cache.layers[n - 1].latents
        tail = mla.query(given[n])[:, length - d.ids.shape[1] :]
        weights[n] = causal_attention(tail, *unfold(mla, latents))[1][0]
    return Run(d, got, alone, weights)


def _cache(model: K3ForCausalLM) -> K3Cache | None:
    """None for a sibling that reads whole sequences only."""
    whole_only = any(isinstance(layer.self_attn, ConvMLA | RotaryMLA) for layer in model.model.layers)
    return None if whole_only else model.new_cache()


def _after(model: K3ForCausalLM, cache: K3Cache) -> Callable:
    """`model` as `answers` calls it, with the document already read into the cache, which grows by the questions."""
    return lambda ids, logits_to_keep: model(ids[:, cache.seen :], cache=cache, logits_to_keep=logits_to_keep)


def _erased(cache: K3Cache, what: str) -> K3Cache:
    """A copy of the cache without its "slots" or its "states"."""
    cache = cache.copy()
    for layer in cache.layers:
        if isinstance(layer, KdaState):
            layer.S = torch.zeros_like(layer.S) if what == "states" else layer.S
        elif what == "slots":
            layer.latents = torch.zeros_like(layer.latents)
    return cache
