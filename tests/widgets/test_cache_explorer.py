"""The cache explorer: its numbers against the published ones, its picture, and its controls driven in the kernel."""

from __future__ import annotations

import time

import plotly.graph_objects as go
import pytest

from k3lite import budget
from k3lite.config import ConfigError, K3Config, presets
from widgets import common
from widgets.cache_explorer import CURVE_TOKENS, compute, describe, explorer, figure

K3 = K3Config.preset("kimi-k3")
MILLION = 1_048_576
GIB = 2**30


def names_of(fig) -> list[str]:
    return [t.name for t in fig.data]


def captions(fig) -> str:
    return "\n".join(a.text for a in fig.layout.annotations if a.visible is not False)


# ---- compute: k3-architecture §3.3


def test_kimi_k3_at_a_million_tokens_gives_the_published_bytes():
    r = compute()
    assert r.tokens == MILLION and r.batch == 1
    assert r.hybrid.total == 29_440_401_408
    assert r.mla.total == 112_340_238_336
    assert r.mha.total == 4_793_183_502_336
    assert r.hybrid.parts == {"latent": 28_991_029_248, "state": 434_110_464, "conv": 15_261_696}
    assert (r.hybrid.per_token, r.mla.per_token, r.mha.per_token) == (27_648, 107_136, 4_571_136)
    assert r.gqa.per_token == 4_571_136 // 12  # 8 of 96 heads
    assert (r.break_even_state, r.break_even) == (5_461, 5_653)


def test_kimi_linear_at_a_million_tokens():
    r = compute(layers=27, kda_layers=20, heads=32, kv_heads=8)
    assert r.hybrid.per_token == 8_064
    assert r.hybrid.parts["latent"] == 7.875 * GIB and r.mla.total == 30.375 * GIB
    assert r.hybrid.parts["state"] == 40 * 2**20


@pytest.mark.parametrize("tokens, saved_percent", [(1024, -335), (4096, -28), (8192, 23), (32768, 61), (131072, 71)])
def test_saving_against_mla_everywhere_depends_on_the_context(tokens, saved_percent):
    r = compute(tokens=tokens)
    assert round(100 * (1 - r.hybrid.total / r.mla.total)) == saved_percent


def test_break_even_is_where_the_two_totals_cross():
    even = compute().break_even
    at, after = compute(tokens=even), compute(tokens=even + 1)
    assert at.hybrid.total > at.mla.total
    assert after.hybrid.total < after.mla.total


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("device", common.DEVICES)
def test_longest_context_fits_and_one_token_more_does_not(device, batch):
    r = compute(device=device, batch=batch)
    for s in r.schemes:
        if s.fits:
            assert s.fixed + s.fits * s.per_token <= r.device_bytes < s.fixed + (s.fits + 1) * s.per_token
    assert r.hybrid.fits == 0 if r.hybrid.fixed > r.device_bytes else r.hybrid.fits > 0


def test_what_fits_at_the_ends():
    assert compute(kda_layers=93).hybrid.fits is None  # nothing grows
    big = compute(batch=1024, device="laptop")  # the states alone are 414 GiB
    assert big.hybrid.fits == 0 and big.hybrid.fits_text == "not one token"


def test_a_batch_is_so_many_times_one_sequence_and_leaves_the_break_even():
    one, many = compute(), compute(batch=8)
    for a, b in zip(one.schemes, many.schemes, strict=True):
        assert b.total == 8 * a.total and b.curve == tuple(8 * n for n in a.curve)
    assert many.break_even == one.break_even


