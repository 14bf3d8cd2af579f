"""The needle lab: its answers against the exam's, its weights against the layer itself, and its controls in the kernel."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import plotly.graph_objects as go
import pytest
import torch

from k3lite.ops.latent_attention import latent_attention
from k3lite.tasks import recall
from k3lite.tasks.recall import KEYS, VOCABULARY, make_documents
from k3lite.tasks.recall_exam import DEPTHS, answers
from k3lite.tasks.recall_job import load_sibling, train_sibling
from k3lite.train import Recipe
from widgets import needle_lab, needle_lab_run
from widgets.needle_lab import LENGTHS, SHARES, compute, count, describe, explorer, figure, siblings, spell, table

VARIANTS = ("kda", "hybrid", "mla", "mla-conv", "mla-rotary")
TRACES = [
    "recall", "counts", *SHARES, "answer right", "answer wrong", "not asked", "question chosen",
]  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One sibling of each kind, hardly trained: what a test needs of them is that they differ."""
    folder, threads = tmp_path_factory.mktemp("siblings"), torch.get_num_threads()
    torch.set_num_threads(1)
    for variant in VARIANTS:
        recipe = Recipe(steps=8, lr=1e-2, warmup=5, task="lab")
        train_sibling(folder / f"{variant}-s0", variant, recipe, longest=32, tokens=256, progress=False)
    torch.set_num_threads(threads)
    return folder


def asked(folder, variant, **options):
    return compute(folder=folder, sibling=f"{variant}-s0", **{"length": 256} | options)


def document(length, facts, seed=0, **options):
    return make_documents(1, length, facts, torch.Generator().manual_seed(seed), questions=min(facts, 16), **options)


# ---- compute


def test_siblings_are_found_as_trained_and_as_shipped_in_the_order_of_their_kinds(folder, tmp_path):
    assert list(siblings(folder)) == [f"{v}-s0" for v in VARIANTS]
    shutil.copytree(folder / "mla-s0" / "model", tmp_path / "mla-s1")
    shutil.copytree(folder / "kda-s0" / "model", tmp_path / "kda-s2")
    assert siblings(tmp_path) == {"kda-s2": tmp_path / "kda-s2", "mla-s1": tmp_path / "mla-s1"}


def test_shipped_siblings_can_be_asked():
    """What they know is the exam's business; here every one of them fits the lab."""
    for name in siblings():
        r = compute(sibling=name, length=256)
        assert len(r.needles) == 8 and all(0 <= n.got < VOCABULARY for n in r.needles)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [256, 2048])  # the second is read in pieces
def test_answers_are_those_of_the_exam(folder, variant, length):
    r = asked(folder, variant, length=length, facts=20, rumours=3, rewritten=2, string=True, seed=5)
    d = document(length, 20, 5, rumours=3, rewritten=2, string=True)
    got = answers(load_sibling(siblings(folder)[r.sibling]), d)
    assert [n.got for n in r.needles] == got.values[0].tolist()
    assert [n.wanted for n in r.needles] == d.values[0].tolist()
    assert r.topic == (int(d.topic), int(got.topic))
    assert r.string == tuple(zip(d.string[0].tolist(), got.string[0].tolist(), strict=True))
    assert [n.decoy is not None for n in r.needles] == [True] * 5 + [False] * 11


def test_every_needle_stands_where_it_is_said_and_its_line_counts(folder):
    r = asked(folder, "kda", length=1024, facts=12, rumours=2, rewritten=3, string=True, seed=1)
    ids = document(1024, 12, 1, rumours=2, rewritten=3, string=True).ids[0].tolist()
    for n in r.needles:
        assert ids[n.place : n.place + 3] == [recall.FACT, n.key, n.wanted]
        later = [i for i in range(n.place + 3, 1024) if ids[i] == recall.FACT and ids[i + 1] == n.key]
        assert not later, "the newest line counts"
    kinds = [line.kind for line in r.lines]
    assert (kinds.count("fact"), kinds.count("rumour"), kinds.count("string")) == (15, 2, 1)
    assert [line.place for line in r.lines] == sorted(line.place for line in r.lines)


@pytest.mark.parametrize("depth", [0, 50, 100])
def test_the_first_needle_stands_at_the_depth_asked_for(folder, depth):
    assert asked(folder, "kda", depth=depth, facts=3).needles[0].depth == pytest.approx(depth, abs=1)


