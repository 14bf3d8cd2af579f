"""Plain attention: the mask with a cache (hazards T09), and three independent witnesses: by hand, torch's SDPA, MLA."""

import math

import pytest
import torch
import torch.nn.functional as F

from k3lite.ops.attention import causal_attention
from k3lite.ops.latent_attention import latent_attention
from tests.helpers import assert_close, dims

shapes = dims("B T L H K V", (1, 1, 1, 1, 3, 2), (2, 5, 5, 2, 6, 4), (2, 1, 7, 3, 4, 5), (1, 3, 8, 2, 60, 7))


def inputs(B, T, L, H, K, V, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(B, n, H, d, generator=rng, dtype=dtype) for n, d in ((T, K), (L, K), (L, V))]


def by_hand(q, k, v, visible, scale):
    """One query at a time, over the keys that visible(b, t, j) names."""
    o, weights = (
        torch.zeros(*q.shape[:3], v.shape[-1], dtype=v.dtype),
        v.new_zeros(len(q), q.shape[2], q.shape[1], k.shape[1]),
    )
    for b, t, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).reshape(-1, 3).tolist():
        keys = [j for j in range(k.shape[1]) if visible(b, t, j)]
        parts = [math.exp(scale * float(q[b, t, h] @ k[b, j, h])) for j in keys]
        for j, part in zip(keys, parts, strict=True):
            weights[b, h, t, j] = part / sum(parts)
            o[b, t, h] += part / sum(parts) * v[b, j, h]
    return o, weights


@shapes
@pytest.mark.parametrize("scale", [None, 0.3])
def test_by_hand(B, T, L, H, K, V, scale):
    x = inputs(B, T, L, H, K, V)
    want = by_hand(*x, lambda b, t, j: j <= L - T + t, K**-0.5 if scale is None else scale)
    for name, g, w in zip(("o", "weights"), causal_attention(*x, scale=scale), want, strict=True):
        assert_close(name, g, w, 1e-12)


@shapes
def test_it_is_torch_sdpa_with_the_mask_anchored_below_right(B, T, L, H, K, V):
    q, k, v = inputs(B, T, L, H, K, V)
    mask = torch.ones(T, L, dtype=torch.bool).tril(L - T)
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)
    assert_close("o", causal_attention(q, k, v)[0], want, 1e-12)


def test_t09_new_queries_see_the_whole_past():
    """All scores equal, values 1..5, the last 2 of 5 tokens ask. torch's is_causal gives 1.0 and 1.5 here."""
    q, k, v = torch.zeros(1, 2, 1, 1), torch.zeros(1, 5, 1, 1), torch.arange(1.0, 6).reshape(1, 5, 1, 1)
    torch.testing.assert_close(causal_attention(q, k, v)[0].flatten(), torch.tensor([2.5, 3.0]))
    top_left = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(top_left.flatten(), torch.tensor([1.0, 1.5]))


def test_t09_a_query_that_sees_nothing_gives_zero_and_a_finite_gradient():
    tensors = [x.requires_grad_() for x in inputs(2, 4, 4, 2, 3, 2)]
    mask = torch.tensor([[False, False, True, True], [False] * 4])
    o, weights = causal_attention(*tensors, key_mask=mask)
    assert not o[0, :2].any() and not o[1].any() and o[0, 2:].all()
    assert not weights[0, :, :, :2].any() and torch.allclose(weights[0, :, 2:].sum(-1), torch.ones(2, 2).double())
    gradients = torch.autograd.grad(o.sum(), tensors)
    assert all(torch.isfinite(g).all() for g in gradients)
    assert not gradients[0][1].any() and not gradients[0][0, :2].any()


