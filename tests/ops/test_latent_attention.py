"""Attention over shared latents: the mask with a cache (shared hazards T09), and the two forms against each other."""

import math

import pytest
import torch

from k3lite.ops import latent_attention as op
from k3lite.ops.latent_attention import latent_attention
from k3lite.pages import PagePool, PageTable
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


@pytest.mark.parametrize("value_width", [V, 17])  # narrower and wider than the keys
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1), (torch.float32, 1), (torch.float32, 1e4)], ids=str)
def test_without_gradients_torchs_kernel_gives_the_same(monkeypatch, value_width, dtype, scale):
    calls, fused = [], op._fused
    monkeypatch.setattr(op, "_fused", lambda *args: (calls.append(1), fused(*args))[1])
    q, latents, _ = inputs(37, 37, dtype=dtype)
    kv_b = torch.randn(H, NOPE + value_width, RANK, generator=torch.Generator().manual_seed(1), dtype=dtype)
    want = latent_attention((q * scale).requires_grad_(), latents, kv_b, NOPE, form="expanded")
    assert want.requires_grad and not calls
    got = latent_attention(q * scale, latents, kv_b, NOPE, form="expanded")
    assert calls == [1] and got.shape == want.shape
    assert_close("o", got, want.detach(), 1e-12 if dtype == torch.float64 else 1e-5)


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


# ---- latents in pages


