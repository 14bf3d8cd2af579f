"""The router explorer: what it computes against loops written out here, its picture, and its controls in the kernel."""

from __future__ import annotations

import time
from statistics import median

import plotly.graph_objects as go
import pytest
import torch

from k3lite.balance import quantile_balanced_bias, sign_rule_bias
from widgets import router
from widgets.router import LAST_STEP, TOKENS, compute, describe, explorer, figure

SMALL = {"experts": 16, "top_k": 2, "skew": 1.5, "ranks": 4}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


# ---- compute


def test_loads_are_over_the_mean_and_every_copy_is_somewhere():
    for copies in (False, True):
        r = compute(**SMALL, copies=copies, step=2, rule="sign")
        assert sum(r.loads) == pytest.approx(16) and len(r.busiest) == len(r.slowest) == 3
        assert max(r.loads) == pytest.approx(r.busiest[-1])
        assert sum(r.own) + sum(r.lent) == sum(map(sum, r.traffic)) == TOKENS * 2
        assert [sum(row) for row in r.traffic] == [TOKENS * 2 // 4] * 4
        assert [sum(column) for column in zip(*r.traffic, strict=True)] == [
            a + b for a, b in zip(r.own, r.lent, strict=True)
        ]


def test_without_copies_tokens_go_home():
    r = compute(**SMALL)
    per_expert = [load * TOKENS * 2 / 16 for load in r.loads]
    at_home = [sum(t for t, home in zip(per_expert, r.home, strict=True) if home == rank) for rank in range(4)]
    assert r.own == tuple(map(round, at_home)) and r.lent == r.redundant == (0,) * 4
    assert r.home == tuple(e // 4 for e in range(16)) and r.slowest[0] == pytest.approx(max(at_home) / (TOKENS * 2 / 4))


def test_with_copies_every_rank_computes_the_same_within_the_bound():
    r = compute(**SMALL, copies=True)
    assert [a + b for a, b in zip(r.own, r.lent, strict=True)] == [TOKENS * 2 // 4] * 4
    assert set(r.slowest) == {1.0} and 0 < max(r.redundant) <= 4
    assert r.loads == compute(**SMALL).loads, "copies change who computes, not who is chosen"


def test_the_first_choice_follows_zipfs_law():
    r = compute(experts=16, top_k=1, skew=1.0, ranks=1)
    shares = sorted((load / 16 for load in r.loads), reverse=True)
    expected = [1 / n for n in range(1, 17)]
    for share, e in zip(shares, expected, strict=True):
        assert share == pytest.approx(e / sum(expected), abs=0.04)
    assert max(compute(experts=16, top_k=1, skew=0.0, ranks=1).loads) < 1.6


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_steps_are_those_of_the_rule(rule):
    """The same walk, with the package's rule applied by hand to the scores of each step."""
    h = router._History(16, 2, 1.5, rule, 0.01, 0)
    bias = torch.zeros(16)
    for step in range(4):
        chosen = h.up_to(step)[-1]
        g = torch.Generator().manual_seed(1_000_003 + step)
        scores = torch.sigmoid(h.preference - torch.empty(TOKENS, 16).exponential_(generator=g).log())
        assert torch.equal(chosen, (scores + bias).sort(descending=True, stable=True).indices[:, :2])
        counts = chosen.flatten().bincount(minlength=16)
        bias = sign_rule_bias(bias, counts, 0.01) if rule == "sign" else quantile_balanced_bias(scores, bias, 2)


def test_rules_differ_as_they_should():
    at = {rule: compute(experts=64, skew=1.5, rule=rule, step=8).busiest for rule in router.RULES}
    assert len({b[0] for b in at.values()}) == 1, "all begin with the same choices"
    assert at["quantile"][2] < 2 < at["sign"][2] < at["none"][2] and at["histogram"][2] < 2
    assert at["sign"][8] < 0.5 * at["none"][8] and at["auxiliary"][8] < 0.9 * at["none"][8]
    assert min(at["none"]) > 5


def test_a_stronger_rule_is_faster():
    slow, fast = (compute(experts=64, skew=1.5, rule="sign", strength=s, step=3).busiest[-1] for s in (0.001, 0.03))
    assert fast < slow - 2


def test_going_back_shows_what_was_there():
    late = compute(**SMALL, rule="quantile", step=6)
    early = compute(**SMALL, rule="quantile", step=2)
    assert early.busiest == late.busiest[:3]
    router._history.cache_clear()
    assert compute(**SMALL, rule="quantile", step=2) == early


@pytest.mark.parametrize(
    "values, message",
    [
        ({"experts": 1}, "experts: got 1, wanted a whole number from 2 to 128."),
        ({"experts": 16, "top_k": 17}, "top-k: got 17, wanted a whole number from 1 to 16."),
        ({"experts": 4, "ranks": 8}, "ranks: got 8, wanted a whole number from 1 to 4."),
        ({"ranks": 3}, "ranks: got 3, wanted a divisor of 1024"),
        ({"step": LAST_STEP + 1}, f"step: got {LAST_STEP + 1}"),
        ({"skew": -1.0}, "skew: got -1.0, wanted a number from 0 to 3."),
        ({"rule": "best"}, "rule: got 'best', wanted one of quantile"),
        ({"strength": 0.0}, "strength: got 0.0, wanted a number above 0."),
        ({"seed": 1.5}, "seed: got 1.5"),
    ],
)
def test_nonsense_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        compute(**values)


def test_words():
    r = compute(experts=64, skew=2.0, ranks=4)
    assert f"{r.dead} experts are dead" in describe(r) and r.dead > 1
    assert f"{r.slowest[0]:.2f} times the mean, and all others wait" in describe(r)
    assert "nothing travels" in describe(compute(experts=64, ranks=1))
    lent = compute(experts=64, skew=2.0, ranks=4, copies=True)
    assert f"a rank holds at most {max(lent.redundant)} (the bound is 16)" in describe(lent)


# ---- figure


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"ranks": 1},
        {"experts": 128, "ranks": 16, "copies": True},
        {"rule": "sign", "step": LAST_STEP},
        {"top_k": 16},
    ],
)
def test_traces_are_always_the_same_in_the_same_order(values):
    fig = figure(compute(**values))
    assert [t.type for t in fig.data] == ["bar", "bar", "scatter", "scatter", "bar", "bar", "heatmap"]
    assert len(fig.layout.annotations) == 4 and len(fig.layout.shapes) == 3


