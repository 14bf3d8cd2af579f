"""The state stepper: what the rules answer step by step, its picture, and its buttons driven in the kernel."""

from __future__ import annotations

import time

import plotly.graph_objects as go
import pytest

from widgets.state_stepper import KEYS, MAX_STEPS, Decay, Read, Write, compute, describe, explorer, figure, spell

REWRITE = [Write("A", "cat"), Write("A", "dog"), Read("A")]
FADING = [Write("A", "cat"), Decay(0.8, 0.9, 0.5), Read("A")]


# ---- compute


def test_nothing_done_is_four_empty_states():
    r = compute()
    assert set(r.states) == {"sum", "delta", "gated delta", "kda"}
    assert all(x == 0 for S in r.states.values() for row in S for x in row)
    assert r.answers is r.question is r.wanted is r.asked_in is None


def test_a_rewritten_key():
    r = compute(REWRITE)
    assert r.answers["sum"] == [1, 1, 0, 0]
    assert r.answers["delta"] == r.answers["gated delta"] == r.answers["kda"] == [0, 1, 0, 0]
    assert (r.question, r.wanted, r.asked_in) == ("A", "dog", 3)


def test_half_a_correction():
    r = compute([Write("A", "cat"), Write("A", "dog", beta=0.5), Read("A")])
    assert r.answers["delta"] == [0.5, 0.5, 0, 0] and r.answers["sum"] == [1, 0.5, 0, 0]


def test_keys_that_are_alike_disturb_each_other():
    """C has cosine .6 with A: reading A finds .6 of what was written under C; the delta rule then corrects."""
    r = compute([Write("A", "cat"), Write("C", "fox"), Read("A")])
    assert r.answers["sum"] == pytest.approx([1, 0, 0.6, 0])
    assert r.answers["delta"] == pytest.approx([1 - 0.36, 0, 0.6, 0])


def test_decay_leaves_the_sum_and_the_delta_rule_alone():
    r = compute(FADING)
    assert [r.answers[n][0] for n in ("sum", "delta", "gated delta", "kda")] == pytest.approx([1, 1, 0.8, 0.9])
    fast = compute([Write("D", "owl"), Decay(0.8, 0.9, 0.5), Read("D")])
    assert [fast.answers[n][3] for n in ("gated delta", "kda")] == pytest.approx([0.8, 0.5])
    gone = compute([Write("A", "cat"), Decay(0.0, 0.0, 0.0), Read("A")])
    assert gone.answers["kda"] == [0, 0, 0, 0] and gone.answers["sum"][0] == 1


def test_the_correction_reads_the_decayed_state():
    """hazards T02: after a decay to .5 a write of the same pair must add the missing half, not nothing."""
    r = compute([Write("A", "cat"), Decay(0.5, 0.5, 0.5), Write("A", "cat"), Read("A")])
    assert r.answers["gated delta"] == r.answers["kda"] == [1, 0, 0, 0]


def test_an_answer_is_that_of_its_moment():
    r = compute([*REWRITE, Write("A", "owl")])
    assert r.answers == compute(REWRITE).answers and r.wanted == "dog"
    assert r.states["delta"][0] == [0, 0, 0, 1]


def test_a_key_that_was_never_written_still_gets_an_answer():
    r = compute([Write("A", "cat"), Read("C")])
    assert r.wanted is None and r.answers["delta"] == pytest.approx([0.6, 0, 0, 0])
    assert "Asked for C (never written)" in describe(r)


def test_keys_are_unit_vectors():
    assert all(sum(x * x for x in k) == pytest.approx(1) for k in KEYS.values())


@pytest.mark.parametrize(
    "step, message",
    [
        (Write("Z", "cat"), "key: got 'Z', wanted one of A, B, C, D."),
        (Read("Z"), "key: got 'Z'"),
        (Write("A", "cow"), "value: got 'cow', wanted one of cat, dog, fox, owl."),
        (Write("A", "cat", 3.0), "beta: got 3.0, wanted a number from 0 to 2."),
        (Decay(slow=1.5), "decay, slow: got 1.5, wanted a share from 0 to 1."),
        ("write", "step: got 'write', wanted a Write, a Decay or a Read."),
    ],
)
def test_nonsense_is_named(step, message):
    with pytest.raises(ValueError, match=message):
        compute([step])


def test_steps_have_an_end():
    with pytest.raises(ValueError, match=f"steps: got {MAX_STEPS + 1}, wanted at most {MAX_STEPS}"):
        compute([Read("A")] * (MAX_STEPS + 1))


def test_words():
    assert spell([0, 1, 0.36, 0]) == "1.00 dog + 0.36 fox"
    assert spell([-0.5, 1, 0, 0]) == "1.00 dog − 0.50 cat" and spell([0.001, 0, 0, 0]) == "nothing"
    assert "sum answers 1.00 cat + 1.00 dog; delta rule answers 1.00 dog" in describe(compute(REWRITE))
    assert "no key has been read" in describe(compute([Write("A", "cat")]))
    texts = [str(s) for s in (Write("A", "cat"), Write("A", "cat", 0.5), Decay(), Read("B"))]
    assert texts == ["write A → cat", "write A → cat, β = 0.50", "decay: gated keeps 0.80, KDA 0.95 and 0.50", "read B"]


