"""The training explorer: curves are the stored history, a live run starts, draws and stops, faults are shown."""

from __future__ import annotations

import json

import plotly.graph_objects as go
import pytest
import torch

from widgets import training
from widgets.training import HISTORY, LiveRun, compute, describe, explorer, figure

ROWS = json.loads(HISTORY.read_text())


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(training, "EVERY", 1)
    monkeypatch.setattr("k3lite.tasks.lm_watch.WATCH_ROWS", 2)
    monkeypatch.setattr("k3lite.tasks.lm_watch.WATCH_DOCUMENTS", 2)


def test_curves_are_what_was_stored():
    c = compute(ROWS[:2])
    assert c.stored.steps == tuple(r["step"] for r in ROWS) and c.live.steps == c.stored.steps[:2]
    assert c.stored.validation[-1] == ROWS[-1]["validation"] and c.stored.size[-1] == ROWS[-1]["hidden"][-1]
    assert c.stored.load[0] == max(layer["max_over_mean"] for layer in ROWS[0]["loads"])
    assert c.recall_from == next(r["step"] for r in ROWS if r["stage"] == "recall")
    want = sum(x**2 for x in ROWS[-1]["weights"].values()) ** 0.5
    assert compute(size_of="weights").stored.size[-1] == pytest.approx(want)


def test_nonsense_is_refused(tmp_path):
    with pytest.raises(ValueError, match="size: got 'colour', wanted one of hidden"):
        compute(size_of="colour")
    with pytest.raises(ValueError, match="no history of a training"):
        compute(path=tmp_path / "none.json")
    with pytest.raises(ValueError, match="steps: got 0"):
        LiveRun(0, 0, print, print)


def test_the_picture_has_the_same_traces_with_and_without_a_live_run():
    empty, both = figure(compute()), figure(compute(ROWS[:3], size_of="gradients"))
    assert isinstance(empty, go.Figure) and len(empty.data) == len(both.data) == 10
    assert [t.name for t in empty.data] == [t.name for t in both.data]
    assert list(both.data[1].x) == [r["step"] for r in ROWS[:3]] and not empty.data[1].x
    assert len(empty.layout.annotations) == len(both.layout.annotations) == 4


def test_sentences_say_what_the_picture_shows():
    assert "has not begun" in describe(compute())
    words = describe(compute(ROWS[:1]))
    assert f"Live run: {ROWS[0]['step']} steps, {ROWS[0]['validation']:.2f} nats" in words
    assert f"{ROWS[-1]['validation']:.2f} nats" in words


def test_a_live_run_starts_draws_and_ends():
    e = explorer(steps=2, seed=3)
    e.controls["button"].click()
    run = e.state["run"]
    run.thread.join()
    assert [r["step"] for r in run.rows] == [1, 2] and list(e.figure.data[1].x) == [1, 2]
    assert e.controls["button"].description == "Start" and e.message.value == ""
    assert "Live run: 2 steps" in e.text.value
    e.controls["size_of"].value = "weights"
    assert "weights" in e.figure.layout.annotations[3].text
    assert e.figure.data[-1].y[-1] == pytest.approx(sum(x**2 for x in run.rows[-1]["weights"].values()) ** 0.5)


def test_the_button_stops_a_live_run():
    e = explorer(steps=training.MOST)
    e.controls["button"].click()
    assert e.controls["button"].description == "Stop"
    e.controls["button"].click()
    run = e.state["run"]
    run.thread.join()
    assert len(run.rows) < training.MOST and e.controls["button"].description == "Start"


def test_a_fault_of_a_live_run_is_shown(monkeypatch):
    def broken(*args, **options):
        raise ValueError("the loss became nan")

    monkeypatch.setattr(training, "train", broken)
    e = explorer(steps=2)
    e.controls["button"].click()
    e.state["run"].thread.join()
    assert "The live run ended: the loss became nan" in e.message.value
