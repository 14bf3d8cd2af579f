"""How to read a claim: each headline claim about K3 and its relatives, the conditions it states, and those it leaves open.

stated      found in what was read
open        a reader needs it, and it was not found
no matter   the condition does not apply (a count of bytes needs no hardware)
here        what we have beside it, measured or worked out; often not the same thing, and then it says so

Everything is read from data/headline_claims.json.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import lru_cache

import ipywidgets as w
import plotly.graph_objects as go

from k3lite.claims import CONDITIONS, LABELS, Headline, headline_claims, quoted_sources
from widgets import common
from widgets.common import labelled, spoken

__all__ = ["OPEN", "STATED", "UNNEEDED", "Checked", "compute", "describe", "details", "explorer", "figure"]

OPEN, UNNEEDED, STATED = 0, 1, 2
MARKS = {OPEN: "open", UNNEEDED: "–", STATED: "✓"}
FREE = ("does not apply", "any")  # how a condition says that it is none


@dataclass(frozen=True)
class Checked:
    """Result of compute()."""

    claims: tuple[Headline, ...]
    chosen: int
    table: tuple[tuple[int, ...], ...]  # of each condition, by claim: OPEN, UNNEEDED or STATED

    @property
    def claim(self) -> Headline:
        return self.claims[self.chosen]

    @property
    def open_of(self) -> tuple[int, ...]:
        """How many conditions each claim leaves open."""
        return tuple(column.count(OPEN) for column in zip(*self.table, strict=True))


@lru_cache(maxsize=1)
def _claims() -> tuple[Headline, ...]:
    return tuple(headline_claims())


def compute(*, claim: str = "kv-cache-75") -> Checked:
    """The conditions of all claims, and the chosen one. Raises ValueError for an id that is none."""
    claims = _claims()
    ids = [c.id for c in claims]
    if claim not in ids:
        raise ValueError(f"claim: got {claim!r}, wanted one of {', '.join(ids)}.")
    table = tuple(tuple(_kind(c.conditions[name]) for c in claims) for name in CONDITIONS)
    return Checked(claims, ids.index(claim), table)


def _kind(value: str | None) -> int:
    return OPEN if value is None else UNNEEDED if value.startswith(FREE) else STATED


def describe(c: Checked) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    claim, missing = c.claim, c.claim.missing
    told = f"“{claim.claim}” is {LABELS[claim.label]}; "
    told += f"open: {', '.join(missing)}. " if missing else "no condition is open. "
    if claim.ours is None:
        return told + "Nothing was measured here beside it."
    return told + f"Beside it here: {claim.ours['value']} {claim.ours['unit']}, {claim.ours['what']}."


def details(c: Checked) -> str:
    """The chosen claim with everything that is known of it, as an HTML table."""
    claim = c.claim
    rows = [("claim", f"{claim.claim} ({LABELS[claim.label]})"), ("source", _source(claim.source))]
    rows += [(name, "not found in what was read" if v is None else v) for name, v in claim.conditions.items()]
    rows += [("caution", claim.caution), ("here", "nothing measured")]
    if claim.ours is not None:
        ours = claim.ours
        rows[-1] = ("here", f"{ours['value']} {ours['unit']}: {ours['what']} ({ours['conditions']}; {ours['command']})")
    cells = "".join(
        f'<tr><th scope="row" style="text-align:left;vertical-align:top;padding:2px 14px 2px 0">{html.escape(name)}</th>'
        f'<td style="text-align:left;padding:2px 0">{html.escape(text)}</td></tr>'
        for name, text in rows
    )
    return f'<table style="max-width:{common.WIDTH}px;line-height:1.4;font-size:13px">{cells}</table>'


def _source(source: str) -> str:
    keys = [part.split(" ", 1) for part in source.split("; ")]
    return "; ".join(f"{quoted_sources()[k[0]]}{', ' + k[1] if len(k) > 1 else ''}" for k in keys)


def figure(c: Checked) -> go.Figure:
    """Conditions (rows) of all claims (columns); the chosen one is framed. Always the same traces in the same order."""
    columns, rows = list(range(len(c.claims))), list(range(len(CONDITIONS)))
    scale = [
        [0, common.VERMILION],
        [0.33, common.VERMILION],
        [0.33, common.GRID],
        [0.67, common.GRID],
        [0.67, common.SKY],
    ]
    trace = {
        "type": "heatmap", "name": "conditions", "z": [list(row) for row in c.table], "x": columns, "y": rows,
        "text": [[MARKS[kind] for kind in row] for row in c.table], "texttemplate": "%{text}",
        "textfont": {"size": 11}, "zmin": 0, "zmax": 2, "colorscale": [*scale, [1, common.SKY]], "showscale": False,
        "xgap": 2, "ygap": 2, "customdata": [[claim.claim for claim in c.claims]] * len(rows),
        "hovertemplate": "%{customdata}<br>%{y}: %{text}<extra></extra>",
    }  # fmt: skip
    frame = {
        "type": "rect", "x0": c.chosen - 0.5, "x1": c.chosen + 0.5, "y0": -0.5, "y1": len(rows) - 0.5,
        "line": {"color": common.ORANGE, "width": 4}, "fillcolor": "rgba(0,0,0,0)",
    }  # fmt: skip
    axes = {
        "xaxis": common.axis("", columns, [x.id for x in c.claims], tickangle=-45, showgrid=False)
        | {"title": {"text": "claim", "font": {"size": 13}, "standoff": 4}},
        "yaxis": common.axis("", rows, CONDITIONS, showgrid=False, range=[len(rows) - 0.5, -0.5]),
    }
    missing = c.open_of[c.chosen]
    found = (
        f"{missing} of {len(rows)} conditions {'is' if missing == 1 else 'are'} open" if missing else "nothing is open"
    )
    return go.Figure({
        "data": [trace],
        "layout": common.layout(
            420, axes, shapes=[frame], margin={"l": 82, "r": 12, "t": 56, "b": 130},
            title={"text": f"<b>{html.escape(c.claim.id)}: {found}</b>", "x": 0, "xref": "paper", "font": {"size": 17}},
        ),
    })  # fmt: skip


def explorer(claim: str = "kv-cache-75") -> common.Explorer:
    """A slider over the claims, the table of conditions, and the chosen claim in full."""
    first = compute(claim=claim)
    c = {"claim": labelled(w.SelectionSlider, "Claim", options=[x.id for x in first.claims], value=claim)}

    def react(_: str) -> None:
        now = compute(claim=c["claim"].value)
        common.redraw(drawn, figure(now))
        full.value, sentence.value = details(now), spoken(describe(now))
        message.show("")

    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    full, sentence, message = w.HTML(details(first)), w.HTML(spoken(describe(first))), common.Message()
    message.watch(c, react)
    return common.Explorer("claims", c, drawn, sentence, message, [*c.values(), message, drawn, full, sentence])
