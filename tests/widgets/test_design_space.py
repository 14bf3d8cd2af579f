"""The design-space explorer: its costs against the budget for every kind of choice, what follows from them, its controls."""

from __future__ import annotations

import dataclasses
import itertools
import time

import plotly.graph_objects as go
import pytest

from k3lite import budget
from k3lite.config import K3Config
from k3lite.devices import find_device, sent_bytes
from widgets.design_space import HIDDEN, compute, describe, explorer, figure
from widgets.design_space_cost import AXES, BF16, CONTEXTS, FILL, K3_CHOICE, MXFP4, Choice, combined, config_of, demand

K3 = K3Config.preset("kimi-k3")
MACHINE = find_device("H200").times(32)


def by_hand(choice: Choice, machine, batch: int, tokens: int) -> tuple[float, bool]:
    """Seconds of a token and whether it fits, from the budget of this config and nothing else."""
    c = config_of(choice)
    work = budget.forward_work(c, 1, tokens, batch)
    seconds = max(work.bytes / machine.memory_bandwidth, work.flops / machine.bf16)
    seconds += sent_bytes(c, batch, machine.count) / machine.link
    held = budget.checkpoint_bytes(c).total + budget.cache_bytes(c, tokens + 1, batch).total
    return seconds / batch, held <= machine.memory


# ---- compute


def test_k3s_choice_is_k3():
    c = config_of(K3_CHOICE)
    assert c.linear_attn_config.full_attn_layers[-1] == 93 and (c.num_mla_layers, c.num_kda_layers) == (24, 69)
    assert dataclasses.replace(c, linear_attn_config=K3.linear_attn_config) == K3
    assert all(
        getattr(K3_CHOICE, name) in values and values == tuple(dict.fromkeys(values)) for name, values in AXES.items()
    )


@pytest.mark.parametrize("n", [0, 1, 24, 47, 92, 93])
def test_layers_are_as_many_as_asked_and_the_last_is_mla(n):
    c = config_of(dataclasses.replace(K3_CHOICE, mla_layers=n))
    assert c.num_mla_layers == n and (not n or c.layer_kinds[-1] == "mla")


