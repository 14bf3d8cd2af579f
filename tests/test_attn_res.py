"""Attention over depth: the mix, and which sources it has at which layer."""

import math

import pytest
import torch

import k3lite.attn_res
from k3lite.attn_res import DepthStream, depth_mix
from tests.helpers import assert_close, random_model, tiny


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- one mix


def test_mix_by_hand():
    """Scores from normed sources without 1/sqrt(d), values raw. Two sources of width 2, one token, eps 0."""
    sources = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])]
    query = torch.tensor([0.5, 1.0])
    root = math.sqrt(2)  # V / rms(V) = (3, 4) / (5 / root) and (0, root)
    scores = [root * (0.6 * 0.5 + 0.8 * 1.0), root]
    p = torch.tensor(scores).softmax(0)
    want = p[0] * sources[0] + p[1] * sources[1]
    norm, proj = torch.tensor([2.0, 4.0]), torch.tensor([[0.25, 0.25]])
    torch.testing.assert_close(depth_mix(sources, norm, proj, 0.0), want)
    assert torch.equal(norm * proj[0], query)


def test_zero_queries_give_the_plain_mean():
    sources = [randn(2, 3, 8, seed=s) for s in range(5)]
    got = depth_mix(sources, torch.ones(8).double(), torch.zeros(1, 8).double(), 1e-5)
    assert_close("mix", got, torch.stack(sources).mean(0), 1e-14)


def test_only_the_product_of_norm_and_query_matters():
    sources, norm, proj = [randn(3, 8, seed=s) for s in range(4)], randn(8, seed=7), randn(1, 8, seed=8)
    want = depth_mix(sources, norm, proj, 1e-5)
    assert_close("mix", depth_mix(sources, torch.ones(8).double(), norm * proj, 1e-5), want, 1e-14)


def test_size_of_a_source_moves_the_mix_and_not_the_scores():
    norm, proj = randn(8, seed=7), randn(1, 8, seed=8)
    a, b = randn(3, 8), randn(3, 8, seed=1)
    doubled = depth_mix([a, 2 * b], norm, proj, 0.0) - depth_mix([a, b], norm, proj, 0.0)
    p_b = doubled / b
    assert_close("one share a token", p_b, p_b[:, :1].expand(-1, 8), 1e-10)
    assert (p_b > 0).all() and (p_b < 1).all()


def test_one_source_is_returned_as_it_is():
    x = randn(3, 8)
    assert_close("mix", depth_mix([x], randn(8, seed=1), randn(1, 8, seed=2), 1e-5), x, 1e-15)


def test_mix_is_fp32():
    sources = [randn(50, 8, seed=s).bfloat16() for s in range(9)]
    norm, proj = randn(8, seed=10).bfloat16(), randn(1, 8, seed=11).bfloat16()
    got = depth_mix(sources, norm, proj, 1e-5)
    want = depth_mix([s.float() for s in sources], norm.float(), proj.float(), 1e-5).bfloat16()
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


def test_equal_sources_and_zero_tokens_are_finite():
    x = torch.zeros(2, 8, requires_grad=True)
    out = depth_mix([x, x, x], torch.ones(8), torch.ones(1, 8), 1e-5)
    out.sum().backward()
    assert not out.any() and torch.isfinite(x.grad).all()


# ---- the schedule


@pytest.fixture
def mixes(monkeypatch):
    """The number of sources of each mix that is made."""
    counts = []

    def counted(sources, *args):
        counts.append(len(sources))
        return depth_mix(sources, *args)

    monkeypatch.setattr(k3lite.attn_res, "depth_mix", counted)
    return counts


def test_k3_makes_186_mixes_of_1002_sources(mixes):
    """A small model with K3's depth: 93 layers, blocks of 12. Nine sources in the last mix."""
    config = tiny("k3", layers=93, mla=[92, 93], hidden_size=8, num_experts=0, num_experts_per_token=0,
                  latent_moe_use_norm=False, attn_res_block_size=12)  # fmt: skip
    random_model(config)(torch.tensor([[1, 2]]))
    assert len(mixes) == 186 and sum(mixes) == 1_002
    assert mixes[0] == 2  # layer 0 has no mix before its attention: its MLP's comes first
    assert mixes[-1] == 9
    assert mixes[22:26] == [2, 2, 3, 3]  # layer 11's MLP; layer 12 before its seal and after; layer 13


@pytest.mark.parametrize("block", [1, 2, 3, 5, 9])
def test_stored_blocks_are_sums_of_sublayer_outputs(monkeypatch, block):
    config = tiny("k3", layers=5, attn_res_block_size=block, rms_norm_eps=3e-4, dtype="float64")
    model, ids = random_model(config), torch.tensor([[1, 2, 3, 4]])
    streams, outputs = [], []

    class Recorded(DepthStream):
        def __init__(self, *args):
            super().__init__(*args)
            streams.append(self)

    monkeypatch.setattr("k3lite.model.DepthStream", Recorded)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.block_sparse_moe if layer.moe else layer.mlp):
            part.register_forward_hook(lambda _module, _args, out: outputs.append(out))
    model(ids)

    stream, sums = streams[0], [sum(outputs[i : i + 2 * block]) for i in range(0, 10, 2 * block)]
    assert stream.eps == 3e-4 and len(stream.blocks) == math.ceil(5 / block)
    assert_close("b0", stream.blocks[0], model.model.embed_tokens(ids), 0)
    for n, (got, want) in enumerate(zip([*stream.blocks[1:], stream.live], sums, strict=True), 1):
        assert_close(f"b{n}", got, want, 1e-12)


def test_layer_0_reads_the_embedding():
    """Its attention's query is in the files and has nothing to choose from."""
    model, ids = random_model(tiny("k3")), torch.tensor([[1, 2, 3]])
    want = model(ids).logits
    with torch.no_grad():
        model.model.layers[0].self_attention_res_proj.weight.fill_(7)
        model.model.layers[0].self_attention_res_norm.weight.fill_(7)
        assert torch.equal(model(ids).logits, want)
        model.model.layers[1].self_attention_res_proj.weight.fill_(7)
        assert not torch.equal(model(ids).logits, want)


def test_without_blocks_it_is_the_running_sum(mixes):
    x = randn(1, 2, 8)
    stream = DepthStream(x, None, 1e-5)
    for layer in range(3):
        assert torch.equal(stream.read(torch.nn.Module(), "none"), stream.live)
        stream.seal_before(layer)
        stream.add(x)
    assert torch.equal(stream.live, x + x + x + x) and not stream.blocks and not mixes


def test_one_block_keeps_the_embedding_apart():
    """A block longer than the model: sources are the embedding and the sum of all outputs."""
    stream = DepthStream(randn(1, 2, 8), 99, 1e-5)
    for layer in range(4):
        stream.seal_before(layer)
        stream.add(randn(1, 2, 8, seed=layer + 1))
    assert len(stream.blocks) == 1
    assert_close("live", stream.live, sum(randn(1, 2, 8, seed=s) for s in range(1, 5)), 1e-14)
