"""Who works: tokens choose experts, a rule evens out the load step by step, and ranks wait for the slowest of them.

logits     preference_j + noise: without a bias the first choice of a token falls on expert j with P(j) ~ 1 / place_j^skew
scores     sigmoid of the logits; the top k of scores + bias are chosen
rule       moves the bias after each step (k3lite.balance); the auxiliary loss moves the preferences instead
ranks      hold the experts in contiguous ranges and bring equally many tokens; with copies, k3lite.moonep plans them

Nothing is trained. Each step brings fresh tokens, the same for every rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ipywidgets as w
import plotly.graph_objects as go
import torch
from torch import Tensor

from k3lite import balance
from k3lite.moe import BINS, RULES, choose
from k3lite.moonep import plan_at_home, plan_balanced
from widgets import common
from widgets.common import labelled, whole
from widgets.router_figure import LAST_STEP, figure

__all__ = ["EXPERTS", "LAST_STEP", "RANKS", "TOKENS", "TOP_K", "Routing", "compute", "describe", "explorer", "figure"]

TOKENS = 1024  # a step, of all ranks together
EXPERTS, TOP_K, RANKS = (16, 32, 64, 128), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
STRENGTHS = (0.001, 0.003, 0.01, 0.03, 0.1)
AUXILIARY = 10  # the auxiliary loss moves preferences down its gradient by strength x AUXILIARY in root mean square
DEAD = 0.05  # share of the mean load


@dataclass(frozen=True)
class Routing:
    """Result of compute(): the loads at one step, and how they came about."""

    experts: int
    top_k: int
    skew: float
    rule: str
    ranks: int
    copies: bool
    step: int
    loads: tuple[float, ...]  # per expert, over the mean
    home: tuple[int, ...]  # per expert, its rank
    busiest: tuple[float, ...]  # per step up to this one: load of the busiest expert over the mean
    slowest: tuple[float, ...]  # per step: tokens of the busiest rank over the mean
    own: tuple[int, ...]  # per rank: visits at its own experts
    lent: tuple[int, ...]  # per rank: visits at copies of others' experts
    redundant: tuple[int, ...]  # per rank: how many copies
    traffic: tuple[tuple[int, ...], ...]  # visits (a token at an expert) from rank (row) to rank (column)

    @property
    def dead(self) -> int:
        """Experts with less than DEAD of the mean load."""
        return sum(load < DEAD for load in self.loads)

    @property
    def travelling(self) -> float:
        """Share of the visits of tokens at experts that lead to another rank."""
        total = sum(map(sum, self.traffic))
        return 1 - sum(self.traffic[r][r] for r in range(self.ranks)) / total


def compute(
    *,
    experts: int = 64,
    top_k: int = 4,
    skew: float = 1.0,
    rule: str = "none",
    strength: float = 0.01,
    ranks: int = 4,
    copies: bool = False,
    step: int = 0,
    seed: int = 0,
) -> Routing:
    """Route step after step up to `step`, which is drawn.

    strength: step of the sign rule; the auxiliary loss moves logits by AUXILIARY times it; the other rules have none.
    copies: whether ranks lend experts to each other (MoonEP).   Raises ValueError that names the value.
    """
    whole("experts", experts, 2, EXPERTS[-1])
    whole("top-k", top_k, 1, experts)
    whole("ranks", ranks, 1, min(experts, TOKENS))
    whole("step", step, 0, LAST_STEP)
    whole("seed", seed, 0, 2**31)
    if TOKENS % ranks:
        raise ValueError(f"ranks: got {ranks}, wanted a divisor of {TOKENS}, so that all bring equally many tokens.")
    if not 0 <= skew <= 3:
        raise ValueError(f"skew: got {skew!r}, wanted a number from 0 to 3.")
    if rule not in RULES:
        raise ValueError(f"rule: got {rule!r}, wanted one of {', '.join(RULES)}.")
    if not strength > 0:
        raise ValueError(f"strength: got {strength!r}, wanted a number above 0.")
    choices = _history(experts, top_k, skew, rule, strength, seed).up_to(step)
    counts = [_by_rank(chosen, ranks, experts) for chosen in choices]
    plans = [plan_balanced(c) if copies else plan_at_home(c) for c in counts]
    shown, loads = plans[-1], counts[-1].sum(0).double()
    at_home = shown.share.gather(0, shown.home[None])[0]
    own = torch.zeros(ranks, dtype=torch.int64).index_add_(0, shown.home, at_home)
    return Routing(
        experts, top_k, skew, rule, ranks, copies, step,
        loads=tuple((loads / loads.mean()).tolist()),
        home=tuple(shown.home.tolist()),
        busiest=tuple(float(c.sum(0).max() / c.sum(0).double().mean()) for c in counts),
        slowest=tuple(p.slowest for p in plans),
        own=tuple(own.tolist()),
        lent=tuple((shown.loads - own).tolist()),
        redundant=tuple(shown.redundant.tolist()),
        traffic=tuple(map(tuple, shown.traffic.tolist())),
    )  # fmt: skip


def _by_rank(chosen: Tensor, ranks: int, experts: int) -> Tensor:
    """[R,E] how many of each rank's tokens chose each expert; the first tokens are the first rank's."""
    rank = torch.arange(len(chosen)) * ranks // len(chosen)
    return (rank[:, None] * experts + chosen).flatten().bincount(minlength=ranks * experts).view(ranks, experts)


class _History:
    """Chosen experts [N,k] of each step, worked out when they are asked for and kept."""

    def __init__(self, experts: int, top_k: int, skew: float, rule: str, strength: float, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        place = torch.randperm(experts, generator=g) + 1.0  # popular experts are anywhere, not all on one rank
        preference = -skew * place.log()
        self.preference = preference - preference.mean()
        self.bias = torch.zeros(experts)
        self.k, self.rule, self.strength, self.seed = top_k, rule, strength, seed
        self.chosen: list[Tensor] = []

    def up_to(self, step: int) -> list[Tensor]:
        while len(self.chosen) <= step:
            self._advance()
        return self.chosen[: step + 1]

    def _advance(self) -> None:
        g = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + len(self.chosen))
        noise = -torch.empty(TOKENS, len(self.bias)).exponential_(generator=g).log()  # Gumbel's: Zipf's law follows
        preference = self.preference.clone().requires_grad_(self.rule == "auxiliary")
        scores = torch.sigmoid(preference + noise)
        chosen = choose(scores.detach(), self.bias, self.k)
        self.chosen.append(chosen)
        counts = chosen.flatten().bincount(minlength=len(self.bias))
        if self.rule == "auxiliary":
            balance.auxiliary_loss(scores, counts, self.k).backward()
            # Its own size would depend on how far the sigmoid is saturated; an optimizer like Adam evens that out too.
            size = preference.grad.square().mean().sqrt().clamp(min=1e-20)
            self.preference = self.preference - self.strength * AUXILIARY * preference.grad / size
        elif self.rule == "sign":
            self.bias = balance.sign_rule_bias(self.bias, counts, self.strength)
        elif self.rule == "quantile":
            self.bias = balance.quantile_balanced_bias(scores, self.bias, self.k)
        elif self.rule == "histogram":
            histogram = balance.score_histogram(scores, self.bias, self.k, BINS)
            self.bias = balance.histogram_balanced_bias(histogram, self.bias, self.k)


@lru_cache(maxsize=16)
def _history(*settings) -> _History:
    return _History(*settings)


def describe(r: Routing) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    step = f"Step {r.step}, {_named(r.rule)}: the busiest of {r.experts} experts has {r.busiest[-1]:.2f} times the mean load"
    dead = "no expert is" if not r.dead else "1 expert is" if r.dead == 1 else f"{r.dead} experts are"
    words = f"{step}, {dead} dead (below 5 % of the mean)."
    if r.ranks == 1:
        return f"{words} One rank holds them all, so nothing travels."
    pace = f"The busiest of {r.ranks} ranks computes {r.slowest[-1]:.2f} times the mean, and all others wait for it"
    if r.copies:
        most, bound = max(r.redundant), -(-r.experts // r.ranks)
        pace = f"With copies every rank computes the same; a rank holds at most {most} (the bound is {bound})"
    return f"{words} {pace}. {r.travelling:.0%} of all visits of a token at an expert lead to another rank."


def _named(rule: str) -> str:
    return {
        "none": "nothing done",
        "auxiliary": "auxiliary loss",
        "sign": "sign rule",
        "quantile": "Quantile Balancing",
        "histogram": "Quantile Balancing by histogram",
    }[rule]


def explorer(rule: str = "none", skew: float = 1.5, experts: int = 64, ranks: int = 4) -> common.Explorer:
    """Fresh controls around the picture: choose a rule, go step by step, spread the experts over ranks, lend copies.

    rule: one of k3lite.moe.RULES.   experts, ranks: one of EXPERTS, RANKS.
    """
    c = _controls(rule, skew, experts, ranks)
    settings = [n for n in c if n not in ("next", "again")]

    def result() -> Routing:
        c["strength"].disabled = c["rule"].value not in ("auxiliary", "sign")
        return compute(**{name: c[name].value for name in settings})

    def react() -> None:
        r = result()
        common.redraw(drawn, figure(r))
        text.value = common.spoken(describe(r))
        message.show("")

    def go_on() -> None:
        if c["step"].value == LAST_STEP:
            message.show(f"Step {LAST_STEP} is the last one. “Start again” goes back to step 0.")
        else:
            c["step"].value += 1

    def go_back() -> None:
        c["step"].value = 0
        message.show("")

    first = result()
    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    text, message = w.HTML(common.spoken(describe(first))), common.Message()
    for name in settings:
        c[name].observe(lambda _: message.guard(react), "value")
    c["next"].on_click(lambda _: message.guard(go_on))
    c["again"].on_click(lambda _: message.guard(go_back))
    columns = [
        [c[n] for n in ("rule", "strength", "experts", "top_k")],
        [c[n] for n in ("skew", "ranks", "copies", "seed")],
    ]
    buttons = w.Box(
        [c["next"], c["again"], c["step"]], layout={"flex_flow": "row wrap", "max_width": f"{common.WIDTH}px"}
    )
    children = [common.side_by_side(columns), buttons, message, drawn, text]
    return common.Explorer("router", c, drawn, text, message, children)


def _controls(rule: str, skew: float, experts: int, ranks: int) -> dict[str, w.Widget]:
    if rule not in RULES:
        raise ValueError(f"rule: got {rule!r}, wanted one of {', '.join(RULES)}")
    slider = w.SelectionSlider
    rules = [(_named(r), r) for r in ("none", "auxiliary", "sign", "quantile", "histogram")]
    counted = {"experts": [(f"{n} experts", n) for n in EXPERTS], "ranks": [(_count(n, "rank"), n) for n in RANKS]}
    # A change of what is simulated repeats all steps: the sliders that do so wait until the hand lets go.
    waits = {"continuous_update": False}
    controls = {
        "rule": labelled(w.Dropdown, "Balancing (rule)", options=rules, value=rule),
        "strength": labelled(slider, "Strength (of loss or sign)", options=STRENGTHS, value=0.01, **waits),
        "experts": labelled(slider, "Experts (number)", options=counted["experts"], value=experts, **waits),
        "top_k": labelled(slider, "Chosen by a token (top-k)", options=TOP_K, value=4, **waits),
        "skew": labelled(w.FloatSlider, "Skew (exponent of Zipf)", min=0, max=2, step=0.1, value=skew, readout_format=".1f", **waits),
        "ranks": labelled(slider, "Ranks (number)", options=counted["ranks"], value=ranks, **waits),
        "copies": labelled(w.Dropdown, "Lend experts (MoonEP)", options=[("no copies", False), ("copies", True)], value=False),
        "seed": labelled(w.IntSlider, "Draw of the tokens (seed)", min=0, max=20, value=0, **waits),
        "step": labelled(w.IntSlider, "Step (number)", min=0, max=LAST_STEP, value=0),
        "next": w.Button(description="One step on", tooltip="route the next batch with what the rule made of this one"),
        "again": w.Button(description="Start again", tooltip="back to step 0, before any balancing"),
    }  # fmt: skip
    controls["step"].layout.width = "560px"
    return controls


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