CHOICES = [
    K3_CHOICE,
    Choice(0, 64, 4096, 64, BF16),
    Choice(93, 2048, 64, 1, MXFP4),
    Choice(48, 256, 384, 8, BF16),
    Choice(3, 1536, 1024, 16, MXFP4),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("batch, tokens", [(1, 1), (7, 4096), (512, 300_000)])
def test_a_point_costs_what_the_budget_says(choice, batch, tokens):
    d = demand(choice, tokens)
    seconds, fits = by_hand(choice, MACHINE, batch, tokens)
    assert d.step(batch, MACHINE).seconds / batch == pytest.approx(seconds, rel=1e-9)
    assert bool(d.fits(batch, MACHINE.memory)) is fits


@pytest.mark.parametrize("tokens", [1, 50_000])
def test_combinations_are_what_their_own_configs_ask_for(tokens):
    attention, mixtures = (
        [(0, 64), (1, 2048), (24, 512), (93, 128)],
        [(64, 64, BF16), (896, 16, MXFP4), (4096, 1, MXFP4)],
    )
    d = combined(attention, mixtures, tokens)
    for i, j in itertools.product(range(4), range(3)):
        want = demand(Choice(*attention[i], *mixtures[j]), tokens)
        for field in dataclasses.fields(want):
            assert getattr(d, field.name)[i, j] == pytest.approx(getattr(want, field.name), rel=1e-12), field.name


def test_as_many_as_fit_is_the_largest_batch():
    s = compute(batch=FILL, tokens=32_768)
    assert (
        by_hand(K3_CHOICE, s.machine, s.k3.batch, 32_768)[1]
        and not by_hand(K3_CHOICE, s.machine, s.k3.batch + 1, 32_768)[1]
    )
    assert s.k3.seconds == pytest.approx(by_hand(K3_CHOICE, s.machine, s.k3.batch, 32_768)[0], rel=1e-9)
    none = compute(devices=11, batch=FILL)
    assert none.k3.batch == 0 and none.k3.seconds is None and not none.k3.fits, "eleven H200 do not hold the weights"
    assert compute(devices=12, batch=FILL, tokens=1024).k3.batch > 0


def test_points_of_every_axis_are_by_hand():
    s = compute(device="B200", devices=16, batch=64, tokens=65_536, bandwidth=0.5, interconnect=0.25)
    one = find_device("B200")
    assert s.machine.memory_bandwidth == 16 * one.memory_bandwidth / 2 and s.machine.link == 4 * one.link
    for name, axis in s.axes.items():
        assert axis.k3 == getattr(K3_CHOICE, name) and [p.value for p in axis.points] == list(AXES[name])
        for p in axis.points:
            seconds, fits = by_hand(dataclasses.replace(K3_CHOICE, **{name: p.value}), s.machine, 64, 65_536)
            assert (p.seconds, p.fits) == (pytest.approx(seconds, rel=1e-9), fits)
            assert p.seconds == pytest.approx(max(p.memory, p.arithmetic) + p.link)
    for name, mla in (("K3", 24), ("MLA everywhere", 93), ("KDA everywhere", 0)):
        choice = dataclasses.replace(K3_CHOICE, mla_layers=mla)
        want = [by_hand(choice, s.machine, 64, n)[0] for n in CONTEXTS]
        assert s.contexts[name] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("batch, tokens", [(64, 65_536), (FILL, 4096), (1, 4096)])
def test_the_cheapest_of_all_is_the_cheapest_of_a_search_by_hand(batch, tokens):
    floors = {"mla_layers": 87, "latent": 1024, "experts": 2048, "top_k": 32}
    s = compute(batch=batch, tokens=tokens, devices=64, **floors)
    allowed = [[v for v in values if v >= floors.get(name, v)] for name, values in AXES.items()]
    found = {}
    for values in itertools.product(*allowed):
        choice = Choice(*values)
        d = demand(choice, tokens)
        size = int(d.batch(batch, s.machine.memory))
        if size and d.fits(size, s.machine.memory):
            found[choice] = by_hand(choice, s.machine, size, tokens)[0]
    best = min(found.values())
    assert found[s.cheapest] == pytest.approx(best, rel=1e-9)
    assert s.cheapest_point.seconds == pytest.approx(best, rel=1e-9) and s.cheapest_point.fits


def test_without_floors_the_cheapest_is_no_model_anyone_wants():
    far, near = compute().cheapest, compute(batch=1, tokens=4096).cheapest
    assert far == Choice(0, 64, 64, 1, MXFP4) and near == Choice(93, 64, 64, 1, MXFP4)


def test_floors_at_k3_give_k3_where_contexts_are_long():
    s = compute(tokens=1_048_576, batch=32, mla_layers=24, latent=512, experts=896, top_k=16)
    assert s.cheapest == K3_CHOICE and s.cheapest_point.seconds == pytest.approx(s.k3.seconds)
    assert [s.axes[n].cheapest for n in AXES] == [24, 512, 896, 16, MXFP4]


def test_the_ratio_follows_from_the_context():
    """A KDA layer has 211 million parameters more than an MLA layer, and its state is moved twice: slots pay below that."""
    assert budget.kda_layer_parameters(K3) - budget.mla_layer_parameters(K3) == 211_544_288
    assert compute(batch=1, tokens=4096).axes["mla_layers"].cheapest == 93
    assert compute(batch=256, tokens=131_072).axes["mla_layers"].cheapest == 0
    between = compute(batch=FILL, tokens=4096).axes["mla_layers"]
    assert between.cheapest == between.turn == 42, "as many slots as arithmetic has time for"


def test_one_sequence_meets_sixteen_experts_however_many_there_are():
    axis = compute(batch=1, tokens=4096).axes["experts"]
    assert axis.hidden == 2048 and [p.fits for p in axis.points][-1] is False, "only memory sets the end"
    assert compute(batch=256, tokens=4096).axes["experts"].hidden < 896, "a batch reads them all"


def test_hidden_and_turn_are_what_they_say():
    for s in (compute(), compute(batch=FILL, tokens=4096), compute(batch=1), compute(arithmetic=1 / 64)):
        for axis in s.axes.values():
            fitting = {p.value: p.seconds for p in axis.points if p.fits}
            if axis.name == "precision":
                assert axis.hidden is axis.turn is axis.one_more is None
                continue
            least = min(fitting.values())
            assert axis.hidden == max(v for v, t in fitting.items() if t <= (1 + HIDDEN) * least)
            limits = [p.limit for p in axis.points if p.seconds is not None]
            assert (axis.turn is None) == (len(set(limits)) == 1)
            if axis.turn is not None:
                assert (
                    limits[AXES[axis.name].index(axis.turn)]
                    != limits[0]
                    == limits[AXES[axis.name].index(axis.turn) - 1]
                )
    assert {p.limit for p in compute(arithmetic=1 / 64).axes["latent"].points} == {"arithmetic"}


def test_one_more_is_the_slope_at_k3():
    axis = compute().axes["mla_layers"]
    here, there = (next(p for p in axis.points if p.value == n) for n in (24, 27))
    assert axis.one_more == pytest.approx((there.seconds - here.seconds) / here.seconds / 3)
    assert compute(device="laptop", devices=1, batch=FILL).axes["top_k"].one_more is None


def test_nothing_fits_on_a_laptop():
    s = compute(device="laptop", devices=1)
    assert s.cheapest is None and s.cheapest_point is None and not s.k3.fits
    assert all(a.cheapest is None and a.hidden is None for a in s.axes.values())
    assert compute(experts=64, top_k=64).cheapest.experts == 64


@pytest.mark.parametrize(
    "values, message",
    [
        ({"device": "abacus"}, "device: got 'abacus', wanted one of H200"),
        ({"devices": 0}, "devices: got 0, wanted a whole number from 1"),
        ({"bandwidth": 0}, "bandwidth: got 0, wanted a factor above 0"),
        ({"arithmetic": True}, "arithmetic: got True"),
        ({"memory": -1.0}, "memory: got -1.0"),
        ({"interconnect": "2"}, "interconnect: got '2'"),
        ({"batch": -1}, "batch: got -1"),
        ({"tokens": 0}, "context length: got 0"),
        ({"mla_layers": 25}, "floor of mla_layers: got 25, wanted one of 0, 3, 6"),
        ({"top_k": 0}, "floor of top_k: got 0, wanted one of 1, 2, 4"),
    ],
)
def test_nonsense_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        compute(**values)


# ---- words and figure


def test_words():
    text = describe(compute())
    assert text.startswith(
        "32 H200 (206 FLOPs a byte), 131,072 tokens, a batch of 256: a token of K3 takes 69.5 µs of all"
    )
    assert "It waits for memory; FLOPs take 0.4 times as long as bytes." in text
    assert (
        "one more MLA layer instead of a KDA layer costs +1.28%, one more expert +0.05%, one more expert a token +0.11%"
        in text
    )
    assert "has 93 KDA to 0 MLA layers, a latent of 64, 1 of 64 experts in MXFP4" in text
    assert text.endswith("A budget knows no quality: where no floor is set, it takes what costs least, however small.")
    floors = describe(compute(mla_layers=24, latent=512, experts=896, top_k=16))
    assert (
        "69 KDA to 24 MLA layers, a latent of 512, 16 of 896 experts in MXFP4; a token costs 100.0% of K3's." in floors
    )
    assert "no quality" not in floors
    assert "does not fit, not even with one sequence" in describe(compute(device="laptop", devices=1, batch=FILL))
    small = describe(compute(device="laptop", devices=1))
    assert "But weights and caches do not fit." in small and "No design that is not below the floors fits." in small
    assert "Hidden" not in small


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"batch": FILL, "tokens": 4096},
        {"mla_layers": 24, "top_k": 16},
        {"device": "laptop", "devices": 1},
        {"device": "laptop", "devices": 1, "batch": FILL},
    ],
)
def test_traces_are_always_the_same_in_the_same_order(values):
    fig = figure(compute(**values))
    assert [t.type for t in fig.data] == ["scatter"] * (5 * 8 + 4)
    assert len(fig.layout.annotations) == 6 and len(fig.layout.shapes) == 5
    assert [t.name for t in fig.data] == [t.name for t in figure(compute()).data]


