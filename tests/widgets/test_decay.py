"""The decay explorer and the tile explorer: numbers by hand and against the model, pictures, and driven controls."""

from __future__ import annotations

import math
import time
from statistics import median

import plotly.graph_objects as go
import pytest
import torch

from k3lite.ops.kda import bounded_gate, kda, l2norm
from k3lite.tasks.text import encode, haystack
from widgets import decay, decay_tile
from widgets.decay import Reading, compute, describe, explorer, figure, read

TEXT = "And it came to pass,\nthat he went out."


def by_hand() -> Reading:
    """One layer, two heads of two channels, four tokens. Head 1 has g = -ln 2 in its first channel, always."""
    g = torch.tensor([[-math.log(2), -math.log(16)]] * 4, dtype=torch.float64)
    z = torch.logit(-g / 5)
    z = torch.stack([z, torch.zeros(4, 2, dtype=torch.float64)], 1)  # head 2: z = 0, so g = -2.5
    return Reading(b"abcd", {3: z}, {3: torch.zeros(2)}, -5.0)


@pytest.fixture(scope="module")
def reading() -> Reading:
    return read(TEXT)


# ---- compute


def test_half_lives_and_what_is_left_by_hand():
    r = compute(by_hand(), layer=3, head=1, token=1, steps=2)
    assert r.channels == (2, 1)  # the fastest first
    assert r.half_life == pytest.approx((0.25, 1.0))
    assert r.kept[0] == pytest.approx((1, 1 / 16, 1 / 256)) and r.kept[1] == pytest.approx((1, 1 / 2, 1 / 4))
    assert r.left == pytest.approx((1 / 256, 1 / 4))
    assert (r.within(0.2), r.within(0.5), r.within(2)) == (0, 1, 2)


def test_the_half_life_is_that_of_the_mean_over_the_text():
    g = torch.tensor([-0.5, -0.5, -2.5, -2.5], dtype=torch.float64)[:, None, None]  # mean -1.5; 0.46 tokens
    varying = Reading(b"abcd", {1: torch.logit(-g / 5)}, {1: torch.zeros(1)}, -5.0)
    r = compute(varying, steps=3)
    assert r.half_life == pytest.approx((math.log(2) / 1.5,)) and r.left == pytest.approx((math.exp(-5.5),))


def test_the_second_head_and_the_softplus_gate_by_hand():
    r = compute(by_hand(), layer=3, head=2, token=0, steps=1)
    assert r.left == pytest.approx((math.exp(-2.5),) * 2)
    soft = compute(by_hand(), layer=3, head=2, token=0, steps=1, gate="softplus")
    assert soft.left == pytest.approx((0.5, 0.5))  # softplus(0) = ln 2


def test_the_run_is_the_models_own(reading):
    """g of each layer, rebuilt from the caught z, is the layer's log_decay of the input that it is given."""
    model = decay._model(decay.MODEL)
    seen = {}
    layers = {i: model.model.layers[i - 1].self_attn for i in reading.z}
    hooks = [a.register_forward_pre_hook(lambda a, x, i=i: seen.update({i: x[0]})) for i, a in layers.items()]
    with torch.no_grad():
        model(encode(TEXT)[None])
        want = {i: a.log_decay(seen[i])[0] for i, a in layers.items()}
    for hook in hooks:
        hook.remove()
    assert list(reading.z) == [1, 2, 3] and reading.text == TEXT.encode()
    for i, g in want.items():
        got = bounded_gate(reading.z[i], reading.A_log[i], reading.lower_bound)
        assert torch.allclose(got, g, atol=1e-6)


def test_left_is_what_kda_leaves_of_a_write(reading):
    """Write at one token with beta = 1 and afterwards never again: the state fades as the picture says."""
    r = compute(reading, layer=1, head=2, token=4, steps=9)
    g = bounded_gate(reading.z[1].double(), reading.A_log[1], -5.0)[4:14, 1][None, :, None]
    K = g.shape[-1]
    k = l2norm(torch.ones(1, 10, 1, K, dtype=torch.float64))
    beta = torch.zeros(1, 10, 1, dtype=torch.float64)
    beta[0, 0] = 1
    _, S = kda(k, k, torch.ones(1, 10, 1, 1, dtype=torch.float64), g, beta)
    share = (S[0, 0, :, 0] / k[0, 0, 0])[torch.tensor(r.channels) - 1]
    assert share.tolist() == pytest.approx(r.left, rel=1e-9)


