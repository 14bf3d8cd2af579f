"""The picture of attention_map: the text with its weights as colour, the weights by place, the five largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from widgets import common

if TYPE_CHECKING:
    from widgets.attention_map import AttentionMap

COLUMNS, ROWS = 68, 6  # characters in a row of the text, and the fewest rows that there is room for
PAPER, BARS, TOPS = (0.5, 1.0), (0.0, 0.6), (0.79, 1.0)  # shares of height; of the width, below
# Nearly clear at zero, so that a dark page stays dark.
SCALE = [[0, "rgba(128,128,128,0.06)"], [1, common.BLUE]]
SIGNS = {"\n": "↵", " ": "\u00a0"}  # an empty text would be taken out of the picture, and not come back when it changes
WORDS = {"\n": "line break", " ": "space"}


def spell(text: str, place: int) -> str:
    """A token with its place: "'=' at 57"."""
    return f"{WORDS.get(text[place], repr(text[place]))} at {place}"


def figure(r: AttentionMap) -> go.Figure:
    """Above: the text, each character on its weight. Below: weight by place, and the five largest.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    percent = [round(100 * x, 2) for x in r.weights]
    top = max(percent)
    rows = _rows(r)
    bare = {"showgrid": False, "showticklabels": False, "ticks": "", "showline": False}
    axes = {
        "xaxis": bare | {"range": [-0.6, COLUMNS - 0.4], "domain": [0, 1], "anchor": "y"},
        "yaxis": bare | {"range": [rows - 0.4, -0.6], "domain": PAPER, "anchor": "x"},
        "xaxis2": {"title": _small("place in the text (bytes)"), "domain": BARS, "anchor": "y2", "showgrid": False,
                   "range": [-2, len(r.text) + 1]},
        "yaxis2": {"title": _small("attention (%)"), "domain": [0, 0.36], "anchor": "x2", "range": [0, 1.08 * top]},
        "xaxis3": {"title": _small("attention (%)"), "domain": TOPS, "anchor": "y3", "range": [0, 1.3 * top],
                   "showgrid": False, "nticks": 4},
        "yaxis3": {"domain": [0, 0.36], "anchor": "x3", "range": [4.6, -0.6], "showgrid": False, "ticks": "",
                   "tickvals": list(range(5)), "ticktext": [spell(r.text, i) for i in r.top] + [""] * (5 - len(r.top))},
    }  # fmt: skip
    look = common.layout(
        560, axes,
        title={"text": _title(r), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.97, "font": {"size": 16}},
        margin={"l": 56, "r": 12, "t": 72, "b": 48},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 12}},
        bargap=0,
    )  # fmt: skip
    return go.Figure(
        {"data": [_cells(percent, r), *_marks(r), _characters(percent, r), *_bars(percent, r)], "layout": look}
    )


def _title(r: AttentionMap) -> str:
    best = r.top[0]
    where = next((n for n, (a, b) in enumerate(r.lines) if a <= best < b), None)
    line = {None: "in no hidden line", 0: "in the line asked for"}.get(where, "in a line not asked for")
    tokens = "1 token" if round(r.effective, 1) == 1 else f"{r.effective:.1f} tokens"
    return f"<b>{100 * r.weights[best]:.0f} % of the attention is on {spell(r.text, best)}, {line} ({tokens} in effect)</b>"


def _small(text: str) -> dict:
    """Title of an axis, close to it."""
    return {"text": text, "font": {"size": 13}, "standoff": 6}


def _rows(r: AttentionMap) -> int:
    return max(ROWS, -(-len(r.text) // COLUMNS))


def _at(places) -> dict:
    """Coordinates of characters in the panel of text."""
    return {"x": [i % COLUMNS for i in places], "y": [i // COLUMNS for i in places]}


def _cells(percent: list[float], r: AttentionMap) -> dict:
    """One cell for each token that may be seen; none for the others."""
    places = _rows(r) * COLUMNS
    seen = [*percent[: r.seen], *[None] * (places - r.seen)]
    return {
        "type": "heatmap", "name": "attention", "z": [seen[i : i + COLUMNS] for i in range(0, places, COLUMNS)],
        "zmin": 0, "zmax": max(percent), "colorscale": SCALE, "showscale": False, "xgap": 1, "ygap": 3, "hoverinfo": "skip",
    }  # fmt: skip


def _marks(r: AttentionMap) -> list[dict]:
    """Lines under the hidden facts, and a frame around the query."""

    def under(name: str, lines, colour: str, dash: str) -> dict:
        x, y = [], []
        for a, b in lines:
            for i in range(a, b):
                if i > a and i % COLUMNS == 0:  # the row ends inside the fact
                    x, y = [*x, None], [*y, None]
                x, y = [*x, i % COLUMNS - 0.45, i % COLUMNS + 0.45], [*y, *[i // COLUMNS + 0.43] * 2]
            x, y = [*x, None], [*y, None]
        return {
            "type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "hoverinfo": "skip",
            "line": {"color": colour, "width": 3, "dash": dash},
        }  # fmt: skip

    frame = {"symbol": "square-open", "size": 18, "color": common.GREEN, "line": {"width": 2.5}}
    return [
        under("fact asked for", r.lines[:1], common.VERMILION, "solid"),
        under("other hidden facts", r.lines[1:] or [(0, 0)], common.ORANGE, "dot"),
        {"type": "scatter", "mode": "markers", "name": "query", **_at([r.query]), "marker": frame, "hoverinfo": "skip"},
    ]


def _characters(percent: list[float], r: AttentionMap) -> dict:
    top = max(percent)
    return {
        "type": "scatter", "mode": "text", "name": "text", "showlegend": False, **_at(range(len(r.text))),
        "text": [SIGNS.get(sign, sign) for sign in r.text],
        "textfont": {"family": "monospace", "size": 14, "color": ["#FFFFFF" if p > 0.5 * top else common.INK for p in percent]},
        "customdata": [[spell(r.text, i), p] for i, p in enumerate(percent)],
        "hovertemplate": "%{customdata[0]}: %{customdata[1]:.2f} %<extra></extra>",
    }  # fmt: skip


def _bars(percent: list[float], r: AttentionMap) -> list[dict]:
    inside = [next((n > 0 for n, (a, b) in enumerate(r.lines) if a <= i < b), None) for i in range(len(r.text))]
    colours = {None: common.BLUE, False: common.VERMILION, True: common.ORANGE}
    flat = {"hoverinfo": "skip", "showlegend": False}
    # Stems and not bars: of three hundred bars in five hundred pixels most would be thinner than a pixel.
    size = [7 if p > 0.02 * max(percent) else 2 for p in percent]
    stems = {
        "type": "scatter", "mode": "markers", "name": "by place", "xaxis": "x2", "yaxis": "y2", "y": percent,
        "marker": {"size": size, "color": [colours[n] for n in inside], "opacity": 1, "line": {"width": 0}},
        "error_y": {"type": "percent", "value": 0, "valueminus": 100, "symmetric": False, "width": 0, "thickness": 2,
                    "color": common.INK},
    }  # fmt: skip
    highest = [percent[i] for i in r.top]
    tops = {
        "type": "bar", "orientation": "h", "name": "five largest", "xaxis": "x3", "yaxis": "y3", "x": highest,
        "y": list(range(len(highest))), "width": 0.7, "marker": {"color": [colours[inside[i]] for i in r.top]},
        "text": [f"{p:.0f} %" if p >= 0.95 else f"{p:.1f} %" for p in highest], "textposition": "outside", "cliponaxis": False,
    }  # fmt: skip
    return [stems | flat, tops | flat]
