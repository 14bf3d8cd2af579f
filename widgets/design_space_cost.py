"""What K3's five choices ask of a machine: weights, cache, FLOPs and rows to experts, from `k3lite.budget` alone.

A choice becomes a config by `dataclasses.replace`. What decoding one token asks for is then taken apart (`Demand`), so that
the time of a step follows for any batch and machine without asking the budget again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from k3lite import budget
from k3lite.config import K3Config
from k3lite.devices import Device, Step, expert_row_bytes, others_met

K3 = K3Config.preset("kimi-k3")
MXFP4, BF16 = "MXFP4", "bf16"
AXES = {
    "mla_layers": tuple(range(0, K3.num_hidden_layers + 1, 3)),
    "latent": (64, 128, 256, 384, 512, 768, 1024, 1536, 2048),
    "experts": (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096),
    "top_k": (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    "precision": (MXFP4, BF16),
}
FLOORS = ("mla_layers", "latent", "experts", "top_k")
CONTEXTS = tuple(2**k for k in range(10, 21))
FILL = 0  # as a batch: as many sequences as fit


@dataclass(frozen=True)
class Choice:
    """What the explorer varies of K3; everything else stays."""

    mla_layers: int = K3.num_mla_layers  # the others are KDA
    latent: int = K3.kv_lora_rank  # numbers of a slot, without the 64 of the shared key
    experts: int = K3.num_experts  # of a layer
    top_k: int = K3.num_experts_per_token
    precision: str = MXFP4  # of the routed experts


K3_CHOICE = Choice()


@lru_cache(maxsize=2048)
def config_of(choice: Choice) -> K3Config:
    """K3 with these choices. MLA layers are spread evenly and the last layer is one; their places cost nothing."""
    layers, n = K3.num_hidden_layers, choice.mla_layers
    mla = {round(layers * (i + 1) / n) for i in range(n)}
    attn = dataclasses.replace(
        K3.linear_attn_config,
        full_attn_layers=tuple(sorted(mla)),
        kda_layers=tuple(i for i in range(1, layers + 1) if i not in mla),
    )
    return dataclasses.replace(
        K3,
        linear_attn_config=attn,
        kv_lora_rank=choice.latent,
        num_experts=choice.experts,
        num_experts_per_token=choice.top_k,
        quantization_config=K3.quantization_config if choice.precision == MXFP4 else None,
    )


@dataclass(frozen=True)
class Demand:
    """Of decoding one token more after a context, taken apart so that any batch follows. Fields may be arrays."""

    stored: float  # bytes of all weights
    kept: float  # bytes of cache, a sequence
    read: float  # bytes of the weights that every step reads
    experts: float  # bytes of all routed experts
    moved: float  # bytes of cache read and written, a sequence
    flops: float  # a sequence
    rows: float  # bytes of a token's rows to one other device and back, all layers
    top_k: float
    missed: float  # chance that a token is not sent to a certain expert

    def batch(self, batch, memory: float):
        """The batch, or with FILL the largest that fits; 0: not even one."""
        if batch != FILL:
            return batch
        return np.maximum(0, np.floor((memory - self.stored) / self.kept))

    def fits(self, batch, memory: float):
        return (self.stored + batch * self.kept <= memory) & (batch > 0)

    def step(self, batch, machine: Device) -> Step:
        """Seconds of one step of the batch, by what it waits for (`budget.forward_work` for any batch at once)."""
        nbytes = self.read + self.experts * (1 - self.missed**batch) + batch * self.moved
        sent = batch * self.rows * others_met(machine.count, self.top_k)
        return Step(nbytes / machine.memory_bandwidth, batch * self.flops / machine.bf16, sent / machine.link)


@lru_cache(maxsize=4096)
def demand(choice: Choice, tokens: int) -> Demand:
    """Of `choice` after `tokens` tokens."""
    c = config_of(choice)
    one, expert = budget.forward_work(c, 1, tokens), c.num_moe_layers * budget.expert_bytes(c)
    return Demand(
        stored=budget.checkpoint_bytes(c).total,
        kept=budget.cache_bytes(c, tokens + 1).total,
        read=one.weight_bytes - round(expert * budget.experts_met(c, 1)),
        experts=expert * c.num_experts,
        moved=one.cache_bytes,
        flops=one.flops,
        rows=c.num_moe_layers * expert_row_bytes(c),
        top_k=c.num_experts_per_token,
        missed=1 - c.num_experts_per_token / c.num_experts,
    )


def combined(attention: list[tuple], mixtures: list[tuple], tokens: int) -> Demand:
    """[attention, mixtures]. Layers add up, and attention and experts do; so a few configs tell all combinations.

    The experts' part does not depend on the context and is worked out once. tests/widgets/test_design_space.py compares with configs
    that change everything together.
    """
    none, base = demand(dataclasses.replace(K3_CHOICE, mla_layers=0), tokens), demand(K3_CHOICE, 1)
    one = {r: demand(dataclasses.replace(K3_CHOICE, mla_layers=1, latent=r), tokens) for _, r in attention}
    other = [demand(dataclasses.replace(K3_CHOICE, experts=e, top_k=k, precision=p), 1) for e, k, p in mixtures]

    def field(name: str) -> np.ndarray:
        column = np.array([getattr(d, name) for d in other], dtype=float)
        if name in ("top_k", "missed"):  # no sums, and the mixture's alone
            return np.broadcast_to(column, (len(attention), len(mixtures)))
        kda = getattr(none, name)
        row = np.array([kda + m * (getattr(one[r], name) - kda) for m, r in attention], dtype=float)
        return (row - getattr(base, name))[:, None] + column

    return Demand(**{f.name: field(f.name) for f in dataclasses.fields(Demand)})
