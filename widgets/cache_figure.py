"""The picture of cache_explorer: bytes against context length, and bytes at the chosen context."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from widgets import common
from widgets.common import DEVICES, format_bytes

if TYPE_CHECKING:
    from widgets.cache_explorer import Comparison, Scheme

# Lines of MHA, GQA, window, MLA and hybrid: told apart by dash as well as by colour.
STYLES = (
    {"color": common.VERMILION, "dash": "dot", "width": 2.5},
    {"color": common.ORANGE, "dash": "dash", "width": 2.5},
    {"color": common.SKY, "dash": "longdash", "width": 2.5},
    {"color": common.BLUE, "dash": "dashdot", "width": 2.5},
    {"color": common.GREEN, "dash": "solid", "width": 3.5},
)
# Parts of a bar that do not have their scheme's colour; values and unused slots are told from keys by a pattern.
PART_COLORS = {"state": common.PURPLE, "conv": "#8FD3B6", "unused": common.INK}
PATTERNS = {"values": "/", "unused": "x"}
NAMES = {"latent": "latents", "state": "state, fp32", "unused": "unused in pages"}
LEFT, RIGHT = (0.0, 0.48), (0.535, 1.0)  # shares of the width
TICKS = {"1k": 2**10, "4k": 2**12, "16k": 2**14, "64k": 2**16, "256k": 2**18, "1M": 2**20, "4M": 2**22}


def figure(r: Comparison) -> go.Figure:
    """Left: bytes against context, log-log. Right: bytes at the chosen context, to scale.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    # To scale with MHA the hybrid would be a hairline, so the scale follows MLA and longer bars are cut.
    top = 1.15 * max(r.mla.total, r.hybrid.total)
    drawn = [b for s in r.schemes for b in s.curve] + [r.device_bytes]
    low, high = min(drawn) / 16, max(drawn) * 8  # room for the labels of the break-even and of the chosen context
    powers = [2.0**e for e in range(0, 91, 5) if low <= 2**e <= high]
    steps = common.byte_steps(top)
    line = {"color": common.INK, "width": 1.5}
    chosen = {"type": "line", "x0": r.tokens, "x1": r.tokens, "y0": 0, "y1": 1, "yref": "y domain", "line": line}
    cache, short = f"cache {r.whose}", {"short": True}
    axes = {
        "xaxis": common.axis(
            "context length (tokens; 1k = 1,024)", TICKS.values(), TICKS, domain=LEFT, type="log",
            range=[math.log10(900), math.log10(4.8e6)],
        ),
        "yaxis": common.axis(
            cache, powers, [format_bytes(b, **short) for b in powers], type="log",
            range=[math.log10(low), math.log10(high)],
        ),
        "xaxis2": common.axis(
            cache, steps, [format_bytes(b, **short) for b in steps], domain=RIGHT, anchor="y2", range=[0, top]
        ),
        "yaxis2": {"anchor": "x2", "range": [-0.75, len(r.schemes) - 0.3], "visible": False},
    }  # fmt: skip
    look = common.layout(
        560, axes,
        title={"text": _title(r), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.965, "font": {"size": 17}},
        annotations=_headings(r) + _bar_captions(r, top) + [_context_label(r), _break_even_label(r)],
        shapes=[chosen | {"layer": "below"}],
        margin={"l": 84, "r": 12, "t": 84, "b": 96},
        barmode="stack",
        legend={"orientation": "h", "traceorder": "normal", "x": 0, "y": -0.17, "yanchor": "top", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": _curves(r) + _marks(r) + _bars(r), "layout": look})


def _title(r: Comparison) -> str:
    than = "as" if r.verdict.endswith("much") else "than"
    return f"<b>At {r.tokens:,} tokens the hybrid keeps {r.verdict} {than} MLA in every layer</b>"


def _curves(r: Comparison) -> list[dict]:
    """One line a scheme."""
    return [
        {
            "type": "scatter", "mode": "lines", "name": s.name, "line": style,
            "x": r.curve_tokens, "y": [float(b) for b in s.curve],
            "text": [format_bytes(b) for b in s.curve], "hovertemplate": "%{x:,} tokens: %{text}",
        }
        for s, style in zip(r.schemes, STYLES, strict=True)
    ]  # fmt: skip


def _marks(r: Comparison) -> list[dict]:
    """Dots at the chosen context, the device's memory and the others', crosses where a cache fills it, the break-even diamond."""
    first, last = r.curve_tokens[0], r.curve_tokens[-1]
    colors = [s["color"] for s in STYLES]
    filled = [s.fits if s.fits and first <= s.fits <= last else None for s in r.schemes]
    even = r.break_even if r.break_even and first <= r.break_even <= last else None
    edge = {"color": common.INK, "width": 1}
    others = [d for d in DEVICES if d != r.device]
    dots = {"type": "scatter", "mode": "markers", "hovertemplate": "%{text}<extra></extra>"}
    return [
        dots | {
            "x": [r.tokens] * len(r.schemes), "y": [float(s.total) for s in r.schemes], "showlegend": False,
            "marker": {"color": colors, "size": 9}, "text": [f"{s.name}: {format_bytes(s.total)}" for s in r.schemes],
        },
        {
            "type": "scatter", "mode": "lines", "x": [first, last], "y": [float(r.device_bytes)] * 2,
            "name": f"memory of one {common.device_label(r.device)}",
            "line": {"color": common.INK, "width": 2, "dash": "longdash"}, "hoverinfo": "name",
        },
        {
            "type": "scatter", "mode": "lines", "name": "memory of the other devices",
            "x": [first, last, None] * len(others), "y": [y for d in others for y in (DEVICES[d], DEVICES[d], None)],
            "text": [common.device_label(d) for d in others for _ in range(3)],
            "line": {"color": common.INK, "width": 0.7, "dash": "dot"}, "hovertemplate": "%{text}<extra></extra>",
        },
        dots | {
            "x": filled, "y": [float(r.device_bytes)] * len(filled), "name": "longest context that fits",
            "marker": {"color": colors, "size": 11, "symbol": "x", "line": edge},
            "text": [f"{s.name}: {s.fits_text}" for s in r.schemes],
        },
        dots | {
            "x": [even], "y": [even and float(even * r.mla.per_token)], "name": "break-even", "showlegend": False,
            "marker": {"color": common.PURPLE, "size": 12, "symbol": "diamond", "line": edge},
            "text": [f"break-even: {r.break_even or 0:,} tokens"],
        },
    ]  # fmt: skip


def _bars(r: Comparison) -> list[dict]:
    """A row a scheme, from the top, stacked from what it keeps and from what its pages leave unused."""
    return [
        {
            "type": "bar", "orientation": "h", "xaxis": "x2", "yaxis": "y2", "width": 0.38, "showlegend": False,
            "x": [float(size)], "y": [row], "name": f"{s.name}: {NAMES.get(kind, kind)}",
            "marker": {
                "color": PART_COLORS.get(kind, style["color"]), "line": {"width": 0},
                "pattern": {"shape": PATTERNS.get(kind, ""), "solidity": 0.25},
            },
            "text": [f"{s.name}, {NAMES.get(kind, kind)}: {format_bytes(size)}"], "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }
        for row, s, style in _rows(r)
        for kind, size in _parts(s)
    ]  # fmt: skip


def _rows(r: Comparison) -> list[tuple[int, Scheme, dict]]:
    """Height, scheme and style of each bar."""
    return [(len(r.schemes) - 1 - i, s, style) for i, (s, style) in enumerate(zip(r.schemes, STYLES, strict=True))]


def _parts(s: Scheme) -> list[tuple[str, int]]:
    """Kind and bytes: the same kinds for a scheme at every setting."""
    return [*s.parts.items(), ("unused", s.unused)]


PLAIN = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "align": "left", "font": {"size": 12}}


def _headings(r: Comparison) -> list[dict]:
    size = {"xref": "paper", "yref": "paper", "y": 1.015, "font": {"size": 13}}
    right = f"At {r.tokens:,} tokens; longest context that fits (cache only)"
    return [
        PLAIN | size | {"x": LEFT[0], "text": "Cache against context length"},
        PLAIN | size | {"x": RIGHT[0], "text": right},
    ]


def _bar_captions(r: Comparison, top: float) -> list[dict]:
    """A line of text above each bar, an arrow head on each bar that is cut, the hybrid's parts below its bar."""
    axes = PLAIN | {"xref": "x2", "yref": "y2"}
    captions = []
    for row, s, _ in _rows(r):
        text = f"<b>{s.name}</b>: {format_bytes(s.total)}; {s.reach_text}"
        captions.append(axes | {"x": 0, "y": row + 0.2, "text": text})
        cut = {"x": top, "y": row, "xanchor": "right", "yanchor": "middle", "font": {"size": 12, "color": "black"}}
        captions.append(axes | cut | {"text": "bar cut ▶", "visible": s.total > top})
    below = {"x": 0, "y": -0.24, "yanchor": "top", "text": "  ".join(_legend(r.hybrid)), "font": {"size": 11}}
    return [*captions, axes | below]


def _legend(hybrid: Scheme) -> list[str]:
    """The hybrid's parts with their bytes, under short names: the line is full."""
    colors, names = {"latent": STYLES[-1]["color"], **PART_COLORS}, {"latent": "latents"}
    return [
        f'<span style="color:{colors[kind]}">■</span> {names.get(kind, kind)} {format_bytes(size)}'
        for kind, size in _parts(hybrid)
    ]


def _context_label(r: Comparison) -> dict:
    """On the line of the chosen context, on its inner side: the curves never reach the top there."""
    inner = "right" if r.tokens > 2**16 else "left"
    return {
        "xref": "x", "yref": "y domain", "x": math.log10(r.tokens), "y": 1, "text": f" {r.tokens:,} tokens ",
        "showarrow": False, "xanchor": inner, "yanchor": "top",
    }  # fmt: skip


def _break_even_label(r: Comparison) -> dict:
    """Below and right of the diamond, where no curve runs, and past the line of the chosen context if that is near."""
    first, last = r.curve_tokens[0], r.curve_tokens[-1]
    visible = r.break_even is not None and first <= r.break_even <= last
    even = r.break_even if visible else first
    rightwards = even < last / 64  # else the label would leave the panel
    x = even * 1.5 if rightwards else even / 1.5
    if rightwards and even < r.tokens < 40 * even:
        x = max(x, 1.1 * r.tokens)
    y = even * r.mla.per_token
    return {
        "xref": "x", "yref": "y", "x": math.log10(even), "y": math.log10(y), "text": f"break-even {even:,} tokens",
        "axref": "x", "ayref": "y", "ax": math.log10(x), "ay": math.log10(y / 6), "visible": visible,
        "xanchor": "left" if rightwards else "right", "yanchor": "top",
        "showarrow": True, "arrowcolor": common.INK, "arrowwidth": 1, "arrowhead": 0, "standoff": 7,
    }  # fmt: skip