def test_the_picture_shows_the_numbers():
    r = compute(**SMALL, copies=True, rule="sign", step=3)
    fig = figure(r)
    even, odd = fig.data[0].y, fig.data[1].y
    merged = [a if b is None else b for a, b in zip(even, odd, strict=True)]
    assert merged == list(r.loads) and sum(y is not None for y in odd) == 8
    assert list(fig.data[2].y) == list(r.busiest) and list(fig.data[3].y) == list(r.slowest)
    assert list(fig.data[4].y) == list(r.own) and list(fig.data[5].y) == list(r.lent)
    assert [tuple(row) for row in fig.data[6].z] == list(r.traffic)
    assert f"Step 3: busiest expert {r.busiest[-1]:.2f} × the mean" in fig.layout.title.text


# ---- explorer


@pytest.fixture
def box():
    return explorer()


def shown(box) -> list[float]:
    return [a if b is None else b for a, b in zip(box.figure.data[0].y, box.figure.data[1].y, strict=True)]


def test_explorer_starts_where_it_is_told():
    box = explorer(rule="quantile", experts=32, ranks=2)
    assert isinstance(box.figure, go.FigureWidget) and repr(box) == "Explorer('router')"
    assert shown(box) == list(compute(experts=32, skew=1.5, rule="quantile", ranks=2).loads)
    with pytest.raises(ValueError, match="rule: got 'best'"):
        explorer(rule="best")


def test_every_control_reaches_the_picture(box):
    c = box.controls
    now = {"experts": 64, "skew": 1.5, "ranks": 4}
    changes = {
        "rule": "sign", "step": 4, "strength": 0.03, "experts": 32, "top_k": 2, "skew": 1.0, "ranks": 8, "seed": 3, "copies": True,
    }  # fmt: skip
    for name, value in changes.items():
        before = box.text.value
        c[name].value = value
        now[name] = value
        r = compute(**now)
        assert shown(box) == list(r.loads) and list(box.figure.data[5].y) == list(r.lent), name
        assert box.message.value == ""
        assert name == "rule" or box.text.value != before, name
    assert describe(compute(**now)).split(":")[0] in box.text.value


def test_buttons_go_on_and_back(box):
    c = box.controls
    c["rule"].value = "quantile"
    c["next"].click()
    assert c["step"].value == 1 and len(box.figure.data[2].y) == 2
    for _ in range(LAST_STEP):
        c["next"].click()
    assert c["step"].value == LAST_STEP and "is the last one" in box.message.value
    c["again"].click()
    assert c["step"].value == 0 and box.message.value == ""


def test_strength_is_out_of_use_where_a_rule_has_none(box):
    c = box.controls
    assert c["strength"].disabled
    c["rule"].value = "sign"
    assert not c["strength"].disabled


def test_a_fault_of_ours_shows_its_traceback(box, monkeypatch):
    monkeypatch.setattr("widgets.router.figure", lambda r: 1 / 0)
    box.controls["step"].value = 1
    assert "ZeroDivisionError" in box.message.value and 'role="alert"' in box.message.value
    monkeypatch.undo()
    box.controls["step"].value = 2
    assert box.message.value == ""


def test_two_explorers_do_not_share_anything_and_nothing_prints(box, capsys):
    other = explorer()
    before = shown(other)
    box.controls["rule"].value = "quantile"
    box.controls["step"].value = 3
    assert shown(other) == before and capsys.readouterr() == ("", "")


def test_every_control_has_its_label_and_a_step_is_not_slow(box):
    for name, control in box.controls.items():
        assert control.description.endswith(")") or name in ("next", "again")
    box.controls["rule"].value = "quantile"
    times = []
    for _ in range(LAST_STEP):
        start = time.thread_time()
        box.controls["next"].click()
        times.append(time.thread_time() - start)
    assert median(times) < 0.2  # CPU seconds
