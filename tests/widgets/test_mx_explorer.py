"""The MX explorer: what it computes against mx and by hand, its picture, and its controls in the kernel."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest
import torch

from k3lite.minifloat import FORMATS
from k3lite.mx import BLOCK, SCALE_RULES, decode, encode, fake_quantize, scale_values
from k3lite.other_formats import round_fp8, round_int4
from widgets.mx_explorer import BINS, CUSTOM, NAMES, PRESETS, compute, describe, explorer, figure, layer, preset


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def with_top(value):
    return (value, *[0.5] * (BLOCK - 1))


# ---- compute


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_numbers_are_those_of_mx(format, rule):
    b = compute(format=format, rule=rule, shift=3)
    x = torch.tensor(preset("Gaussian")) * 8
    codes, scales = encode(x, format, scale_rule=rule)
    kept = decode(codes, scales, format)
    assert b.values == tuple(x.tolist()) and b.kept == tuple(kept.tolist()) and b.scale_byte == int(scales)
    assert [int(c, 2) for c in b.codes] == codes.tolist() and {len(c) for c in b.codes} == {FORMATS[format].bits}
    assert b.error == pytest.approx(float((kept - x).norm() / x.norm()))
    assert b.beside["INT4"][0] == tuple(round_int4(x).tolist()) and b.beside["FP8, E4M3"][0] == tuple(
        round_fp8(x).tolist()
    )


def test_t19_by_hand():
    assert [compute(values=with_top(7.0), rule=r).kept[0] for r in SCALE_RULES] == [6, 8, 6]
    assert [sum(compute(values=with_top(7.0), rule=r).clipped) for r in SCALE_RULES] == [1, 0, 1]
    b = compute(values=with_top(6.0))
    assert b.scale_byte == 127 and b.scale == 1 and b.codes[0] == "0111" and b.kept == b.values and b.error == 0


def test_bytes_of_a_block():
    assert [compute(format=f).bytes for f in FORMATS] == [17, 33, 33]


def test_powers_of_two_move_the_scale_and_nothing_else():
    a, b = compute(), compute(shift=-9)
    assert b.scale_byte == a.scale_byte - 9 and b.codes == a.codes and b.error == pytest.approx(a.error)


@pytest.mark.parametrize("shift", [-30, 17, 30])
def test_other_formats_end_in_numbers(shift):
    """INT4's scale is fp16, which ends long before 2^30."""
    b = compute(shift=shift)
    assert all(0 < error <= 1 for _, error in b.beside.values()) and "nan" not in describe(b)


def test_the_layer_is_the_needle_models_and_its_shares_are_counted():
    x, b = layer(), compute()
    assert x.shape == (4608, BLOCK)  # three layers of 8 experts, three matrices of 64 x 32 numbers
    scale = scale_values(encode(x, "e2m1")[1])
    assert len(b.shares) == BINS and sum(b.shares) == pytest.approx(
        float(((x / scale).abs() <= 12).float().mean()), abs=1e-5
    )
    assert b.layer_clipped == pytest.approx(float((x.abs().amax(-1) > 6 * scale[:, 0]).float().mean()))
    kept = fake_quantize(x, "e2m1")
    assert b.layer_errors[NAMES["e2m1"]] == pytest.approx(float((kept - x).norm() / x.norm()))
    assert sum(compute(rule="ceil").shares[BINS // 2 :]) == 0 < sum(b.shares[BINS // 2 :])


@pytest.mark.parametrize(
    "values, message",
    [
        ({"format": "e3m2"}, "format: got 'e3m2', wanted one of e2m1, e4m3, e5m2."),
        ({"rule": "up"}, "scale rule: got 'up', wanted one of floor, ceil, nearest."),
        ({"shift": 31}, "shift: got 31, wanted a whole number from -30 to 30."),
        ({"shift": 0.5}, "shift: got 0.5"),
        ({"values": (1.0,) * 31}, "values: got 31 numbers, wanted 32, each from -8 to 8."),
        ({"values": with_top(9.0)}, "each from -8 to 8"),
        ({"values": with_top(float("nan"))}, "each from -8 to 8"),
    ],
)
def test_nonsense_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        compute(**values)


def test_words():
    b = compute(values=with_top(7.0))
    assert "scale is byte 127, 2^0" in describe(b) and "17 bytes (4.25 bits a number" in describe(b)
    assert "1 of 32 numbers is clipped" in describe(b) and f"{b.error:.1%}" in describe(b)
    assert "nothing is clipped" in describe(compute(values=(0.0,) * BLOCK))


# ---- figure


@pytest.mark.parametrize(
    "values", [{}, {"format": "e5m2", "shift": -30}, {"values": (0.0,) * BLOCK}, {"rule": "ceil", "shift": 30}]
)
def test_traces_are_always_the_same_in_the_same_order(values):
    fig = figure(compute(**values))
    assert [t.type for t in fig.data] == ["scatter"] * 3 + ["bar"] * 2 + ["scatter"]


def test_the_picture_shows_the_numbers():
    b = compute(values=with_top(7.0), format="e2m1")
    fig = figure(b)
    assert tuple(fig.data[0].y) == b.values and tuple(fig.data[1].y) == b.kept and tuple(fig.data[3].y) == b.shares
    assert tuple(fig.layout.xaxis.ticktext) == b.codes and tuple(fig.data[4].x) == tuple(b.layer_errors.values())
    assert "1 clipped" in fig.layout.title.text and f"{b.error:.1%}" in fig.layout.title.text
    assert fig.data[1].customdata[0] == "0111, off by -1" and tuple(fig.data[5].y) == (6, *[None] * 31)
    assert list(fig.layout.xaxis2.tickvals) == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 12]


# ---- explorer


@pytest.fixture
def box():
    return explorer()


def test_explorer_starts_where_it_is_told():
    box = explorer(format="e4m3", rule="ceil", shift=2, start="one outlier")
    assert isinstance(box.figure, go.FigureWidget) and repr(box) == "Explorer('mx')"
    want = compute(values=tuple(preset("one outlier")), format="e4m3", rule="ceil", shift=2)
    assert tuple(box.figure.data[1].y) == want.kept
    with pytest.raises(ValueError, match="start: got 'x'"):
        explorer(start="x")


def test_every_control_reaches_the_picture(box):
    now = {}
    for name, value in {"format": "e5m2", "rule": "ceil", "shift": -4}.items():
        before = box.text.value
        box.controls[name].value = now[name] = value
        assert tuple(box.figure.data[1].y) == compute(**now).kept, name
        assert box.message.value == "" and box.text.value != before, name


def test_a_number_is_moved_and_a_preset_moves_all(box):
    box.controls["value 3"].value = 7.5
    numbers = [*preset("Gaussian")]
    numbers[3] = 7.5
    assert (
        tuple(box.figure.data[0].y) == compute(values=tuple(numbers)).values and box.controls["start"].value == CUSTOM
    )
    box.controls["start"].value = "a slope"
    assert [box.controls[f"value {i}"].value for i in range(BLOCK)] == pytest.approx(preset("a slope"))
    assert tuple(box.figure.data[0].y) == compute(values=tuple(preset("a slope"))).values


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_the_sliders(name):
    assert compute(values=tuple(preset(name))).values == tuple(torch.tensor(preset(name)).tolist())