@pytest.mark.parametrize("variant, head", [("hybrid", 1), ("mla", 5), ("mla-conv", 2), ("mla-rotary", 6)])
def test_weights_are_those_of_the_layer(folder, variant, head):
    """The values that the layer averages, weighted as said, are what its attention returns for the question."""
    r = asked(folder, variant, facts=5, question=4)
    model, ids = load_sibling(siblings(folder)[r.sibling]), document(256, 5).ids
    mla = model.model.layers[r.heads[head][0] - 1].self_attn
    given, gated = [], []
    mla.kv_a_proj_with_mqa.register_forward_pre_hook(lambda _, x: given.append(x[0]))
    mla.o_proj.register_forward_pre_hook(lambda _, x: gated.append(x[0]))
    at = 256 + 2 * 4
    assert int(ids[0, at]) == r.asked.key and len(r.weights[head]) == at + 1
    with torch.no_grad():
        model(ids)
        x = given[0]
        latents, kv = mla.latents(x), mla.kv_b()[r.heads[head][1] - 1]
        mine = torch.tensor(r.weights[head]) @ (latents[0, : at + 1, : mla.rank] @ kv[mla.nope_dim :].mT)
        want = latent_attention(mla.query(x), latents, mla.kv_b(), mla.nope_dim)[0, at, r.heads[head][1] - 1]
        torch.testing.assert_close(mine, want, rtol=1e-3, atol=2e-4)
        out = want * torch.sigmoid(mla.g_proj(x)[0, at]).unflatten(0, (mla.heads, -1))[r.heads[head][1] - 1]
        real = gated[0][0, at].unflatten(0, (mla.heads, -1))[r.heads[head][1] - 1]
    torch.testing.assert_close(out, real, rtol=1e-3, atol=2e-4)  # and it is what the model itself works with


def test_shares_add_up_and_the_line_is_told_from_its_other_line(folder):
    r = asked(folder, "mla-conv", facts=6, rewritten=2, rumours=1, string=True, question=2)
    for head in range(len(r.heads)):
        w, shares = r.weights[head], r.shares(head)
        assert sum(shares) == pytest.approx(1, abs=1e-3) and len(shares) == len(SHARES)
        old = next(x for x in r.lines if x.key == r.asked.key and x.place != r.asked.place)
        assert shares[0] == pytest.approx(sum(w[r.asked.place : r.asked.place + 3]))
        assert shares[1] == pytest.approx(sum(w[old.place : old.place + 3])) and shares[1] > 0
        assert shares[4] == pytest.approx(sum(w[256:]))
    assert r.shares(r.best_head)[0] == max(r.shares(h)[0] for h in range(len(r.heads)))


def test_erasing_one_memory_leaves_what_the_other_answers(folder):
    """Nothing but the state, or the slots, may differ; what is erased must matter, and reading must be undisturbed."""
    r = asked(folder, "hybrid", facts=16, string=True)
    assert all(set(n.alone) == {"states", "slots"} for n in r.needles)
    d, model = document(256, 16, string=True), load_sibling(siblings(folder)["hybrid-s0"])
    cache = model.new_cache()
    with torch.no_grad():
        model(d.ids[:, :256], cache=cache)
        for what in ("states", "slots"):
            left = cache.copy()
            for layer, kind in zip(left.layers, left.kinds, strict=True):
                if kind == "mla" and what == "states":
                    layer.latents = torch.zeros_like(layer.latents)
                if kind == "kda" and what == "slots":
                    layer.S = torch.zeros_like(layer.S)
            guess = model(d.ids[:, 256:], cache=left).logits.argmax(-1)[0]
            assert [n.alone[what] for n in r.needles] == guess[2:34:2].tolist()
            assert r.topic_alone[what] == guess[0] and r.string_alone[what] == tuple(guess[33:41].tolist())
    assert [n.alone["slots"] for n in r.needles] != [n.got for n in r.needles]
    assert r.right_alone("states") == sum(n.alone["states"] == n.wanted for n in r.needles)


