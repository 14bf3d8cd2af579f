"""The picture of state_capacity: the state as a heat map, and the error of each key by order of writing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from widgets import common

if TYPE_CHECKING:
    from widgets.state_capacity import Capacity

LEFT, RIGHT = (0.0, 0.38), (0.55, 1.0)  # shares of the width
# Two hues that colour-blind readers tell apart; nearly clear at zero, so that a dark page stays dark.
DIVERGING = [[0, common.BLUE], [0.5, "rgba(128,128,128,0.08)"], [1, common.VERMILION]]


def figure(r: Capacity) -> go.Figure:
    """Left: the state of one draw. Right: squared error of each key, measured and expected.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    top = 1.15 * max(1.1, max(r.mean_error), max(r.theory or [0]), sorted(r.error)[int(0.95 * (r.pairs - 1))])
    axes = {
        "xaxis": {"title": _small("value channel"), "domain": LEFT, "showgrid": False, "constrain": "domain"},
        "yaxis": {
            "title": _small("key channel"), "autorange": "reversed", "showgrid": False,
            "scaleanchor": "x", "constrain": "domain",
        },
        "xaxis2": {
            "title": _small("pairs by order of writing (oldest first)"), "domain": RIGHT, "anchor": "y2",
            "range": [0, r.pairs + 1], "showgrid": False,
        },
        "yaxis2": {
            "title": _small("squared error (1 = no answer)"), "anchor": "x2", "range": [-0.02 * top, top],
        },
    }  # fmt: skip
    one = {
        "type": "line", "xref": "x2 domain", "yref": "y2", "x0": 0, "x1": 1, "y0": 1, "y1": 1,
        "line": {"color": common.INK, "width": 1, "dash": "dot"}, "layer": "below",
    }  # fmt: skip
    look = common.layout(
        470, axes,
        title={"text": _title(r), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.965, "font": {"size": 17}},
        shapes=[one],
        annotations=_headings(r),
        margin={"l": 60, "r": 12, "t": 84, "b": 100},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": -0.2, "yanchor": "top", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": [_state(r), *_errors(r)], "layout": look})


def _small(text: str) -> dict:
    """Title of an axis, close to it."""
    return {"text": text, "font": {"size": 13}, "standoff": 8}


def _title(r: Capacity) -> str:
    plural = "pair" if r.pairs == 1 else "pairs"
    back = f"{r.accuracy:.0%} come back" if r.pairs > 1 else f"squared error {r.error_mean:.2f}"
    return f"<b>{r.pairs} {plural} in a state of {r.key_width} × {r.key_width}: {back}</b>"


def _state(r: Capacity) -> dict:
    reach = max(max(map(abs, row)) for row in r.state) or 1.0
    return {
        "type": "heatmap", "z": r.state, "x0": 1, "y0": 1, "zmin": -reach, "zmax": reach, "colorscale": DIVERGING, "name": "state",
        "colorbar": {"x": LEFT[1], "xpad": 6, "thickness": 10, "len": 0.8, "outlinewidth": 0, "nticks": 5},
        "hovertemplate": "key channel %{y}, value channel %{x}: %{z:.2f}<extra></extra>",
    }  # fmt: skip


def _errors(r: Capacity) -> list[dict]:
    """Dots of this draw, right and wrong ones with marks of their own; the mean of all draws; theory."""
    order = list(range(1, r.pairs + 1))

    def dots(name: str, right: bool, color: str, symbol: str) -> dict:
        return {
            "type": "scatter", "mode": "markers", "name": name, "xaxis": "x2", "yaxis": "y2",
            "marker": {"color": color, "symbol": symbol, "size": 7, "opacity": 0.85},
            "x": order, "y": [e if ok == right else None for e, ok in zip(r.error, r.right, strict=True)],
            "hovertemplate": f"pair %{{x}}: error %{{y:.2f}}, {name}<extra></extra>",
        }  # fmt: skip

    line = {"type": "scatter", "mode": "lines", "xaxis": "x2", "yaxis": "y2", "x": order, "hoverinfo": "skip"}
    expected = r.theory if r.theory is not None else [None] * r.pairs
    return [
        dots("right value nearest", True, common.BLUE, "circle"),
        dots("another value nearer", False, common.VERMILION, "x"),
        line | {"name": f"mean of {r.draws} draws", "y": r.mean_error, "line": {"color": common.SKY, "width": 2}},
        line | {"name": "theory", "y": expected, "line": {"color": common.ORANGE, "width": 3, "dash": "dash"}},
    ]  # fmt: skip


def _headings(r: Capacity) -> list[dict]:
    place = {
        "xref": "paper", "yref": "paper", "y": 1.015, "xanchor": "left", "yanchor": "bottom", "showarrow": False,
        "font": {"size": 13},
    }  # fmt: skip
    missing = "; no theory for this setting" if r.theory is None else ""
    right = f"Error of each key: mean {r.error_mean:.2f}{missing}"
    return [place | {"x": LEFT[0], "text": "The state"}, place | {"x": RIGHT[0], "text": right}]
