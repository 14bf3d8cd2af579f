"""The gated MLA layer against its formula, written out with an explicit softmax (shared sheet §2.2)."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from k3lite.cache import K3Cache
from k3lite.mla import GatedMLA
from tests.helpers import assert_close, randomise, tiny


def layer_of(kind, **changes):
    layer = GatedMLA(tiny(kind, **changes)).double()
    randomise(((f"self_attn.{n}", p) for n, p in layer.named_parameters()), seed=1)
    return layer


def hidden(T=7):
    return torch.randn(2, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def formula(m, x, kind):
    w = {n.removesuffix(".weight"): p for n, p in m.named_parameters()}
    if kind == "k3":
        q = F.rms_norm(x @ w["q_a_proj"].T, (20,), w["q_a_layernorm"], eps=1e-6) @ w["q_b_proj"].T
    else:
        q = x @ w["q_proj"].T
    kv = x @ w["kv_a_proj_with_mqa"].T
    c, k_r = F.rms_norm(kv[..., :12], (12,), w["kv_a_layernorm"], eps=1e-6), kv[..., 12:]
    heads = []
    for h in range(2):
        q_h = q[..., 12 * h : 12 * (h + 1)]
        kv_h = c @ w["kv_b_proj"][18 * h : 18 * (h + 1)].T
        k_h, v_h = torch.cat([kv_h[..., :8], k_r], -1), kv_h[..., 8:]
        scores = q_h @ k_h.mT / 12**0.5
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        heads.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v_h)
    o = torch.cat(heads, -1)
    if kind == "k3":
        o = o * (x @ w["g_proj"].T).sigmoid()
    return o @ w["o_proj"].T, torch.cat([c, k_r], -1)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("kind", ["k3", "linear"])
def test_formula(kind, form):
    layer, x = layer_of(kind), hidden()
    whole = K3Cache.empty(tiny(kind, layers=1, mla=[1]), 2, torch.float64)
    whole.extend(x.shape[1])
    layer.form, cache = form, whole.layers[0]
    want, latents = formula(layer, x, kind)
    assert_close("y", layer(x), want, 1e-12)
    assert_close("y with a cache", layer(x, cache), want, 1e-12)
    assert_close("what is cached", cache.latents, latents, 1e-12)


@pytest.mark.parametrize("kind", ["k3", "linear"])
def test_order_of_the_past_does_not_matter(kind):
    """NoPE: shuffled, the earlier tokens give the last one the same output."""
    layer, x = layer_of(kind), hidden(20)
    order = torch.cat([torch.randperm(19, generator=torch.Generator().manual_seed(0)), torch.tensor([19])])
    assert_close("last", layer(x[:, order])[:, -1], layer(x)[:, -1], 1e-12)


def test_the_inner_eps_is_not_the_config_s():
    """1e-6, the class default of the released code (shared sheet §7.2)."""
    layers = [layer_of("k3", rms_norm_eps=eps) for eps in (1e-5, 1e-2)]
    assert torch.equal(layers[0](hidden()), layers[1](hidden()))


def test_cached_numbers_per_token():
    """rank + rope, whatever the number of heads: 576 in K3."""
    config = tiny("k3")
    for heads in (1, 2, 4):
        c = dataclasses.replace(config, num_attention_heads=heads)
        assert GatedMLA(c).latents(torch.zeros(1, 1, 32)).shape[-1] == c.latent_width == 16