@pytest.mark.parametrize("T", [2, 6])
def test_padding_and_packing_give_each_sequence_what_it_gets_alone(T):
    q, k, v = inputs(2, T, 6, 2, 3, 4)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :3] = False
    alone = causal_attention(q[:1, -min(T, 3) :], k[:1, 3:], v[:1, 3:])[0]
    assert_close("padded", causal_attention(q, k, v, key_mask=mask)[0][:1, -min(T, 3) :], alone, 1e-12)
    if T == 6:
        packed = causal_attention(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 2, 2, 6]))[0]
        parts = [causal_attention(q[:1, a:b], k[:1, a:b], v[:1, a:b])[0] for a, b in ((0, 2), (2, 6))]
        assert_close("packed", packed, torch.cat(parts, 1), 1e-12)


def test_in_one_piece_and_token_by_token():
    q, k, v = inputs(2, 6, 6, 2, 3, 4)
    pieces = [causal_attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1])[0] for t in range(6)]
    assert_close("o", torch.cat(pieces, 1), causal_attention(q, k, v)[0], 1e-12)


def test_it_is_latent_attention_with_the_latents_unfolded():
    rng = torch.Generator().manual_seed(1)
    B, T, L, H, nope, rope, V, rank = 2, 3, 7, 2, 6, 3, 4, 5
    shapes = (B, T, H, nope + rope), (B, L, rank + rope), (H, nope + V, rank)
    q, latents, kv_b = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    kv = torch.einsum("blr,hnr->blhn", latents[..., :rank], kv_b)
    k = torch.cat([kv[..., :nope], latents[..., None, rank:].expand(-1, -1, H, -1)], -1)
    assert_close("o", causal_attention(q, k, kv[..., nope:])[0], latent_attention(q, latents, kv_b, nope), 1e-12)


def test_half_precision_scores_are_made_in_fp32():
    q, k, v = (x.bfloat16() for x in inputs(1, 5, 5, 2, 8, 4))
    o, weights = causal_attention(q, k, v)
    assert o.dtype == torch.bfloat16 and weights.dtype == torch.float32
    want = causal_attention(q.double(), k.double(), v.double())
    assert_close("weights", weights, want[1], 1e-6)
    assert_close("o", o, want[0], 4e-3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": (2, 5, 6)}, r"q: got shape \(2, 5, 6\), wanted \[B, T, H, K\]"),
        ({"k": (2, 4, 2, 6)}, r"k: got shape \(2, 4, 2, 6\), wanted \(2, L, 2, 6\) with L of 5 or more"),
        ({"k": (2, 5, 2, 5)}, r"k: got shape \(2, 5, 2, 5\)"),
        ({"v": (2, 6, 2, 4)}, r"v: got shape \(2, 6, 2, 4\), wanted \(2, 5, 2, V\)"),
        ({"v": (2, 5)}, r"v: got shape \(2, 5\)"),
        ({"key_mask": (2, 4)}, r"key_mask: got torch.bool \(2, 4\), wanted bool \(2, 5\)"),
    ],
)
def test_wrong_shapes_are_named(change, message):
    shapes = {"q": (2, 5, 2, 6), "k": (2, 5, 2, 6), "v": (2, 5, 2, 4)} | change
    x = {name: torch.zeros(s, dtype=torch.bool if name == "key_mask" else None) for name, s in shapes.items()}
    with pytest.raises(ValueError, match=message):
        causal_attention(**x)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("to, got", [(torch.long, "torch.int64 on cpu"), ("meta", "on meta")], ids=["whole", "meta"])
def test_dtypes_and_devices_are_named(name, to, got):
    given = dict(zip("qkv", inputs(1, 2, 5, 1, 3, 2), strict=True))
    given[name] = given[name].to(to)
    with pytest.raises(ValueError, match=f"[qkv]: got .*{got}|[kv]: got .*, wanted .*, as q is"):
        causal_attention(**given)


def test_packed_rows_have_no_past():
    q, k, v = inputs(1, 2, 5, 1, 3, 2)
    with pytest.raises(ValueError, match="k: got 5 keys for 2 packed queries"):
        causal_attention(q, k, v, cu_seqlens=torch.tensor([0, 2]))
