"""Attention over shared latents: the mask with a cache (shared hazards T09), and the two forms against each other."""

import math

import pytest
import torch

from k3lite.ops.latent_attention import latent_attention
from tests.helpers import assert_close, dims

NOPE, ROPE, RANK, V, H = 6, 3, 5, 4, 2
forms = pytest.mark.parametrize("form", ["expanded", "absorbed"])
masks = pytest.mark.parametrize("mask", [None, "padded", "packed"])


def inputs(T, L, B=2, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(B, T, H, NOPE + ROPE, generator=rng, dtype=dtype)
    latents = torch.randn(B, L, RANK + ROPE, generator=rng, dtype=dtype)
    kv_b = torch.randn(H, NOPE + V, RANK, generator=rng, dtype=dtype)
    return q, latents, kv_b


def by_hand(q, latents, kv_b, visible):
    """One query, one key at a time. visible(b, t, s): whether query t of row b may see key s."""
    B, T, L = q.shape[0], q.shape[1], latents.shape[1]
    out = torch.zeros(B, T, H, V, dtype=q.dtype)
    for b in range(B):
        for t in range(T):
            for h in range(H):
                keys = [s for s in range(L) if visible(b, t, s)]
                scores, values = [], []
                for s in keys:
                    kv = kv_b[h] @ latents[b, s, :RANK]
                    key = torch.cat([kv[:NOPE], latents[b, s, RANK:]])
                    scores.append(q[b, t, h] @ key / math.sqrt(NOPE + ROPE))
                    values.append(kv[NOPE:])
                if keys:
                    out[b, t, h] = torch.stack(scores).softmax(0) @ torch.stack(values)
    return out


@forms
def test_t09_new_queries_see_the_whole_past(form):
    """All scores equal, values 1..5, the last 2 of 5 tokens ask."""
    latents = torch.tensor([[1.0, 0], [2, 0], [3, 0], [4, 0], [5, 0]]).unsqueeze(0)
    kv_b = torch.tensor([[[0.0], [1.0]]])  # key 0, value c
    o = latent_attention(torch.ones(1, 2, 1, 2), latents, kv_b, 1, form=form)
    torch.testing.assert_close(o.flatten(), torch.tensor([2.5, 3.0]))


@forms
def test_t09_a_query_that_sees_nothing_gives_zero(form):
    tensors = [x.requires_grad_() for x in inputs(4, 4)]
    mask = torch.tensor([[False, False, True, True], [False] * 4])
    o = latent_attention(*tensors, NOPE, key_mask=mask, form=form)
    assert not o[0, :2].any() and not o[1].any() and o[0, 2:].all()
    gradients = torch.autograd.grad(o.sum(), tensors)
    assert all(torch.isfinite(g).all() for g in gradients)
    assert not gradients[0][1].any() and not gradients[1][1].any()  # nor does it ask for anything


@dims("T L", (1, 1), (5, 5), (1, 7), (3, 7))
@forms
def test_by_hand(T, L, form):
    q, latents, kv_b = inputs(T, L)
    want = by_hand(q, latents, kv_b, lambda b, t, s: s <= L - T + t)
    assert_close("o", latent_attention(q, latents, kv_b, NOPE, form=form), want, 1e-12)


@dims("T L", (5, 5), (2, 7))
@forms
def test_padded_keys(T, L, form):
    q, latents, kv_b = inputs(T, L)
    mask = torch.ones(2, L, dtype=torch.bool)
    mask[0, :2] = False
    want = by_hand(q, latents, kv_b, lambda b, t, s: s <= L - T + t and bool(mask[b, s]))
    assert_close("o", latent_attention(q, latents, kv_b, NOPE, key_mask=mask, form=form), want, 1e-12)


@forms
def test_packed(form):
    q, latents, kv_b = inputs(9, 9, B=1)
    starts = [0, 4, 4, 5, 9]
    want = by_hand(q, latents, kv_b, lambda b, t, s: s <= t and not any(s < start <= t for start in starts))
    got = latent_attention(q, latents, kv_b, NOPE, cu_seqlens=torch.tensor(starts), form=form)
    assert_close("o", got, want, 1e-12)


def options(mask, L):
    if mask == "padded":
        return {"key_mask": torch.arange(L).expand(2, L) >= torch.tensor([[0], [min(3, L - 1)]])}
    return {"cu_seqlens": torch.tensor([0, min(3, L), L])} if mask == "packed" else {}


@masks
@dims("T L", (1, 1), (1, 40), (17, 40), (40, 40))
def test_absorbed_equals_expanded(T, L, mask):
    T = L if mask == "packed" else T  # packed rows have no past
    tensors = [x.requires_grad_() for x in inputs(T, L, B=1 if mask == "packed" else 2)]
    results = {}
    for form in ("expanded", "absorbed"):
        o = latent_attention(*tensors, NOPE, form=form, **options(mask, L))
        weighting = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype)
        results[form] = [o, *torch.autograd.grad((o * weighting).sum(), tensors)]
    for name, a, e in zip(("o", "dq", "dlatents", "dkv_b"), *results.values(), strict=True):
        assert_close(name, a, e, 1e-12)


@masks
@forms
def test_blocks_of_queries_change_nothing(monkeypatch, form, mask):
    L = 23
    q, latents, kv_b = inputs(L, L, B=1 if mask == "packed" else 2)
    whole = latent_attention(q, latents, kv_b, NOPE, form=form, **options(mask, L))
    for numbers in (1, 3 * 2 * H * L):  # one row at a time, and a few
        monkeypatch.setattr("k3lite.ops.latent_attention.MAX_SCORES", numbers)
        got = latent_attention(q, latents, kv_b, NOPE, form=form, **options(mask, L))
        assert_close(f"{numbers} scores", got, whole, 1e-13)


@forms
def test_order_of_the_past_does_not_matter(form):
    """No position is encoded (NoPE)."""
    q, latents, kv_b = inputs(1, 20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    want = latent_attention(q, latents, kv_b, NOPE, form=form)
    assert_close("o", latent_attention(q, latents[:, order], kv_b, NOPE, form=form), want, 1e-13)


@forms
def test_large_scores_and_low_precision(form):
    """Scores of 1e4 overflow no softmax, and bf16 tensors meet in fp32."""
    q, latents, kv_b = (x.bfloat16() for x in inputs(5, 9))
    o = latent_attention(1e3 * q, latents, kv_b, NOPE, form=form)
    assert o.dtype == torch.bfloat16 and torch.isfinite(o).all()
    want = latent_attention(q.double(), latents.double(), kv_b.double(), NOPE)
    assert_close("o", latent_attention(q, latents, kv_b, NOPE, form=form), want, 2e-2)


@pytest.mark.parametrize(
    "T, options, message",
    [
        (10, {}, "latents: got 9 tokens for 10 queries, wanted at least as many"),
        (5, {"form": "flash"}, "form: got 'flash', wanted 'auto', 'expanded' or 'absorbed'"),
    ],
    ids=["too-few-latents", "form"],
)
def test_wrong_arguments(T, options, message):
    q, latents, kv_b = inputs(T, 9)
    with pytest.raises(ValueError, match=message):
        latent_attention(q, latents, kv_b, NOPE, **options)
