"""The picture of a training: loss, recall, loads and sizes by step, stored and live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from widgets import common

if TYPE_CHECKING:
    from widgets.training import Curve, Curves

COLUMNS, ROWS = ((0.0, 0.44), (0.56, 1.0)), ((0.62, 1.0), (0.0, 0.38))
PANELS = ("Loss (nats per asked byte)", "Recall of one needle (share)", "Busiest expert (× mean)", "Size of {}")
UNITS = {"hidden": "root mean square"}  # of a size; the others are norms
KEYS = (("loss", "validation"), ("recall",), ("load",), ("size",))


def figure(c: Curves) -> go.Figure:
    """Four panels over the step. Always the same traces in the same order, so that an explorer can redraw in place."""
    axes, notes, traces = {}, [], []
    for i, (title, keys) in enumerate(zip(PANELS, KEYS, strict=True)):
        end = "" if i == 0 else str(i + 1)
        across, up = COLUMNS[i % 2], ROWS[i // 2]
        axes[f"xaxis{end}"] = {
            "domain": list(across),
            "anchor": f"y{end}",
            "title": {"text": "step", "font": {"size": 13}, "standoff": 6},
            "rangemode": "tozero",
        }
        axes[f"yaxis{end}"] = {"domain": list(up), "anchor": f"x{end}", "rangemode": "tozero"}
        if keys == ("recall",):
            axes[f"yaxis{end}"] |= {"range": [-0.03, 1.03]}
        notes.append(_heading(title.format(f"{c.size_of} ({UNITS.get(c.size_of, 'norm')})"), across[0], up[1]))
        for key in keys:
            traces += [_line(c.stored, "stored", key, end, i == 0), _line(c.live, "live", key, end, i == 0)]
    look = common.layout(
        590, axes, annotations=notes, margin={"l": 50, "r": 12, "t": 90, "b": 50},
        title={"text": _title(c), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.97, "yanchor": "top", "font": {"size": 17}},
        legend={"orientation": "h", "x": 0, "y": 1.05, "yanchor": "bottom", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": traces, "layout": look})


def _title(c: Curves) -> str:
    """Where the live run stands; the stored one before there is any."""
    run, name = (c.live, "Live") if c.live.steps else (c.stored, "Stored")
    steps = f"{run.steps[-1]:,} step{'s' * (run.steps[-1] != 1)}"
    return f"<b>{name} run, {steps}: {run.validation[-1]:.2f} nats per held-out byte, recall {run.recall[-1]:.0%}</b>"


def _heading(text: str, x: float, y: float) -> dict:
    place = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    return place | {"x": x, "y": y + 0.01, "text": text, "font": {"size": 13}}


def _line(curve: Curve, run: str, key: str, axis: str, named: bool) -> dict:
    label = {"loss": "training", "validation": "held-out"}.get(key, "")
    return {
        "type": "scatter", "mode": "lines+markers", "name": f"{run}, {label}" if label else run, "showlegend": named,
        "x": list(curve.steps), "y": list(getattr(curve, key)), "xaxis": f"x{axis}", "yaxis": f"y{axis}",
        "line": {
            "color": common.BLUE if run == "stored" else common.ORANGE, "dash": "dot" if key == "loss" else "solid", "width": 2,
        },
        "marker": {"size": 4, "symbol": "circle" if run == "stored" else "diamond"},
        "hovertemplate": f"step %{{x}}: %{{y:.3f}} ({run}{', ' + label if label else ''})<extra></extra>",
    }  # fmt: skip
