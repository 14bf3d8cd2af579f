"""The picture of design_space: what a token costs along each of the five choices, and against the context."""

from __future__ import annotations

from math import log10
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from k3lite.spell import format_seconds
from widgets import common
from widgets.design_space_cost import AXES, CONTEXTS

if TYPE_CHECKING:
    from widgets.design_space import Axis, Point, Space

COLUMNS = ((0.0, 0.27), (0.365, 0.635), (0.73, 1.0))  # shares of the width
ROWS = ((0.6, 1.0), (0.0, 0.36))  # shares of the height
PLACES = {"mla_layers": (0, 0), "latent": (1, 0), "precision": (2, 0), "experts": (0, 1), "top_k": (1, 1)}
CONTEXT_PLACE = (2, 1)
TITLES = {
    "mla_layers": "MLA layers of 93",
    "latent": "latent (numbers)",
    "precision": "precision of experts",
    "experts": "experts a layer",
    "top_k": "experts a token (top-k)",
}
TICKS = {
    "mla_layers": (0, 24, 48, 72, 93),
    "latent": (64, 128, 256, 512, 1024, 2048),
    "experts": (64, 256, 896, 4096),
    "top_k": (1, 2, 4, 8, 16, 32, 64),
}
CONTEXT_TICKS = {"1k": 2**10, "8k": 2**13, "64k": 2**16, "1M": 2**20}
# Memory, arithmetic, links and their sum: told apart by dash as well as by colour.
PARTS = {
    "memory": {"color": common.BLUE, "dash": "dash", "width": 2},
    "arithmetic": {"color": common.VERMILION, "dash": "dot", "width": 2},
    "link": {"color": common.PURPLE, "dash": "dashdot", "width": 2},
    "seconds": {"color": common.INK, "dash": "solid", "width": 3},
}
NAMES = {"memory": "bytes over bandwidth", "arithmetic": "FLOPs over arithmetic", "link": "rows over links", "seconds": "a token"}  # fmt: skip
CONTEXT_STYLES = {
    "K3": {"color": common.INK, "dash": "solid", "width": 3},
    "MLA everywhere": {"color": common.SKY, "dash": "longdash", "width": 2},
    "KDA everywhere": {"color": common.GREEN, "dash": "dashdot", "width": 2},
}
EDGE = {"color": common.INK, "width": 1}
MARKS = {
    "K3's choice": {"symbol": "diamond", "size": 12, "color": common.ORANGE, "line": EDGE},
    "cheapest not below the floor": {"symbol": "star", "size": 13, "color": common.GREEN, "line": EDGE},
    "largest that is hidden": {"symbol": "square", "size": 10, "color": common.SKY, "line": EDGE},
    "does not fit": {"symbol": "x", "size": 7, "color": common.VERMILION},
}