def test_the_picture_shows_the_numbers():
    s = compute(batch=FILL, tokens=4096, mla_layers=24)
    fig = figure(s)
    lines = {t.name: t for t in fig.data[:8]}
    axis = s.axes["mla_layers"]
    assert list(lines["a token"].y) == [p.seconds for p in axis.points] and list(lines["a token"].x) == list(
        AXES["mla_layers"]
    )
    assert list(lines["bytes over bandwidth"].y) == [p.memory for p in axis.points]
    assert list(lines["K3's choice"].x) == [24] and list(lines["K3's choice"].y) == [s.k3.seconds]
    assert list(lines["cheapest not below the floor"].x) == [42] and list(lines["largest that is hidden"].x) == [93]
    assert lines["a token"].text[14] == f"42: 8.35 µs, a token, batch {axis.points[14].batch:,}"
    assert [shape.visible for shape in fig.layout.shapes] == [True, False, False, False, False]
    assert fig.layout.shapes[0].x0 == 24
    assert [list(t.y) for t in fig.data[-4:-1]] == [list(curve) for curve in s.contexts.values()]
    assert fig.layout.title.text == "<b>A token of K3 costs 9.38 µs of 32 × H200: it waits for memory</b>"
    assert "if it did fit" in figure(compute(devices=1)).layout.title.text
    assert "does not fit on 1 × laptop" in figure(compute(device="laptop", devices=1, batch=FILL)).layout.title.text


