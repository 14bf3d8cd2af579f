"""Siblings: equal size, the layers they are named for, and two that see positions in their own way."""

import math

import pytest
import torch

from k3lite.tasks.recall import VOCABULARY
from k3lite.tasks.siblings import (
    MLA_HEADS,
    VARIANTS,
    ConvMLA,
    RotaryMLA,
    make_sibling,
    rotate,
    sibling_cache_bytes,
    sibling_config,
)

KINDS = {
    "kda": ["kda"] * 4,
    "hybrid": ["kda", "kda", "kda", "mla"],
    "1:1": ["kda", "mla"] * 2,
    "mla": ["mla"] * 4,
    "mla-conv": ["mla"] * 4,
    "mla-rotary": ["mla"] * 4,
}


def sibling(variant, seed=0, **options):
    return make_sibling(variant, sibling_config(variant, VOCABULARY, **options), seed).eval()


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def ids(batch=2, tokens=20, seed=0):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("variant", KINDS)
def test_layers_are_those_of_the_name(variant):
    assert list(sibling(variant).config.layer_kinds) == KINDS[variant]


def test_eight_layers_for_seven_to_one():
    assert list(sibling("7:1", layers=8).config.layer_kinds) == ["kda"] * 7 + ["mla"]


@pytest.mark.parametrize(("layers", "width"), [(4, 16), (4, 32), (8, 16)])
def test_siblings_have_as_many_parameters(layers, width):
    variants = [v for v in VARIANTS if layers == 8 or v != "7:1"]
    sizes = {v: parameters(sibling(v, layers=layers, width=width)) for v in variants}
    assert max(sizes.values()) / min(sizes.values()) < 1.012, sizes


@pytest.mark.parametrize(
    ("variant", "layers", "message"),
    [
        ("mamba", 4, "variant: got 'mamba', wanted one of kda, hybrid"),
        ("hybrid", 6, "layers: got 6, wanted a multiple of 4 for hybrid"),
        ("7:1", 4, "layers: got 4, wanted a multiple of 8 for 7:1"),
        ("kda", 0, "layers: got 0, wanted a multiple of 1"),
    ],
)
def test_what_cannot_be_made(variant, layers, message):
    with pytest.raises(ValueError, match=message):
        sibling_config(variant, VOCABULARY, layers=layers)


@pytest.mark.parametrize("variant", KINDS)
def test_the_seed_decides_the_weights(variant):
    a, b, c = (torch.cat([p.flatten() for p in sibling(variant, seed).parameters()]) for seed in (3, 3, 4))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.isfinite(a).all()


@pytest.mark.parametrize("variant", KINDS)
def test_no_sibling_sees_the_future(variant):
    model, x = sibling(variant), ids()
    other = x.clone()
    other[:, 12:] = (other[:, 12:] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(x).logits, model(other).logits
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-2)


# ---- what knows the order of the past, and what does not


def swapped_past(variant, layers=1):
    """Largest change of the last logits when the tokens before it change places."""
    model, x = sibling(variant, layers=layers), ids(4)
    shuffled = torch.cat([x[:, :-4].flip(1), x[:, -4:]], 1)
    with torch.no_grad():
        return float((model(x).logits[:, -1] - model(shuffled).logits[:, -1]).abs().max())


def test_plain_mla_does_not_know_the_order_of_the_past():
    assert swapped_past("mla") < 1e-5


@pytest.mark.parametrize("variant", ["mla-conv", "mla-rotary", "kda"])
def test_the_others_do(variant):
    assert swapped_past(variant) > 1e-3


def test_a_convolution_sees_three_tokens_back_and_a_slot_all_of_them():
    """In one layer of mla-conv, the newest token's query depends on four tokens and nothing before."""
    layer = sibling("mla-conv").model.layers[0].self_attn
    x = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    far, near = x.clone(), x.clone()
    far[:, -5] += 1
    near[:, -4] += 1
    query = [layer.query(layer.conv1d(y, None, None)[0])[:, -1] for y in (x, far, near)]
    assert torch.equal(query[0], query[1]) and not torch.allclose(query[0], query[2])


