"""The picture of decay: half-life per channel, what is left of a token while others are read, and what is left then."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from widgets import common

if TYPE_CHECKING:
    from widgets.decay import Decay

LEFT, MIDDLE, RIGHT = (0.0, 0.27), (0.31, 0.79), (0.83, 1.0)  # shares of the width
SHORTEST, LONGEST = 0.1, 10_000  # ends of the half-life axis in tokens; what lies beyond is drawn at the end
TICKS = {"0.1": 0.1, "1": 1, "10": 10, "100": 100, "1k": 1000, "10k+": 10_000}
# Half-life up to ... tokens: colour.
GROUPS = (
    (2, common.VERMILION),
    (16, common.ORANGE),
    (100, common.SKY),
    (math.inf, common.BLUE),
)


def figure(r: Decay) -> go.Figure:
    """Three panels with one row a channel, the fastest to forget at the bottom.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    rows, count = list(range(1, len(r.channels) + 1)), len(r.channels)
    names = [f"channel {c}: half-life {_tokens(h)}" for c, h in zip(r.channels, r.half_life, strict=True)]
    drawn = [min(max(h, SHORTEST * 1.15), LONGEST) for h in r.half_life]  # a hair's breadth, so that each is seen
    colours = [next(colour for limit, colour in GROUPS if h <= limit) for h in r.half_life]
    kept = [[round(x, 3) for x in row] for row in r.kept]
    end = max(len(kept[0]) - 1, 1)
    bar = {"type": "bar", "orientation": "h", "y": rows, "showlegend": False, "text": names, "textposition": "none"}
    traces = [
        bar | {"x": [round(h, 3) for h in drawn], "marker": {"color": colours}, "hovertemplate": "%{text}<extra></extra>"},
        {
            "type": "heatmap", "z": kept, "x": list(range(end + 1)), "y": rows, "xaxis": "x2", "yaxis": "y2",
            "colorscale": "Cividis", "zmin": 0, "zmax": 1, "showscale": False,
            "hovertemplate": "after %{x} tokens: %{z:.1%}<extra></extra>",
        },
        bar | {
            "x": [round(100 * x, 2) for x in r.left], "xaxis": "x3", "yaxis": "y3", "marker": {"color": common.GREEN},
            "hovertemplate": "%{text}<br>left: %{x} %<extra></extra>",
        },
    ]  # fmt: skip
    span = {"range": [0.4, count + 0.6], "showgrid": False}
    hidden = span | {"showticklabels": False, "ticks": ""}
    axes = {
        "xaxis": common.axis(
            "half-life (tokens, log scale)", TICKS.values(), TICKS, domain=LEFT, type="log",
            range=[math.log10(SHORTEST), math.log10(LONGEST)],
        ),
        "yaxis": span | {"title": {"text": "channels, fastest to forget below", "font": {"size": 13}}},
        "xaxis2": {"domain": MIDDLE, "anchor": "y2", "range": [-0.5, end + 0.5], "showgrid": False,
                   "title": {"text": "tokens read since", "font": {"size": 13}}},
        "yaxis2": hidden | {"anchor": "x2"},
        "xaxis3": common.axis("left then (%)", (0, 50, 100), ("0", "50", "100"), domain=RIGHT, anchor="y3",
                              range=[0, 104]),
        "yaxis3": hidden | {"anchor": "x3"},
    }  # fmt: skip
    mark = {"type": "line", "xref": "x2", "yref": "y2 domain", "x0": r.steps, "x1": r.steps, "y0": 0, "y1": 1}
    look = common.layout(
        460, axes,
        title={"text": _title(r), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.955, "font": {"size": 17}},
        annotations=_headings(r),
        shapes=[mark | {"line": {"color": common.VERMILION, "width": 2, "dash": "dot"}}],
        margin={"l": 56, "r": 12, "t": 84, "b": 56},
        bargap=0.15,
    )  # fmt: skip
    return go.Figure({"data": traces, "layout": look})


def _title(r: Decay) -> str:
    gate = "" if r.gate == "bounded" else " (softplus)"
    fast, slow = r.within(2), len(r.channels) - r.within(100)
    return (
        f"<b>Layer {r.layer}, head {r.head}{gate}: {fast} of {len(r.channels)} channels forget half within 2 tokens, "
        f"{slow} keep it for over 100</b>"
    )


def _headings(r: Decay) -> list[dict]:
    place = {"xref": "paper", "yref": "paper", "y": 1.015, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    place |= {"font": {"size": 13}, "align": "left"}
    key = f"left of token {r.token}: <b>dark</b> nothing, <b>bright</b> all; dotted: {r.steps} later"
    return [
        place | {"x": LEFT[0], "text": "Half-life, mean over this text"},
        place | {"x": MIDDLE[0], "text": key},
        place | {"x": RIGHT[0], "text": f"after {r.steps} tokens"},
    ]


def _tokens(half_life: float) -> str:
    return (
        f"{half_life:,.2g} tokens"
        if half_life < 10
        else f"{half_life:,.0f} tokens"
        if half_life < 1e6
        else "over a million tokens"
    )