def test_the_state_stays_fp32_when_the_cached_numbers_shrink():
    two, one = (compute(number_bytes=n).hybrid.parts for n in (2, 1))
    assert one["state"] == two["state"]
    assert (one["latent"], one["conv"]) == (two["latent"] // 2, two["conv"] // 2)


def test_what_a_scheme_keeps_by_kind_adds_up():
    r = compute(tokens=2048, batch=3)
    for s in r.schemes:
        assert sum(s.parts.values()) == s.total
    assert r.gqa.parts["keys"] == r.gqa.parts["values"] and r.mla.parts["state"] == r.mla.parts["conv"] == 0


def test_a_window_keeps_gqa_rows_up_to_its_length_and_no_more():
    short, long = compute(tokens=2048, window=4096), compute(tokens=MILLION, window=4096)
    assert short.window.total == short.gqa.total
    assert long.window.total == 4096 * long.gqa.per_token and long.window.fits is None
    assert compute(window=2**17, batch=64, device="laptop").window.fits == 16 * 10**9 // (64 * long.gqa.per_token)


def test_one_kv_head_is_mqa():
    r = compute(kv_heads=1)
    assert r.gqa.name == "MQA, 1 KV head" and r.gqa.per_token == r.mha.per_token // 96


@pytest.mark.parametrize(
    "tokens, page, slots, then", [(1024, 6144, 5120, 5119), (1536, 1024, 512, 511), (1024, 64, 0, 63)]
)
def test_pages_leave_the_slots_of_their_last_one_unused(tokens, page, slots, then):
    r = compute(tokens=tokens, page_size=page, batch=8)
    assert r.hybrid.unused == slots * r.hybrid.per_token and r.mha.unused == slots * r.mha.per_token
    assert r.unused_next == then * r.hybrid.per_token
    paged = budget.paged_cache_bytes(K3, tokens, 8, page_size=page)
    assert r.hybrid.total + r.hybrid.unused == paged.total - paged.table
    assert compute(tokens=MILLION, window=4096, page_size=6144).window.unused == 2048 * r.gqa.per_token // 8


def test_nothing_is_unused_in_pages_of_one_token():
    r = compute(page_size=1, tokens=1536)
    assert r.unused_next == 0 and all(s.unused == 0 for s in r.schemes)


def test_without_kda_layers_the_hybrid_is_the_twin():
    r = compute(kda_layers=0)
    assert r.hybrid.total == r.mla.total and r.hybrid.fixed == 0 and r.break_even is None
    assert "no layer is KDA" in describe(r)


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"kv_heads": 7}, "key-value heads: got 7, wanted a divisor of 96 heads"),
        ({"kv_heads": 97}, "key-value heads: got 97"),
        ({"heads": 0}, "heads: got 0"),
        ({"layers": 2.5}, "layers: got 2.5, wanted a whole number"),
        ({"kda_layers": 94}, "KDA layers: got 94, wanted a whole number from 0 to 93"),
        ({"kda_layers": -1}, "KDA layers: got -1"),
        ({"head_dim": -128}, "head width: got -128"),
        ({"latent_width": True}, "latent width: got True"),
        ({"number_bytes": 0}, "bytes per number: got 0"),
        ({"tokens": 0}, "context length: got 0"),
        ({"batch": 0}, "batch: got 0"),
        ({"window": 0}, "window: got 0"),
        ({"page_size": 0}, "page: got 0, wanted a whole number from 1"),
        ({"device": "abacus"}, "device: got 'abacus', wanted one of H200"),
    ],
)
def test_compute_names_the_value_it_cannot_take(wrong, named):
    with pytest.raises(ValueError, match=named):
        compute(**wrong)


# ---- words


def test_the_sentence_says_the_published_result():
    text = describe(compute())
    assert text.startswith(
        "At 1,048,576 tokens the hybrid keeps 27.4 GiB per sequence where MLA in every layer would keep 104.6 GiB: "
        "3.8 times less. Up to 5,653 tokens the hybrid costs more"
    )
    assert "5,461 tokens if the convolution inputs are left out" in text
    assert "5,083,573 tokens of the hybrid's cache and 1,316,084 tokens of MLA's, with no weights in it" in text
    assert "A window of the last 4,096 tokens keeps 1.45 GiB and nothing older." in text
    assert text.endswith(
        "In pages of 64 tokens the hybrid holds 27.4 GiB, none of it unused; "
        "one token more would begin a page and leave 1.66 MiB unused."
    )


def test_the_sentence_follows_batch_and_short_contexts():
    text = describe(compute(batch=8, tokens=1024))
    assert "for a batch of 8 sequences" in text and "times more" in text and "nothing older" not in text


