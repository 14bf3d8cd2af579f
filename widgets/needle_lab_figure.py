"""The picture of needle_lab: heat map of recall, where the attention goes, the document's lines; and the table of answers."""

from __future__ import annotations

import html
from operator import eq
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from k3lite.tasks import recall
from k3lite.tasks.recall_exam import DEPTHS
from widgets import common
from widgets.needle_lab_run import LENGTHS

if TYPE_CHECKING:
    from widgets.needle_lab import NeedleLab

SHARES = ("line asked for", "its other line", "other lines", "words", "questions")  # of the attention
MAP, HEADS = (0.0, 0.42), (0.58, 1.0)  # shares of the width
UPPER, LOWER = (0.56, 1.0), (0.0, 0.3)  # of the height
COLOURS = (common.VERMILION, common.PURPLE, common.ORANGE, common.SKY, common.INK)  # in the order of SHARES
SCALE = [[0, "#DDDDDD"], [1, common.BLUE]]  # opaque: the counts must be legible on it, on a light and a dark page
EMPTY = "·"  # an empty text would be taken out of the picture, and not come back when it changes

Counts = dict[tuple[int, int], tuple[int, int]]  # (length, fifth of the depth): right, asked


def count(r: NeedleLab, counts: Counts | None = None) -> Counts:
    """`counts` with the answers of r added to them."""
    counts = dict(counts or {})
    for n in r.needles:
        cell = r.length, min(DEPTHS - 1, int(n.depth * DEPTHS / 100))
        right, asked = counts.get(cell, (0, 0))
        counts[cell] = right + n.right, asked + 1
    return counts


def spell(token: int) -> str:
    """What a token is: 'value 3', 'key 200', 'word 5 of topic 2', all counted from 1."""
    kinds = {
        "word": recall.WORD,
        "key": recall.KEY,
        "value": recall.VALUE,
        "symbol": recall.SYMBOL,
        "topic": recall.TOPIC,
    }
    kind = max((k for k in kinds if kinds[k] <= token), key=kinds.__getitem__)
    number = token - kinds[kind]
    if kind == "word":
        return f"word {number % recall.WORDS + 1} of topic {number // recall.WORDS + 1}"
    if token >= recall.FACT:
        return ("FACT", "RUMOUR", "STRING", "TOPIC?", "ASK", "COPY", "END")[token - recall.FACT]
    return f"{kind} {number + 1}"