def test_designs_that_do_not_fit_are_crossed():
    s = compute()
    crosses = [t for t in figure(s).data if t.name == "does not fit"]
    assert [list(t.x) for t in crosses] == [
        [p.value for p in s.axes[n].points if not p.fits]
        for n in ("mla_layers", "latent", "precision", "experts", "top_k")
    ]
    assert crosses[0].x[0] == 78 and list(crosses[2].x) == [BF16]


# ---- explorer


@pytest.fixture
def box():
    return explorer()


def test_explorer_starts_where_it_is_told():
    box = explorer(device="B200", devices=16, batch=64, tokens=8192)
    assert isinstance(box.figure, go.FigureWidget) and repr(box) == "Explorer('design_space')"
    assert box.figure.data[-1].x[0] == 8192 and "16 × B200" in box.figure.layout.title.text
    with pytest.raises(ValueError, match="device: got 'abacus'"):
        explorer(device="abacus")


@pytest.mark.parametrize(
    "name, value",
    [
        ("device", "H100 SXM"), ("devices", 64), ("tokens", 1024), ("batch", FILL), ("bandwidth", 2.0), ("arithmetic", 0.25),
        ("memory", 0.5), ("interconnect", 1 / 16), ("mla_layers", 24), ("latent", 512), ("experts", 896), ("top_k", 16),
    ],
)  # fmt: skip
def test_every_control_reaches_the_picture(box, name, value):
    before = box.text.value
    box.controls[name].value = value
    want = figure(compute(**{name: value}))
    assert box.message.value == "" and box.text.value != before
    assert [list(t.y) for t in box.figure.data] == [list(t.y) for t in want.data]
    assert box.figure.layout.title.text == want.layout.title.text


def test_labels_end_in_their_unit_and_no_update_is_slow(box):
    times = []
    for name, control in box.controls.items():
        assert control.description.endswith(")"), name
        values = [option[1] for option in control.options]
        for value in (values[0], values[-1]):
            start = time.thread_time()
            control.value = value
            times.append(time.thread_time() - start)
            assert box.message.value == "", (name, value)
    assert sorted(times)[len(times) // 2] < 0.2, "CPU seconds, the median"


def test_a_fault_is_said(box):
    box.controls["batch"].options = [("wrong", -3), *box.controls["batch"].options]
    box.controls["batch"].value = -3
    assert "Not drawn." in box.message.value and "batch: got -3" in box.message.value
    box.controls["batch"].value = 64
    assert box.message.value == "" and "a batch of 64" in box.text.value