# ---- rotary


def test_rotation_is_that_of_the_formula():
    x = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x)
    for t in range(7):
        for i in range(4):
            angle = t / 10_000 ** (2 * i / 8)
            a, b = x[:, t, 2 * i], x[:, t, 2 * i + 1]
            torch.testing.assert_close(turned[:, t, 2 * i], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(turned[:, t, 2 * i + 1], a * math.sin(angle) + b * math.cos(angle))


def test_scores_depend_on_the_distance_alone():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 8, generator=g), torch.randn(1, 8, generator=g)
    turned_q, turned_k = rotate(q.expand(60, 8)), rotate(k.expand(60, 8))
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 5, 20):
        same = scores.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), atol=1e-4, rtol=1e-4)
    assert scores[20, 0] != pytest.approx(float(scores[20, 15]), abs=1e-2)


def test_rotary_mla_turns_queries_and_shared_keys_and_nothing_else():
    layer = sibling("mla-rotary").model.layers[0].self_attn
    plain = sibling("mla").model.layers[0].self_attn
    rank = plain.rank
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    q, kept, q0, kept0 = layer.query(x), layer.latents(x), plain.query(x), plain.latents(x)
    assert torch.equal(q[..., :32], q0[..., :32]) and torch.equal(kept[..., :rank], kept0[..., :rank])
    torch.testing.assert_close(kept[..., rank:], rotate(kept0[..., rank:]))
    for head in range(MLA_HEADS):
        torch.testing.assert_close(q[:, :, head, 32:], rotate(q0[:, :, head, 32:]))
    assert torch.equal(q[:, 0], q0[:, 0]) and not torch.allclose(q[:, 5], q0[:, 5])


def test_variants_are_their_own_kind_of_layer():
    assert all(type(layer.self_attn) is ConvMLA for layer in sibling("mla-conv").model.layers)
    assert all(type(layer.self_attn) is RotaryMLA for layer in sibling("mla-rotary").model.layers)


# ---- caches


@pytest.mark.parametrize("variant", ["kda", "hybrid", "1:1", "mla"])
def test_the_cache_takes_what_was_said(variant):
    model = sibling(variant)
    cache = model.new_cache()
    with torch.no_grad():
        model(ids(1, 37), cache=cache)
    assert sibling_cache_bytes(variant, model.config, 37) == cache.bytes()


def test_on_paper_a_convolution_keeps_three_inputs_a_layer():
    config = sibling_config("mla-conv", VOCABULARY)
    kept = sibling_cache_bytes("mla-conv", config, 100)
    assert kept.conv == 4 * 3 * 64 * 4 and kept.latent == 4 * 100 * config.latent_width * 4 and kept.state == 0
    assert sibling_cache_bytes("mla-rotary", config, 100).total == kept.latent


@pytest.mark.parametrize("variant", ["mla-conv", "mla-rotary"])
def test_who_has_no_cache_says_so(variant):
    model = sibling(variant)
    with pytest.raises(ValueError, match="cache: this sibling reads whole sequences only"):
        model(ids(1), cache=model.new_cache())
    with pytest.raises(ValueError, match="without padding"):
        model(ids(1), attention_mask=torch.tensor([[0] + [1] * 19]))


def test_rotary_does_not_take_packed_sequences():
    with pytest.raises(ValueError, match="cu_seqlens: this sibling counts positions from the start of a row"):
        sibling("mla-rotary")(ids(1), cu_seqlens=torch.tensor([0, 5, 20]))


def test_conv_in_front_of_mla_does_not_cross_packed_borders():
    model, x = sibling("mla-conv"), ids(1)
    with torch.no_grad():
        packed = model(x, cu_seqlens=torch.tensor([0, 8, 20])).logits
        alone = model(x[:, 8:]).logits
    torch.testing.assert_close(packed[:, 8:], alone)
