"""The state capacity explorer: its numbers against theory, its picture, and its controls driven in the kernel."""

from __future__ import annotations

import math
import time

import plotly.graph_objects as go
import pytest

from k3lite.tasks.capacity import RULES, theory
from widgets.state_capacity import KEY_WIDTHS, PAIRS, compute, describe, explorer, figure

# ---- compute


@pytest.mark.parametrize("rule, half_life", [("sum", math.inf), ("sum", 16), ("delta", math.inf), ("gated delta", 32)])
def test_mean_error_is_near_theory(rule, half_life):
    r = compute(rule=rule, half_life=half_life)
    want = theory(rule, 64, 32, log_decay=-math.log(2) / half_life)
    assert r.theory == pytest.approx(want.tolist(), abs=1e-4)
    assert r.error_mean == pytest.approx(r.theory_mean, rel=0.1)
    assert len(r.error) == len(r.right) == len(r.mean_error) == r.pairs == 64


@pytest.mark.parametrize(
    "rule, width, pairs, error",
    [
        ("sum", 32, 16, 0.45),
        ("sum", 64, 128, 2.0),
        ("delta", 32, 16, 0.28),
        ("delta", 32, 64, 1.07),
        ("delta", 64, 256, 1.5),
    ],
)
def test_errors_that_were_measured_before(rule, width, pairs, error):
    """training-notes §4, by another program; a few draws each."""
    assert compute(rule=rule, key_width=width, pairs=pairs).error_mean == pytest.approx(error, rel=0.1)


def test_the_delta_rule_keeps_the_newest_and_the_sum_treats_all_alike():
    delta, total = compute(rule="delta"), compute(rule="sum")
    assert delta.quarters.newest > 0.9 and delta.quarters.oldest < 0.2
    assert delta.mean_error[0] > 1 > 0.2 > delta.mean_error[-1]
    assert abs(total.quarters.newest - total.quarters.oldest) < 0.15


def test_an_error_above_one_and_the_right_value_still_the_nearest():
    """training-notes §4: the sum, width 64, 128 pairs."""
    r = compute(rule="sum", key_width=64, pairs=128)
    assert r.error_mean > 1.8 and r.accuracy > 0.95


def test_likeness_of_keys_hurts_and_has_theory_for_the_sum_only():
    for rule in ("sum", "delta"):
        errors = [compute(rule=rule, correlation=c).error_mean for c in (0.0, 0.3, 0.6)]
        assert errors == sorted(errors)
    assert compute(rule="sum", correlation=0.3).theory is not None
    assert compute(rule="delta", correlation=0.3).theory is None
    assert compute(rule="kda", half_life=32).theory is None
    assert compute(rule="kda").theory == compute(rule="delta").theory


def test_the_first_draw_is_the_one_that_is_shown():
    a, b = compute(seed=0), compute(seed=1)
    assert a == compute(seed=0) and a.error != b.error and a.state != b.state
    assert len(a.state) == 32 and len(a.state[0]) == 32
    assert a.theory == b.theory


