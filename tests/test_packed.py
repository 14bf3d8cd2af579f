"""Products with packed weights equal the dense ones, hold no dense expert, and a packed model says what a rounded one says."""

import pytest
import torch

from k3lite import packed
from k3lite.config import K3Config
from k3lite.generate import generate
from k3lite.moe import Experts
from k3lite.mx import fake_quantize, pack_mxfp4, unpack_mxfp4
from k3lite.packed import PackedExperts, pack_experts, packed_linear, packed_linear_naive, unpack_experts
from tests.helpers import assert_close, dims, random_model

TINY = K3Config.preset("k3-tiny")
IDS = torch.arange(1, 13).view(2, 6)
precisions = pytest.mark.parametrize(
    "dtype, rel", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp64", "fp32", "bf16"]
)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def value_and_gradient(function, x, *weights):
    x = x.clone().requires_grad_()
    y = function(x, *weights)
    y.backward(randn(*y.shape, dtype=y.dtype, seed=1))
    return y, x.grad


# ---- products


@dims("M N K", (1, 1, 32), (3, 5, 64), (17, 130, 96), (0, 4, 32), (2, 1025, 64))
@precisions
def test_equals_the_dense_product(M, N, K, dtype, rel, monkeypatch):
    monkeypatch.setattr(packed, "TILE", 1000)  # several tiles, the last one short
    weights = pack_mxfp4(randn(N, K))
    x = randn(M, K, dtype=dtype, seed=2)
    for name, got, want in zip(
        ("y", "dx"),
        value_and_gradient(packed_linear, x, *weights),
        value_and_gradient(packed_linear_naive, x, *weights),
        strict=True,
    ):
        assert got.dtype == dtype
        assert_close(name, got, want, rel)


def test_any_number_of_leading_axes():
    weights, x = pack_mxfp4(randn(6, 32)), randn(2, 3, 5, 32)
    assert torch.equal(packed_linear(x, *weights), packed_linear(x.view(-1, 32), *weights).view(2, 3, 5, 6))
    assert packed_linear(x[0, 0, 0], *weights).shape == (6,)


def test_the_dense_expert_is_never_held(monkeypatch):
    """Neither on the way there nor back: what is decoded at once stays within TILE numbers."""
    decoded = []

    def watched(*args):
        w = unpack_mxfp4(*args)
        decoded.append(w.numel())
        return w

    monkeypatch.setattr(packed, "unpack_mxfp4", watched)
    value_and_gradient(packed_linear, randn(2, 1024), *pack_mxfp4(randn(300, 1024)))
    assert sum(decoded) == 2 * 300 * 1024 and max(decoded) <= packed.TILE < 300 * 1024


def test_nothing_dense_is_kept_for_the_way_back():
    x = randn(2, 1024).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        packed_linear(x, *pack_mxfp4(randn(300, 1024)))
    assert kept and all(t.dtype == torch.uint8 for t in kept)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 32)}, r"x: got torch.float32 \(2, 32\) for weight_packed \(4, 32\), wanted"),
        ({"x": torch.zeros(2, 64, dtype=torch.float16)}, "x: got torch.float16"),
        ({"weight_scale": torch.zeros(4, 1, dtype=torch.uint8)}, "weight_packed, weight_scale: got"),
        ({"backend": "cuda"}, "backend: got 'cuda', wanted one of auto, torch, triton"),
    ],
)
def test_bad_arguments(change, message):
    weight_packed, weight_scale = pack_mxfp4(randn(4, 64))
    arguments = {"x": torch.zeros(2, 64), "weight_packed": weight_packed, "weight_scale": weight_scale}
    with pytest.raises(ValueError, match=message):
        packed_linear(**arguments | change)


# ---- models


def rounded(model, rule="floor"):
    """The model as fake quantisation sees it: dense experts of rounded values."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Experts):
                for w in module.parameters():
                    w.copy_(fake_quantize(w, scale_rule=rule))
    return model


@pytest.mark.parametrize("rule", ["floor", "ceil"])
@precisions
def test_a_packed_layer_is_the_rounded_layer(rule, dtype, rel):
    layer = random_model(TINY).model.layers[1].block_sparse_moe.to(dtype)
    want = value_and_gradient(rounded(layer, rule), randn(2, 5, 64, dtype=dtype))
    pack_experts(layer, rule)
    assert isinstance(layer.experts, PackedExperts) and not layer.experts.training
    for name, a, b in zip(("y", "dx"), value_and_gradient(layer, randn(2, 5, 64, dtype=dtype)), want, strict=True):
        assert_close(name, a, b, rel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_model_generates_what_the_rounded_one_does(dtype):
    config = K3Config.from_dict(TINY.to_dict() | {"dtype": dtype})
    plain, want, model = random_model(config), rounded(random_model(config)), random_model(config)
    pack_experts(model)
    tokens = generate(model, IDS, 24)
    assert torch.equal(tokens, generate(want, IDS, 24))
    assert_close("logits", model(IDS).logits, want(IDS).logits, 1e-6 if dtype == "float32" else 2e-2)
    assert (plain(IDS).logits - want(IDS).logits).abs().max() > 0.01, "rounding shows"


def test_only_routed_experts_change():
    model = random_model(TINY)
    before = {n: p.clone() for n, p in model.named_parameters() if ".experts." not in n}
    pack_experts(model)
    assert before.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_unpacked_experts_can_be_trained_and_pack_to_the_same_bytes():
    model = random_model(TINY)
    want = rounded(random_model(TINY)).state_dict()
    pack_experts(model)
    bytes_ = {n: t.clone() for n, t in model.state_dict().items()}
    unpack_experts(model)
    assert (
        all(torch.equal(t, want[n]) for n, t in model.state_dict().items()) and want.keys() == model.state_dict().keys()
    )
    model(IDS, labels=IDS).loss.backward()
    assert model.model.layers[1].block_sparse_moe.experts.w1.grad.abs().sum() > 0
    pack_experts(model)
    assert all(torch.equal(t, bytes_[n]) for n, t in model.state_dict().items())


def test_widths_that_cannot_be_packed():
    from tests.helpers import tiny

    with pytest.raises(ValueError, match="w1: got an input width of 24, wanted a multiple of 32 to pack it"):
        pack_experts(random_model(tiny("k3")))


def test_half_the_tokens_to_no_expert():
    """An expert without tokens is not decoded."""
    layer = random_model(TINY).model.layers[1].block_sparse_moe
    pack_experts(layer)
    z, weights = randn(2, 32), torch.ones(2, 2)
    out = layer.experts(z, torch.tensor([[3, 1], [1, 3]]), weights)
    alone = [layer.experts._expert(e, z) for e in (1, 3)]
    assert_close("out", out, alone[0] + alone[1], 1e-6)
