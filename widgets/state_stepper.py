"""One small state, step by step: write, decay or read, and see what each of four rules holds and answers.

The state is 4 x 4. Keys are unit vectors, values have one channel each, so an answer can be read off as amounts of
the four values. Steps are kept as a list and replayed from an empty state, with k3lite.tasks.capacity doing the
writing. A model's token does three of them in K3's order: decay, write, read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ipywidgets as w
import plotly.graph_objects as go
import torch

from k3lite.tasks.capacity import RULES, step
from widgets import common
from widgets.common import labelled
from widgets.state_stepper_figure import RULE_NAMES, VALUES, figure, spell

__all__ = [
    "KEYS",
    "MAX_STEPS",
    "VALUES",
    "Decay",
    "Read",
    "Result",
    "Write",
    "compute",
    "describe",
    "explorer",
    "figure",
]

KEYS = {"A": (1.0, 0.0, 0.0, 0.0), "B": (0.0, 1.0, 0.0, 0.0), "C": (0.6, 0.8, 0.0, 0.0), "D": (0.0, 0.0, 1.0, 0.0)}
MAX_STEPS = 60


@dataclass(frozen=True)
class Write:
    """Store a value under a key with strength beta (0..2)."""

    key: str
    value: str
    beta: float = 1.0

    def __str__(self) -> str:
        return f"write {self.key} → {self.value}" + (f", β = {self.beta:.2f}" if self.beta != 1 else "")


@dataclass(frozen=True)
class Decay:
    """Shares that are left: gated for all channels of gated delta; slow for KDA's channels 1-2, fast for 3-4."""

    gated: float = 0.8
    slow: float = 0.95
    fast: float = 0.5

    def __str__(self) -> str:
        return f"decay: gated keeps {self.gated:.2f}, KDA {self.slow:.2f} and {self.fast:.2f}"


@dataclass(frozen=True)
class Read:
    """Ask for a key."""

    key: str

    def __str__(self) -> str:
        return f"read {self.key}"


Step = Write | Decay | Read


@dataclass(frozen=True)
class Result:
    """Result of compute(): what the four rules hold after the last step, and what they answer to the last question."""

    steps: tuple[Step, ...]
    states: dict[str, list[list[float]]]  # rule -> 4 x 4, key channels down, value channels across
    question: str | None  # the key last read
    asked_in: int | None  # the number of that step, from 1
    answers: dict[str, list[float]] | None  # rule -> amount of each value; None while nothing has been read
    wanted: str | None  # the value last written under that very key before it was read


def compute(steps: list[Step] | tuple[Step, ...] = ()) -> Result:
    """Replay the steps from an empty state. Raises ValueError that names what is not a step, key, value or share."""
    if len(steps) > MAX_STEPS:
        raise ValueError(f"steps: got {len(steps)}, wanted at most {MAX_STEPS}; undo some or start anew.")
    for s in steps:
        _check(s)
    states = {rule: torch.zeros(4, len(VALUES)) for rule in RULES}
    written: dict[str, str] = {}
    question = asked_in = answers = wanted = None
    for i, s in enumerate(steps):
        if isinstance(s, Write):
            value = torch.eye(len(VALUES))[VALUES.index(s.value)]
            states = {rule: step(S, _key(s.key), value, rule, s.beta) for rule, S in states.items()}
            written[s.key] = s.value
        elif isinstance(s, Decay):
            rates = {"gated delta": _log(s.gated), "kda": torch.tensor([_log(s.slow)] * 2 + [_log(s.fast)] * 2)}
            # beta = 0 writes nothing, so this is the decay alone. The sum and the delta rule have none.
            states |= {r: step(states[r], _key("A"), torch.zeros(4), r, 0.0, g) for r, g in rates.items()}
        else:
            question, asked_in, wanted = s.key, i + 1, written.get(s.key)
            answers = {rule: _rounded(_key(s.key) @ S) for rule, S in states.items()}
    held = {rule: _rounded(S) for rule, S in states.items()}
    return Result(tuple(steps), held, question, asked_in, answers, wanted)


def _check(s: Step) -> None:
    if not isinstance(s, (Write, Decay, Read)):
        raise ValueError(f"step: got {s!r}, wanted a Write, a Decay or a Read.")
    if isinstance(s, Decay):
        for name, share in vars(s).items():
            if not 0 <= share <= 1:
                raise ValueError(f"decay, {name}: got {share!r}, wanted a share from 0 to 1.")
        return
    if s.key not in KEYS:
        raise ValueError(f"key: got {s.key!r}, wanted one of {', '.join(KEYS)}.")
    if isinstance(s, Write):
        if s.value not in VALUES:
            raise ValueError(f"value: got {s.value!r}, wanted one of {', '.join(VALUES)}.")
        if not 0 <= s.beta <= 2:
            raise ValueError(f"beta: got {s.beta!r}, wanted a number from 0 to 2.")