@pytest.mark.parametrize("variant", ["kda", "mla", "mla-conv", "mla-rotary"])
def test_of_one_kind_of_memory_none_is_erased(folder, variant):
    r = asked(folder, variant)
    assert all(n.alone == {} for n in r.needles)
    layers = 0 if variant == "kda" else 4
    assert r.heads == tuple((n, h) for n in range(1, layers + 1) for h in (1, 2))
    assert ("nothing but states" if variant == "kda" else "nothing but slots") in describe(r)


def test_another_question_is_answered_without_reading_again(folder, monkeypatch):
    first = asked(folder, "hybrid", seed=9)
    monkeypatch.setattr(needle_lab_run, "prefill", lambda *_: pytest.fail("the document was read again"))
    second = asked(folder, "hybrid", seed=9, question=3)
    assert second.needles == first.needles and second.weights != first.weights


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sibling": "gpt"}, "sibling: got 'gpt', wanted one of kda-s0, hybrid-s0"),
        ({"length": 300}, "length: got 300, wanted one of 256, 512"),
        ({"facts": 0}, f"facts: got 0, wanted a whole number from 1 to {KEYS}."),
        ({"facts": 100}, "length: got 256, wanted a multiple of 4, 400 or more"),
        ({"facts": 4, "rumours": 3, "rewritten": 2}, "rumours, rewritten: got 3 and 2, wanted together at most 4."),
        ({"depth": 101}, "depth: got 101"),
        ({"depth": 50, "rewritten": 1}, "depth: got 50 and 1 rewritten keys, wanted 0 to 100 percent, and none."),
        ({"facts": 3, "question": 4}, "question: got 4, wanted a whole number from 1 to 3."),
        ({"seed": -1}, "document: got -1"),
    ],
)
def test_nonsense_is_named(folder, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        compute(folder=folder, **{"length": 256} | options)


def test_no_siblings_a_damaged_one_and_one_of_other_tokens_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="siblings: none in .*`k3lite train recall --out"):
        compute(folder=tmp_path)
    copy = tmp_path / "kda-s0"
    shutil.copytree(folder / "kda-s0" / "model", copy)
    real = needle_lab_run.VOCABULARY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needle_lab_run, "VOCABULARY", real + 1)
        with pytest.raises(ValueError, match=f"knows {VOCABULARY} tokens, wanted {real + 1}; train it again."):
            compute(folder=tmp_path, length=256)
    (copy / "card.json").write_text(json.dumps({**json.loads((copy / "card.json").read_text()), "sha256": "0"}))
    with pytest.raises(ValueError, match="not the weights that card.json describes"):
        compute(folder=tmp_path, length=256)


# ---- words and pictures


@pytest.mark.parametrize(
    "token, name",
    [
        (recall.WORD, "word 1 of topic 1"),
        (recall.WORD + 2 * recall.WORDS + 4, "word 5 of topic 3"),
        (recall.KEY + 255, "key 256"),
        (recall.VALUE, "value 1"),
        (recall.SYMBOL + 3, "symbol 4"),
        (recall.TOPIC + 7, "topic 8"),
        (recall.FACT, "FACT"),
        (recall.ASK_TOPIC, "TOPIC?"),
        (recall.END, "END"),
    ],
)
def test_tokens_are_spelled(token, name):
    assert spell(token) == name


def test_words_say_what_the_picture_says(folder):
    r = asked(folder, "hybrid", facts=8, rewritten=2, string=True)
    text = describe(r)
    assert f"hybrid-s0: {r.right} of 8 values right in 256 tokens, the topic" in text
    assert f"its states alone give {r.right_alone('states')} right" in text
    assert f"its slots alone give {r.right_alone('slots')}." in text
    assert f"Asked for {spell(r.asked.key)}" in text and f"it says {spell(r.asked.got)}" in text
    assert f"{sum(a == b for a, b in r.string)} of 8 symbols of the string right" in text
    counts = count(asked(folder, "hybrid", facts=8, rewritten=2, string=True, seed=1), count(r))
    right = sum(a for a, _ in counts.values())
    assert f"On the heat map so far: {right} of 16 values right; by guessing it would be 1 in 16." in describe(
        r, counts
    )


