"""A training as it runs: loss, recall, loads and norms of a live run, beside the stored history of the shipped model.

stored   data/models/lm/history.json, written while the shipped model was trained
live     the same model and text on fewer bytes a step, from the start, for as long as the reader lets it run
loads    the busiest expert of any layer over the mean of its layer; 1 is balance
size     hidden: root mean square of the live sum behind the last sub-layer;  gradients, weights: norm over all parts
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ipywidgets as w
import plotly.graph_objects as go
import torch
from torch import Tensor

from k3lite.tasks.lm import Preset, lm_model, prose_rows, stage_recipe
from k3lite.tasks.lm_watch import Monitor
from k3lite.tasks.text import DATA, haystack
from k3lite.train import train
from widgets import common
from widgets.common import labelled, whole
from widgets.training_figure import figure

__all__ = ["HISTORY", "Curves", "LiveRun", "compute", "describe", "explorer", "figure"]

HISTORY = DATA / "models" / "lm" / "history.json"
SIZES = ("hidden", "gradients", "weights")
LENGTH, ROWS = 64, 8  # bytes in a row of the live run, rows in a step
STEPS, MOST, EVERY = 200, 2000, 10


@dataclass(frozen=True)
class Curve:
    """One run, a number for each record."""

    steps: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()
    validation: tuple[float, ...] = ()
    recall: tuple[float, ...] = ()
    load: tuple[float, ...] = ()
    size: tuple[float, ...] = ()


@dataclass(frozen=True)
class Curves:
    """Result of compute()."""

    size_of: str
    stored: Curve
    live: Curve
    recall_from: int | None  # first stored step of the recall stage


def compute(live: Sequence[dict] = (), *, size_of: str = "hidden", path: Path = HISTORY) -> Curves:
    """The stored history and the rows of a live run (as `lm_watch.Monitor` makes them), as curves.

    Raises ValueError for another size, and where the history cannot be read.
    """
    if size_of not in SIZES:
        raise ValueError(f"size: got {size_of!r}, wanted one of {', '.join(SIZES)}.")
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}: no history of a training ({e}).") from e
    recall = next((r["step"] for r in stored if r["stage"] == "recall"), None)
    return Curves(size_of, _curve(stored, size_of), _curve(live, size_of), recall)


def _curve(rows: Sequence[dict], size_of: str) -> Curve:
    def column(value: Callable[[dict], float]) -> tuple:
        return tuple(value(row) for row in rows)

    def size(row: dict) -> float:
        return row["hidden"][-1] if size_of == "hidden" else sum(x**2 for x in row[size_of].values()) ** 0.5

    return Curve(
        steps=column(lambda r: r["step"]),
        loss=column(lambda r: r["loss"]),
        validation=column(lambda r: r["validation"]),
        recall=column(lambda r: r["recall"]),
        load=column(lambda r: max(layer["max_over_mean"] for layer in r["loads"])),
        size=column(size),
    )


def describe(c: Curves) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    s = c.stored
    words = (
        f"Stored run: {s.steps[-1]} steps, {s.validation[-1]:.2f} nats per held-out byte, recall of one needle "
        f"{s.recall[-1]:.0%}, the busiest expert at {s.load[-1]:.2f} times the mean."
    )
    if not c.live.steps:
        return f"{words} The live run has not begun."
    v = c.live
    return f"{words} Live run: {v.steps[-1]} steps, {v.validation[-1]:.2f} nats per held-out byte, {v.load[-1]:.2f} times the mean."


class _Enough(Exception):
    """The reader pressed stop."""


class LiveRun:
    """A fresh model that trains in a thread of its own until its steps are done or `stop` is called.

    on_rows: called with all rows so far after each record.   on_end: called with what went wrong, or None.
    """

    def __init__(
        self, steps: int, seed: int, on_rows: Callable[[list[dict]], None], on_end: Callable[[Exception | None], None]
    ) -> None:
        whole("steps", steps, 1, MOST)
        whole("seed", seed, 0, 2**31)
        self.recipe, self.rows, self.enough = stage_recipe("text", Preset(steps, 1), seed), [], threading.Event()
        self.on_rows, self.on_end = on_rows, on_end
        self.thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Ends before the next step."""
        self.enough.set()

    def run(self) -> None:
        """The body of the thread."""
        fault = None
        try:
            model = lm_model(self.recipe.seed)
            monitor = Monitor(
                model, "text", self.recipe, self.batch_at, EVERY, history=self.rows, on_record=self.on_rows
            )
            train(model, self.batch_at, self.recipe, on_step=monitor, progress=False)
        except _Enough:
            pass
        except Exception as e:  # a thread would swallow it
            fault = e
        self.on_end(fault)

    def batch_at(self, step: int) -> tuple[Tensor, Tensor]:
        if self.enough.is_set():
            raise _Enough
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + step)
        rows = prose_rows(haystack("train"), ROWS, LENGTH, generator)
        return rows, rows


def explorer(steps: int = STEPS, seed: int = 0) -> common.Explorer:
    """Fresh controls around the picture: a button that starts and stops a live run."""
    first = compute()
    c = {
        "steps": labelled(w.BoundedIntText, "Length (steps)", min=1, max=MOST, value=steps),
        "seed": labelled(w.BoundedIntText, "Seed", min=0, max=2**31, value=seed),
        "size_of": labelled(w.Dropdown, "Size of", options=SIZES, value=first.size_of),
        "button": w.Button(description="Start", icon="play", tooltip="Start or stop a live run"),
    }
    state: dict[str, LiveRun | None] = {"run": None}

    def draw(*_) -> None:
        run = state["run"]
        curves = compute([] if run is None else list(run.rows), size_of=c["size_of"].value)
        common.redraw(drawn, figure(curves))
        spoken.value = common.spoken(describe(curves))

    def ended(fault: Exception | None) -> None:
        c["button"].description, c["button"].icon = "Start", "play"
        if fault is not None:
            message.show(f"The live run ended: {fault}", error=True)

    def press(_) -> None:
        run = state["run"]
        if run is not None and run.thread.is_alive():
            run.stop()
            return
        state["run"] = LiveRun(c["steps"].value, c["seed"].value, lambda rows: message.guard(draw), ended)
        c["button"].description, c["button"].icon = "Stop", "stop"
        message.show("")
        draw()
        state["run"].start()

    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    spoken, message = w.HTML(common.spoken(describe(first))), common.Message()
    c["button"].on_click(lambda b: message.guard(lambda: press(b)))
    message.watch({"size_of": c["size_of"]}, draw)
    columns = [[c["steps"], c["seed"]], [c["size_of"], c["button"]]]
    made = common.Explorer(
        "training", c, drawn, spoken, message, [common.side_by_side(columns), message, drawn, spoken]
    )
    made.state = state
    return made