def test_reading_leaves_no_hook_behind_and_is_not_run_twice():
    model = decay._model(decay.MODEL)
    one = read(TEXT)
    assert not any(m._forward_hooks for m in model.modules())
    assert read(TEXT) is one


@pytest.mark.parametrize("text, size", [("", 0), ("a", 1), ("a" * 257, 257), ("é" * 129, 258)])
def test_read_names_a_text_that_is_too_short_or_too_long(text, size):
    with pytest.raises(ValueError, match=f"text: got {size} bytes, wanted 2 to 256"):
        read(text)


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"layer": 4}, "layer: got 4, wanted one of the KDA layers 1, 2, 3"),
        ({"head": 0}, "head: got 0, wanted a whole number from 1 to 2"),
        ({"head": 3}, "head: got 3"),
        ({"token": 38}, "token: got 38, wanted a whole number from 0 to 36"),
        ({"token": -1}, "token: got -1"),
        ({"token": 30, "steps": 8}, "steps: got 8, wanted a whole number from 0 to 7"),
        ({"gate": "clamp"}, "gate: got 'clamp', wanted bounded or softplus"),
    ],
)
def test_compute_names_the_value_it_cannot_take(reading, wrong, named):
    with pytest.raises(ValueError, match=named):
        compute(reading, **wrong)


# ---- words and picture


def test_the_sentence_counts_what_the_picture_shows(reading):
    r = compute(reading, layer=2, head=1, token=2, steps=1)
    text = describe(r)
    fast, medium, slow = (sum(h <= n for h in r.half_life) for n in (2, 16, 100))
    assert f"{fast} of the 32 channels of layer 2, head 1 forget half within 2 tokens, {medium} within 16" in text
    assert f"and {32 - slow} keep half for more than 100" in text
    assert "at token 2 ('d'), 1 token later" in text
    assert f"more than half in {sum(x > 0.5 for x in r.left)} of them" in text
    assert "softplus" not in text and "softplus" in describe(compute(reading, layer=2, gate="softplus"))


@pytest.mark.parametrize("byte, shown", [(10, "line break"), (32, "space"), (233, "byte 233"), (65, "'A'")])
def test_bytes_have_names(byte, shown):
    assert decay._shown(byte) == shown


def test_the_text_is_marked_where_it_was_written_and_read():
    r = compute(by_hand(), layer=3, head=1, token=1, steps=1)
    marked = decay.marked(r)
    assert marked.count("outline") == 1 and marked.count("underline") == 1
    assert marked.index(">a") < marked.index("outline") < marked.index(">b<") < marked.index("underline")
    nasty = Reading(b"<\n\xe9>", *(getattr(by_hand(), n) for n in ("z", "A_log", "lower_bound")))
    assert "&lt;" in decay.marked(compute(nasty, layer=3, steps=0)) and "·" in decay.marked(
        compute(nasty, layer=3, steps=0)
    )


def test_the_figure_draws_half_lives_what_is_kept_and_what_is_left(reading):
    r = compute(reading, layer=3, head=2, token=5, steps=7)
    fig = figure(r)
    bars, heat, left = fig.data
    assert [round(h, 3) for h in r.half_life] == list(bars.x)  # none of this head leaves the axis
    assert [list(row) for row in heat.z] == [[round(x, 3) for x in row] for row in r.kept]
    assert list(heat.x) == list(range(len(TEXT) - 5))
    assert list(left.x) == [round(100 * x, 2) for x in r.left]
    assert fig.layout.shapes[0].x0 == 7
    assert f"{r.within(2)} of 32 channels forget half within 2 tokens" in fig.layout.title.text
    fig.to_json()


