"""The deep small model and its microscope: what is watched is what the model does, and a hidden source is hidden."""

import pytest
import torch

from k3lite.attn_res import depth_mix
from k3lite.tasks.depth import (
    LENGTH,
    ROWS,
    WatchedStream,
    depth_config,
    depth_exam,
    depth_model,
    loss_when_cut,
    measure,
    parse_size,
    prose,
    read_shares,
    rms,
    size_name,
    watching,
)
from k3lite.tasks.text import haystack
from k3lite.train import Recipe
from tests.helpers import assert_close, random_model

IDS = torch.tensor([[84, 104, 101, 32, 99, 97, 116], [72, 101, 32, 115, 97, 119, 46]])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def model(block_size, layers=4):
    return random_model(depth_config(block_size, layers))


def test_models_differ_in_their_queries_alone():
    plain, full, blocks = (depth_model(depth_config(size), seed=3) for size in (None, 0.5, 4))
    assert depth_config(2).layer_kinds == ("kda", "kda", "kda", "mla") * 2
    extra = {name for name, _ in full.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert len(extra) == 2 * 16 + 2 and all("_res_" in name for name in extra)
    assert full.state_dict().keys() == blocks.state_dict().keys()
    for m in (plain, blocks):
        assert all(torch.equal(value, full.state_dict()[name]) for name, value in m.state_dict().items())
    assert [size_name(size) for size in (None, 0.5, 2, 4)] == ["plain", "full", "block-2", "block-4"]


def test_sizes_by_name():
    assert [parse_size(text) for text in ("plain", "full", "4", "1.5")] == [None, 0.5, 4, 1.5]
    with pytest.raises(ValueError, match="block size: got 'wide', wanted plain, full, or a number of layers"):
        parse_size("wide")


def test_rows_are_prose_and_depend_on_seed_and_step():
    batch_at = prose(Recipe(steps=10, lr=1e-3, seed=5))
    ids, labels = batch_at(3)
    assert ids.shape == (ROWS, LENGTH) and torch.equal(ids, labels) and 0 <= int(ids.min()) <= int(ids.max()) < 128
    assert torch.equal(batch_at(3)[0], ids) and not torch.equal(batch_at(4)[0], ids)
    assert not torch.equal(prose(Recipe(steps=10, lr=1e-3, seed=6))(3)[0], ids)
    assert bytes(ids[0].tolist()) in bytes(haystack("train").tolist())


def test_exam_is_held_out():
    rows = depth_exam(3)
    assert rows.shape == (3, LENGTH)
    assert bytes(rows.flatten().tolist()) in bytes(haystack("heldout").tolist())
    assert bytes(rows[0].tolist()) not in bytes(haystack("train").tolist())


@pytest.mark.parametrize("size", [None, 0.5, 1, 3])
def test_watching_changes_nothing_and_ends(size):
    m = model(size)
    want = m(IDS).logits
    with watching(m) as streams:
        assert_close("logits", m(IDS).logits, want, 1e-5)
    assert torch.equal(m(IDS).logits, want) and len(streams) == 1
    (stream,) = streams
    assert len(stream.reads) == 9 and len(stream.outputs) == len(stream.sums) == 8


def test_watching_ends_after_an_error():
    m = model(1)
    with pytest.raises(RuntimeError), watching(m):
        raise RuntimeError
    assert m.model.stream_type is not WatchedStream and "stream_type" not in vars(m.model)


def test_shares_belong_to_what_was_read():
    """Each read is the sum of its sources by its shares, and equals the model's own mix."""
    m = model(1)
    with watching(m) as streams:
        m(IDS)
    (stream,), last = streams, m.model
    sources = [*stream.blocks, stream.live]
    want = depth_mix(sources, last.output_attn_res_norm.weight, last.output_attn_res_proj.weight, stream.eps)
    by_share = sum(share[..., None] * V for share, V in zip(stream.reads[-1].weights, sources, strict=True))
    assert_close("final", stream.reads[-1].what, want, 1e-5)
    assert_close("by share", by_share, want, 1e-5)

    rows = read_shares(stream)
    assert [len(row) for row in rows] == [1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in rows)
    assert read_shares(stream, token=2)[-1] == pytest.approx(stream.reads[-1].weights[:, 0, 2].tolist())
    assert read_shares(stream)[-1] == pytest.approx(stream.reads[-1].weights.mean((1, 2)).tolist())


def test_zero_queries_share_alike():
    m = model(0.5)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if name.endswith("res_proj.weight"):
                p.zero_()
    with watching(m) as streams:
        m(IDS)
    assert [len(row) for row in read_shares(streams[0])] == list(range(1, 10))
    for row in read_shares(streams[0]):
        assert row == pytest.approx([1 / len(row)] * len(row), abs=1e-5)


def test_a_hidden_source_is_read_by_no_one():
    """Set to anything, it changes nothing; the other shares keep their ratios at the first reader that has it."""
    m = model(2)
    with watching(m, hidden=1) as hidden:
        cut = m(IDS).logits
    with watching(m) as seen:
        m(IDS)
    rows, whole = read_shares(hidden[0]), read_shares(seen[0])
    assert all(row[1] == 0 for row in rows[1:]) and all(sum(row) == pytest.approx(1, abs=1e-5) for row in rows)
    assert rows[1] == [1, 0] and whole[1][1] > 0

    # Layers 1 and 2 write source 1. Nobody reads it, so other weights in there change nothing.
    with torch.no_grad():
        m.model.layers[0].self_attn.o_proj.weight.mul_(7)
        m.model.layers[1].mlp.down_proj.weight.mul_(7)
    with watching(m, hidden=1):
        assert torch.equal(m(IDS).logits, cut)
    assert not torch.allclose(m(IDS).logits, cut)


def test_loss_without():
    m = model(2)
    with torch.no_grad():
        want = float(m(IDS, labels=IDS).loss)
    assert loss_when_cut(m, IDS, None) == pytest.approx(want, rel=1e-5)
    assert loss_when_cut(m, IDS, 0) != pytest.approx(want, rel=1e-3)
    assert loss_when_cut(m, IDS, 99) == pytest.approx(want, rel=1e-5), "a source that does not exist"


@pytest.mark.parametrize("size", [None, 1])
def test_measured_sizes_and_gradients(size):
    m = model(size)
    got = measure(m, IDS)
    with watching(m) as streams:
        loss = m(IDS, labels=IDS).loss
    loss.backward()
    (stream,), layer = streams, m.model.layers[2]
    assert got.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert [len(x) for x in (got.read_rms, got.output_rms, got.live_rms, got.gradients)] == [9, 8, 8, 4]
    assert got.output_rms[3] == pytest.approx(rms(stream.outputs[3]), rel=1e-5)
    assert got.live_rms[3] == pytest.approx(rms(sum(stream.outputs[2:4]) if size else stream.sums[3]), rel=1e-5)
    assert got.read_rms[-1] == pytest.approx(rms(stream.reads[-1].what), rel=1e-5)
    squares = sum(float(p.grad.square().sum()) for p in layer.mlp.parameters())
    assert got.gradients[2] == pytest.approx(squares**0.5, rel=1e-4)
    assert len(got.shares) == (9 if size else 0)


def test_measuring_leaves_no_gradients():
    m = model(1)
    measure(m, IDS)
    assert all(p.grad is None for p in m.parameters())
