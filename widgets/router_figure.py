"""The picture of router: load of each expert and each rank, how they changed, and who sends to whom."""

from __future__ import annotations

from math import log10
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from widgets import common

if TYPE_CHECKING:
    from widgets.router import Routing

LAST_STEP = 16  # where the course ends
LEFT, RIGHT = (0.0, 0.56), (0.69, 1.0)  # shares of the width
TOP, BOTTOM = (0.62, 1.0), (0.0, 0.36)  # shares of the height
TICKS = (1, 2, 5, 10, 20, 50, 100)
TRAFFIC = [[0, "rgba(128,128,128,0.08)"], [1, common.BLUE]]


def figure(r: Routing) -> go.Figure:
    """Left: load of each expert, and the course of the busiest. Right: tokens of each rank, and the traffic matrix.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    ranks = list(range(r.ranks))
    high, top = 1.12 * max(2.0, *r.loads), max(2.0, *r.busiest, *r.slowest)
    numbers = {"showgrid": False, "tickvals": ranks[:: 1 if r.ranks <= 8 else 3]}
    edges = [-0.5, r.ranks - 0.5]
    axes = {
        "xaxis": _axis("expert (number)", LEFT, "y", range=[-0.7, r.experts - 0.3], showgrid=False),
        "yaxis": _axis("load over the mean", TOP, "x", range=[0, high]),
        "xaxis2": _axis("step", LEFT, "y2", range=[-0.4, LAST_STEP + 0.4], showgrid=False),
        "yaxis2": _axis("times the mean (log)", BOTTOM, "x2", type="log", range=[-0.05, log10(1.25 * top)], tickvals=TICKS),
        "xaxis3": _axis("rank", RIGHT, "y3", range=edges, **numbers),
        "yaxis3": _axis("visits of tokens", TOP, "x3", range=[0, 1.15 * max(a + b for a, b in zip(r.own, r.lent, strict=True))]),
        "xaxis4": _axis("to rank", RIGHT, "y4", range=edges, **numbers),
        "yaxis4": _axis("from rank", BOTTOM, "x4", range=edges[::-1], **numbers),
    }  # fmt: skip
    mean = sum(r.own + r.lent) / r.ranks
    look = common.layout(
        620, axes,
        title={"text": _title(r), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.97, "font": {"size": 17}},
        shapes=[_level("x", "y", 1.0), _level("x2", "y2", 1.0), _level("x3", "y3", mean)],
        annotations=_headings(r),
        barmode="stack",
        bargap=0.15,
        margin={"l": 66, "r": 12, "t": 76, "b": 96},
        legend={"orientation": "h", "x": 0, "y": -0.13, "yanchor": "top", "traceorder": "normal", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": [*_experts(r), *_course(r), *_ranks(r, ranks), _traffic(r, ranks)], "layout": look})


def _axis(title: str, domain: tuple[float, float], anchor: str, **settings) -> dict:
    named = {"text": title, "font": {"size": 13}, "standoff": 8}
    return {"title": named, "domain": domain, "anchor": anchor} | settings


def _title(r: Routing) -> str:
    at = f"Step {r.step}: busiest expert {r.busiest[-1]:.2f} × the mean, {r.dead} dead"
    return f"<b>{at}</b>" if r.ranks == 1 else f"<b>{at}; busiest rank {r.slowest[-1]:.2f} ×</b>"


def _level(x: str, y: str, at: float) -> dict:
    """A dotted line at the mean."""
    line = {"color": common.INK, "width": 1, "dash": "dot"}
    return {
        "type": "line", "xref": f"{x} domain", "yref": y, "x0": 0, "x1": 1, "y0": at, "y1": at, "line": line,
        "layer": "below",
    }  # fmt: skip


def _experts(r: Routing) -> list[dict]:
    """Bars in two colours by turns, so that the ranges of the ranks can be seen."""

    def bars(name: str, odd: int, color: str) -> dict:
        shown = [load if home % 2 == odd else None for load, home in zip(r.loads, r.home, strict=True)]
        return {
            "type": "bar", "name": name, "x": list(range(r.experts)), "y": shown, "xaxis": "x", "yaxis": "y",
            "marker": {"color": color, "line": {"width": 0}},
            "hovertemplate": f"expert %{{x}}: %{{y:.2f}} times the mean<extra>{name}</extra>",
        }  # fmt: skip

    return [bars("experts of rank 0, 2, …", 0, common.BLUE), bars("of rank 1, 3, …", 1, common.SKY)]


def _course(r: Routing) -> list[dict]:
    steps = list(range(r.step + 1))
    line = {"type": "scatter", "mode": "lines+markers", "xaxis": "x2", "yaxis": "y2", "x": steps}
    return [
        line | {
            "name": "busiest expert", "y": list(r.busiest), "line": {"color": common.VERMILION, "width": 3},
            "marker": {"symbol": "circle", "size": 6}, "hovertemplate": "step %{x}: busiest expert %{y:.2f}<extra></extra>",
        },
        line | {
            "name": "busiest rank", "y": list(r.slowest), "line": {"color": common.GREEN, "width": 3, "dash": "dash"},
            "marker": {"symbol": "square", "size": 6}, "hovertemplate": "step %{x}: busiest rank %{y:.2f}<extra></extra>",
        },
    ]  # fmt: skip


def _ranks(r: Routing, ranks: list[int]) -> list[dict]:
    def bars(name: str, tokens: tuple[int, ...], color: str, pattern: str) -> dict:
        return {
            "type": "bar", "name": name, "x": ranks, "y": list(tokens), "xaxis": "x3", "yaxis": "y3",
            "marker": {"color": color, "pattern": {"shape": pattern}, "line": {"width": 0}},
            "hovertemplate": f"rank %{{x}}: %{{y:,}} by {name}<extra></extra>",
        }  # fmt: skip

    return [
        bars("own experts", r.own, common.GREEN, ""),
        bars("copies of others' experts", r.lent, common.ORANGE, "/"),
    ]


def _traffic(r: Routing, ranks: list[int]) -> dict:
    return {
        "type": "heatmap", "name": "traffic", "z": [list(row) for row in r.traffic], "x": ranks, "y": ranks,
        "xaxis": "x4", "yaxis": "y4", "zmin": 0, "zmax": max(map(max, r.traffic)), "colorscale": TRAFFIC, "xgap": 1, "ygap": 1,
        "colorbar": {"x": RIGHT[1], "xpad": 4, "y": sum(BOTTOM) / 2, "len": 0.4, "thickness": 9, "outlinewidth": 0, "nticks": 4},
        "hovertemplate": "from rank %{y} to rank %{x}: %{z:,} visits<extra></extra>",
    }  # fmt: skip


def _headings(r: Routing) -> list[dict]:
    place = {
        "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
        "font": {"size": 13},
    }  # fmt: skip
    lent = f"Ranks: most copies on one, {max(r.redundant)}" if r.copies else "Ranks: no copies"
    texts = (
        (LEFT[0], TOP[1], "Experts: who was chosen"),
        (LEFT[0], BOTTOM[1], "So far: busiest expert and busiest rank"),
        (RIGHT[0], TOP[1], lent),
        (RIGHT[0], BOTTOM[1], f"Traffic: {r.travelling:.0%} of visits leave their rank"),
    )
    return [place | {"x": x, "y": y + 0.012, "text": text} for x, y, text in texts]
