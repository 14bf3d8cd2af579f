"""Needle lab: hide facts in a document, ask one of the trained siblings, and see what it answers and where it looks.

A document is words of a topic with hidden lines (k3lite/tasks/recall.py): facts, rumours, rewritten facts, a string.
The siblings (k3lite/tasks/siblings.py) were trained alike and differ in the memory of their layers.

right        the likeliest of all tokens after "ASK key" is the value that was written last
attention    weights of every head of every MLA layer, when it reads the key of the chosen question
states alone the same questions, with all slots set to zero after the document: what is right then, came from the states
slots alone  the same, with the states of the KDA layers set to zero

Erasing is a test after the fact: no sibling was trained with an empty memory. A right answer proves that the other
kind was enough; a wrong one does not prove that nothing was there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ipywidgets as w
import plotly.graph_objects as go

from k3lite.tasks import recall
from k3lite.tasks.recall import KEYS, SLOT, STRING, VALUES
from k3lite.tasks.recall_exam import ASKED
from widgets import common
from widgets.common import labelled, whole
from widgets.needle_lab_figure import SHARES, Counts, count, figure, spell, table
from widgets.needle_lab_run import FOLDER, LENGTHS, Run, model_of, run_of, siblings

__all__ = ["FOLDER", "LENGTHS", "Counts", "NeedleLab", "compute", "count", "describe", "explorer", "figure", "siblings"]

MARKS = {recall.FACT: "fact", recall.RUMOUR: "rumour", recall.STRING_MARK: "string"}
ANYWHERE = -1  # ipywidgets takes None for no choice at all
STALE = "The settings have changed; the picture is of the document before. Press Ask."
FACTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # where the slider stops


@dataclass(frozen=True)
class Line:
    """A hidden line. place: of its mark, in tokens.   size: tokens.   key: token, None for the string."""

    place: int
    size: int
    kind: str  # of MARKS
    key: int | None


@dataclass(frozen=True)
class Needle:
    """One question and what came back; all but depth and place are token ids."""

    key: int
    wanted: int
    got: int
    decoy: int | None  # the other value that stands beside the key, old or rumoured
    alone: dict[str, int]  # answers by what was left: "states", "slots"; empty where there is one kind of memory only
    depth: float  # percent of the document
    place: int  # of the line that counts, in tokens

    @property
    def right(self) -> bool:
        return self.got == self.wanted


@dataclass(frozen=True)
class NeedleLab:
    """Result of compute(): one document, asked once."""

    sibling: str
    kinds: tuple[str, ...]  # of its layers
    seed: int
    length: int
    hidden: tuple[int, int, int, bool]  # facts, rumours, rewritten, string: what the heat map belongs to
    lines: tuple[Line, ...]
    needles: tuple[Needle, ...]
    topic: tuple[int, int]  # wanted, got
    string: tuple[tuple[int, int], ...]  # wanted and got of each symbol; empty where there is none
    topic_alone: dict[str, int]  # as Needle.alone
    string_alone: dict[str, tuple[int, ...]]
    question: int  # counted from 1
    heads: tuple[tuple[int, int], ...]  # layer and head, from 1, of all MLA layers; empty for KDA alone
    weights: tuple[tuple[float, ...], ...]  # of each head, over all tokens up to the question's key

    @property
    def asked(self) -> Needle:
        return self.needles[self.question - 1]

    @property
    def right(self) -> int:
        return sum(n.right for n in self.needles)

    def right_alone(self, what: str) -> int:
        """Right answers of the "states" or the "slots" alone."""
        return sum(n.alone[what] == n.wanted for n in self.needles)

    def on(self, head: int, line: Line) -> float:
        """Share of a head's attention (number in `heads`, from 0) on a line."""
        return sum(self.weights[head][line.place : line.place + line.size])

    def shares(self, head: int) -> tuple[float, ...]:
        """Of a head's attention, in the order of SHARES; they add up to 1."""
        mine = [line for line in self.lines if line.key == self.asked.key]
        asked = sum(self.on(head, line) for line in mine if line.place == self.asked.place)
        other = sum(self.on(head, line) for line in mine if line.place != self.asked.place)
        rest = sum(self.on(head, line) for line in self.lines if line not in mine)
        behind = sum(self.weights[head][self.length :])
        return asked, other, rest, max(0.0, 1 - asked - other - rest - behind), behind

    @cached_property  # asked for once a line
    def best_head(self) -> int | None:
        """The head with the most attention on the line asked for; None where there is no MLA layer."""
        return max(range(len(self.heads)), key=lambda h: self.shares(h)[0], default=None)


# ---- the three functions of an explorer


