"""The attention map: its weights against the layer itself, its picture, and its controls driven in the kernel."""

from __future__ import annotations

import math

import plotly.graph_objects as go
import pytest
import torch

from k3lite.ops.latent_attention import latent_attention
from widgets import attention_map
from widgets.attention_map import (
    FACTS,
    MAX_TEXT,
    compute,
    describe,
    document,
    explorer,
    figure,
    mla_layers,
)
from widgets.attention_map_figure import COLUMNS, spell

# ---- the document


@pytest.mark.parametrize("depth", [0, 5, 37, 50, 95, 100])
@pytest.mark.parametrize("needles", [1, 2, 3, 4])
def test_every_fact_stands_whole_on_its_own_line_and_the_text_is_unharmed(needles, depth):
    text = "one two three four five six seven eight nine ten"
    for asked in range(1, needles + 1):
        full, lines = document(text, FACTS[:needles], depth, asked)
        assert [full[a:b] for a, b in lines][0] == FACTS[asked - 1]
        assert {full[a:b] for a, b in lines} == set(FACTS[:needles])
        assert all(full[a - 1] == full[b] == "\n" for a, b in lines)
        assert full.endswith(f"?{FACTS[asked - 1][:3]}=")
        rest = full[:-5]
        for fact in FACTS[:needles]:
            rest = rest.replace(f"\n{fact}\n", "")
        assert rest == text
        if asked == 1:
            before = full[: lines[0][0] - 1]
            filler_before = len(before) - 10 * sum(f"\n{f}\n" in before for f in FACTS)
            assert filler_before == round(len(text) * depth / 100)


def test_signs_that_mark_facts_are_taken_out_of_the_readers_text():
    assert compute(text="Call 555-1234? x=y", depth=100).text.startswith("Call - xy\n")
    assert compute(text="né", depth=100).text.startswith("n \n")


# ---- compute


@pytest.mark.parametrize("needles, query, head", [(1, None, 1), (3, 120, 2), (4, 0, 1), (2, 60, 2)])
def test_weights_are_those_of_the_layer(needles, query, head):
    """The values that the layer averages, weighted as the map says, are what latent_attention returns."""
    r = compute(needles=needles, query=query, head=head)
    q, k, v = attention_map._run(r.text)[r.layer]
    mla = attention_map._model().model.layers[r.layer - 1].self_attn
    given = []
    hook = mla.register_forward_pre_hook(lambda _, x: given.append(x[0]))
    with torch.no_grad():
        attention_map._model()(torch.tensor([list(r.text.encode())]))
        hook.remove()
        want = latent_attention(mla.query(given[0]), mla.latents(given[0]), mla.kv_b(), mla.nope_dim)
    got = torch.tensor(r.weights) @ v[0, :, head - 1]
    torch.testing.assert_close(got, want[0, r.query, head - 1], rtol=1e-3, atol=1e-4)
    assert sum(r.weights) == pytest.approx(1, abs=1e-3) and not any(r.weights[r.query + 1 :])


def test_one_hidden_line_gets_nearly_all_and_of_several_the_asked_one_does_not_stand_out():
    """What chapter 02 reports: the shipped layer looks for a fact, not for the fact that was asked for."""
    assert compute(needles=1).on_asked > 0.95 and compute(needles=1).on_others == 0
    several = [compute(needles=4, asked=asked, head=head) for asked in (1, 2, 3, 4) for head in (1, 2)]
    assert all(r.on_asked + r.on_others > 0.95 for r in several)
    assert sum(r.on_asked for r in several) / len(several) < 0.6


def test_entropy_effective_number_and_the_five_largest():
    r = compute(needles=3, sharpness=0.25)
    entropy = -sum(p * math.log2(p) for p in r.weights if p > 0)
    assert r.entropy == pytest.approx(entropy, abs=0.01) and r.effective == pytest.approx(2**r.entropy)
    assert [r.weights[i] for i in r.top] == sorted(r.weights, reverse=True)[:5]
    assert r.on_asked == pytest.approx(sum(r.weights[slice(*r.lines[0])]))


def test_sharpness_goes_from_even_to_one():
    spread = [compute(query=200, sharpness=s).effective for s in (1e-6, 0.1, 1, 10, 1000)]
    assert spread[0] == pytest.approx(201, rel=0.01) and spread == sorted(spread, reverse=True)
    assert spread[-1] < 1.05