def figure(r: NeedleLab, counts: Counts | None = None) -> go.Figure:
    """Left: recall by length and depth of all that `counts` holds, this document's by default. Right: where each head
    looks. Below: every hidden line at its place.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    counts = count(r) if counts is None else counts
    fifths = [f"{100 * i // DEPTHS} – {100 * (i + 1) // DEPTHS} %" for i in range(DEPTHS)]
    names = [f"layer {n}, head {h}" for n, h in r.heads]
    top = max([1, *(100 * r.on(r.best_head, line) for line in r.lines if r.heads)])
    bare = {"showgrid": False, "ticks": "", "showline": False}
    axes = {
        "xaxis": common.axis("", range(len(LENGTHS)), [f"{n:,}" for n in LENGTHS], domain=MAP, anchor="y", **bare,
                             range=[-0.5, len(LENGTHS) - 0.5]) | {"title": _small("length (tokens)")},
        "yaxis": common.axis("", range(DEPTHS), fifths, domain=UPPER, anchor="x", **bare, range=[DEPTHS - 0.5, -0.5])
        | {"title": _small("depth of the fact")},
        "xaxis2": {"title": _small("attention (%)"), "domain": HEADS, "anchor": "y2", "range": [0, 100]},
        "yaxis2": common.axis("", range(len(names)), names, domain=UPPER, anchor="x2", **bare,
                              range=[max(1, len(names)) - 0.4, -0.6]),
        "xaxis3": {"title": _small("place in the document (tokens)"), "domain": [0, 1], "anchor": "y3", "showgrid": False,
                   "tickformat": ",", "range": [-0.01 * r.length, 1.01 * r.length]},
        "yaxis3": {"title": _small("attention on the line (%)" if r.heads else " "), "domain": LOWER, "anchor": "x3",
                   "range": [-0.12 * top, 1.2 * top], "showticklabels": bool(r.heads)},
    }  # fmt: skip
    look = common.layout(
        620, axes,
        title={"text": _title(r), "x": 0, "xref": "paper", "xanchor": "left", "y": 0.975, "font": {"size": 16}},
        margin={"l": 124, "r": 12, "t": 92, "b": 48}, barmode="stack", bargap=0.35, annotations=_notes(r, counts),
        legend={"orientation": "h", "traceorder": "normal", "x": 1, "y": 1.0, "xanchor": "right", "yanchor": "bottom",
                "font": {"size": 12}},
        legend2={"orientation": "h", "x": 0, "y": LOWER[1], "yanchor": "bottom", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": [*_map(counts, LENGTHS), *_shares(r), *_strip(r)], "layout": look})


def _title(r: NeedleLab) -> str:
    parts = [
        f"{r.right} of {len(r.needles)} values right",
        "topic right" if r.topic[0] == r.topic[1] else "topic wrong",
    ]
    if r.string:
        parts.append(f"{sum(a == b for a, b in r.string)} of {len(r.string)} symbols")
    return f"<b>{html.escape(r.sibling)} after {r.length:,} tokens: {', '.join(parts)}</b>"


def _small(text: str) -> dict:
    """Title of an axis, close to it."""
    return {"text": text, "font": {"size": 13}, "standoff": 6}


def _notes(r: NeedleLab, counts: Counts) -> list[dict]:
    """Headings of the three panels, always three, and what stands in place of weights that do not exist."""
    facts, rumours, rewritten, string = r.hidden
    kind = f"{facts} fact{'s' * (facts > 1)}" + f", {rewritten} rewritten" * bool(rewritten)
    kind += f", {rumours} rumour{'s' * (rumours > 1)}" * bool(rumours) + ", a string" * string
    asked = sum(n for _, n in counts.values())
    best = "" if not r.heads else f", layer {r.heads[r.best_head][0]}, head {r.heads[r.best_head][1]}"
    texts = [
        (MAP[0], UPPER[1] + 0.085, f"right / asked, {asked} so far: {kind}"),
        (HEADS[0], UPPER[1] + 0.085, f"where it looks, asked for {spell(r.asked.key)}"),
        (0, LOWER[1] + 0.065, f"the hidden lines{best}"),
        (0.79, 0.78, "no slots: a state has no map" if not r.heads else " "),
    ]
    flat = {"xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 13}}
    return [
        flat | {"x": x, "y": y, "text": text, "xanchor": "center" if i == 3 else "left", "yanchor": "bottom"}
        for i, (x, y, text) in enumerate(texts)
    ]  # fmt: skip


def _map(counts: Counts, lengths: tuple[int, ...]) -> list[dict]:
    """A cell for each length and fifth of the depth; nothing where nothing was asked."""
    cells = [[counts.get((n, i)) for n in lengths] for i in range(DEPTHS)]
    percent = [[None if c is None else round(100 * c[0] / c[1]) for c in row] for row in cells]
    flat = [(x, y, cells[y][x]) for y in range(DEPTHS) for x in range(len(lengths))]
    ink = [common.INK if c is None else "#FFFFFF" if c[0] / c[1] > 0.8 else "#111111" for *_, c in flat]
    return [
        {"type": "heatmap", "name": "recall", "z": percent, "zmin": 0, "zmax": 100, "colorscale": SCALE, "xgap": 2,
         "ygap": 2, "showscale": False, "hoverinfo": "skip"},
        {"type": "scatter", "mode": "text", "name": "counts", "showlegend": False, "x": [x for x, *_ in flat],
         "y": [y for _, y, _ in flat], "text": [EMPTY if c is None else f"{c[0]}/{c[1]}" for *_, c in flat],
         "textfont": {"size": 13, "color": ink}, "hoverinfo": "skip"},
    ]  # fmt: skip


def _shares(r: NeedleLab) -> list[dict]:
    """One bar a head, of five parts."""
    rows = [[round(100 * x, 1) for x in r.shares(h)] for h in range(len(r.heads))]
    return [
        {"type": "bar", "orientation": "h", "name": name, "xaxis": "x2", "yaxis": "y2", "y": list(range(len(rows))),
         "x": [row[i] for row in rows], "marker": {"color": colour}, "hovertemplate": f"{name}: %{{x}} %<extra></extra>"}
        for i, (name, colour) in enumerate(zip(SHARES, COLOURS, strict=True))
    ]  # fmt: skip


def _strip(r: NeedleLab) -> list[dict]:
    """The hidden lines at their places, as high as the attention on them; apart from each other by shape and colour."""
    answered = {n.place: n for n in r.needles}
    groups = [
        ("answer right", [x for x in r.lines if x.place in answered and answered[x.place].right], common.GREEN, "circle"),
        ("answer wrong", [x for x in r.lines if x.place in answered and not answered[x.place].right], common.VERMILION, "x"),
        ("not asked", [x for x in r.lines if x.place not in answered], common.INK, "line-ns-open"),
        ("question chosen", [x for x in r.lines if x.place == r.asked.place], common.BLUE, "circle-open"),
    ]  # fmt: skip

    def attention(line) -> float:
        return round(100 * r.on(r.best_head, line), 2) if r.heads else 0.0

    def name(line) -> str:
        return line.kind if line.key is None else f"{line.kind} about {spell(line.key)}"

    return [
        {"type": "scatter", "mode": "markers", "name": title, "xaxis": "x3", "yaxis": "y3", "legend": "legend2",
         "x": [x.place for x in lines], "y": [attention(x) for x in lines], "customdata": [name(x) for x in lines],
         "marker": {"symbol": symbol, "color": colour, "size": 18 if "chosen" in title else 9, "line": {"width": 2, "color": colour}},
         "hovertemplate": "%{customdata}, at %{x}: %{y} %<extra></extra>"}
        for title, lines, colour, symbol in groups
    ]  # fmt: skip


def table(r: NeedleLab) -> str:
    """HTML: one row a question, with what was wanted and what came; headings are marked for screen readers."""
    alone = list(r.needles[0].alone)
    heads = ["question", "depth", "wanted", "answer", "verdict", *(f"{what} alone" for what in alone)]

    def left(wanted: int, answers: dict[str, int]) -> list[str]:
        return [f"{spell(got)}, {_verdict(wanted, got)}" for got in answers.values()]

    topic, got = r.topic
    rows = [["the topic", "", spell(topic), spell(got), _verdict(topic, got), *left(topic, r.topic_alone)]]
    for n in r.needles:
        verdict = "the other value" if n.got == n.decoy else _verdict(n.wanted, n.got)
        rows.append(
            [spell(n.key), f"{n.depth:.0f} %", spell(n.wanted), spell(n.got), verdict, *left(n.wanted, n.alone)]
        )
    if r.string:
        wanted, got = zip(*r.string, strict=True)
        same = [f"{sum(map(eq, wanted, x))} of {len(wanted)} right" for x in (got, *r.string_alone.values())]
        rows.append(["the string", "", _symbols(wanted), _symbols(got), *same])

    def line(tag: str, cells: list[str]) -> str:
        first, *rest = (html.escape(cell) for cell in cells)
        scope = "col" if tag == "th" else "row"
        return f'<tr><th scope="{scope}">{first}</th>' + "".join(
            f'<{tag}{" scope=col" if tag == "th" else ""}>{cell}</{tag}>' for cell in rest
        ) + "</tr>"  # fmt: skip

    caption = f"Answers of {html.escape(r.sibling)}: the likeliest of all tokens."
    notes = ["Alone: with the other kind of memory set to zero after reading."] * bool(alone)
    notes += ["Each symbol of the string is asked after the right one before it."] * bool(r.string)
    style = "<style>.k3lite-needles td, .k3lite-needles th {padding: 1px 10px; text-align: left}</style>"
    return (
        f'{style}<table class="k3lite-needles" style="font-size:13px;line-height:1.4;margin:4px 0">'
        f'<caption style="text-align:left;padding:2px 10px"><b>{caption}</b> {" ".join(notes)}</caption>'
        f"<thead>{line('th', heads)}</thead><tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"
    )


def _symbols(tokens: tuple[int, ...]) -> str:
    """'3 1 7 ...', with a dash where a token is no symbol."""
    first, last = recall.SYMBOL, recall.SYMBOL + recall.SYMBOLS - 1
    return " ".join(str(t - first + 1) if first <= t <= last else "–" for t in tokens)


def _verdict(wanted: int, got: int) -> str:
    return "right" if wanted == got else "wrong"