def compute(
    *,
    sibling: str | None = None,
    folder: Path = FOLDER,
    length: int = 1024,
    facts: int = 8,
    depth: float | None = None,
    rumours: int = 0,
    rewritten: int = 0,
    string: bool = False,
    question: int = 1,
    seed: int = 0,
) -> NeedleLab:
    """Ask one sibling about one document, which `seed` and the options fix: every sibling can be asked the same.

    sibling: a name of siblings(folder), the first by default.   length: one of LENGTHS, in tokens.
    facts: how many are hidden; of these 16 are asked at most.   depth: percent at which the first stands; None: anywhere.
    rumours, rewritten, string: what else is hidden, as in make_documents.   question: counted from 1.
    Raises ValueError that names the value, what came and what was wanted; CheckpointError for a damaged sibling.
    """
    known = siblings(folder)
    sibling = next(iter(known)) if sibling is None else sibling
    if sibling not in known:
        raise ValueError(f"sibling: got {sibling!r}, wanted one of {', '.join(known)}.")
    if length not in LENGTHS:
        raise ValueError(f"length: got {length!r}, wanted one of {', '.join(map(str, LENGTHS))}.")
    whole("facts", facts, 1, KEYS)
    whole("rumours", rumours, 0, KEYS)
    whole("rewritten keys", rewritten, 0, KEYS)
    whole("question", question, 1, min(facts, ASKED))
    whole("document", seed, 0, 2**31)
    run = run_of(known[sibling], length, facts, depth, (rumours, rewritten, string), seed)
    d, got = run.documents, run.answers
    at = 2 * question  # of the question's key, behind the document
    weights = [row[at, : length + at + 1].tolist() for w in run.weights.values() for row in w]
    return NeedleLab(
        sibling=sibling,
        kinds=model_of(known[sibling]).config.layer_kinds,
        seed=seed,
        length=length,
        hidden=(facts, rumours, rewritten, string),
        lines=_lines(d.ids[0, :length].tolist()),
        needles=tuple(_needles(run, length)),
        topic=(int(d.topic), int(got.topic)),
        string=tuple(zip(d.string[0].tolist(), got.string[0].tolist(), strict=True)) if string else (),
        topic_alone={what: int(a.topic) for what, a in run.alone.items()},
        string_alone={what: tuple(a.string[0].tolist()) for what, a in run.alone.items() if string},
        question=question,
        heads=tuple((n, h) for n, w in run.weights.items() for h in range(1, len(w) + 1)),
        weights=tuple(tuple(round(x, 6) for x in row) for row in weights),
    )


def _lines(ids: list[int]) -> tuple[Line, ...]:
    """The hidden lines of a document: their marks stand nowhere else."""
    marks = [(i, MARKS[token]) for i, token in enumerate(ids) if token in MARKS]
    return tuple(
        Line(i, 1 + STRING, kind, None) if kind == "string" else Line(i, 3, kind, ids[i + 1]) for i, kind in marks
    )


