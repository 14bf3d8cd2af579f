"""The picture of a block in an MX format: given and kept numbers with their codes, and a trained layer in that format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from k3lite.minifloat import FORMATS
from widgets import common

if TYPE_CHECKING:
    from widgets.mx_explorer import Block

ABOVE, BELOW = (0.5, 1.0), (0.0, 0.29)  # shares of the height
LEFT, RIGHT = (0.0, 0.5), (0.74, 1.0)  # of the width, below
BARS = 5


def figure(b: Block) -> go.Figure:
    """Above: the 32 numbers, given and kept, over their codes. Below: |value| / scale over a layer, and errors by format.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    top = max((abs(v) for v in (*b.values, *b.kept)), default=0) * 1.12 or 1.0
    names = list(b.layer_errors)
    axes = {
        "xaxis": common.axis(
            "code (sign, exponent, mantissa)", range(len(b.codes)), b.codes,
            domain=[0, 1], anchor="y", tickangle=-90, range=[-0.6, 31.6], tickfont={"size": 11, "family": "monospace"},
        ),
        "yaxis": {
            "title": {"text": "number", "font": {"size": 13}}, "domain": list(ABOVE), "anchor": "x",
            "range": [-top, top], "zeroline": True, "zerolinecolor": common.INK, "exponentformat": "power",
        },
        "xaxis2": _grid_axis(b),
        "yaxis2": {
            "title": {"text": "share of the layer", "font": {"size": 13}}, "domain": list(BELOW), "anchor": "x2",
            "tickformat": ".0%", "rangemode": "tozero",
        },
        "xaxis3": {
            "title": {"text": "error over the layer", "font": {"size": 13}}, "domain": list(RIGHT), "anchor": "y3",
            "tickformat": ".0%", "rangemode": "tozero", "nticks": 5,
        },
        "yaxis3": common.axis(
            "", range(BARS), names, domain=list(BELOW), anchor="x3", range=[BARS - 0.4, -0.6], tickfont={"size": 11}
        ),
    }  # fmt: skip
    look = common.layout(
        640, axes,
        title={"text": _title(b), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.97, "font": {"size": 17}},
        bargap=0.05,
        margin={"l": 62, "r": 12, "t": 78, "b": 54},
        legend={"orientation": "h", "x": 0, "y": 1.005, "yanchor": "bottom", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": [*_numbers(b), _layer(b), _errors(b), _clipped(b)], "layout": look})


def _title(b: Block) -> str:
    lost = sum(b.clipped)
    rest = f", {lost} clipped" if lost else ""
    return f"<b>{b.bytes} bytes, scale 2<sup>{b.scale_byte - 127}</sup>: kept with an error of {b.error:.1%}{rest}</b>"


def _grid_axis(b: Block) -> dict:
    """Ticks at the values that there are, as far as they can be told apart."""
    f = FORMATS[b.format]
    values = sorted({abs(v) for v in f.values.tolist() if abs(v) <= f.largest})
    shown = values if len(values) <= 8 else [f.largest * part for part in (0, 0.25, 0.5, 0.75, 1)]
    return common.axis(
        "|value| / scale (to the right of the largest: clipped)", [*shown, 2 * f.largest],
        [*(f"{v:g}" for v in shown), f"{2 * f.largest:g}"],
        domain=list(LEFT), anchor="y2", range=[0, 2 * f.largest], tickfont={"size": 11},
    )  # fmt: skip


def _numbers(b: Block) -> list[dict]:
    def marks(name: str, values, symbol: str, color: str, size: int, text) -> dict:
        return {
            "type": "scatter", "mode": "markers", "name": name, "x": list(range(len(values))), "y": list(values),
            "customdata": list(text),
            "marker": {"symbol": symbol, "color": color, "size": size, "line": {"width": 2, "color": color}},
            "hovertemplate": f"number %{{x}}, {name}: %{{y:.4g}} %{{customdata}}<extra></extra>",
        }  # fmt: skip

    fate = ["(clipped)" if clipped else "" for clipped in b.clipped]
    int4 = b.beside["INT4"][0]
    kept = [f"{c}, off by {k - v:+.3g}" for c, k, v in zip(b.codes, b.kept, b.values, strict=True)]
    return [
        marks("given", b.values, "circle-open", common.INK, 11, fate),
        marks("kept", b.kept, "circle", common.BLUE, 6, kept),
        marks("kept in INT4", int4, "x-thin", common.ORANGE, 7, [""] * len(int4)),
    ]


def _clipped(b: Block) -> dict:
    """A ring around each number that was cut down to the largest; drawn last, and there also if it has nothing to show."""
    return {
        "type": "scatter", "mode": "markers", "name": "clipped", "x": list(range(len(b.kept))),
        "y": [kept if clipped else None for kept, clipped in zip(b.kept, b.clipped, strict=True)], "hoverinfo": "skip",
        "marker": {"symbol": "circle-open", "color": common.VERMILION, "size": 17, "line": {"width": 2}},
    }  # fmt: skip


def _layer(b: Block) -> dict:
    largest = FORMATS[b.format].largest
    width = 2 * largest / len(b.shares)
    places = [(i + 0.5) * width for i in range(len(b.shares))]
    return {
        "type": "bar", "name": "a trained layer", "x": places, "y": list(b.shares), "width": width, "xaxis": "x2",
        "yaxis": "y2", "showlegend": False,
        "marker": {"color": [common.SKY if p < largest else common.VERMILION for p in places], "line": {"width": 0}},
        "hovertemplate": "around %{x:.3g}: %{y:.2%} of the numbers<extra></extra>",
    }  # fmt: skip


def _errors(b: Block) -> dict:
    errors = list(b.layer_errors.values())
    now = list(FORMATS).index(b.format)
    return {
        "type": "bar", "orientation": "h", "name": "errors", "x": errors, "y": list(range(BARS)), "xaxis": "x3",
        "yaxis": "y3", "showlegend": False, "text": [f"{e:.1%}" for e in errors], "textposition": "auto",
        "marker": {"color": [common.BLUE if i == now else common.SKY for i in range(BARS)], "line": {"width": 0}},
        "hovertemplate": "%{y}: %{x:.2%}<extra></extra>",
    }  # fmt: skip