def test_the_sentence_follows_the_pages():
    assert "holds 502.3 MiB, 67.5 MiB of it unused." in describe(compute(tokens=1024, page_size=6144, number_bytes=1))
    assert describe(compute(page_size=1)).endswith(
        "In pages of one token the hybrid holds 27.4 GiB, none of it unused."
    )
    assert describe(compute(kda_layers=93)).endswith("Nothing of the hybrid lies in pages.")


@pytest.mark.parametrize(
    "n, text, short",
    [
        (0, "0 B", "0 B"),
        (1023, "1,023 B", "1023 B"),
        (8192, "8.00 KiB", "8 KiB"),
        (434_110_464, "414.0 MiB", "414 MiB"),
        (1.25 * GIB, "1.25 GiB", "1.25 GiB"),
        (GIB - 1, "1.00 GiB", "1 GiB"),
        (4_793_183_502_336, "4.36 TiB", "4.359 TiB"),
    ],
)
def test_bytes_are_spelled_in_binary_units(n, text, short):
    assert common.format_bytes(n) == text
    assert common.format_bytes(n, short=True) == short


@pytest.mark.parametrize("top", [1, 5, 1000, 1.4 * GIB, 120 * GIB, 2.0**62])
def test_byte_ticks_are_few_and_cover_the_axis(top):
    steps = common.byte_steps(top)
    assert steps[0] == 0 and steps[-1] <= top and 2 <= len(steps) <= 7
    assert steps[-1] > top / 2


# ---- figure


def test_curves_hold_the_bytes_of_each_scheme():
    r = compute()
    fig = figure(r)
    names = ["MHA, 96 heads", "GQA, 8 KV heads", "window, last 4,096 tokens", "MLA in every layer"]
    assert names_of(fig)[:5] == [*names, "hybrid, 69 KDA + 24 MLA"]
    for trace, s in zip(fig.data[:5], r.schemes, strict=True):
        assert tuple(trace.x) == CURVE_TOKENS and tuple(trace.y) == s.curve
        assert trace.y[CURVE_TOKENS.index(MILLION)] == s.total
    assert fig.layout.xaxis.type == fig.layout.yaxis.type == "log"


def test_marks_stand_where_they_should():
    r = compute()
    dots, memory, others, filled, even = figure(r).data[5:10]
    assert list(dots.x) == [MILLION] * 5 and list(dots.y) == [s.total for s in r.schemes]
    assert set(memory.y) == {141e9} and memory.name == "memory of one H200, 141 GB"
    assert set(others.y) == {float(n) for n in common.DEVICES.values()} - {141e9} | {None}
    assert list(filled.x) == [30_845, 370_148, None, 1_316_084, None]  # the window's nowhere, the hybrid's off the axis
    assert list(even.x) == [5_653] and even.y[0] == 5_653 * 107_136


def row(fig, height: int) -> list[float]:
    """Lengths of the bars stacked at one height."""
    return [b.x[0] for b in fig.data[10:] if b.y[0] == height]


def test_bars_are_to_scale_stacked_by_kind_and_say_where_they_are_cut():
    r = compute(tokens=1_572_864, page_size=6144)
    fig = figure(r)
    assert fig.layout.barmode == "stack"
    for height, s in zip((4, 3, 2, 1, 0), r.schemes, strict=True):
        assert row(fig, height) == [*s.parts.values(), s.unused]
    assert row(fig, 4)[0] == r.mha.total / 2 and sum(row(fig, 2)) == 6144 * r.gqa.per_token
    low, high = fig.layout.xaxis2.range
    assert low == 0 and r.mla.total < high < r.gqa.total
    assert captions(fig).count("bar cut") == 2
    assert "hybrid, 69 KDA + 24 MLA</b>: 40.9 GiB; fits 5,083,573 tokens" in captions(fig)
    assert "window, last 4,096 tokens</b>: 1.45 GiB; keeps nothing older" in captions(fig)
    assert "state 414.0 MiB" in captions(fig)