def _needles(run: Run, length: int) -> list[Needle]:
    d, last = run.documents, max(1, length // SLOT - 1)
    columns = (
        d.ids[:, length + 2 : length + 2 + 2 * d.values.shape[1] : 2],
        d.values,
        run.answers.values,
        d.decoys,
        d.depth,
    )
    rows = zip(*(column[0].tolist() for column in columns), strict=True)
    return [
        Needle(
            key=key,
            wanted=wanted,
            got=got,
            decoy=None if decoy == recall.IGNORE else decoy,
            alone={what: int(a.values[0, i]) for what, a in run.alone.items()},
            depth=depth,
            place=SLOT * round(depth / 100 * last),
        )
        for i, (key, wanted, got, decoy, depth) in enumerate(rows)
    ]


def describe(r: NeedleLab, counts: Counts | None = None) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    counts = count(r) if counts is None else counts
    topic = "right" if r.topic[0] == r.topic[1] else f"wrong ({spell(r.topic[1])}, not {spell(r.topic[0])})"
    string = f", {sum(a == b for a, b in r.string)} of {len(r.string)} symbols of the string right" if r.string else ""
    said = [
        f"{r.sibling}: {r.right} of {len(r.needles)} values right in {r.length:,} tokens, the topic {topic}{string}."
    ]
    said.append(_erasing(r))
    n = r.asked
    old = "" if n.got != n.decoy else ", the other value that stands beside this key"
    answer = ", which is right" if n.right else f"; wanted was {spell(n.wanted)}"
    said.append(f"Asked for {spell(n.key)}, at {n.depth:.0f} % of the document, it says {spell(n.got)}{old}{answer}.")
    if r.heads:
        (layer, head), share = r.heads[r.best_head], r.shares(r.best_head)
        most = max(range(len(SHARES)), key=share.__getitem__)
        said.append(
            f"Of all heads, head {head} of layer {layer} looks at the line asked for most: {_percent(share[0])} of its "
            f"attention{'' if most == 0 else f', and {_percent(share[most])} on {SHARES[most]}'}."
        )
    right, asked = map(sum, zip(*counts.values(), strict=True))
    said.append(f"On the heat map so far: {right} of {asked} values right; by guessing it would be 1 in {VALUES}.")
    return " ".join(said)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "less than half a percent"


def _erasing(r: NeedleLab) -> str:
    if r.needles[0].alone:
        return (
            f"With its slots erased after reading, its states alone give {r.right_alone('states')} right; with its "
            f"states erased, its slots alone give {r.right_alone('slots')}."
        )
    only = "states, so whatever it answers came from them" if r.kinds[0] == "kda" else "slots, and no state"
    return f"It has nothing but {only}."


def explorer(folder: Path = FOLDER, sibling: str | None = None, length: int = 1024, facts: int = 8) -> common.Explorer:
    """Fresh controls around the picture: hide facts, ask a sibling, see its answers, where it looks, and a heat map.

    folder, sibling, length, facts: as in compute(). "Ask" reads the document to the chosen sibling; "New document" draws
    another one first. A document counts once for each sibling on the heat map, which has nothing in common with the maps
    of other siblings and of other things hidden.
    """
    folder = Path(folder)
    result = compute(folder=folder, sibling=sibling, length=length, facts=facts)
    c = _controls(list(siblings(folder)), result)
    settings = [name for name in c if name not in ("ask", "new", "question")]
    busy = False  # while the menu of questions is filled, that is no choice of the reader's

    def options() -> dict:
        values = {name: c[name].value for name in settings}
        return values | {"depth": None if values["depth"] == ANYWHERE else values["depth"]}

    last = {"seed": 0, **options()}
    counts, asked = {_map_of(result): count(result)}, [last]

    def show(note: str = "") -> None:
        mine = counts[_map_of(result)]
        common.redraw(drawn, figure(result, mine))
        rows.value, said.value = table(result), common.spoken(describe(result, mine))
        message.show(note)

    def ask(seed: int) -> None:
        nonlocal result, last, busy
        message.show(f"Reading {c['length'].value:,} tokens ...")
        this = {"seed": seed, **options()}
        result, last = compute(folder=folder, **this), this
        again = this in asked
        if not again:
            asked.append(this)
            counts[_map_of(result)] = count(result, counts.get(_map_of(result)))
        busy = True
        c["question"].options = _questions(result)
        c["question"].value, busy = 1, False
        show("The same document again: it counts once on the heat map." if again else "")

    def choose() -> None:
        nonlocal result
        result = compute(folder=folder, question=c["question"].value, **last)
        show("" if last == {"seed": last["seed"], **options()} else STALE)

    drawn = go.FigureWidget(figure(result))  # traces in the constructor: those added later are lost on reload
    rows, said, message = w.HTML(table(result)), w.HTML(common.spoken(describe(result))), common.Message()
    c["ask"].on_click(lambda _: message.guard(lambda: ask(last["seed"])))
    c["new"].on_click(lambda _: message.guard(lambda: ask(last["seed"] + 1)))
    c["question"].observe(lambda _: busy or message.guard(choose), "value")
    for name in settings:
        c[name].observe(lambda _: message.show(STALE), "value")
    columns = [
        [c[n] for n in ("sibling", "length", "facts", "depth")],
        [c[n] for n in ("rumours", "rewritten", "string", "question")],
    ]
    buttons = w.HBox([c["ask"], c["new"]], layout={"margin": "4px 0 4px 200px"})
    parts = [common.side_by_side(columns), buttons, message, drawn, said, rows]
    box = common.Explorer("needle lab", c, drawn, said, message, parts)
    box.table = rows
    return box


def _map_of(r: NeedleLab) -> tuple:
    return r.sibling, r.hidden


def _questions(r: NeedleLab) -> list[tuple[str, int]]:
    return [(f"{i}: {spell(n.key)}, at {n.depth:.0f} %", i) for i, n in enumerate(r.needles, 1)]


def _controls(names: list[str], r: NeedleLab) -> dict[str, w.Widget]:
    places = [("anywhere", ANYWHERE), *((f"{p} %", p) for p in range(0, 101, 10))]
    facts = sorted({*FACTS, r.hidden[0]})
    return {
        "sibling": labelled(w.Dropdown, "Sibling (memory, seed)", options=names, value=r.sibling),
        "length": labelled(
            w.SelectionSlider, "Length (tokens)", options=[(f"{n:,}", n) for n in LENGTHS], value=r.length
        ),
        "facts": labelled(w.SelectionSlider, "Needles: facts (number)", options=facts, value=r.hidden[0]),
        "depth": labelled(w.SelectionSlider, "First needle's depth (%)", options=places, value=ANYWHERE),
        "rumours": labelled(w.IntSlider, "Distractors: rumours (number)", min=0, max=ASKED, value=0),
        "rewritten": labelled(w.IntSlider, "Rewritten keys (number)", min=0, max=ASKED, value=0),
        "string": labelled(
            w.Dropdown, f"String, {STRING} symbols (yes/no)", options=[("no", False), ("yes", True)], value=False
        ),
        "question": labelled(w.Dropdown, "Where it looks for (question)", options=_questions(r), value=1),
        "ask": w.Button(description="Ask", tooltip="Read this document to the chosen sibling and ask"),
        "new": w.Button(description="New document", tooltip="Draw another document with these settings, and ask"),
    }