def test_the_mask_off_lets_a_query_look_ahead_and_changes_nothing_for_the_last():
    on, off = compute(query=50), compute(query=50, causal=False)
    assert on.seen == 51 and off.seen == len(off.text)
    assert sum(off.weights[51:]) > 0.5 and off.on_asked > on.on_asked  # the fact stands behind the query
    assert compute(causal=False).weights == compute().weights


def test_first_token_sees_itself_alone():
    r = compute(query=0)
    assert r.weights[0] == 1 and r.top == (0,) and r.entropy == 0


def test_only_layers_with_slots_are_offered():
    kinds = attention_map._model().config.layer_kinds
    assert [kinds[n - 1] for n in mla_layers()] == ["mla"] * kinds.count("mla")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"text": "a" * (MAX_TEXT + 1)}, f"text: got {MAX_TEXT + 1} bytes, wanted at most {MAX_TEXT}."),
        ({"facts": ("abc=40711",)}, "facts: got 'abc=40711', wanted 1 to 8: three small letters"),
        ({"facts": ()}, "facts: got 0 facts, wanted 1 to 8"),
        ({"facts": ("abc=4071", "abc=9999")}, "facts: got the keys abc, abc, wanted each once."),
        ({"needles": 0}, "hidden facts: got 0, wanted a whole number from 1 to 4."),
        ({"needles": 2, "asked": 3}, "fact asked for: got 3, wanted a whole number from 1 to 2."),
        ({"depth": 101}, "place: got 101, wanted 0 to 100 percent."),
        ({"query": 10_000}, "query token: got 10000, wanted a whole number from 0 to"),
        ({"layer": 1}, r"layer: got 1, wanted one with attention weights \(4\)."),
        ({"head": 3}, "head: got 3, wanted a whole number from 1 to 2."),
        ({"sharpness": 0}, "sharpness: got 0, wanted a factor above 0."),
        ({"sharpness": math.nan}, "sharpness: got nan"),
    ],
)
def test_nonsense_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute(**arguments)


def test_an_empty_text_still_has_its_fact():
    assert compute(text="").text == "\nabc=4071\n?abc="


def test_words_say_what_the_picture_says():
    r = compute(needles=3, sharpness=0.5, causal=False, query=100)
    text = describe(r)
    assert f"Head 1 of layer 4, asked by {spell(r.text, 100)}, may look at {len(r.text)} tokens" in text
    assert f"{100 * r.weights[r.top[0]]:.0f} % on {spell(r.text, r.top[0])}" in text
    assert f"the 2 other hidden lines {100 * r.on_others:.0f} %" in text
    assert "What-if: scores multiplied by 0.5 and the mask lifted" in text
    plain = describe(compute())
    assert "What-if" not in plain and "other hidden" not in plain


# ---- figure


@pytest.mark.parametrize(
    "arguments", [{}, {"needles": 4, "query": 0}, {"text": "x" * MAX_TEXT, "needles": 4}, {"text": ""}]
)
def test_traces_are_always_the_same_in_the_same_order(arguments):
    r = compute(**arguments)
    fig = figure(r)
    names = ["attention", "fact asked for", "other hidden facts", "query", "text", "by place", "five largest"]
    assert [t.name for t in fig.data] == names
    cells = [x for row in fig.data[0].z for x in row if x is not None]
    assert cells == [round(100 * x, 2) for x in r.weights[: r.seen]]
    assert len(fig.data[4].text) == len(fig.data[5].y) == len(r.text)
    assert max(fig.data[4].y) <= fig.layout.yaxis.range[0]
    assert all(fig.data[4].text)  # plotly never shows a text again that was once empty