def test_half_lives_beyond_the_axis_are_drawn_at_its_end(reading):
    r = compute(reading, layer=2, head=1)
    x = figure(r).data[0].x
    assert max(r.half_life) > 1e6 and max(x) == 10_000 and min(x) >= 0.1


def test_traces_and_notes_stay_the_same_in_number(reading):
    usual = figure(compute(reading))
    for r in (
        compute(reading, token=36, steps=0),
        compute(by_hand(), layer=3, steps=3),
        compute(reading, gate="softplus"),
    ):
        fig = figure(r)
        assert [t.type for t in fig.data] == [t.type for t in usual.data]
        assert len(fig.layout.annotations) == len(usual.layout.annotations)


# ---- explorer


@pytest.fixture
def box():
    return explorer(TEXT)


def drawn(box):
    return [list(map(list, t.z)) if t.type == "heatmap" else list(t.x) for t in box.figure.data]


def test_explorer_starts_with_the_picture_of_its_arguments(reading):
    box = explorer(TEXT, layer=3, head=2)
    want = figure(compute(reading, layer=3, head=2))
    assert isinstance(box.figure, go.FigureWidget) and repr(box) == "Explorer('decay')"
    assert list(box.figure.data[0].x) == list(want.data[0].x)
    assert "layer 3, head 2" in box.text.value and box.message.value == ""


def test_explorer_takes_the_shortest_text():
    box = explorer("ab")
    assert box.controls["steps"].value == 1 and len(box.figure.data[1].x) == 2


def test_explorer_opens_on_held_out_prose():
    box = explorer()
    assert encode(box.controls["text"].value).tolist() == haystack("heldout")[20_004:20_164].tolist()


@pytest.mark.parametrize(
    "name, value", [("layer", 2), ("head", 2), ("gate", "softplus"), ("token", 20), ("steps", 3)]
)  # fmt: skip
def test_each_control_changes_the_picture(box, reading, name, value):
    box.controls[name].value = value
    settings = {n: c.value for n, c in box.controls.items() if n != "text"}
    want = compute(reading, **settings)
    assert settings[name] == value
    assert list(box.figure.data[2].x) == [round(100 * x, 2) for x in want.left]
    assert box.figure.layout.title.text == figure(want).layout.title.text
    assert box.message.value == "" and describe(want)[:40] in box.text.value


def test_a_readers_own_text_is_run_through_the_model(box):
    box.controls["text"].value = "Call me Ishmael."
    r = compute(read("Call me Ishmael."), steps=15)
    assert box.controls["steps"].value == 15  # 16 would lie behind the end
    assert list(box.figure.data[2].x) == [round(100 * x, 2) for x in r.left]
    assert box.message.value == ""


def test_the_token_can_go_to_the_end_and_pushes_the_steps(box):
    box.controls["token"].value = box.controls["token"].max
    assert (box.controls["token"].value, box.controls["steps"].value) == (len(TEXT) - 2, 1)
    assert box.message.value == ""
    box.controls["token"].value = 0
    assert box.controls["steps"].max == len(TEXT) - 1


@pytest.mark.parametrize("text", ["", "x", "x" * 300])
def test_a_text_it_cannot_take_is_refused_in_sight_and_mended_by_the_next(box, text):
    before = drawn(box)
    box.controls["text"].value = text
    assert f"text: got {len(text)} bytes" in box.message.value and 'role="alert"' in box.message.value
    assert drawn(box) == before
    box.controls["text"].value = TEXT
    assert box.message.value == ""


