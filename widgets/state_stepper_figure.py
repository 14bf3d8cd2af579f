"""The picture of state_stepper: four states side by side, and under each its answer to the last question."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from widgets import common

if TYPE_CHECKING:
    from widgets.state_stepper import Result

# Light at zero on light and dark pages alike: the numbers in the cells are dark there.
DIVERGING = [[0, common.BLUE], [0.5, "rgba(128,128,128,0.10)"], [1, common.VERMILION]]
VALUES = ("cat", "dog", "fox", "owl")  # value channels, one each
RULE_NAMES = {"sum": "sum", "delta": "delta rule", "gated delta": "gated delta", "kda": "KDA"}
COLUMNS = ((0.0, 0.22), (0.26, 0.48), (0.52, 0.74), (0.78, 1.0))  # shares of the width, one a rule
STATES, ANSWERS = (0.5, 1.0), (0.0, 0.3)  # shares of the height


def figure(r: Result) -> go.Figure:
    """Above: the states as heat maps with their numbers. Below: amount of each value in the answers.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    reach = max([1.0, *(abs(x) for S in r.states.values() for row in S for x in row)])
    answers = r.answers or {rule: [0.0] * len(VALUES) for rule in r.states}
    low = min([0.0, *(x for a in answers.values() for x in a)])
    high = max([1.0, *(x for a in answers.values() for x in a)])
    traces, axes, notes = [], {}, []
    for i, (rule, S) in enumerate(r.states.items()):
        state, answer = ("" if i == 0 else str(i + 1)), str(i + 5)  # plotly calls its first axis plainly "x"
        traces.append(_state(S, reach, state, RULE_NAMES[rule]))
        traces.append(_answer(answers[rule], r, answer, RULE_NAMES[rule]))
        axes |= _axes(i, state, answer, [1.15 * low, 1.25 * high])
        notes += _notes(i, rule, r)
    axes["yaxis"] |= {"title": {"text": "key channel", "font": {"size": 13}}}
    axes["yaxis5"] |= {"title": {"text": "amount", "font": {"size": 13}}}
    look = common.layout(
        560, axes,
        title={"text": _title(r), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.97, "font": {"size": 17}},
        annotations=notes, margin={"l": 60, "r": 12, "t": 88, "b": 40}, showlegend=False, bargap=0.3,
    )  # fmt: skip
    return go.Figure({"data": traces, "layout": look})


def _title(r: Result) -> str:
    if r.answers is None:
        return f"<b>{len(r.steps)} steps; nothing asked yet</b>"
    if r.wanted is None:
        blank = [RULE_NAMES[rule] for rule, a in r.answers.items() if spell(a) == "nothing"]
        return f"<b>{r.question} was never written; {len(blank)} of 4 rules answer nothing</b>"
    wanted = VALUES.index(r.wanted)
    right = [RULE_NAMES[n] for n, a in r.answers.items() if all(abs(x - (j == wanted)) < 0.1 for j, x in enumerate(a))]
    who = {4: "all four rules are", 0: "no rule is"}.get(
        len(right), f"{', '.join(right)} {'are' if right[1:] else 'is'}"
    )
    return f"<b>Asked for {r.question}: {who} within 0.1 of “{r.wanted}”</b>"


def spell(answer: list[float]) -> str:
    """'1.00 dog + 0.36 cat', the largest amount first; 'nothing' below a hundredth."""
    parts = sorted(zip(answer, VALUES, strict=True), key=lambda p: -abs(p[0]))
    return " + ".join(f"{x:.2f} {name}" for x, name in parts if abs(x) >= 0.01).replace("+ -", "− ") or "nothing"


def _state(S, reach: float, axis: str, name: str) -> dict:
    return {
        "type": "heatmap", "z": S, "zmin": -reach, "zmax": reach, "colorscale": DIVERGING, "showscale": False,
        "x": list(VALUES), "y": [1, 2, 3, 4], "xaxis": f"x{axis}", "yaxis": f"y{axis}",
        "text": [[f"{x:.2f}" if x else "" for x in row] for row in S], "texttemplate": "%{text}",
        "textfont": {"size": 12}, "xgap": 2, "ygap": 2,
        "name": name, "hovertemplate": "key channel %{y}, %{x}: %{z:.3f}<extra>" + name + "</extra>",
    }  # fmt: skip


def _answer(answer: list[float], r: Result, axis: str, name: str) -> dict:
    """Bars; the value that should have come back in green, with a pattern so that colour is not needed."""
    wanted = [v == r.wanted for v in VALUES]
    return {
        "type": "bar", "x": list(VALUES), "y": answer, "xaxis": f"x{axis}", "yaxis": f"y{axis}", "name": name,
        "marker": {
            "color": [common.GREEN if ok else common.ORANGE for ok in wanted],
            "pattern": {"shape": ["" if ok else "/" for ok in wanted]},
        },
        "text": [f"{x:.2f}" if abs(x) >= 0.005 else "" for x in answer], "textposition": "outside", "cliponaxis": False,
        "hovertemplate": "%{x}: %{y:.3f}<extra>" + name + "</extra>",
    }  # fmt: skip


def _axes(i: int, state: str, answer: str, amounts: list[float]) -> dict[str, dict]:
    column, first = list(COLUMNS[i]), i == 0
    return {
        f"xaxis{state}": {"domain": column, "anchor": f"y{state}", "showgrid": False, "ticks": ""},
        f"yaxis{state}": {
            "domain": list(STATES), "anchor": f"x{state}", "autorange": "reversed", "showgrid": False,
            "tickvals": [1, 2, 3, 4], "showticklabels": first, "ticks": "",
        },
        f"xaxis{answer}": {"domain": column, "anchor": f"y{answer}", "showgrid": False, "ticks": ""},
        f"yaxis{answer}": {
            "domain": list(ANSWERS), "anchor": f"x{answer}", "range": amounts, "zeroline": True,
            "zerolinecolor": common.INK, "showticklabels": first,
        },
    }  # fmt: skip


def _notes(i: int, rule: str, r: Result) -> list[dict]:
    place = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    x = COLUMNS[i][0]
    asked = f"answer to {r.question}, asked in step {r.asked_in}" if r.question else "no question yet"
    return [
        place | {"x": x, "y": STATES[1] + 0.01, "text": f"<b>{RULE_NAMES[rule]}</b>", "font": {"size": 14}},
        place | {"x": x, "y": ANSWERS[1] + 0.02, "text": asked, "font": {"size": 12}},
    ]
