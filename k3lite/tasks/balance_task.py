"""Balance of experts on a small task: one LatentMoE layer, tokens of unequal kinds, several ways to even out the load.

Tokens come from clusters, the frequent ones many times as often as the rare ones (Zipf's law); each cluster has a
function of its own that the layer must learn. What is measured is who works: tokens for each expert, step by step.

    x = m + c_j + noise e          m: what all tokens share;   c_j: cluster j's centre;   e ~ normal
    y = tanh(x A_j)                wanted, from the layer alone, without a residual sum
    P(j) ~ 1 / j^skew

Nothing here is K3's but the layer; sizes are such that a run takes ten seconds on one core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from k3lite.config import K3Config
from k3lite.moe import RULES, LatentMoE

WIDTH, LATENT, EXPERT_WIDTH = 32, 16, 16
EXPERTS, TOP_K, SHARED = 64, 4, 1
CLUSTERS, NOISE = 64, 0.5
TOKENS, STEPS, LR, WARMUP = 1024, 600, 1e-2, 30
LAST = 50  # steps whose loads and losses are reported as the result
DEAD = 0.05  # an expert with less than this share of the mean load
BALANCED = (
    3.0  # the busiest expert of a batch has at most this many times the mean load; single batches reach 2 by chance
)


@dataclass(frozen=True)
class Data:
    """What kind of tokens: skew of the frequencies, and the size of what all tokens share (a cluster's is 1)."""

    skew: float
    common: float


DATA = {"shared": Data(skew=1.0, common=2.0), "skewed": Data(skew=1.5, common=0.0)}


@dataclass(frozen=True)
class Method:
    """A way to balance. strength: weight of the auxiliary loss, rate of the sign rule; 0 for the others."""

    rule: str
    strength: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule: got {self.rule!r}, wanted one of {', '.join(RULES)}")
        if (self.strength > 0) != (self.rule in ("auxiliary", "sign")):
            raise ValueError(f"strength: got {self.strength:g} for {self.rule!r}; auxiliary and sign have one above 0")

    def __str__(self) -> str:
        return f"{self.rule}:{self.strength:g}" if self.strength else self.rule

    @classmethod
    def parse(cls, text: str) -> Method:
        """'quantile', 'sign:0.01'. Raises ValueError that names what is wrong."""
        rule, _, strength = text.partition(":")
        try:
            return cls(rule, float(strength or 0))
        except ValueError as e:
            raise ValueError(f"method {text!r}: {e}") from e


METHODS = (
    *(Method("none"), Method("auxiliary", 0.01), Method("auxiliary", 0.1)),
    *(Method("sign", 0.001), Method("sign", 0.01), Method("quantile"), Method("histogram")),
)


class Clusters:
    """The tokens: the same centres and functions for one seed, whatever the method."""

    def __init__(self, data: Data, seed: int) -> None:
        g = torch.Generator().manual_seed(1000 + seed)
        self.centres = torch.randn(CLUSTERS, WIDTH, generator=g)
        self.functions = torch.randn(CLUSTERS, WIDTH, WIDTH, generator=g) * WIDTH**-0.5
        self.centres += data.common * torch.randn(WIDTH, generator=g)
        self.frequency = torch.arange(1, CLUSTERS + 1, dtype=torch.float64) ** -data.skew
        self.seed = seed

    def batch(self, step: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
        """x and y [1,tokens,WIDTH] of a step; steps below 0 are held out."""
        g = torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + step)
        cluster = torch.multinomial(self.frequency, tokens, replacement=True, generator=g)
        x = self.centres[cluster] + NOISE * torch.randn(tokens, WIDTH, generator=g)
        return x[None], torch.einsum("nd,nde->ne", x, self.functions[cluster]).tanh()[None]


def make_layer(seed: int, method: Method = Method("none"), **changes) -> LatentMoE:
    """A fresh layer; matrices normal with variance 1 / inputs. changes: other fields of its config."""
    sizes = {
        "hidden_size": WIDTH, "routed_expert_hidden_size": LATENT, "moe_intermediate_size": EXPERT_WIDTH,
        "num_experts": EXPERTS, "num_experts_per_token": TOP_K, "num_shared_experts": SHARED, "quantization_config": None,
    }  # fmt: skip
    layer = LatentMoE(dataclasses.replace(K3Config.preset("k3-tiny"), **sizes | changes))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() >= 2:
                p.normal_(0, p.shape[-1] ** -0.5, generator=g)
    layer.gate.rule = method.rule
    if method.rule == "sign":
        layer.gate.rate = method.strength
    if method.rule == "auxiliary":
        layer.gate.auxiliary_weight = method.strength
    return layer


@dataclass(eq=False)
class Run:
    """What happened in one training."""

    data: str
    method: Method
    seed: int
    losses: list[float]  # a step: mean squared error over the variance of y, 1 for a layer that says the mean
    counts: Tensor  # [steps,E] tokens that chose each expert
    layer: LatentMoE

    @property
    def busiest(self) -> list[float]:
        """A step: load of the busiest expert over the mean load."""
        return (self.counts.amax(1) / self.counts.double().mean(1)).tolist()

    @property
    def loads(self) -> list[float]:
        """Each expert's load over the mean load, in the last steps together."""
        total = self.counts[-LAST:].double().sum(0)
        return (total / total.mean()).tolist()

    @property
    def loss(self) -> float:
        """Mean of the last steps."""
        return sum(self.losses[-LAST:]) / len(self.losses[-LAST:])


def dead(loads: Sequence[float]) -> int:
    """Experts that get less than DEAD of the mean load."""
    return sum(load < DEAD for load in loads)


def balanced_from(busiest: Sequence[float], window: int = 10) -> int | None:
    """The first step from which the busiest expert, averaged over `window` steps, stays within BALANCED to the end."""
    sums = [0.0]
    for value in busiest:
        sums.append(sums[-1] + value)
    means = [(sums[i + window] - sums[i]) / window for i in range(len(busiest) - window + 1)]
    late = max((i + 1 for i, mean in enumerate(means) if mean > BALANCED), default=0)
    return late if late < len(means) else None


def thinned(values: Sequence[float], size: int) -> list[float]:
    """Means of groups of `size`, for a curve with fewer points."""
    edges = [*range(0, len(values), size), len(values)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def train_layer(
    data: str,
    method: Method,
    seed: int = 0,
    steps: int = STEPS,
    tokens: int = TOKENS,
    on_step: Callable[[int, float], None] | None = None,
) -> Run:
    """Train one layer: AdamW, linear warm-up and decay. on_step(step, loss) is called after every step."""
    if data not in DATA:
        raise ValueError(f"data: got {data!r}, wanted one of {', '.join(DATA)}")
    if steps < 1:
        raise ValueError(f"steps: got {steps}, wanted 1 or more")
    clusters, layer = Clusters(DATA[data], seed), make_layer(seed, method)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    losses, counts = [], []
    layer.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP) * (1 - 0.95 * step / steps)
        x, y = clusters.batch(step, tokens)
        loss = (layer(x) - y).square().mean() / y.var()
        optimizer.zero_grad()
        (loss if layer.gate.auxiliary is None else loss + layer.gate.auxiliary).backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        counts.append(layer.gate.seen_counts)
        layer.gate.balance()
        losses.append(loss.item())
        if on_step:
            on_step(step, losses[-1])
    layer.eval()
    return Run(data, method, seed, losses, torch.stack(counts), layer)


@torch.no_grad()
def held_out(layer: LatentMoE, clusters: Clusters, tokens: int = 8192) -> tuple[float, list[float]]:
    """Loss, and each expert's load over the mean, on tokens that no step has seen; the bias stays as it is."""
    x, y = clusters.batch(-1, tokens)
    chosen, _ = layer.gate(x[0])
    counts = chosen.flatten().bincount(minlength=EXPERTS).double()
    return float((layer(x) - y).square().mean() / y.var()), (counts / counts.mean()).tolist()