def test_marks_stand_at_the_facts_and_at_the_query():
    r = compute(needles=2, query=120)
    fig = figure(r)
    a, b = r.lines[0]
    drawn = {(round(x), round(y)) for x, y in zip(fig.data[1].x, fig.data[1].y, strict=True) if x is not None}
    assert drawn == {(i % COLUMNS, i // COLUMNS) for i in range(a, b)}
    assert (fig.data[3].x[0], fig.data[3].y[0]) == (120 % COLUMNS, 120 // COLUMNS)


def test_title_says_the_finding():
    assert "in the line asked for" in figure(compute()).layout.title.text
    r = next(r for r in (compute(needles=4, asked=a) for a in (1, 2, 3, 4)) if r.on_asked < 0.1)
    assert (
        f"{100 * r.weights[r.top[0]]:.0f} % of the attention is on {spell(r.text, r.top[0])}"
        in figure(r).layout.title.text
    )
    assert "in a line not asked for" in figure(r).layout.title.text
    assert "in no hidden line" in figure(compute(query=20)).layout.title.text


# ---- explorer


@pytest.fixture
def box():
    return explorer()


def test_explorer_starts_with_the_picture_of_its_arguments():
    box, expected = explorer(text="A quiet day at sea.", needles=2), compute(text="A quiet day at sea.", needles=2)
    assert isinstance(box.figure, go.FigureWidget)
    assert list(box.figure.data[5].y) == [round(100 * x, 2) for x in expected.weights]
    assert repr(box) == "Explorer('attention map')" and box.message.value == ""
    assert box.controls["query"].value == expected.query


CHANGES = [
    ("text", "Another text, without a single number in it."),
    ("facts", "zzy=5555"),
    ("needles", 3),
    ("depth", 70),
    ("query", 30),
    ("head", (4, 2)),
    ("sharpness", 0.25),
    ("causal", False),
]


@pytest.mark.parametrize("name, value", CHANGES)
def test_each_control_redraws_as_compute_says(box, name, value):
    if name == "causal":
        box.controls["query"].value = 30
    elif name == "head":
        box.controls["needles"].value = 4
    before = list(box.figure.data[5].y)
    box.controls[name].value = value
    layer, head = box.controls["head"].value
    values = {n: c.value for n, c in box.controls.items() if n not in ("head", "facts")}
    expected = figure(compute(**values, facts=tuple(box.controls["facts"].value.split()), layer=layer, head=head))
    assert list(box.figure.data[5].y) == list(expected.data[5].y) != before
    assert box.figure.layout.title.text == expected.layout.title.text and box.message.value == ""


def test_another_text_puts_the_query_back_to_its_end(box):
    box.controls["query"].value = 10
    box.controls["needles"].value = 4
    assert box.controls["query"].value == box.controls["query"].max == len(compute(needles=4).text) - 1
    assert [label for label, _ in box.controls["asked"].options] == ["?abc=", "?kqz=", "?mwd=", "?xop="]
    box.controls["asked"].value = 4
    box.controls["needles"].value = 2  # the question asked for must still be hidden
    assert box.controls["asked"].value == 2 and box.message.value == ""
    assert "?kqz=" in "".join(box.figure.data[4].text)


def test_the_readers_own_facts(box):
    box.controls["needles"].value = 4
    box.controls["facts"].value = "cat=1111 dog=2222"
    assert box.controls["needles"].value == box.controls["needles"].max == 2
    assert [label for label, _ in box.controls["asked"].options] == ["?cat=", "?dog="]
    shown = "".join(box.figure.data[4].text)
    assert "cat=1111" in shown and "dog=2222" in shown and box.message.value == ""
    before = box.figure.data[5].y
    box.controls["facts"].value = "cat=1111 dog=22"
    assert "facts: got &#x27;dog=22&#x27;" in box.message.value and box.figure.data[5].y == before
    box.controls["facts"].value = "cat=1111 dog=2222 cow=3333"
    assert box.controls["needles"].max == 3 and box.message.value == ""


def test_a_text_that_is_too_long_is_said_and_the_picture_stays(box):
    before = box.figure.data[5].y
    box.controls["text"].value = "x" * 1000
    assert "text: got 1000 bytes" in box.message.value and box.figure.data[5].y == before
    box.controls["text"].value = "short again"
    assert box.message.value == "" and box.figure.data[5].y != before


def test_every_control_is_labelled_with_its_unit(box):
    assert all("(" in c.description and c.description.endswith(")") for c in box.controls.values())


def test_the_run_is_kept_while_only_the_query_moves(box, monkeypatch):
    monkeypatch.setattr(attention_map, "encode", lambda text: pytest.fail("the model read the text again"))
    box.controls["query"].value = 42
    box.controls["sharpness"].value = 0.5
    assert box.message.value == ""


def test_two_explorers_do_not_touch_each_other(box):
    other = explorer()
    box.controls["needles"].value = 4
    assert other.controls["needles"].value == 1 and len(other.controls["asked"].options) == 1
