"""The cache as a whole: snapshots and rollback (shared hazards T08), sharing, a full pool, and bytes as predicted."""

import math

import pytest
import torch

from k3lite import budget
from k3lite.cache import K3Cache, KdaState
from k3lite.ops.kda import kda
from k3lite.pages import PoolFull
from tests.helpers import assert_close, random_model, tiny

kinds = pytest.mark.parametrize("kind", ["k3", "linear"])


def model_of(kind="k3", dtype="float64", **changes):
    return random_model(tiny(kind, dtype=dtype, **changes))


def tokens(*shape, seed=0):
    return torch.randint(1, 48, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, ids, cache):
    return model(ids, cache=cache).logits


def contents(cache):
    """Everything that a cache remembers, as copies."""
    for layer in cache.layers:
        yield from (
            (layer.S.clone(), *(w.clone() for w in layer.conv)) if isinstance(layer, KdaState) else (layer.latents,)
        )
    yield torch.tensor(cache.seen)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- T08


class Scalar:
    """One KDA and one MLA layer of width 1: decay 1/2, beta 1/2, key 1; latents and windows keep the values seen."""

    def __init__(self):
        a = tiny("k3").linear_attn_config
        a = type(a)((1,), (2,), num_heads=1, head_dim=1, use_full_rank_gate=True, gate_lower_bound=-5.0)
        config = tiny("k3", linear_attn_config=a, num_hidden_layers=2, kv_lora_rank=1, qk_rope_head_dim=0)
        self.cache = K3Cache.empty(config, 1, torch.float64, page_size=2)

    def read(self, *values, cache=None):
        cache = self.cache if cache is None else cache
        for v in values:
            v = torch.full((1, 1, 1, 1), float(v), dtype=torch.float64)
            one = torch.ones_like(v)
            cache.extend(1)
            state, latents = cache.layers
            state.S = kda(one, one, v, math.log(0.5) * one, 0.5 * one[..., 0], initial_state=state.S)[1]
            state.conv = tuple(torch.cat([w[:, 1:], v[..., 0]], 1) for w in state.conv)
            latents.append(v[..., 0])
        return self

    @property
    def state(self):
        return self.cache.layers[0].S.item()

    @property
    def all(self):
        state, latents = self.cache.layers
        return state.S.item(), state.conv[0].flatten().tolist(), latents.latents.flatten().tolist(), self.cache.seen


def test_t08_states():
    s = Scalar()
    assert [s.read(v).state for v in (1, 2, 3, 4)] == [0.5, 1.125, 1.78125, 2.4453125]


def test_t08_resume_at_the_right_token():
    s = Scalar().read(1, 2)
    snapshot = s.cache.copy()
    s.read(3, 4)
    want = s.all
    s.cache.rollback(snapshot)
    assert s.all == (1.125, [0, 1, 2], [1, 2], 2)
    assert s.read(3, 4).all == want == (2.4453125, [2, 3, 4], [1, 2, 3, 4], 4)
    # the state after token 3 beside the latents after token 2 is what went wrong elsewhere: 2.486328
    wrong = Scalar().read(1, 2, 3).read(3, 4)
    assert wrong.state == pytest.approx(2.486328, abs=1e-6)


def test_t08_rejected_drafts_leave_nothing():
    s = Scalar().read(1, 2)
    snapshot = s.cache.copy()
    s.read(3, 9, 9)  # a draft, of which the first token is accepted
    s.cache.rollback(snapshot)
    assert s.read(3, 4).all == (2.4453125, [2, 3, 4], [1, 2, 3, 4], 4)
    assert Scalar().read(1, 2, 3, 9, 9, 4).state == pytest.approx(3.434082, abs=1e-6)


@kinds
def test_t08_no_draft_accepted_leaves_every_bit(kind):
    model = model_of(kind)
    cache = model.new_cache(2, page_size=8)
    feed(model, tokens(2, 21), cache)
    before, snapshot = list(contents(cache)), cache.copy()
    want = feed(model, tokens(2, 1, seed=1), snapshot.copy())
    feed(model, tokens(2, 5, seed=2), cache)
    cache.rollback(snapshot)
    assert same(contents(cache), before)
    assert torch.equal(feed(model, tokens(2, 1, seed=1), cache), want)


