"""The picture of depth: who reads which depth, and what the model answers with and without one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from widgets import common

if TYPE_CHECKING:
    from widgets.depth import Depths

LEFT, RIGHT = (0.0, 0.6), (0.8, 1.0)  # shares of the width
FULL_COLOUR = 0.5  # shares from here on look alike; few are larger, and most would be pale on a scale up to 1
TICKS = {"tickvals": [0, 0.1, 0.2, 0.3, 0.4, 0.5], "ticktext": ["0 %", "10 %", "20 %", "30 %", "40 %", "50 % or more"]}
SHARES = [[0, "rgba(86,180,233,0.12)"], [1, common.BLUE]]  # ever more of one colour, also on a dark page


def figure(d: Depths) -> go.Figure:
    """Left: shares of each reader (row, the input at the bottom) over its sources. Right: probabilities of the next byte.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    rows, columns, bars = list(range(len(d.readers))), list(range(len(d.sources))), list(range(len(d.answer)))
    axes = {
        "xaxis": _axis("source", LEFT, "y", columns, d.sources, tickangle=-45),
        "yaxis": _axis("reader", (0.0, 1.0), "x", rows, d.readers),
        "xaxis2": _axis("probability", RIGHT, "y2", (0, 0.5, 1), ("0", "0.5", "1"), range=[0, 1.02]),
        "yaxis2": _axis("next byte", (0.35, 1.0), "x2", bars, [a[0] for a in d.answer], range=[len(bars) - 0.4, -0.6]),
    }
    look = common.layout(
        640, axes,
        title={"text": _title(d), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.97, "font": {"size": 17}},
        annotations=_headings(d),
        barmode="group",
        bargap=0.25,
        margin={"l": 82, "r": 12, "t": 76, "b": 96},
        legend={"x": RIGHT[0], "y": 0.22, "yanchor": "top", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": [_shares(d), *_answer(d)], "layout": look})


def _axis(title: str, domain: tuple[float, float], anchor: str, values, texts, **settings) -> dict:
    """Ticks by number and name; rows and columns are named, not measured."""
    place = {"domain": list(domain), "anchor": anchor, "showgrid": False, "tickfont": {"size": 11}}
    return common.axis(title, values, texts, **place, **settings)


def _title(d: Depths) -> str:
    loss, cut_loss = d.losses
    if d.cut is None:
        return f"<b>Nothing is cut out: {loss:.2f} nats per byte</b>"
    return f"<b>Without “{d.sources[d.cut]}”: {loss:.2f} → {cut_loss:.2f} nats per byte</b>"


def _shares(d: Depths) -> dict:
    named = [[(reader, source) for source in d.sources] for reader in d.readers]
    return {
        "type": "heatmap", "name": "shares", "z": [list(row) for row in d.shares], "xaxis": "x", "yaxis": "y",
        "x": list(range(len(d.sources))), "y": list(range(len(d.readers))), "customdata": named,
        "zmin": 0, "zmax": FULL_COLOUR, "colorscale": SHARES, "xgap": 1, "ygap": 1, "hoverongaps": False,
        "colorbar": {"x": LEFT[1], "xpad": 6, "len": 0.5, "thickness": 10, "outlinewidth": 0, **TICKS},
        "hovertemplate": "%{customdata[0]} reads %{customdata[1]}: %{z:.1%}<extra></extra>",
    }  # fmt: skip


def _answer(d: Depths) -> list[dict]:
    def bars(name: str, which: int, color: str, pattern: str) -> dict:
        return {
            "type": "bar", "orientation": "h", "name": name, "x": [a[which] for a in d.answer],
            "y": list(range(len(d.answer))), "xaxis": "x2", "yaxis": "y2",
            "marker": {"color": color, "pattern": {"shape": pattern}, "line": {"width": 0}},
            "hovertemplate": f"%{{x:.1%}} {name}<extra></extra>",
        }  # fmt: skip

    return [bars("as trained", 1, common.BLUE, ""), bars("with the cut", 2, common.ORANGE, "/")]


def _headings(d: Depths) -> list[dict]:
    place = {
        "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
        "font": {"size": 13},
    }  # fmt: skip
    of = "mean over the text" if d.mean else f"at byte {d.token}"
    seen = d.text[max(0, d.token - 14) : d.token].replace("<", "&lt;")
    texts = ((LEFT[0], f"Shares, {of} (a row sums to 1)"), (RIGHT[0] - 0.1, f"After “…{seen}”"))
    return [place | {"x": x, "y": 1.012, "text": text} for x, text in texts]