# ---- figure


@pytest.mark.parametrize("steps", [[], REWRITE, FADING, [Read("C")], [Write("A", "cat", 2.0)] * 4])
def test_traces_are_always_the_same_in_the_same_order(steps):
    fig = figure(compute(steps))
    assert [t.type for t in fig.data] == ["heatmap", "bar"] * 4
    assert [t.name for t in fig.data[::2]] == ["sum", "delta rule", "gated delta", "KDA"]
    assert len(fig.layout.annotations) == 8


def test_the_picture_shows_states_and_answers():
    r = compute(REWRITE)
    fig = figure(r)
    assert [list(row) for row in fig.data[2].z] == r.states["delta"] and list(fig.data[1].y) == r.answers["sum"]
    assert fig.layout.title.text == "<b>Asked for A: delta rule, gated delta, KDA are within 0.1 of “dog”</b>"
    assert "no rule is" in figure(compute([Write("A", "cat", 0.2), Read("A")])).layout.title.text
    assert "0 of 4" in figure(compute([Write("A", "cat"), Read("C")])).layout.title.text
    assert "answer to A, asked in step 3" in [a.text for a in fig.layout.annotations]


# ---- explorer


@pytest.fixture
def box():
    return explorer()


def click(box, *names):
    for name in names:
        box.controls[name].click()


def states(box):
    return {t.name: [list(row) for row in t.z] for t in box.figure.data[::2]}


def named(r):
    return dict(zip(("sum", "delta rule", "gated delta", "KDA"), r.states.values(), strict=True))


def test_explorer_starts_with_the_steps_it_is_given():
    box = explorer(REWRITE)
    assert isinstance(box.figure, go.FigureWidget) and states(box) == named(compute(REWRITE))
    assert "write A → dog" in box.history.value and repr(box) == "Explorer('state stepper')"
    click(box, "undo", "undo")
    assert states(box) == named(compute(REWRITE[:1]))


def test_buttons_do_what_they_say(box):
    c = box.controls
    click(box, "write")
    assert states(box) == named(compute([Write("A", "cat")]))
    c["value"].value, c["beta"].value, c["key"].value = "fox", 0.5, "C"
    click(box, "write")
    c["gated"].value, c["slow"].value, c["fast"].value = 0.7, 0.9, 0.3
    click(box, "decay", "read")
    steps = [Write("A", "cat"), Write("C", "fox", 0.5), Decay(0.7, 0.9, 0.3), Read("C")]
    r = compute(steps)
    assert states(box) == named(r) and list(box.figure.data[7].y) == r.answers["kda"]
    assert box.text.value.count("KDA answers") == 1 and all(str(s) in box.history.value for s in steps)
    click(box, "token")
    assert states(box) == named(compute([*steps, steps[2], steps[1], steps[3]]))


def test_changing_a_control_changes_nothing_that_was_done(box):
    click(box, "write", "decay")
    before = states(box)
    box.controls["slow"].value = 0.1
    box.controls["beta"].value = 0.2
    assert states(box) == before
    click(box, "read")
    assert states(box) == before


def test_undo_and_empty(box):
    click(box, "undo")
    assert states(box) == named(compute()) and box.message.value == ""
    click(box, "write", "write", "read", "undo")
    assert states(box) == named(compute([Write("A", "cat")] * 2)) and "no key has been read" in box.text.value
    click(box, "reset")
    assert states(box) == named(compute()) and "nothing yet" in box.history.value


def test_too_many_steps_are_refused_in_sight(box):
    click(box, *["write"] * (MAX_STEPS + 1))
    assert "wanted at most 60" in box.message.value and 'role="alert"' in box.message.value
    assert box.history.value.count("<li>") == MAX_STEPS
    click(box, "undo")
    assert box.message.value == ""


def test_a_fault_of_ours_shows_its_traceback_and_undoes_the_step(box, monkeypatch):
    def broken(r):
        raise RuntimeError("<b>nothing</b> was drawn")

    monkeypatch.setattr("widgets.state_stepper.figure", broken)
    click(box, "write")
    assert "RuntimeError" in box.message.value and "&lt;b&gt;nothing" in box.message.value
    monkeypatch.undo()
    click(box, "read")
    assert states(box) == named(compute([Read("A")]))


def test_two_explorers_do_not_share_anything_and_nothing_prints(box, capsys):
    other = explorer()
    click(box, "write", "read")
    assert states(other) == named(compute())
    assert capsys.readouterr() == ("", "")


def test_every_control_has_its_label_and_no_step_is_slow(box):
    for name in ("key", "value", "beta", "gated", "slow", "fast"):
        assert box.controls[name].description.endswith(")")
    assert all(box.controls[n].description and box.controls[n].tooltip for n in ("write", "decay", "read", "undo"))
    times = []
    for _ in range(MAX_STEPS):
        start = time.thread_time()
        click(box, "write")
        times.append(time.thread_time() - start)
    assert min(times[-10:]) < 0.2
