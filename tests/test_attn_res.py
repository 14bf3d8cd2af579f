"""Attention over depth: the mix, and which sources it has at which layer."""

import math

import pytest
import torch

import k3lite.attn_res
from k3lite.attn_res import DepthStream, depth_mix, depth_query, join_live, read_blocks, sources_per_read
from k3lite.config import ConfigError
from tests.helpers import assert_close, dims, random_model, tiny


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


# ---- two phases


def leaves(n, R, *shape, size=1.0):
    """n blocks, R live sums of that shape, R norm weights and R projections, all wanting gradients."""
    make = [(n, *shape), (R, *shape), (R, shape[-1]), (R, 1, shape[-1])]
    tensors = [size * randn(*s, seed=i) for i, s in enumerate(make)]
    return [x.requires_grad_() for x in tensors]


def naive(blocks, lives, norms, projs):
    mixes = [depth_mix([*blocks, h], w, p, 1e-5) for h, w, p in zip(lives, norms, projs, strict=True)]
    return torch.stack(mixes)


def in_two_phases(blocks, lives, norms, projs):
    queries = torch.stack([depth_query(w, p) for w, p in zip(norms, projs, strict=True)])
    partial = zip(*read_blocks(list(blocks), queries, 1e-5), lives, queries, strict=True)
    return torch.stack([join_live(mix, log_sum, h, q, 1e-5) for mix, log_sum, h, q in partial])


@dims("n R B T d", (1, 1, 1, 1, 5), (1, 3, 2, 5, 8), (4, 24, 1, 7, 12), (8, 2, 3, 1, 9))
def test_two_phases_are_exact_with_every_gradient(n, R, B, T, d):
    inputs = leaves(n, R, B, T, d)
    want, got = naive(*inputs), in_two_phases(*inputs)
    assert_close("mix", got, want, 1e-13)
    weight = randn(*want.shape, seed=9)
    gradients = [torch.autograd.grad((x * weight).sum(), inputs) for x in (got, want)]
    for name, g, w in zip(("blocks", "live", "norm", "proj"), *gradients, strict=True):
        assert_close(f"d{name}", g, w, 1e-12)


def test_two_phases_do_not_overflow():
    """Scores of thousands: exp() of one of them alone is inf in every dtype."""
    blocks, lives, norms, projs = leaves(3, 2, 1, 4, 8, size=60.0)
    want, got = naive(blocks, lives, norms, projs), in_two_phases(blocks, lives, norms, projs)
    assert (norms * projs.squeeze(1)).detach().abs().max() > 1000
    assert_close("mix", got, want, 1e-12)


def test_two_phases_in_bf16_return_bf16():
    inputs = [x.detach().bfloat16() for x in leaves(3, 2, 1, 4, 8)]
    got, want = in_two_phases(*inputs), naive(*[x.float() for x in inputs])
    assert got.dtype == torch.bfloat16
    assert_close("mix", got.float(), want, 4e-3)


@pytest.mark.parametrize("block", [0.5, 1, 1.5, 2, 9])
def test_a_whole_model_in_two_phases(block):
    """Reads between two seals visit the blocks together; the whole model says the same."""
    model, ids = random_model(tiny("k3", layers=5, attn_res_block_size=block, dtype="float64")), torch.tensor([[1, 2]])
    want = model(ids).logits
    names = [(layer, f"{part}_res") for layer in model.model.layers for part in ("self_attention", "mlp")][1:]
    names.append((model.model, "output_attn_res"))
    queries = torch.stack(
        [depth_query(*(getattr(owner, f"{name}_{w}").weight for w in ("norm", "proj"))) for owner, name in names]
    )
    stretches = []

    class InTwoPhases(DepthStream):
        done = 0

        def read(self, owner, name):
            if not self.blocks:
                return self.live
            if not stretches or stretches[-1][0] != len(self.blocks):
                ahead = queries[self.done : self.done + int(2 * self.block_size)]
                stretches.append((len(self.blocks), self.done, read_blocks(self.blocks, ahead, self.eps)))
            _, start, (mixes, log_sums) = stretches[-1]
            r, self.done = self.done - start, self.done + 1
            return join_live(mixes[r], log_sums[r], self.live, queries[start + r], self.eps)

    model.model.stream_type = InTwoPhases
    assert_close("logits", model(ids).logits, want, 1e-12)
    assert len(stretches) == math.ceil(5 / block)


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
    assert [1, *mixes] == sources_per_read(93, 12)
    assert mixes[22:26] == [2, 2, 3, 3]  # layer 11's MLP; layer 12 before its seal and after; layer 13


@pytest.mark.parametrize("block", [1, 2, 3, 5, 9])
def test_stored_blocks_are_sums_of_sublayer_outputs(block):
    config = tiny("k3", layers=5, attn_res_block_size=block, rms_norm_eps=3e-4, dtype="float64")
    model, ids = random_model(config), torch.tensor([[1, 2, 3, 4]])
    streams, outputs = [], []

    class Recorded(DepthStream):
        def __init__(self, *args):
            super().__init__(*args)
            streams.append(self)

    model.model.stream_type = Recorded
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


# ---- Full AttnRes: a block of one sub-layer


def test_full_makes_every_output_a_source(mixes):
    model, ids = random_model(tiny("k3", layers=5, attn_res_block_size=0.5, dtype="float64")), torch.tensor([[1, 2, 3]])
    streams, outputs = [], []
    model.model.stream_type = lambda *args: streams.append(DepthStream(*args)) or streams[-1]
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.block_sparse_moe if layer.moe else layer.mlp):
            part.register_forward_hook(lambda _module, _args, out: outputs.append(out))
    model(ids)
    assert [1, *mixes] == sources_per_read(5, 0.5) == list(range(1, 12)), (
        "the n-th sub-layer reads the embedding and n outputs"
    )
    sources = [*streams[0].blocks, streams[0].live]
    for n, (got, want) in enumerate(zip(sources, [model.model.embed_tokens(ids), *outputs], strict=True)):
        assert_close(f"source {n}", got, want, 0)


def test_a_block_of_three_sublayers():
    """The paper counts sub-layers, so half layers must do; sealed before sub-layers 0, 3, 6, 9."""
    stream = DepthStream(randn(1, 2, 8), 1.5, 1e-5)
    outputs = [randn(1, 2, 8, seed=s + 1) for s in range(10)]
    for s, output in enumerate(outputs):
        stream.seal_before(s / 2)
        stream.add(output)
    assert len(stream.blocks) == 4
    for n in (1, 2, 3):
        assert_close(f"b{n}", stream.blocks[n], sum(outputs[3 * n - 3 : 3 * n]), 1e-14)
    assert_close("live", stream.live, outputs[9], 0)


@pytest.mark.parametrize("block", [0.5, 1, 1.5, 2, 3, 9])
def test_sources_are_counted_as_they_are_read(mixes, block):
    """Also where blocks do not divide the depth."""
    random_model(tiny("k3", layers=5, attn_res_block_size=block))(torch.tensor([[1, 2]]))
    assert [1, *mixes] == sources_per_read(5, block)


@pytest.mark.parametrize("block", [0.25, 1.3, -1, True, "2"])
def test_block_size_is_in_halves_of_a_layer(block):
    with pytest.raises(ConfigError, match=f"attn_res_block_size: got {block!r}, wanted"):
        tiny("k3", attn_res_block_size=block)