@kinds
@pytest.mark.parametrize("at", [0, 7, 8, 9, 16, 23], ids=lambda n: f"after{n}")
def test_t08_a_snapshot_at_any_token(kind, at):
    """At, before and behind page borders; more than one; the live cache goes on, back and on again."""
    model, ids = model_of(kind), tokens(2, 30)
    want = feed(model, ids, None)
    cache = model.new_cache(2, page_size=8)
    early = cache.copy()
    if at:
        feed(model, ids[:, :at], cache)
    snapshot, kept = cache.copy(), list(contents(cache))
    feed(model, tokens(2, 9, seed=5), cache)
    assert same(contents(snapshot), kept), "a snapshot does not notice"
    cache.rollback(snapshot)
    assert_close("after rolling back", feed(model, ids[:, at:], cache), want[:, at:], 1e-10)
    assert same(contents(snapshot), kept)
    cache.rollback(early)
    assert_close("from the start", feed(model, ids, cache), want, 1e-10)
    assert_close("the snapshot itself", feed(model, ids[:, at:], snapshot), want[:, at:], 1e-10)


def test_t08_130_tokens_in_pages_of_64():
    """flashinfer#4896: of 130 tokens two pages are full, and what goes with them is the state of token 128."""
    model, ids = model_of(), tokens(1, 140)
    cache = model.new_cache(1)
    feed(model, ids[:, :128], cache)
    border = cache.copy()
    feed(model, ids[:, 128:130], cache)
    want = feed(model, ids, None)[:, 128:]
    other = border.copy()
    assert other.pages.table.tolist() == cache.pages.table[:, :2].tolist() and other.seen == 128
    assert_close("from the border", feed(model, ids[:, 128:], other), want, 1e-10)


def test_rollback_wants_a_copy_of_the_same_cache():
    model = model_of()
    cache, other = model.new_cache(2), model.new_cache(2)
    with pytest.raises(ValueError, match=r"snapshot: got a cache of batch 2 with other pages, wanted a copy\(\)"):
        cache.rollback(other)
    with pytest.raises(
        ValueError, match=r"snapshot: got a cache of batch 1, wanted a copy\(\) of this one \(batch 2\)"
    ):
        cache.rollback(cache.select([0]))


def test_a_snapshot_remembers_the_padding():
    model = model_of()
    cache, mask = model.new_cache(2), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    model(tokens(2, 4), cache=cache, attention_mask=mask)
    snapshot = cache.copy()
    feed(model, tokens(2, 3), cache)
    cache.rollback(snapshot)
    assert torch.equal(cache.mask, mask.bool()) and cache.nbytes() == cache.reserved().total + 8


# ---- sharing, freeing, a full pool


@kinds
def test_a_batch_with_different_prefixes_shared(kind):
    """Two prompts, three continuations: each as if it stood alone."""
    model, prompts, more = model_of(kind), tokens(2, 21), tokens(3, 12, seed=1)
    cache = model.new_cache(2, page_size=8)
    feed(model, prompts, cache)
    batch = cache.select([0, 1, 0])
    got = feed(model, more, batch)
    for i, row in enumerate((0, 1, 0)):
        alone = feed(model, torch.cat([prompts[row : row + 1], more[i : i + 1]], 1), None)[:, 21:]
        assert_close(f"sequence {i}", got[i : i + 1], alone, 1e-10)
    table = batch.pages.table
    assert torch.equal(table[0, :2], table[2, :2]) and not (table[0] == table[1]).any()
    assert len(set(table[:, 2].tolist())) == 3


