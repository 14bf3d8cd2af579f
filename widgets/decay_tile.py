"""Why a bound on the decay makes tiles safe: the factors of one tile, and which number formats can hold them.

c_i = i g                                            decay so far, the same g for every token and channel
A_ij = sum_d k_id k_jd e^(c_i - c_j),  j < i         what the chunk form needs; every e^(c_i - c_j) is at most 1
     = (e^(c_i - c) k_i) . (e^(c - c_j) k_j)         as one matrix product; c is where the tile is measured from

The first factor shrinks and the second grows. Their product is harmless; each alone must fit the number format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ipywidgets as w
import plotly.graph_objects as go
import torch

from k3lite.ops.kda import l2norm
from widgets import common
from widgets.common import labelled, whole

__all__ = ["FORMATS", "Tile", "compute", "describe", "explorer", "figure"]

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ORIGINS = ("start", "middle")
LONGEST = 64  # tokens
WIDTH = 64  # numbers of a key
STRONGEST = -12.0  # log-decay a token; K3's gate stops at -5, Kimi Linear's does not stop
EXACT = 0.02  # relative error up to which a product counts as right; bf16 rounds each factor to 0.4 %


@dataclass(frozen=True)
class Tile:
    """Result of compute(). Exponents are natural logarithms: a factor is e to that power."""

    g: float
    tokens: int
    origin: str
    small: tuple[float, ...]  # exponent of e^(c_i - c) for tokens 1 ... LONGEST, with the tile's own c
    large: tuple[float, ...]  # exponent of e^(c - c_j)
    error: dict[str, float | None]  # format -> relative error of A (root mean square); None: a factor overflowed

    @property
    def largest(self) -> float:
        """Exponent of the largest factor in the tile."""
        return max(max(self.small[: self.tokens]), max(self.large[: self.tokens]))

    def verdict(self, name: str) -> str:
        """'right', 'wrong' or 'overflow' for one format."""
        error = self.error[name]
        return "overflow" if error is None else "right" if error <= EXACT else "wrong"


def compute(*, g: float = -5.0, tokens: int = 16, origin: str = "start") -> Tile:
    """A of one tile of random unit keys, as a product of two factors in each format, against fp64 pair by pair.

    g: log-decay of every token, STRONGEST to 0.   tokens: in the tile, 2 to LONGEST.
    origin: "start", factors relative to the state before the tile, or "middle", relative to its middle token.
    The factors are rounded to the format and multiplied with fp32 sums, as tensor cores do.
    Raises ValueError that names the value.
    """
    whole("tile", tokens, 2, LONGEST)
    if not isinstance(g, (int, float)) or not STRONGEST <= g <= 0:
        raise ValueError(f"log-decay: got {g!r}, wanted a number from {STRONGEST:g} to 0.")
    if origin not in ORIGINS:
        raise ValueError(f"origin: got {origin!r}, wanted {' or '.join(ORIGINS)}.")
    k = l2norm(torch.randn(LONGEST, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[:tokens]
    c = g * torch.arange(1, LONGEST + 1, dtype=torch.float64)
    relative = c - (c[tokens // 2] if origin == "middle" else 0)
    exact = ((c[:tokens, None] - c[:tokens]).tril().exp() * (k @ k.mT)).tril(-1)
    error: dict[str, float | None] = {}
    for name, dtype in FORMATS.items():
        row, column = ((sign * relative[:tokens, None]).exp() * k for sign in (1, -1))
        factors = [x.to(dtype).float() for x in (row, column)]
        A = (factors[0] @ factors[1].mT).tril(-1)
        fits = all(bool(x.isfinite().all()) for x in (*factors, A))
        error[name] = float((A - exact).norm() / exact.norm()) if fits else None
    return Tile(float(g), tokens, origin, tuple(relative.tolist()), tuple((-relative).tolist()), error)


def describe(r: Tile) -> str:
    """The result in plain sentences."""
    ends = {"right": "comes out right", "wrong": "comes out wrong", "overflow": "overflows"}
    parts = [f"{name} {ends[r.verdict(name)]}{_size(r.error[name])}" for name in FORMATS]
    return (
        f"With a log-decay of {r.g:g} a token, the largest factor in a tile of {r.tokens} tokens, measured from its "
        f"{r.origin}, is e^{r.largest:.1f} = {_power(r.largest)}. The product in {parts[0]}, in {parts[1]}, "
        f"in {parts[2]}."
    )


def _size(error: float | None) -> str:
    return "" if error is None else f" (error {error:.0e})"


def _power(exponent: float, raised: str = "^{}") -> str:
    """e^exponent in tens: 80 -> '10^34.7'."""
    return "10" + raised.format(f"{exponent / math.log(10):.1f}")


def figure(r: Tile) -> go.Figure:
    """Left: both factors by token, with the formats' limits. Right: error of the product in each format.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    tokens, last = list(range(1, LONGEST + 1)), r.tokens - 1
    curves = [
        (r.large, "growing factor", common.VERMILION, "solid"),
        (r.small, "shrinking factor", common.BLUE, "dash"),
    ]
    tens = [[round(x / math.log(10), 2) for x in exponents] for exponents, *_ in curves]
    top = {name: math.log10(torch.finfo(dtype).max) for name, dtype in FORMATS.items()}
    limits = [("fp32 and bf16 end here", top["fp32"]), ("fp16 ends here", top["fp16"])]
    traces = [
        {"type": "scatter", "x": tokens[: r.tokens], "y": y[: r.tokens], "name": name, "mode": "lines",
         "line": {"color": colour, "dash": dash, "width": 3.5}}
        for y, (_, name, colour, dash) in zip(tens, curves, strict=True)
    ]  # fmt: skip
    traces += [
        {"type": "scatter", "x": [1, LONGEST], "y": [round(y, 2)] * 2, "name": name, "mode": "lines+text",
         "showlegend": False, "line": {"color": common.INK, "width": 1.5, "dash": "dot"}, "text": ["", name],
         "textposition": "top left"}
        for name, y in limits
    ]  # fmt: skip
    errors = [r.error[name] for name in FORMATS]
    shown = [8.0 if e is None else round(max(math.log10(max(e, 1e-9)) + 8, 0.15), 2) for e in errors]
    colours = {"right": common.GREEN, "wrong": common.ORANGE, "overflow": common.VERMILION}
    labels = ["overflow" if e is None else f"{e:.0e}" for e in errors]
    traces.append({
        "type": "bar", "x": list(FORMATS), "y": shown, "xaxis": "x2", "yaxis": "y2", "showlegend": False, "width": 0.7,
        "marker": {"color": [colours[r.verdict(name)] for name in FORMATS]}, "text": labels,
        "textposition": "outside", "constraintext": "none", "cliponaxis": False, "hoverinfo": "skip",
    })  # fmt: skip
    high = max(45, *(y[last] for y in tens))
    powers = list(range(-300, 301, 20))
    axes = {
        "xaxis": {"domain": [0, 0.64], "range": [0.5, LONGEST + 0.5], "title": {"text": "token of the tile", "font": {"size": 13}}},
        "yaxis": common.axis("size of the factor (log scale)", powers, [f"10<sup>{p}</sup>" for p in powers],
                             range=[min(-45, *(y[last] for y in tens)) * 1.05, high * 1.05]),
        "xaxis2": {"domain": [0.74, 1], "anchor": "y2", "showgrid": False,
                   "title": {"text": "factors rounded to", "font": {"size": 13}}},
        "yaxis2": common.axis("relative error of A (log scale)", range(0, 9, 2), ["10<sup>-8</sup>", "10<sup>-6</sup>",
                              "10<sup>-4</sup>", "10<sup>-2</sup>", "1"], anchor="x2", range=[0, 9]),
    }  # fmt: skip
    right = [name for name in FORMATS if r.verdict(name) == "right"]
    which = " and ".join(filter(None, [", ".join(right[:-1]), right[-1]])) if right else "no format"
    title = f"<b>g = {r.g:g}, tile of {r.tokens} tokens: factors up to {_power(r.largest, '<sup>{}</sup>')}; {which} can hold them</b>"
    look = common.layout(
        400, axes,
        title={"text": title, "x": 0, "xref": "paper", "xanchor": "left",
               "font": {"size": 17}},
        margin={"l": 84, "r": 12, "t": 84, "b": 56},
        legend={"orientation": "h", "x": 0, "y": 1.01, "yanchor": "bottom", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": traces, "layout": look})


def explorer(g: float = -5.0, tokens: int = 16, origin: str = "start") -> common.Explorer:
    """Fresh controls around the picture: decay a token, tokens in a tile, where the factors are measured from."""
    first = compute(g=g, tokens=tokens, origin=origin)
    c = {
        "g": labelled(w.FloatSlider, "Log-decay g (per token)", min=STRONGEST, max=0, step=0.1, value=g),
        "tokens": labelled(w.IntSlider, "Tile (tokens)", min=2, max=LONGEST, value=tokens),
        "origin": labelled(w.Dropdown, "Measured from its (place)", options=list(ORIGINS), value=origin),
    }

    def react() -> None:
        # A slider of step 0.1 gives -4.9 as -4.8999999999999995.
        r = compute(g=round(c["g"].value, 1), tokens=c["tokens"].value, origin=c["origin"].value)
        common.redraw(drawn, figure(r))
        text.value = common.spoken(describe(r))
        message.show("")

    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    text, message = w.HTML(common.spoken(describe(first))), common.Message()
    for control in c.values():
        control.observe(lambda _: message.guard(react), "value")
    columns = [[c["g"], c["tokens"]], [c["origin"]]]
    return common.Explorer("tile", c, drawn, text, message, [common.side_by_side(columns), message, drawn, text])