def test_titles_and_axes_say_the_finding_and_the_units():
    fig = figure(compute(batch=8, tokens=2048))
    assert fig.layout.title.text == "<b>At 2,048 tokens the hybrid keeps 2.3 times more than MLA in every layer</b>"
    assert "tokens" in fig.layout.xaxis.title.text
    assert fig.layout.yaxis.title.text == fig.layout.xaxis2.title.text == "cache for a batch of 8 sequences"
    assert all(t.split()[1] in ("MiB", "GiB", "TiB", "PiB") for t in fig.layout.yaxis.ticktext)
    assert "break-even 5,653 tokens" in captions(fig) and "cache only" in captions(fig)


@pytest.mark.parametrize(
    "setting",
    [{"kda_layers": 0}, {"kda_layers": 93}, {"heads": 1, "kv_heads": 1, "head_dim": 1, "latent_width": 1, "layers": 1,
     "kda_layers": 1, "tokens": 1}, {"batch": 2**20, "layers": 1024, "heads": 1024, "head_dim": 4096}],
    ids=["no KDA", "all KDA", "smallest", "largest"],
)  # fmt: skip
def test_the_figure_keeps_its_shape_at_the_ends(setting):
    usual, fig = figure(compute()), figure(compute(**setting))
    assert [t.type for t in fig.data] == [t.type for t in usual.data]
    assert len(fig.layout.annotations) == len(usual.layout.annotations)
    fig.to_json()  # whole numbers beyond 64 bits would fail here
    assert ("break-even" in captions(fig)) == (fig.data[9].x[0] is not None)


# ---- explorer


@pytest.fixture
def box():
    return explorer()


def drawn(box) -> dict:
    return {name: list(t.y) for name, t in zip(names_of(box.figure), box.figure.data, strict=True)}


def test_explorer_starts_with_the_picture_of_its_arguments():
    box = explorer("kimi-linear-48b", tokens=131_072, device="RTX 4090")
    expected = figure(compute(layers=27, kda_layers=20, heads=32, kv_heads=8, tokens=131_072, device="RTX 4090"))
    assert isinstance(box.figure, go.FigureWidget)
    assert [t.to_plotly_json()["y"] for t in expected.data] == [list(t.y) for t in box.figure.data]
    assert repr(box) == "Explorer('cache')"
    assert "131,072 tokens" in box.text.value and box.message.value == ""


def test_moving_the_context_moves_the_dots_the_bars_and_the_words(box):
    curve = list(box.figure.data[4].y)
    box.controls["tokens"].value = 2048
    r = compute(tokens=2048)
    assert list(box.figure.data[5].x) == [2048] * 5
    assert [b.x[0] for b in box.figure.data[10:]] == [n for s in r.schemes for n in (*s.parts.values(), s.unused)]
    assert list(box.figure.data[4].y) == curve
    assert box.figure.layout.shapes[0].x0 == 2048
    assert "2.3 times more" in box.figure.layout.title.text and "2.3 times more" in box.text.value
    assert box.controls["preset"].value == "kimi-k3"  # the model is still that model


@pytest.mark.parametrize(
    "name, value, scheme",
    [("batch", 8, 0), ("number_bytes", 1, 0), ("layers", 60, 0), ("kda_layers", 40, 4), ("heads", 48, 0),
     ("kv_heads", 12, 1), ("head_dim", 64, 0), ("latent_width", 288, 3), ("window", 512, 2)],
)  # fmt: skip
def test_each_control_changes_what_it_should(box, name, value, scheme):
    box.controls[name].value = value
    settings = {n: c.value for n, c in box.controls.items() if n != "preset"}
    assert settings[name] == value
    expected = compute(**settings).schemes[scheme]
    assert tuple(box.figure.data[scheme].y) == expected.curve != compute().schemes[scheme].curve
    shapes_the_model = name in ("layers", "kda_layers", "heads", "head_dim", "latent_width")
    assert (box.controls["preset"].value == "custom") == shapes_the_model
    assert "Not drawn" not in box.message.value


def test_the_device_moves_its_line(box):
    box.controls["device"].value = "RTX 4090"
    assert set(box.figure.data[6].y) == {24e9} and "RTX 4090, 24 GB" in box.figure.data[6].name


