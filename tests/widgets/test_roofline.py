"""The roofline explorer: its work against the budget, which side of the ridge things fall on, its controls."""

from __future__ import annotations

import time

import pytest

from k3lite import budget
from k3lite.config import K3Config
from widgets.roofline import BATCHES, CONTEXTS, TBYTES, TFLOPS, compute, describe, explorer, figure

K3 = K3Config.preset("kimi-k3")


def test_passes_have_the_budgets_intensity():
    prefill, alone, together, slot, state, row = compute(tokens=8192, batch=32).passes
    assert prefill.intensity == budget.forward_work(K3, 8192).intensity
    assert alone.intensity == budget.forward_work(K3, 1, 8192).intensity
    assert together.intensity == budget.forward_work(K3, 1, 8192, batch=32).intensity
    assert slot.intensity == 2 * 96 * (576 + 512) / 1152 and state.intensity == 7 / 8 and row.intensity == 1.0


def test_below_the_ridge_memory_is_the_limit_and_above_it_arithmetic():
    r = compute(tflop_s=1000, tbyte_s=5)
    prefill, alone = r.passes[:2]
    assert r.ridge == 200 and alone.intensity < 200 < prefill.intensity
    assert alone.reached == pytest.approx(alone.intensity * 5e12) and prefill.reached == pytest.approx(1e15)
    assert alone.seconds == pytest.approx(budget.forward_work(K3, 1, 32_768).bytes / 5e12)
    assert prefill.seconds == pytest.approx(budget.forward_work(K3, 32_768).flops / 1e15)


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"tflop_s": 0}, "arithmetic: got 0, wanted a number above 0"),
        ({"tbyte_s": -1.0}, "bandwidth: got -1.0"),
        ({"tbyte_s": "5"}, "bandwidth: got '5'"),
        ({"tokens": 0}, "context length: got 0"),
        ({"batch": 0}, "batch: got 0"),
    ],
)
def test_compute_names_the_value_it_cannot_take(wrong, named):
    with pytest.raises(ValueError, match=named):
        compute(**wrong)


def test_the_sentence_says_the_limits():
    text = describe(compute())
    assert text.startswith("This machine can do 200 FLOPs while it moves a byte. Prefill of 32,768 tokens asks for 4,8")
    assert "arithmetic is the limit, and it takes 7.57 s at least" in text
    assert "asks for 2.7: memory is the limit, 1.3% of the arithmetic can be used, a token takes 27.8 ms" in text
    assert "memory is the limit" not in describe(compute(tbyte_s=1000))  # a ridge of 1 FLOP/B


def test_the_picture_has_the_roof_and_every_pass_under_it():
    r = compute()
    fig = figure(r)
    assert [t.name for t in fig.data] == ["the machine's roof", *(p.name for p in r.passes)]
    assert list(fig.data[0].y) == [0.3 * 5e12, 1e15, 1e15]
    for trace, p in zip(fig.data[1:], r.passes, strict=True):
        assert (trace.x[0], trace.y[0]) == (p.intensity, p.reached)
    assert fig.layout.title.text == "<b>After 32,768 tokens, a batch of 64 can use 9.8% of the machine's arithmetic</b>"
    assert "fills the machine's arithmetic" in figure(compute(tbyte_s=1000)).layout.title.text


@pytest.mark.parametrize("name, value", [("tflop_s", 10_000), ("tbyte_s", 0.05), ("tokens", 1024), ("batch", 4096)])
def test_each_control_redraws(name, value):
    box = explorer()
    before = box.text.value
    box.controls[name].value = value
    expected = compute(**{n: c.value for n, c in box.controls.items()})
    assert box.text.value != before and box.message.value == "" and repr(box) == "Explorer('roofline')"
    assert [t.x[0] for t in box.figure.data[1:]] == [p.intensity for p in expected.passes]
    assert list(box.figure.data[0].y) == list(figure(expected).data[0].y)


def test_the_ends_of_all_sliders_can_be_drawn_and_no_update_is_slow():
    box, times = explorer(), []
    for name, values in (("tflop_s", TFLOPS), ("tbyte_s", TBYTES), ("tokens", CONTEXTS), ("batch", BATCHES)):
        assert box.controls[name].description.endswith(")")
        for value in (values[0], values[-1]):
            start = time.thread_time()
            box.controls[name].value = value
            times.append(time.thread_time() - start)
            assert box.message.value == ""
    assert min(times) < 0.05  # CPU seconds, the least of eight