@kinds
@pytest.mark.parametrize("at", [0, 7, 8, 21], ids=lambda n: f"after{n}")
def test_a_fork_goes_on_in_every_branch_and_the_cache_stays(kind, at):
    model, ids, more = model_of(kind), tokens(2, 21)[:, :at], tokens(6, 12, seed=1)
    cache = model.new_cache(2, page_size=8)
    if at:
        feed(model, ids, cache)
    kept = list(contents(cache))
    branches = cache.fork(3)
    got = feed(model, more, branches)
    want = feed(model, torch.cat([ids.repeat_interleave(3, 0), more], 1), None)[:, at:]
    assert_close("branches", got, want, 1e-10)
    assert same(contents(cache), kept)
    assert branches.pages.held() == 2 * (at // 8) + 6 * (-(-(at + 12) // 8) - at // 8)


@kinds
@pytest.mark.parametrize("page_size", [1, 8])
def test_caches_of_different_lengths_join_and_go_on(kind, page_size):
    """The shorter ones pause: as padding does at the left, but behind what they have read, and for no forward pass."""
    model, lengths, more = model_of(kind), (2, 17, 8), tokens(4, 10, seed=1)
    root = model.new_cache(page_size=page_size)
    texts = [tokens(1, n, seed=n) for n in lengths]
    caches = [root.another() for _ in texts]
    for text, cache in zip(texts, caches, strict=True):
        feed(model, text, cache)
        cache.pause(17 - cache.seen)
    batch = K3Cache.joined([caches[0], caches[1], caches[2].copy(), caches[0]])
    assert batch.batch == 4 and batch.mask.sum(1).tolist() == [2, 17, 8, 2]
    kept = [list(contents(c)) for c in caches]
    got = torch.cat(
        [feed(model, more[:, :4], batch), *(feed(model, more[:, t : t + 1], batch) for t in range(4, 10))], 1
    )
    for i, row in enumerate((0, 1, 2, 0)):
        whole = torch.cat([texts[row], more[i : i + 1]], 1)
        assert_close(f"sequence {i}", got[i : i + 1], feed(model, whole, None)[:, lengths[row] :], 1e-10)
    assert all(same(contents(c), before) for c, before in zip(caches, kept, strict=True))


def test_joined_caches_without_padding_have_no_mask():
    model = model_of()
    root = model.new_cache()
    pair = [root.another(), root.another(2)]
    for cache in pair:
        feed(model, tokens(cache.batch, 5), cache)
        cache.pause(0)
    assert K3Cache.joined(pair).mask is None and K3Cache.joined(pair).batch == 3


def test_what_cannot_be_forked_paused_or_joined():
    model = model_of()
    a, b = model.new_cache(), model.new_cache()
    for call, message in (
        (lambda: a.fork(0), "times: got 0, wanted 1 or more"),
        (lambda: a.pause(-1), "tokens: got -1, wanted 0 or more"),
        (lambda: K3Cache.joined([]), "caches: got none"),
        (lambda: K3Cache.joined([a, b]), "caches: got caches with different pages"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    c = a.another()
    feed(model, tokens(1, 3), c)
    with pytest.raises(ValueError, match=r"caches: got \[0, 3\] tokens, wanted equally many"):
        K3Cache.joined([a, c])


def test_a_pause_that_finds_no_page_changes_nothing():
    model = model_of()
    cache = model.new_cache(pages=1, page_size=8)
    feed(model, tokens(1, 5), cache)
    before = list(contents(cache))
    with pytest.raises(PoolFull):
        cache.pause(4)
    assert same(contents(cache), before) and cache.mask is None


def test_pages_return_when_a_cache_is_freed_or_forgotten():
    model = model_of()
    cache = model.new_cache(1, pages=4, page_size=8)
    pool = cache.pages.pool
    feed(model, tokens(1, 20), cache)
    other = cache.another(1)
    feed(model, tokens(1, 8, seed=1), other)
    assert pool.free == 0
    del other
    assert pool.free == 1
    cache.free()
    assert pool.free == 4 and same(contents(cache), contents(model.new_cache(1)))
    want = feed(model, tokens(1, 20), None)
    assert_close("used again", feed(model, tokens(1, 20), cache), want, 1e-10)


def test_a_full_pool_leaves_the_cache_as_it_was():
    model, ids = model_of(), tokens(1, 24)
    cache = model.new_cache(1, pages=2, page_size=8)
    feed(model, ids[:, :10], cache)
    before = list(contents(cache))
    mask = torch.ones(1, 7)
    with pytest.raises(PoolFull, match=r"pages: 1 wanted, 0 of 2 free \(for 1 x 7 more tokens after 10, pages of 8\)"):
        model(ids[:, 10:17], cache=cache, attention_mask=mask)
    assert same(contents(cache), before) and cache.mask is None
    assert_close("what fits", feed(model, ids[:, 10:16], cache), feed(model, ids[:, :16], None)[:, 10:], 1e-10)
    snapshot = cache.copy()
    with pytest.raises(PoolFull, match="This cache holds 2 pages, other caches and snapshots 0 more"):
        feed(model, ids[:, :1], snapshot)


def test_a_snapshot_in_a_full_pool_is_the_price_of_copy_on_write():
    """A snapshot costs no page until the live cache writes on the page that both have begun."""
    model = model_of()
    cache = model.new_cache(1, pages=2, page_size=8)
    feed(model, tokens(1, 12), cache)
    snapshot = cache.copy()
    with pytest.raises(PoolFull, match="pages: 1 wanted"):
        feed(model, tokens(1, 1), cache)
    del snapshot
    feed(model, tokens(1, 4), cache)


# ---- bytes


@kinds
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_bytes_held_are_as_predicted_and_as_allocated(kind, dtype, page_size):
    model, width, seen = model_of(kind, dtype), 2 if dtype == "bfloat16" else 4, 0
    cache = model.new_cache(2, page_size=page_size)
    for new in (0, 1, 1, 61, 1, 1, 40):
        if new:
            feed(model, tokens(2, new), cache)
        seen += new
        predicted = budget.paged_cache_bytes(model.config, seen, 2, page_size=page_size, number_bytes=width)
        assert cache.reserved() == predicted and cache.nbytes() == predicted.total
        assert cache.bytes() == budget.cache_bytes(model.config, seen, 2, width)
        assert cache.unused_bytes() == predicted.latent - cache.bytes().latent
        assert (
            predicted.latent
            == cache.pages.pool.nbytes()
            == sum(slab.untyped_storage().nbytes() for slab in cache.pages.pool.slabs)
        )
        assert predicted.table == cache.pages.table.untyped_storage().nbytes()


@pytest.mark.parametrize("shared, new", [(16, 0), (16, 1), (19, 0), (19, 1), (19, 30), (0, 5)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_held_with_a_shared_prefix(shared, new, batch):
    model = model_of()
    prefix = model.new_cache(1, page_size=8)
    if shared:
        feed(model, tokens(1, shared), prefix)
    cache = prefix.select([0] * batch)
    pool = prefix.pages.pool
    del prefix
    if new:
        feed(model, tokens(batch, new), cache)
    predicted = budget.paged_cache_bytes(
        model.config, shared + new, batch, page_size=8, shared=shared, number_bytes=8, state_bytes=8
    )
    assert cache.reserved() == predicted and cache.nbytes() == predicted.total
    assert predicted.latent == pool.nbytes()


def test_a_fixed_pool_is_there_from_the_start():
    model = model_of()
    cache = model.new_cache(2, pages=10, page_size=8)
    pool = cache.pages.pool
    assert pool.nbytes() == 10 * pool.page_bytes and cache.reserved().latent == 0
    feed(model, tokens(2, 9), cache)
    assert cache.reserved().latent == 4 * pool.page_bytes and pool.free == 6


def test_latents_can_be_replaced_for_an_experiment():
    model = model_of()
    cache = model.new_cache(1, page_size=8)
    feed(model, tokens(1, 12), cache)
    snapshot, kept = cache.copy(), list(contents(cache))
    layer = cache.layers[-1]
    layer.latents = torch.zeros_like(layer.latents)
    assert not cache.layers[-1].latents.any() and cache.layers[-2].latents.any()
    assert same(contents(snapshot), kept)
    with pytest.raises(ValueError, match=r"latents: got shape \(1, 3, 16\), wanted \(1, 12, 16\)"):
        layer.latents = torch.zeros(1, 3, 16)


def test_a_model_without_mla_layers_needs_no_page():
    model = model_of(mla=[])
    cache = model.new_cache(1, pages=0)
    feed(model, tokens(1, 20), cache)
    assert cache.seen == 20 and cache.reserved().latent == cache.reserved().table == 0