def test_the_other_value_beside_a_key_is_named_as_such(folder):
    r = asked(folder, "kda", facts=3, rewritten=1)
    for got, named in ((r.asked.decoy, True), (r.asked.wanted, False), (recall.WORD, False)):
        this = replace(r, needles=(replace(r.asked, got=got), *(replace(n, got=n.wanted) for n in r.needles[1:])))
        assert ("the other value that stands beside this key" in describe(this)) == named
        assert ("<td>the other value</td>" in table(this)) == named
        assert ("which is right" in describe(this)) == (got == r.asked.wanted) == (this.right == 3)


def test_counts_fill_up_by_length_and_depth(folder):
    first, second = asked(folder, "hybrid", facts=16), asked(folder, "hybrid", facts=16, length=512)
    both = count(second, count(first))
    assert sum(n for _, n in both.values()) == 32
    for r in (first, second):
        for fifth in range(DEPTHS):
            mine = [n for n in r.needles if fifth * 20 <= n.depth < (fifth + 1) * 20 + (fifth == DEPTHS - 1)]
            wanted = (sum(n.right for n in mine), len(mine))
            assert both.get((r.length, fifth), (0, 0)) == wanted
    at = asked(folder, "kda", facts=1, depth=100)
    assert list(count(at)) == [(256, DEPTHS - 1)]
    before = dict(both)
    count(first, both)
    assert both == before, "the counts given are not changed"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("options", [{}, {"facts": 1}, {"facts": 40, "string": True, "rumours": 4, "rewritten": 4}])
def test_traces_and_notes_are_always_the_same_in_the_same_order(folder, variant, options):
    r = asked(folder, variant, **options)
    fig = figure(r)
    assert [t.name for t in fig.data] == TRACES and len(fig.layout.annotations) == 4
    assert all(fig.data[1].text)  # plotly never shows a text again that was once empty
    assert [len(t.x) for t in fig.data[2:7]] == [len(r.heads)] * 5
    assert sum(len(t.x) for t in fig.data[7:10]) == len(r.lines)
    assert ("no slots" in fig.layout.annotations[3].text) == (variant == "kda")
    assert f"{r.right} of {len(r.needles)} value" in fig.layout.title.text


def test_the_map_shows_the_counts_and_the_strip_the_answers():
    r = compute(sibling="mla-s0", length=256, facts=24, seed=3)  # as shipped: it guesses
    counts = {(256, 0): (1, 4), (4096, 4): (3, 3)}
    fig = figure(r, counts)
    z = fig.data[0].z
    assert z[0][0] == 25 and z[4][len(LENGTHS) - 1] == 100 and sum(x is not None for row in z for x in row) == 2
    assert [t for t in fig.data[1].text if t != "·"] == ["1/4", "3/3"]
    assert list(fig.data[7].x) == sorted(n.place for n in r.needles if n.right)
    assert list(fig.data[8].x) == sorted(n.place for n in r.needles if not n.right)
    assert len(fig.data[9].x) == 24 - 16 and list(fig.data[10].x) == [r.asked.place]
    assert fig.data[10].y[0] == round(100 * r.shares(r.best_head)[0], 2)
    assert 0 < r.right < 16, "some and not all, or this test says little"


def test_the_table_has_a_row_for_every_question_and_headings_for_screen_readers(folder):
    r = asked(folder, "hybrid", facts=8, rewritten=1, string=True)
    rows = re.findall("<tr>(.*?)</tr>", table(r))
    assert len(rows) == 1 + 1 + 8 + 1 and rows[0].count("<th scope=") == 7
    for n, row in zip(r.needles, rows[2:], strict=False):
        cells = re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row)
        assert cells[:4] == [spell(n.key), f"{n.depth:.0f} %", spell(n.wanted), spell(n.got)]
        assert cells[4] == ("right" if n.right else "the other value" if n.got == n.decoy else "wrong")
        assert cells[5].startswith(spell(n.alone["states"])) and cells[6].startswith(spell(n.alone["slots"]))
        assert row.startswith('<th scope="row">')
    topic, string = (re.findall("<td>(.*?)</td>", row) for row in (rows[1], rows[-1]))
    assert topic[1:3] == [spell(r.topic[0]), spell(r.topic[1])] and topic[4].startswith(spell(r.topic_alone["states"]))
    same = sum(a == b for (a, _), b in zip(r.string, r.string_alone["slots"], strict=True))
    assert string[3] == f"{sum(a == b for a, b in r.string)} of 8 right" and string[5] == f"{same} of 8 right"
    assert "states alone" not in table(asked(folder, "kda")) and "<caption" in table(r)


