"""The depth explorer: what it computes against the model run by hand, its picture, and its controls in the kernel."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest
import torch

from k3lite.attn_res import sources_per_read
from k3lite.checkpoint import load_model
from k3lite.tasks.depth import LAYERS, LENGTH, depth_config, read_shares, size_name, watching
from k3lite.tasks.text import encode
from widgets.depth import FOLDER, NOTHING, SIZES, TEXT, compute, describe, explorer, figure, names, spelled


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


# ---- compute


@pytest.mark.parametrize("size", list(SIZES))
def test_numbers_are_those_of_the_stored_model(size):
    model, ids = load_model(FOLDER / size_name(size)), encode(TEXT).unsqueeze(0)
    assert model.config == depth_config(size)
    d = compute(size=size, token=9)
    with torch.no_grad(), watching(model) as streams:
        out = model(ids, labels=ids)
    want = read_shares(streams[0], 8)
    assert [[x for x in row if x is not None] for row in d.shares] == [pytest.approx(row) for row in want]
    assert d.losses == (pytest.approx(float(out.loss), rel=1e-5),) * 2
    best = out.logits[0, 8].softmax(-1)
    assert d.answer[0][0] == spelled(int(best.argmax())) and d.answer[0][1] == pytest.approx(
        float(best.max()), rel=1e-4
    )


@pytest.mark.parametrize("size", list(SIZES))
def test_a_row_for_each_reader_with_the_sources_there_are(size):
    d = compute(size=size)
    reads = sources_per_read(LAYERS, size)
    assert [sum(x is not None for x in row) for row in d.shares] == reads
    assert len(d.readers) == 2 * LAYERS + 1 and len(d.sources) == reads[-1]
    assert all(sum(x for x in row if x is not None) == pytest.approx(1, abs=1e-5) for row in d.shares)


def test_names():
    readers, sources = names(depth_config(4))
    assert readers[:2] == ("1 KDA", "1 MLP") and readers[6:8] == ("4 MLA", "4 MLP") and readers[-1] == "final"
    assert sources == ("embedding", "layers 1–4", "layers 5–8")
    assert names(depth_config(1))[1][:3] == ("embedding", "layer 1", "layer 2")
    assert names(depth_config(0.5))[1] == ("embedding", *readers[:-1])
    assert names(depth_config(3))[1][-1] == "layers 7–8"
    assert [spelled(b) for b in (32, 10, 65, 7)] == ["space", "new line", "A", "byte 7"]


def test_a_cut_source_is_read_by_nobody_and_changes_the_answer():
    whole, cut = compute(size=1), compute(size=1, cut=1)
    assert all(row[1] in (None, 0) for row in cut.shares) and any(row[1] for row in whole.shares[1:])
    assert cut.losses[0] == whole.losses[0] != cut.losses[1]
    assert all(before == after for _, before, after in whole.answer)
    assert any(before != after for _, before, after in cut.answer)


def test_bytes_differ_and_the_mean_is_theirs():
    rows = [compute(token=t).shares[-1] for t in range(1, len(TEXT) + 1)]
    assert rows[3] != rows[20]
    mean = compute(mean=True).shares[-1]
    assert mean == tuple(pytest.approx(sum(column) / len(rows), abs=1e-5) for column in zip(*rows, strict=True))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"size": 3}, "block size: got 3, wanted one of 0.5, 1, 4."),
        ({"text": "a"}, f"text: got 1 characters, wanted 2 to {LENGTH}, all of them ASCII."),
        ({"text": "x" * (LENGTH + 1)}, f"text: got {LENGTH + 1} characters"),
        ({"text": "naïve"}, "all of them ASCII"),
        ({"token": 0}, "byte: got 0, wanted a whole number from 1 to"),
        ({"text": "short", "token": 6}, "byte: got 6, wanted a whole number from 1 to 5."),
        ({"size": 4, "cut": 3}, "source to cut: got 3, wanted a whole number from 0 to 2."),
    ],
)
def test_nonsense_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        compute(**values)


def test_words():
    d = compute(size=4, cut=0)
    assert f"Without “embedding” the loss over the text goes from {d.losses[0]:.2f} to {d.losses[1]:.2f}" in describe(d)
    assert f"the embedding gets {d.embedding:.0%}" in describe(d)
    assert "nats per byte over the text" in describe(compute(mean=True)) and "Over the whole text" in describe(
        compute(mean=True)
    )


# ---- figure


@pytest.mark.parametrize("values", [{}, {"size": 0.5}, {"cut": 0}, {"mean": True}, {"text": "a <b>", "token": 5}])
def test_traces_are_always_the_same_in_the_same_order(values):
    fig = figure(compute(**values))
    assert [t.type for t in fig.data] == ["heatmap", "bar", "bar"] and len(fig.layout.annotations) == 2


def test_the_picture_shows_the_numbers():
    d = compute(size=4, cut=1)
    fig = figure(d)
    assert tuple(tuple(row) for row in fig.data[0].z) == d.shares
    assert list(fig.layout.yaxis.ticktext) == list(d.readers) and list(fig.layout.xaxis.ticktext) == list(d.sources)
    assert list(fig.data[1].x) == [a[1] for a in d.answer] and list(fig.data[2].x) == [a[2] for a in d.answer]
    assert f"{d.losses[0]:.2f} → {d.losses[1]:.2f}" in fig.layout.title.text and "layers 1–4" in fig.layout.title.text


# ---- explorer


@pytest.fixture
def box():
    return explorer()


def test_explorer_starts_where_it_is_told():
    box = explorer(size=4, token=7, cut=0)
    assert isinstance(box.figure, go.FigureWidget) and repr(box) == "Explorer('depth')"
    assert tuple(map(tuple, box.figure.data[0].z)) == compute(size=4, token=7, cut=0).shares
    with pytest.raises(ValueError, match="block size: got 7"):
        explorer(size=7)


def test_every_control_reaches_the_picture(box):
    now = {"size": 1, "token": 20}
    for name, value in {
        "token": 33,
        "mean": True,
        "cut": 2,
        "text": "Once upon a time there was a little girl",
    }.items():
        before = box.text.value
        box.controls[name].value = value
        now[name] = value
        assert tuple(map(tuple, box.figure.data[0].z)) == compute(**now).shares, name
        assert box.message.value == "" and box.text.value != before, name


def test_another_size_has_other_sources_to_cut(box):
    c = box.controls
    c["cut"].value = 8
    c["size"].value = 4
    assert c["cut"].label == "nothing" and [n for _, n in c["cut"].options] == [NOTHING, 0, 1, 2]
    assert tuple(map(tuple, box.figure.data[0].z)) == compute(size=4).shares
    c["cut"].value = 2
    assert "layers 5–8" in box.figure.layout.title.text


def test_a_shorter_text_takes_the_slider_along(box):
    box.controls["token"].value = 40
    box.controls["text"].value = "a short one"
    assert box.controls["token"].max == 11 and box.controls["token"].value == 11 and box.message.value == ""
    assert tuple(map(tuple, box.figure.data[0].z)) == compute(text="a short one", token=11).shares


def test_a_text_that_cannot_be_read_says_so_and_the_picture_stays(box):
    shown = box.figure.data[0].z
    box.controls["text"].value = "ü" * 5
    assert "all of them ASCII" in box.message.value and box.figure.data[0].z == shown
    box.controls["text"].value = TEXT
    assert box.message.value == ""