def test_one_change_is_drawn_once_and_nothing_prints(box, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(decay, "figure", lambda r: calls.append(r) or figure(r))
    box.controls["text"].value = "A shorter one."  # moves two sliders too
    box.controls["layer"].value = 2
    assert len(calls) == 2 and capsys.readouterr() == ("", "")


def test_two_explorers_do_not_share_anything():
    one, two = explorer(TEXT), explorer(TEXT)
    before = drawn(two), two.text.value
    one.controls["layer"].value = 2
    assert (drawn(two), two.text.value) == before
    assert not set(one.controls.values()) & set(two.controls.values())


@pytest.mark.parametrize("make", [lambda: explorer(TEXT), decay_tile.explorer], ids=["decay", "tile"])
def test_every_control_has_a_label_with_its_unit(make):
    assert all(c.description.endswith(")") for c in make().controls.values())


def test_no_update_is_slow(box):
    times = []
    for token in range(1, 20):
        start = time.thread_time()
        box.controls["token"].value = token
        times.append(time.thread_time() - start)
    assert median(times) < 0.2  # CPU seconds


# ---- the tile


def test_factors_by_hand():
    r = decay_tile.compute(g=-5, tokens=16)
    assert r.large[:2] == (5, 10) and r.small[15] == -80 and r.largest == 80
    assert decay_tile.compute(g=-5, tokens=16, origin="middle").largest == 40


@pytest.mark.parametrize(
    "setting, verdicts",
    [
        ({"tokens": 16}, ("right", "right", "overflow")),
        ({"tokens": 17}, ("right", "right", "overflow")),
        ({"tokens": 18}, ("overflow", "overflow", "overflow")),  # 5 x 18 = 90 > 88.7 = ln of the largest fp32
        ({"tokens": 2}, ("right", "right", "right")),
        ({"tokens": 3}, ("right", "right", "overflow")),  # e^15 > 65504
        ({"tokens": 32, "origin": "middle"}, ("right", "right", "overflow")),
        ({"g": -0.5, "tokens": 64}, ("right", "right", "overflow")),
        ({"g": -12.0, "origin": "middle"}, ("overflow", "overflow", "overflow")),
        ({"g": 0.0, "tokens": 64}, ("right", "right", "right")),
    ],
)
def test_what_each_format_can_hold(setting, verdicts):
    r = decay_tile.compute(**setting)
    assert tuple(map(r.verdict, decay_tile.FORMATS)) == verdicts


def test_a_wrong_product_is_not_called_right():
    r = decay_tile.Tile(-1, 2, "start", (0.0,) * 64, (0.0,) * 64, {"fp32": 0.5, "bf16": None, "fp16": 0.001})
    assert [r.verdict(n) for n in decay_tile.FORMATS] == ["wrong", "overflow", "right"]
    assert "fp32 comes out wrong (error 5e-01), in bf16 overflows, in fp16 comes out right" in decay_tile.describe(r)
    assert "fp16 can hold them" in decay_tile.figure(r).layout.title.text


@pytest.mark.parametrize(
    "wrong, named",
    [({"g": 0.1}, "log-decay: got 0.1"), ({"g": -12.5}, "log-decay: got -12.5"), ({"g": "x"}, "log-decay: got 'x'"),
     ({"tokens": 1}, "tile: got 1, wanted a whole number from 2 to 64"), ({"tokens": 65}, "tile: got 65"),
     ({"origin": "end"}, "origin: got 'end', wanted start or middle")],
)  # fmt: skip
def test_the_tile_names_the_value_it_cannot_take(wrong, named):
    with pytest.raises(ValueError, match=named):
        decay_tile.compute(**wrong)


def test_the_tile_is_drawn_and_follows_its_controls():
    box = decay_tile.explorer()
    growing, shrinking, *_, bars = box.figure.data
    assert list(growing.y)[-1] == 34.74 and list(shrinking.y)[-1] == -34.74 and len(growing.x) == 16
    assert list(bars.text)[2] == "overflow" and "fp32 and bf16 can hold them" in box.figure.layout.title.text
    box.controls["tokens"].value = 18
    assert "no format can hold them" in box.figure.layout.title.text and list(bars.text) == ["overflow"] * 3
    box.controls["origin"].value = "middle"
    assert "fp32 and bf16 can hold them" in box.figure.layout.title.text and "from its middle" in box.text.value
    box.controls["g"].value = -0.3
    assert "fp32, bf16 and fp16 can hold them" in box.figure.layout.title.text and "-0.3" in box.text.value
    assert box.message.value == "" and repr(box) == "Explorer('tile')"