def test_one_pair_comes_back_whole():
    r = compute(pairs=1)
    assert r.error_mean < 1e-6 and r.accuracy == 1 and r.chance == 1
    assert "1 pair in a state" in describe(r) and "quarter" not in describe(r)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"pairs": 0}, "pairs: got 0, wanted a whole number from 1 to 256."),
        ({"key_width": 2.5}, "key width: got 2.5, wanted a whole number from 4 to 128."),
        ({"correlation": 1.2}, "correlation: got 1.2, wanted 0 to 1"),
        ({"beta": 2.5}, "beta: got 2.5, wanted a number from 0 to 2."),
        ({"half_life": 0}, "half-life: got 0, wanted a number of writes above 0."),
        ({"half_life": math.nan}, "half-life: got nan"),
        ({"rule": "product"}, "rule: got 'product', wanted one of 'sum'"),
        ({"half_life": 8}, "'delta' forgets nothing; 'gated delta' does"),
    ],
)
def test_nonsense_is_named(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        compute(**arguments)


def test_words_say_what_the_picture_says():
    r = compute(rule="sum")
    text = describe(r)
    assert "64 pairs in a state of 32 x 32, written by the sum" in text
    assert f"{r.accuracy:.0%} of the keys" in text and "(guessing: 1.6%)" in text
    assert f"mean squared error is {r.error_mean:.2f}" in text and "theory expects 1.97" in text
    assert "no closed form" in describe(compute(correlation=0.2))


# ---- figure


@pytest.mark.parametrize("pairs", [1, 3, 256])
@pytest.mark.parametrize("rule", RULES)
def test_traces_are_always_the_same_in_the_same_order(pairs, rule):
    fig = figure(compute(pairs=pairs, rule=rule, key_width=4, correlation=0.2))
    names = ["state", "right value nearest", "another value nearer", "mean of 8 draws", "theory"]
    assert [t.name for t in fig.data] == names
    assert all(len(t.y) == pairs for t in fig.data[1:])
    assert len(fig.layout.annotations) == 2


def test_each_pair_has_one_dot_and_the_title_says_the_finding():
    r = compute(pairs=96)
    fig = figure(r)
    right, wrong = fig.data[1].y, fig.data[2].y
    assert [a if a is not None else b for a, b in zip(right, wrong, strict=True)] == r.error
    assert [a is not None for a in right] == r.right
    assert f"96 pairs in a state of 32 × 32: {r.accuracy:.0%} come back" in fig.layout.title.text
    assert [list(row) for row in fig.data[0].z] == r.state
    assert list(fig.data[4].y) == r.theory
    assert max(r.mean_error) < fig.layout.yaxis2.range[1]


# ---- explorer


@pytest.fixture
def box():
    return explorer()


def test_explorer_starts_with_the_picture_of_its_arguments():
    box = explorer(pairs=24, key_width=16, rule="sum")
    expected = compute(pairs=24, key_width=16, rule="sum")
    assert isinstance(box.figure, go.FigureWidget)
    assert list(box.figure.data[3].y) == expected.mean_error
    assert describe(expected).replace("'", "&#x27;") in box.text.value
    assert repr(box) == "Explorer('state capacity')" and box.message.value == ""


@pytest.mark.parametrize(
    "name, value",
    [("pairs", 96), ("key_width", 16), ("correlation", 0.3), ("rule", "sum"), ("beta", 0.5), ("seed", 3)],
)
def test_each_control_changes_what_it_should(box, name, value):
    box.controls[name].value = value
    expected = compute(**{name: value})
    assert list(box.figure.data[3].y) == expected.mean_error != compute().mean_error
    assert [list(row) for row in box.figure.data[0].z] == expected.state
    assert box.figure.layout.title.text == figure(expected).layout.title.text
    assert f"{expected.error_mean:.2f}" in box.text.value and box.message.value == ""


def test_the_half_life_serves_the_rules_that_have_one(box):
    c = box.controls
    assert c["half_life"].disabled
    c["rule"].value = "gated delta"
    assert not c["half_life"].disabled
    c["half_life"].value = 16
    assert list(box.figure.data[3].y) == compute(rule="gated delta", half_life=16).mean_error
    c["rule"].value = "delta"
    assert "forgets nothing" in box.message.value and c["half_life"].disabled
    assert list(box.figure.data[3].y) == compute().mean_error
    c["rule"].value = "kda"
    assert box.message.value == ""
    assert list(box.figure.data[3].y) == compute(rule="kda", half_life=16).mean_error


def test_a_fault_of_ours_shows_its_traceback(box, monkeypatch):
    def broken(r):
        raise RuntimeError("<b>nothing</b> was drawn")

    monkeypatch.setattr("widgets.state_capacity.figure", broken)
    box.controls["pairs"].value = 8
    assert "RuntimeError" in box.message.value and "&lt;b&gt;nothing" in box.message.value


def test_a_change_is_drawn_once_prints_nothing_and_stays_in_its_explorer(box, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("widgets.state_capacity.figure", lambda r: calls.append(r) or figure(r))
    other = explorer()
    before = list(other.figure.data[3].y)
    calls.clear()
    box.controls["pairs"].value = 8
    assert len(calls) == 1 and list(other.figure.data[3].y) == before
    assert capsys.readouterr() == ("", "")


def test_every_control_has_its_label_and_no_update_is_slow(box):
    for control in box.controls.values():
        assert control.description.endswith(")")
    box.controls["key_width"].value = KEY_WIDTHS[-1]
    box.controls["pairs"].value = PAIRS[-1]
    times = []
    for seed in range(1, 9):
        start = time.thread_time()
        box.controls["seed"].value = seed
        times.append(time.thread_time() - start)
    assert min(times) < 0.2  # CPU seconds at the largest setting, the least of eight


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="rule: got 'product'"):
        explorer(rule="product")