def figure(s: Space) -> go.Figure:
    """Five panels, one a choice, and one against the context. The five share one scale of times.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    traces, axes = [], {}
    span = _range([p.seconds for a in s.axes.values() for p in a.points], below=1.0)
    for number, name in enumerate(PLACES, 1):
        traces += _axis_traces(s.axes[name], _suffix(number))
        axes |= _y(number, PLACES[name], span, PLACES[name][0] == 0) | {f"xaxis{_suffix(number)}": _x(name, number)}
    number = len(PLACES) + 1
    traces += _context_traces(s, _suffix(number))
    ticks = {"tickvals": list(CONTEXT_TICKS.values()), "ticktext": list(CONTEXT_TICKS), "type": "log"}
    axes |= _y(number, CONTEXT_PLACE, _range([t for curve in s.contexts.values() for t in curve], below=0.1), True)
    axes[f"xaxis{_suffix(number)}"] = _place_x(CONTEXT_PLACE, number, "context (tokens)") | ticks
    floors = [_floor(n, s.axes[name]) for n, name in enumerate(PLACES, 1)]
    look = common.layout(
        680, axes,
        title={"text": _title(s), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.975, "font": {"size": 17}},
        shapes=floors,
        annotations=_headings(),
        margin={"l": 74, "r": 12, "t": 84, "b": 150},
        legend={"orientation": "h", "x": 0, "y": -0.13, "yanchor": "top", "traceorder": "normal", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": traces, "layout": look})


def _suffix(number: int) -> str:
    return "" if number == 1 else str(number)


def _range(costs: list[float | None], below: float) -> tuple[float, float]:
    """Powers of ten around all costs, with so many decades below them for the parts."""
    known = [log10(t) for t in costs if t is not None]
    return (min(known) - below, max(known) + 0.1) if known else (-6.0, 0.0)


def _y(number: int, place: tuple[int, int], span: tuple[float, float], labels: bool) -> dict[str, dict]:
    steps = (1, 2, 5) if span[1] - span[0] < 2.5 else (1,)
    ticks = [m * 10.0**e for e in range(-12, 7) for m in steps]
    named = {"tickvals": ticks, "ticktext": [format_seconds(t) for t in ticks], "showticklabels": labels}
    y = {"type": "log", "range": span, "domain": ROWS[place[1]], "anchor": f"x{_suffix(number)}"}
    title = {"title": {"text": "a token (log)" if place[0] == 0 else "", "font": {"size": 13}, "standoff": 4}}
    return {f"yaxis{_suffix(number)}": y | named | title}


def _place_x(place: tuple[int, int], number: int, title: str) -> dict:
    named = {"text": title, "font": {"size": 13}, "standoff": 8}
    return {"title": named, "domain": COLUMNS[place[0]], "anchor": f"y{_suffix(number)}", "showgrid": False}


def _x(name: str, number: int) -> dict:
    base = _place_x(PLACES[name], number, TITLES[name])
    if name == "precision":
        return base | {"type": "category", "range": [-0.5, 1.5]}
    base |= {"tickvals": TICKS[name], "ticktext": [f"{n:,}" for n in TICKS[name]]}
    first, last = AXES[name][0], AXES[name][-1]
    if name == "mla_layers":
        return base | {"range": [first - 5, last + 5]}
    return base | {"type": "log", "range": [log10(first) - 0.12, log10(last) + 0.12]}


def _axis_traces(a: Axis, suffix: str) -> list[dict]:
    """Four lines and four kinds of marks. The first panel alone is in the legend."""
    on = {"type": "scatter", "xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "hovertemplate": "%{text}<extra></extra>"}
    values = [p.value for p in a.points]
    lines = [
        on | {
            "mode": "lines+markers" if a.name == "precision" else "lines", "name": NAMES[part], "line": style, "x": values,
            "y": [getattr(p, part) for p in a.points], "text": [_hover(a, p, part) for p in a.points],
            "legendgroup": part, "showlegend": suffix == "",
        }
        for part, style in PARTS.items()
    ]  # fmt: skip
    shown = {
        "K3's choice": [a.k3],
        "cheapest not below the floor": [a.cheapest],
        "largest that is hidden": [a.hidden],
        "does not fit": [p.value for p in a.points if not p.fits],
    }
    by_value = {p.value: p for p in a.points}
    marks = [
        on | {
            "mode": "markers", "name": kind, "marker": MARKS[kind], "x": chosen,
            "y": [by_value[v].seconds if v is not None else None for v in chosen],
            "text": [f"{kind}: {_value(v)}" for v in chosen], "legendgroup": kind, "showlegend": suffix == "",
        }
        for kind, chosen in shown.items()
    ]  # fmt: skip
    return lines + marks[::-1]  # K3's diamond last, on top


def _hover(a: Axis, p: Point, part: str) -> str:
    time = getattr(p, part)
    if time is None:
        return f"{_value(p.value)}: does not fit"
    return f"{_value(p.value)}: {format_seconds(time)}, {NAMES[part]}, batch {p.batch:,}"


def _value(v: object) -> str:
    return f"{v:,}" if isinstance(v, int) else str(v)


def _context_traces(s: Space, suffix: str) -> list[dict]:
    on = {"type": "scatter", "xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "hovertemplate": "%{text}<extra></extra>"}
    lines = [
        on | {
            "mode": "lines", "name": name if name != "K3" else "K3, against the context", "line": CONTEXT_STYLES[name],
            "x": CONTEXTS, "y": curve, "showlegend": name != "K3",
            "text": ["" if t is None else f"{name}, {n:,} tokens: {format_seconds(t)} a token" for n, t in zip(CONTEXTS, curve, strict=True)],
        }
        for name, curve in s.contexts.items()
    ]  # fmt: skip
    here = on | {
        "mode": "markers", "name": "K3's choice", "marker": MARKS["K3's choice"], "x": [s.tokens], "y": [s.k3.seconds],
        "text": [f"K3 at {s.tokens:,} tokens"], "showlegend": False,
    }  # fmt: skip
    return [*lines, here]


def _floor(number: int, a: Axis) -> dict:
    """A dotted line at the reader's floor; hidden where the floor is the axis' end."""
    at = a.floor if a.floor is not None else 0
    return {
        "type": "line", "xref": f"x{_suffix(number)}", "yref": f"y{_suffix(number)} domain", "x0": at, "x1": at, "y0": 0, "y1": 1,
        "line": {"color": common.INK, "width": 1.5, "dash": "dot"},
        "visible": a.floor is not None and a.floor > a.points[0].value,
    }  # fmt: skip


def _headings() -> list[dict]:
    plain = {
        "xref": "paper",
        "yref": "paper",
        "showarrow": False,
        "xanchor": "left",
        "yanchor": "bottom",
        "font": {"size": 13},
    }
    places = [*PLACES.items(), ("context", CONTEXT_PLACE)]
    words = {
        "mla_layers": "KDA or MLA", "latent": "width of a slot", "precision": "bits", "experts": "experts",
        "top_k": "experts at work", "context": "K3 and both extremes",
    }  # fmt: skip
    return [
        plain | {"x": COLUMNS[x][0], "y": ROWS[y][1] + 0.01, "text": f"<b>{words[name]}</b>"} for name, (x, y) in places
    ]


def _title(s: Space) -> str:
    machine = f"{s.machine.count} × {s.machine.name}"
    if s.k3.seconds is None:
        return f"<b>K3 does not fit on {machine}</b>"
    fits = "" if s.k3.fits else ", if it did fit"
    over = "memory" if s.k3.limit == "memory" else "arithmetic"
    return f"<b>A token of K3 costs {format_seconds(s.k3.seconds)} of {machine}{fits}: it waits for {over}</b>"