# ---- explorer


@pytest.fixture
def box(folder):
    return explorer(folder, sibling="hybrid-s0", length=256, facts=4)


def shown(box):
    return box.figure.layout.annotations[0].text


def test_explorer_starts_with_the_picture_of_its_arguments(folder, box):
    r = asked(folder, "hybrid", facts=4)
    assert isinstance(box.figure, go.FigureWidget) and repr(box) == "Explorer('needle lab')"
    assert box.figure.layout.title.text == figure(r).layout.title.text and box.table.value == table(r)
    assert describe(r) in box.text.value.replace("&#x27;", "'") and box.message.value == ""


CHANGES = [
    ("sibling", "mla-conv-s0"), ("length", 512), ("facts", 16), ("depth", 30), ("rumours", 2), ("rewritten", 2),
    ("string", True),
]  # fmt: skip


@pytest.mark.parametrize("name, value", CHANGES)
def test_each_control_is_for_the_next_ask(folder, box, name, value):
    before = box.table.value
    box.controls[name].value = value
    assert "Press Ask" in box.message.value and box.table.value == before
    box.controls["ask"].click()
    r = compute(folder=folder, **{"sibling": "hybrid-s0", "length": 256, "facts": 4} | {name: value})
    assert box.message.value == "" and box.table.value == table(r) != before
    assert box.figure.layout.title.text == figure(r).layout.title.text


def test_ask_keeps_the_document_and_new_document_draws_another(folder, box):
    box.controls["new"].click()
    assert box.table.value == table(asked(folder, "hybrid", facts=4, seed=1)) and "8 so far: 4 facts" in shown(box)
    box.controls["ask"].click()
    assert "it counts once" in box.message.value and "8 so far" in shown(box)
    box.controls["sibling"].value = "kda-s0"
    box.controls["ask"].click()
    assert box.table.value == table(asked(folder, "kda", facts=4, seed=1)) and "4 so far" in shown(box)
    box.controls["sibling"].value = "hybrid-s0"
    box.controls["new"].click()
    assert "12 so far" in shown(box), "every sibling has its own map"
    box.controls["string"].value = True
    box.controls["new"].click()
    assert "4 so far: 4 facts, a string" in shown(box), "and so has every kind of document"


def test_the_question_moves_at_once_and_goes_back_to_the_first_with_a_new_document(folder, box):
    box.controls["question"].value = 3
    r = asked(folder, "hybrid", facts=4, question=3)
    assert box.figure.layout.annotations[1].text.endswith(spell(r.asked.key)) and "4 so far" in shown(box)
    assert list(box.figure.data[10].x) == [r.asked.place]
    box.controls["facts"].value = 2
    box.controls["question"].value = 4  # still of the document that is drawn
    assert "Press Ask" in box.message.value
    box.controls["ask"].click()
    assert box.controls["question"].value == 1 and len(box.controls["question"].options) == 2
    assert box.message.value == ""


def test_what_does_not_fit_is_said_and_the_picture_stays(box):
    before = box.table.value
    box.controls["facts"].value = 256
    box.controls["new"].click()
    assert "length: got 256, wanted a multiple of 4, 1024 or more" in box.message.value and "alert" in box.message.value
    assert box.table.value == before and "4 so far" in shown(box)
    box.controls["facts"].value = 8
    box.controls["ask"].click()
    assert box.message.value == "" and box.table.value != before


def test_every_control_is_labelled_with_its_unit(box):
    labels = [c.description for n, c in box.controls.items() if n not in ("ask", "new")]
    assert all("(" in label and label.endswith(")") and len(label) <= 29 for label in labels)
    assert (box.controls["ask"].description, box.controls["new"].description) == ("Ask", "New document")


def test_two_explorers_do_not_touch_each_other(folder, box):
    other = explorer(folder, sibling="hybrid-s0", length=256, facts=4)
    box.controls["new"].click()
    assert "4 so far" in shown(other) and other.controls["question"].value == 1


def test_a_folder_without_siblings_is_said_at_once(tmp_path):
    with pytest.raises(ValueError, match="siblings: none in"):
        needle_lab.explorer(tmp_path)
