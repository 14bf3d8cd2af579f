"""What a state of fixed size gives back: random pairs written by one of four rules, then every key read.

state      key width x key width numbers, written pair by pair
error      |answer - value|^2 / |value|^2 for each key: 0 perfect, 1 as good as no answer
right      of all values written, the right one is the nearest to the answer

Pairs, rules and theory come from k3lite.tasks.capacity. Nothing is trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import ipywidgets as w
import plotly.graph_objects as go
import torch

from k3lite.tasks.capacity import RULES, draw_pairs, retrieval, theory, write_pairs
from widgets import common
from widgets.common import labelled, whole
from widgets.state_capacity_figure import figure

__all__ = ["DRAWS", "KEY_WIDTHS", "PAIRS", "Capacity", "Quarters", "compute", "describe", "explorer", "figure"]

DRAWS = 8  # independent sets of pairs behind each mean; the picture shows the state and the keys of the first
PAIRS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
KEY_WIDTHS = (4, 8, 16, 32, 64, 128)
HALF_LIVES = (math.inf, 1024, 512, 256, 128, 64, 32, 16, 8, 4)
SPREAD = 8  # KDA: half-lives of the channels from half_life / SPREAD to half_life * SPREAD


class Quarters(NamedTuple):
    """Share of right answers among the oldest and the newest quarter of the pairs, over all draws."""

    oldest: float
    newest: float


@dataclass(frozen=True)
class Capacity:
    """Result of compute(). Lists by order of writing, the oldest pair first."""

    pairs: int
    key_width: int
    correlation: float
    rule: str
    beta: float
    half_life: float  # writes; inf: nothing fades
    state: list[list[float]]  # of the first draw: key channels down, value channels across
    error: list[float]  # of the first draw
    right: list[bool]  # of the first draw
    mean_error: list[float]  # over all draws
    theory: list[float] | None
    accuracy: float  # share of right answers over all pairs and draws
    accuracy_deviation: float  # standard deviation of that share from draw to draw
    quarters: Quarters
    draws: int = DRAWS

    @property
    def error_mean(self) -> float:
        return sum(self.mean_error) / self.pairs

    @property
    def theory_mean(self) -> float | None:
        return None if self.theory is None else sum(self.theory) / self.pairs

    @property
    def chance(self) -> float:
        """Share of right answers of somebody who picks one of the values written."""
        return 1 / self.pairs


def compute(
    *,
    pairs: int = 64,
    key_width: int = 32,
    correlation: float = 0.0,
    rule: str = "delta",
    beta: float = 1.0,
    half_life: float = math.inf,
    seed: int = 0,
) -> Capacity:
    """Write `pairs` random pairs into a state of key_width x key_width and read every key.

    correlation: expected cosine between keys, 0..1. beta: write strength, 0..2. half_life: writes after which half
    is left, inf for no decay; for "kda" the channels' half-lives are spread evenly, on a log scale, from an eighth
    to eight times of it. Raises ValueError that names the value, what came and what was wanted.
    """
    whole("pairs", pairs, 1, PAIRS[-1])
    whole("key width", key_width, KEY_WIDTHS[0], KEY_WIDTHS[-1])
    whole("seed", seed, 0, 2**31)
    if not 0 <= beta <= 2:
        raise ValueError(f"beta: got {beta!r}, wanted a number from 0 to 2.")
    if not half_life > 0:
        raise ValueError(f"half-life: got {half_life!r}, wanted a number of writes above 0.")
    generator = torch.Generator().manual_seed(seed)
    keys, values = draw_pairs(pairs, key_width, key_width, correlation, generator, draws=DRAWS)
    log_decay = _log_decay(rule, half_life, key_width)
    S = write_pairs(keys, values, rule, beta, log_decay)
    r = retrieval(S, keys, values)
    expected = theory(rule, pairs, key_width, beta, log_decay, correlation)
    shares = r.right.double().mean(-1)
    quarter = max(1, pairs // 4)
    return Capacity(
        pairs, key_width, correlation, rule, beta, half_life,
        state=_rounded(S[0]),
        error=_rounded(r.error[0]),
        right=r.right[0].tolist(),
        mean_error=_rounded(r.error.mean(0)),
        theory=None if expected is None else _rounded(expected),
        accuracy=float(shares.mean()),
        accuracy_deviation=float(shares.std()),
        quarters=Quarters(*(float(x.double().mean()) for x in (r.right[:, :quarter], r.right[:, -quarter:]))),
    )  # fmt: skip


def _log_decay(rule: str, half_life: float, key_width: int) -> float | torch.Tensor:
    """Natural logarithm of what is left after one write: one number, or one for each channel of "kda"."""
    if rule != "kda":
        return -math.log(2) / half_life
    return -math.log(2) / (half_life * torch.logspace(-1, 1, key_width, base=SPREAD))


def _rounded(x: torch.Tensor) -> list:
    """Four decimals: enough for a picture, and a third of the message."""
    return (x.double().mul(1e4).round() / 1e4).tolist()


def describe(r: Capacity) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    plural = "pair" if r.pairs == 1 else "pairs"
    found = (
        f"{r.pairs} {plural} in a state of {r.key_width} x {r.key_width}, written by {_named(r.rule)}: "
        f"{r.accuracy:.0%} of the keys give the right value as the nearest one (guessing: {r.chance:.1%})."
    )
    error = f"The mean squared error is {r.error_mean:.2f}, where 1 would be no answer at all"
    expected = "; no closed form is known here" if r.theory is None else f"; theory expects {r.theory_mean:.2f}"
    if r.pairs < 4:
        return f"{found} {error}{expected}."
    ends = f"Of the oldest quarter {r.quarters.oldest:.0%} come back, of the newest {r.quarters.newest:.0%}."
    return f"{found} {error}{expected}. {ends}"


def _named(rule: str) -> str:
    return {"sum": "the sum", "delta": "the delta rule", "gated delta": "gated delta", "kda": "KDA"}[rule]


def explorer(pairs: int = 64, key_width: int = 32, rule: str = "delta") -> common.Explorer:
    """Fresh controls around the picture: fill a state, choose how it is written, see which keys come back.

    pairs: one of PAIRS. key_width: one of KEY_WIDTHS. rule: one of k3lite.tasks.capacity.RULES.
    """
    c = _controls(pairs, key_width, rule)

    def result() -> Capacity:
        c["half_life"].disabled = c["rule"].value == "delta"
        values = {name: control.value for name, control in c.items()}
        return compute(**values | ({"half_life": math.inf} if c["half_life"].disabled else {}))

    def react() -> None:
        r = result()
        common.redraw(drawn, figure(r))
        text.value = common.spoken(describe(r))
        message.show(
            "The delta rule forgets nothing, so the half-life is out of use. Gated delta is the delta rule with a decay."
            if c["half_life"].disabled and c["half_life"].value < math.inf
            else ""
        )

    first = result()
    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    text, message = w.HTML(common.spoken(describe(first))), common.Message()
    for control in c.values():
        control.observe(lambda _: message.guard(react), "value")
    columns = [
        [c[n] for n in ("rule", "pairs", "key_width", "seed")],
        [c[n] for n in ("correlation", "beta", "half_life")],
    ]
    return common.Explorer(
        "state capacity", c, drawn, text, message, [common.side_by_side(columns), message, drawn, text]
    )


def _controls(pairs: int, key_width: int, rule: str) -> dict[str, w.Widget]:
    slider = w.SelectionSlider
    hundredths = {"step": 0.05, "readout_format": ".2f"}
    lives = [("nothing fades" if n == math.inf else f"{n:,} writes", n) for n in HALF_LIVES]
    widths = [(f"{d} (state {d} × {d})", d) for d in KEY_WIDTHS]
    rules = [("sum (linear attention)", "sum"), ("delta rule", "delta"), ("gated delta", "gated delta"), ("KDA", "kda")]
    if rule not in RULES:
        raise ValueError(f"rule: got {rule!r}, wanted one of {', '.join(map(repr, RULES))}")
    return {
        "rule": labelled(w.Dropdown, "Rule (how a pair is written)", options=rules, value=rule),
        "pairs": labelled(slider, "Pairs written (number)", options=[(f"{n} pairs", n) for n in PAIRS], value=pairs),
        "key_width": labelled(slider, "Key width (numbers)", options=widths, value=key_width),
        "seed": labelled(w.IntSlider, "Draw of the pairs (seed)", min=0, max=20, value=0),
        "correlation": labelled(w.FloatSlider, "Likeness of keys (cosine)", min=0, max=0.95, value=0.0, **hundredths),
        "beta": labelled(w.FloatSlider, "Write strength β (share, 0–2)", min=0, max=2, value=1.0, **hundredths),
        "half_life": labelled(slider, "Half-life (writes)", options=lives, value=math.inf),
    }
