"""Decoding beside a long context: time per token and cache bytes of three models of equal width.

All layers MLA (absorbed), three KDA layers to one MLA layer, all KDA. The caches are real and the model decodes from
them, but their latents and states are random numbers: a prefill of 262,144 tokens would take hours and change no time.
What the all-MLA model could do at best is reckoned in the same run: its latents read once at the speed of a copy, or
the products of its attention at the rate of a large product, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from k3lite import bench
from k3lite.budget import KIB, MIB
from k3lite.cache import K3Cache, KdaState
from k3lite.config import K3Config, LinearAttnConfig
from k3lite.model import K3ForCausalLM

LAYERS, WIDTH, LATENT = 8, 256, 64
HEADS, HEAD = 48, 16  # MLA: as in K3 the latent is four heads wide (512 and 128), and many heads read it (96)
KDA_HEADS, KDA_HEAD = 4, 64
MODELS = {"all-MLA": range(1, 9), "hybrid 3:1": (4, 8), "KDA only": ()}  # name -> MLA layers, from 1
CONTEXTS = (1 * KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
BATCHES = (1, 4)
ROUNDS = 12  # the best counts
COPY, PRODUCT = 256 * MIB, 1024  # bytes, far more than a cache holds; rows and columns of a large product


def config(mla_layers: Iterable[int], heads: int = HEADS, head: int = HEAD) -> K3Config:
    """K3's layers at width 256, fp32: 64 cached numbers a token and MLA layer, four states of 64 x 64 a KDA layer.

    mla_layers: from 1.   heads, head: heads of an MLA layer and their width. The MLPs are dense, one width wide.
    """
    mla = tuple(mla_layers)
    return K3Config(
        vocab_size=256,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        intermediate_size=WIDTH,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=head,
        qk_rope_head_dim=0,
        v_head_dim=head,
        mla_use_output_gate=True,
        hidden_act="situ",
        linear_attn_config=LinearAttnConfig(
            kda_layers=tuple(i for i in range(1, LAYERS + 1) if i not in mla),
            full_attn_layers=mla,
            num_heads=KDA_HEADS,
            head_dim=KDA_HEAD,
            use_full_rank_gate=True,
            gate_lower_bound=-5.0,
        ),
    )


def filled_cache(model: K3ForCausalLM, tokens: int, batch: int = 1) -> K3Cache:
    """A cache as after `tokens` tokens in each sequence, with random latents and states."""
    cache, rng = model.new_cache(batch), torch.Generator().manual_seed(0)
    cache.extend(tokens)
    for slab in cache.pages.pool.slabs:
        slab.normal_(generator=rng)
    for layer in cache.layers:
        if isinstance(layer, KdaState):
            layer.S.normal_(0, 0.1, generator=rng)
    return cache


@dataclass(frozen=True)
class Step:
    """One decoded token for every sequence of a batch."""

    model: str
    tokens: int
    batch: int
    seconds: float  # for the whole batch
    cache_bytes: int  # held for the whole batch, `K3Cache.nbytes`


@dataclass(frozen=True)
class Floors:
    """What the machine does at best, measured between the steps."""

    copy_bytes_s: float  # bytes a second that a copy moves, those it reads and those it writes both counted
    product_flop_s: float  # of one large fp32 product

    def read_s(self, tokens: int, batch: int) -> float:
        """Seconds to read the latents of the all-MLA model once, all layers."""
        return batch * tokens * LAYERS * LATENT * 4 / self.copy_bytes_s

    def products_s(self, tokens: int, batch: int) -> float:
        """Seconds for the products of its absorbed attention over them."""
        return attention_flops(tokens, batch) / self.product_flop_s


def attention_flops(tokens: int, batch: int = 1) -> int:
    """Floating-point operations of scores and sums over the latents in all layers; a multiply-add is two."""
    return 4 * batch * LAYERS * HEADS * LATENT * tokens


@torch.no_grad()
def measure(contexts: Iterable[int], batch: int = 1, rounds: int = ROUNDS) -> tuple[dict[str, list[Step]], Floors]:
    """Decoding steps of each model after each number of tokens: the best of `rounds`, each a few tokens longer.

    All of them, a copy and a product take turns.
    Memory: all caches at once, about 1.7 times that of all-MLA at the longest context.
    """
    ids = torch.zeros(batch, 1, dtype=torch.long)
    source, target, square = torch.ones(COPY // 4), torch.ones(COPY // 4), torch.ones(PRODUCT, PRODUCT)
    works = {"copy": lambda: target.copy_(source), "product": lambda: square @ square}
    held = {}
    for name, mla in MODELS.items():
        model = K3ForCausalLM(config(mla)).eval()
        for tokens in contexts:
            cache = filled_cache(model, tokens, batch)
            works[name, tokens] = lambda model=model, cache=cache: model(ids, cache=cache)
            held[name, tokens] = cache.nbytes()
    best = bench.turns(works, rounds)
    steps = {n: [Step(n, t, batch, best[n, t], held[n, t]) for t in contexts] for n in MODELS}
    return steps, Floors(2 * COPY / best["copy"], 2 * PRODUCT**3 / best["product"])


def cases(device: str) -> Iterator[bench.Row | str]:
    """Every row and remark of `k3lite bench decode`. Raises ValueError for another device than the CPU."""
    if device != "cpu":
        raise ValueError(f"device: got {device!r}, wanted 'cpu': decoding is measured there only")
    yield from cpu_cases(CONTEXTS, BATCHES)


def cpu_cases(contexts: tuple[int, ...], batches: tuple[int, ...], rounds: int = ROUNDS) -> Iterator[bench.Row | str]:
    """The hybrid and the KDA-only model beside the all-MLA one, what each caches, and how near to a floor that one is."""
    yield "times are for one token of every sequence; caches hold random latents and states in place of a prefill"
    for batch in batches:
        steps, floors = measure(contexts, batch, rounds)
        twins = steps["all-MLA"]
        for name in ("hybrid 3:1", "KDA only"):
            for step, twin in zip(steps[name], twins, strict=True):
                case = f"{name}, {step.tokens:,} tokens, batch {batch}"
                yield bench.row("decode", case, step.seconds, twin.model, twin.seconds, torch.float32)
        for row in zip(*steps.values(), strict=True):
            held = ", ".join(f"{step.model} {step.cache_bytes / MIB:.2f} MiB" for step in row)
            yield f"caches at {row[0].tokens:,} tokens, batch {batch}: {held}"
        yield nearness(twins[-1], floors)
        flat = [step.seconds for step in steps["KDA only"]]
        yield f"KDA only, batch {batch}: the slowest context takes {max(flat) / min(flat):.2f} times the fastest"


def nearness(step: Step, floors: Floors) -> str:
    """A remark: an all-MLA step beside the two floors."""
    read, products = (f(step.tokens, step.batch) for f in (floors.read_s, floors.products_s))
    return (
        f"{step.model} at {step.tokens:,} tokens, batch {step.batch}: {step.seconds * 1e3:.1f} ms. Its latents once at the "
        f"speed of a copy ({floors.copy_bytes_s / 1e9:.0f} GB/s): {read * 1e3:.1f} ms. Its attention's "
        f"{attention_flops(step.tokens, step.batch) / 1e9:.1f} GFLOP at the rate of a product of {PRODUCT} x {PRODUCT} "
        f"({floors.product_flop_s / 1e9:.0f} GFLOP/s): {products * 1e3:.1f} ms. {step.seconds / max(read, products):.2f} "
        "times the larger"
    )