def _key(name: str) -> torch.Tensor:
    return torch.tensor(KEYS[name])


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf


def _rounded(x: torch.Tensor) -> list:
    return (x.double().mul(1e4).round() / 1e4 + 0.0).tolist()  # + 0.0 turns -0.0 into 0.0


def describe(r: Result) -> str:
    """The last answers in words."""
    if r.answers is None:
        return f"{len(r.steps)} steps so far, and no key has been read yet."
    asked = f"Asked for {r.question}" + (f" (last written: {r.wanted})" if r.wanted else " (never written)")
    return f"{asked}: " + "; ".join(f"{RULE_NAMES[rule]} answers {spell(a)}" for rule, a in r.answers.items()) + "."


def explorer(steps: list[Step] | tuple[Step, ...] = ()) -> common.Explorer:
    """Fresh controls around the picture, `steps` already done. Buttons add a step; undo takes the last one back.

    The list of steps shows what was done, newest last.
    """
    c = _controls()
    done: list[Step] = list(steps)

    def show(new: list[Step]) -> None:
        nonlocal done
        r = compute(new)
        common.redraw(drawn, figure(r))
        done = new  # only a step that was drawn counts
        text.value, history.value = common.spoken(describe(r)), _history(r)
        message.show("")

    def decay() -> Decay:
        return Decay(c["gated"].value, c["slow"].value, c["fast"].value)

    def write() -> Write:
        return Write(c["key"].value, c["value"].value, c["beta"].value)

    first = compute(done)
    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    text, message = w.HTML(common.spoken(describe(first))), common.Message()
    history = w.HTML(_history(first))
    actions = {
        "write": lambda: show([*done, write()]),
        "decay": lambda: show([*done, decay()]),
        "read": lambda: show([*done, Read(c["key"].value)]),
        "token": lambda: show([*done, decay(), write(), Read(c["key"].value)]),
        "undo": lambda: show(done[:-1]),
        "reset": lambda: show([]),
    }
    for name, action in actions.items():
        c[name].on_click(lambda _, action=action: message.guard(action))
    controls = common.side_by_side(
        [[c[n] for n in ("key", "value", "beta")], [c[n] for n in ("gated", "slow", "fast")]]
    )
    row = {"flex_flow": "row wrap", "max_width": f"{common.WIDTH}px"}
    buttons = w.Box([c[n] for n in actions], layout=row)
    box = common.Explorer("state stepper", c, drawn, text, message, [controls, buttons, message, drawn, text, history])
    box.history = history
    return box


def _controls() -> dict[str, w.Widget]:
    keys = [(f"{name} = ({', '.join(f'{x:g}' for x in k)})", name) for name, k in KEYS.items()]
    share = {"min": 0.0, "max": 1.0, "step": 0.05, "readout_format": ".2f"}
    buttons = {
        "write": ("Write", "store the value under the key"),
        "decay": ("Decay", "let the states fade: gated delta and KDA only"),
        "read": ("Read", "ask every rule for the key"),
        "token": ("Decay, write, read", "what one token of K3 does, in this order"),
        "undo": ("Undo", "take the last step back"),
        "reset": ("Empty all", "start with empty states"),
    }
    return {
        "key": labelled(w.Dropdown, "Key (unit vector)", options=keys, value="A"),
        "value": labelled(w.Dropdown, "Value (one channel)", options=VALUES, value="cat"),
        "beta": labelled(w.FloatSlider, "Write strength β (share, 0–2)", value=1.0, **share | {"max": 2.0}),
        "gated": labelled(w.FloatSlider, "Gated delta (share kept)", value=0.8, **share),
        "slow": labelled(w.FloatSlider, "KDA, rows 1–2 (share kept)", value=0.95, **share),
        "fast": labelled(w.FloatSlider, "KDA, rows 3–4 (share kept)", value=0.5, **share),
    } | {
        name: w.Button(description=label, tooltip=hint, layout={"width": "auto", "min_width": "90px"})
        for name, (label, hint) in buttons.items()
    }


def _history(r: Result) -> str:
    """The steps as a numbered list, in columns."""
    items = "".join(f"<li>{s}</li>" for s in r.steps) or "<li>nothing yet</li>"
    style = f"max-width:{common.WIDTH - 20}px;margin:4px 10px;font-size:13px;line-height:1.4"
    return f'<div style="{style}"><b>Steps</b><ol style="columns:3;margin:2px 0">{items}</ol></div>'