def test_the_page_size_moves_the_unused_part_only(box):
    curves = [list(t.y) for t in box.figure.data[:5]]
    box.controls["tokens"].value = 1024
    box.controls["page_size"].value = 6144
    assert row(box.figure, 1)[-1] == 5120 * 107_136
    assert [list(t.y) for t in box.figure.data[:5]] == curves and box.controls["preset"].value == "kimi-k3"
    assert "135.0 MiB of it unused" in box.text.value and "unused 135.0 MiB" in captions(box.figure)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_can_be_chosen_and_left(box, preset):
    box.controls["preset"].value = "custom"
    before = drawn(box)
    box.controls["preset"].value = preset
    c = box.controls
    assert c["preset"].value == preset and c["heads"].value % c["kv_heads"].value == 0
    assert (drawn(box) == before) == (preset == "kimi-k3")
    assert "Not drawn" not in box.message.value
    c["latent_width"].value += 1
    assert c["preset"].value == "custom"


def test_layers_keep_the_share_of_kda_while_they_are_moved(box):
    c = box.controls
    for layers in (1, 2, 5, 93):
        c["layers"].value = layers
    assert c["kda_layers"].value == 69 and c["kda_layers"].label == "69 of 93 = 74.2%"


def test_key_value_heads_follow_the_heads_with_a_note(box):
    c = box.controls
    c["heads"].value = 90
    assert c["kv_heads"].value == 6
    assert "Key-value heads set from 8 to 6: they must divide the 90 heads." in box.message.value
    assert box.figure.data[1].name == "GQA, 6 KV heads"
    c["tokens"].value = 4096
    assert box.message.value == ""  # a note goes with the next change


@pytest.mark.parametrize("name, value", [("heads", 0), ("heads", -4), ("head_dim", 0), ("latent_width", 10**9)])
def test_nonsense_is_refused_in_sight_and_mended_by_the_next_value(box, name, value):
    good, before = box.controls[name].value, drawn(box)
    box.controls[name].value = value
    assert f"got {value}, wanted a whole number" in box.message.value and 'role="alert"' in box.message.value
    assert drawn(box) == before
    box.controls["tokens"].value = 4096
    assert "wanted a whole number" in box.message.value  # still there while the value is
    box.controls[name].value = good
    assert box.message.value == "" and list(box.figure.data[5].x) == [4096] * 5


def test_a_fault_of_ours_shows_its_traceback(box, monkeypatch):
    def broken(r):
        raise RuntimeError("<b>nothing</b> was drawn")

    monkeypatch.setattr("widgets.cache_explorer.figure", broken)
    box.controls["tokens"].value = 4096
    assert "RuntimeError" in box.message.value and "Traceback" in box.message.value
    assert "&lt;b&gt;nothing" in box.message.value  # shown as text, not as markup


def test_nothing_prints_and_one_change_is_drawn_once(box, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("widgets.cache_explorer.figure", lambda r: calls.append(r) or figure(r))
    box.controls["preset"].value = "kimi-linear-48b"  # moves seven controls
    box.controls["heads"].value = 20
    assert len(calls) == 2
    assert capsys.readouterr() == ("", "")


def test_two_explorers_do_not_share_anything():
    one, two = explorer(), explorer()
    before = drawn(two), two.text.value
    one.controls["layers"].value = 40
    assert (drawn(two), two.text.value) == before and two.controls["layers"].value == 93
    assert not set(one.controls.values()) & set(two.controls.values())


def test_every_control_has_its_label_and_no_update_is_slow(box):
    for name, control in box.controls.items():
        assert control.description and (name == "preset" or control.description.endswith(")"))
    box.controls["tokens"].value = 2048
    times = []
    for tokens in CURVE_TOKENS:
        start = time.thread_time()  # not the clock: others may be using this machine
        box.controls["tokens"].value = tokens
        times.append(time.thread_time() - start)
    assert min(times[1:]) < 0.1


def test_an_unknown_preset_is_named():
    with pytest.raises(ConfigError, match="no 'kimi-k4'"):
        explorer("kimi-k4")