def paged(latents, page_size, rng):
    """The same latents in pages whose order is random: table and pool of a life with other sequences come and gone."""
    B, L, width = latents.shape
    pool = PagePool(1, width, latents.dtype, page_size=page_size, pages=2 * B * (L // page_size + 1))
    others, table = [PageTable(pool, 1) for _ in range(pool.pages)], PageTable(pool, B)
    for other in others:
        other.reserve(page_size)
    while others:  # tokens come one by one while pages fall free in random order
        del others[int(torch.randint(len(others), (), generator=rng))]
        if table.tokens < L and pool.free >= B:
            table.reserve(1)
            table.write(0, latents[:, table.tokens - 1 : table.tokens])
    while table.tokens < L:
        table.reserve(1)
        table.write(0, latents[:, table.tokens - 1 : table.tokens])
    return table


@dims(
    "T L page block",
    (1, 1, 4, 8),
    (1, 23, 1, 5),
    (1, 24, 8, 8),
    (1, 25, 8, 5),
    (4, 33, 7, 10),
    (1, 64, 16, 1000),
    (9, 9, 3, 4),
)
@pytest.mark.parametrize("mask", [None, "padded"])
def test_pages_in_any_order_equal_the_expanded_form(monkeypatch, T, L, page, block, mask):
    """Blocks of `block` tokens, so that most read several pages, across borders of pages and of blocks."""
    q, latents, kv_b = inputs(T, L)
    want = latent_attention(q, latents, kv_b, NOPE, form="expanded", **options(mask, L))
    table = paged(latents, page, torch.Generator().manual_seed(L))
    assert torch.equal(op.join_pieces(table.pieces(0)), latents)
    monkeypatch.setattr(op, "BLOCK", block * (RANK + ROPE))
    for form in ("absorbed", "expanded"):
        got = latent_attention(q, table.pieces(0), kv_b, NOPE, form=form, **options(mask, L))
        assert_close(form, got, want, 1e-12)


def test_sequences_with_shared_prefixes(monkeypatch):
    """Rows 0 and 2 begin alike, row 1 does not; then each goes on with its own latents."""
    q, latents, kv_b = inputs(2, 30, B=3)
    latents[2, :19] = latents[0, :19]
    pool = PagePool(1, RANK + ROPE, torch.float64, page_size=4)
    prefixes = PageTable(pool, 2)
    prefixes.reserve(19)
    prefixes.write(0, latents[:2, :19])
    table = prefixes.select([0, 1, 0])
    table.reserve(11)
    table.write(0, latents[:, 19:])
    monkeypatch.setattr(op, "BLOCK", 6 * (RANK + ROPE))
    want = latent_attention(q, latents, kv_b, NOPE, form="expanded")
    assert_close("o", latent_attention(q, table.pieces(0), kv_b, NOPE, form="absorbed"), want, 1e-12)
    assert table.held() == 2 * 4 + 3 * 4, "four full pages of each prefix, and four more for each sequence"


def test_blocks_with_nothing_to_see(monkeypatch):
    """Padding over whole blocks, and a sequence that is padding throughout."""
    q, latents, kv_b = inputs(2, 20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :13], mask[1] = False, False
    monkeypatch.setattr(op, "BLOCK", 4 * (RANK + ROPE))
    pieces = [list(x.split(3)) for x in latents]
    o = latent_attention(q, pieces, kv_b, NOPE, key_mask=mask, form="absorbed")
    assert_close("o", o, latent_attention(q, latents, kv_b, NOPE, key_mask=mask, form="expanded"), 1e-12)
    assert not o[1].any() and o[0].all()


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=str)
def test_blocks_with_scores_of_any_size(monkeypatch, scale):
    """The largest score may come first, last or in between: nothing overflows."""
    q, latents, kv_b = inputs(1, 40)
    monkeypatch.setattr(op, "BLOCK", 7 * (RANK + ROPE))
    want = latent_attention(scale * q, latents, kv_b, NOPE, form="expanded")
    for turn in (0, 13, 39):
        turned = latents.roll(turn, 1)
        got = latent_attention(scale * q, [[x] for x in turned], kv_b, NOPE, form="absorbed")
        assert_close(f"turned by {turn}", got, want, 1e-12 * scale)


@pytest.mark.parametrize("onednn", [True, False], ids=["onednn", "plain"])
@dims("T L", (1, 300), (3, 301))
def test_blocks_in_fp32_and_bf16(monkeypatch, onednn, T, L):
    """The product for few rows, and what stands in for it where torch lacks it."""
    assert hasattr(torch.ops.mkldnn, "_linear_pointwise"), "this torch has it, so both are tested"
    if not onednn:
        monkeypatch.setattr(torch.ops, "mkldnn", object())
    monkeypatch.setattr(op, "BLOCK", 64 * (RANK + ROPE))
    q, latents, kv_b = inputs(T, L)
    want = latent_attention(q, latents, kv_b, NOPE, form="expanded")
    for dtype, rel in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        low = [x.to(dtype) for x in (q, latents, kv_b)]
        pieces = [list(x.split(50)) for x in low[1]]
        with torch.no_grad():
            got = latent_attention(low[0], pieces, low[2], NOPE, form="absorbed")
        assert got.dtype == dtype
        assert_close(str(dtype), got, want, rel)


def test_blocks_have_the_gradient_of_the_query(monkeypatch):
    q, latents, kv_b = (x.float() for x in inputs(2, 40))
    monkeypatch.setattr(op, "BLOCK", 7 * (RANK + ROPE))
    gradients = []
    for given in (latents, [list(x.split(9)) for x in latents]):
        leaf = q.clone().requires_grad_()
        latent_attention(leaf, given, kv_b, NOPE, form="absorbed").square().sum().backward()
        gradients.append(leaf.grad)
    assert_close("dq", gradients[1], gradients[0], 1e-5)


def test_blocks_are_read_and_not_copied(monkeypatch):
    """A piece that holds a block is that block; several are put together, and no more than a block of them."""
    whole = torch.arange(30.0).view(15, 2)
    pieces = [whole[:8], whole[8:9], whole[9:10], whole[10:]]
    blocks = list(op._blocks(pieces, 4))
    assert torch.equal(torch.cat(blocks), whole) and [len(b) for b in blocks] == [4, 4, 4, 3]
    inside = whole.untyped_storage().data_ptr()
    assert [b.untyped_storage().data_ptr() == inside for b in blocks] == [True, True, False, True]
    monkeypatch.setattr(op, "BLOCK", 8)
    monkeypatch.setattr(op, "join_pieces", lambda pieces: pytest.fail("put together"))
    q, latents, kv_b = inputs(1, 40, B=1)
    latent_attention(q, [[latents[0]]], kv_b, NOPE, form="absorbed")


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


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q", lambda x: x[0], r"q: got torch.float\d+ \(.*\), wanted floats \[B, T, H, nope\+rope\]"),
        ("q", lambda x: x.long(), "q: got torch.int64"),
        ("q", lambda x: x[..., :-1], "latents: got shape .*, wanted rows of rank"),
        ("q", lambda x: x[:, :, :-1], "kv_b: got shape"),
        ("latents", lambda x: x[0], "latents: got shape"),
        ("latents", lambda x: x[..., :-1], "latents: got shape"),
        ("latents", lambda x: x.half(), "latents: got torch.float16 on cpu, wanted torch.float"),
        ("kv_b", lambda x: x[0], "kv_b: got shape"),
        ("kv_b", lambda x: x[:, :1], "kv_b: got shape"),
        ("kv_b", lambda x: x.half(), "kv_b: got torch.float16"),
        ("kv_b", lambda x: x.to("meta"), "kv_b: got torch.float.* on meta, wanted .* on cpu"),
    ],
)
def test_shapes_dtypes_and_devices_are_named(name, change, message):
    given = dict(zip(("q", "latents", "kv_b"), inputs(5, 9), strict=True))
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        latent_attention(**given, nope_dim=NOPE)
