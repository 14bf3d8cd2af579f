"""Generation: greedy and sampled, streamed from the cache, the same alone as in a batch."""

import pytest
import torch

from k3lite import budget
from k3lite.config import K3Config
from k3lite.generate import generate, generate_batch, pick, prefill, read_batch, stream
from k3lite.model import K3ForCausalLM
from k3lite.ops import latent_attention
from tests.helpers import assert_close, random_model, tiny


@pytest.fixture(scope="module")
def model():
    model = K3ForCausalLM(K3Config.preset("k3-tiny")).double().eval()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(96, (2, 23), generator=torch.Generator().manual_seed(2))


def greedy_without_cache(model, ids, n):
    for _ in range(n):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[:, -n:]


def test_greedy_is_the_argmax_of_the_whole_sequence_each_time(model, ids):
    with torch.no_grad():
        assert torch.equal(generate(model, ids, 12), greedy_without_cache(model, ids, 12))


@pytest.mark.parametrize("piece", [1, 5, 23, 100])
def test_prefill_in_pieces(model, ids, piece):
    with torch.no_grad():
        want = model(ids).logits[:, -1]
    got = prefill(model, ids, model.new_cache(2), piece=piece)
    assert torch.allclose(got, want, rtol=0, atol=1e-10)


def test_left_padded_prompts_go_on_as_they_would_alone(model, ids):
    short = ids[1:, 9:]
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), short], 1)
    mask = torch.ones(2, 23)
    mask[1, :9] = 0
    both = generate(model, torch.cat([ids[:1], padded]), 8, attention_mask=mask)
    assert torch.equal(both[0], generate(model, ids[:1], 8)[0])
    assert torch.equal(both[1], generate(model, short, 8)[0])


def test_a_stream_yields_as_it_goes_and_can_be_continued_from_its_cache(model, ids):
    cache = model.new_cache(2)
    tokens = stream(model, ids, 10, cache=cache)
    first = next(tokens)
    assert cache.seen == ids.shape[1], "the first token needs nothing but the prompt"
    rest = torch.stack([first, *(next(tokens) for _ in range(3))], 1)
    more = generate(model, rest[:, -1:], 6, cache=cache)
    assert torch.equal(torch.cat([rest, more], 1), generate(model, ids, 10))


def test_sampling_follows_its_generator(model, ids):
    def sample(seed):
        return generate(model, ids, 20, temperature=1.0, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sample(3), sample(3))
    assert not torch.equal(sample(3), sample(4))


def test_sampled_frequencies_are_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    got = pick(logits, temperature=0.7, generator=torch.Generator().manual_seed(0)).bincount(minlength=4) / 20_000
    assert torch.allclose(got, (logits[0] / 0.7).softmax(-1), atol=0.015)


@pytest.mark.parametrize(
    ("options", "allowed"), [({"top_k": 2}, {1, 2}), ({"top_p": 0.5}, {2}), ({"top_p": 0.85}, {1, 2})]
)
def test_top_k_and_top_p_leave_only_the_likeliest(options, allowed):
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(500, 4)  # softmax .087 .237 .644 .032
    got = pick(logits, temperature=1.0, generator=torch.Generator().manual_seed(0), **options)
    assert set(got.tolist()) == allowed


def test_stop_ids_end_a_sequence_and_then_the_stream(model, ids):
    free = generate(model, ids, 12)
    stop = int(free[0, 3])
    assert stop not in free[1], "only the first sequence meets it"
    stopped = generate(model, ids, 12, stop_ids=(stop,))
    first = free[0].tolist().index(stop)
    assert (stopped[0, first:] == stop).all()
    assert torch.equal(stopped[1], free[1])
    assert generate(model, ids[:1], 12, stop_ids=(stop,)).shape[1] == first + 1


def test_nothing_asked_nothing_made(model, ids):
    assert generate(model, ids, 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature: got -1"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
    ],
)
def test_settings_out_of_range(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, ids, 3, **options)


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="ids: got no token"):
        generate(model, torch.zeros(1, 0, dtype=torch.long), 3)


# ---- prompts of different lengths

LENGTHS = (1, 2, 3, 8, 23, 17, 30)  # shorter than, as long as and longer than a convolution, at and off page borders
kinds = pytest.mark.parametrize("kind", ["k3", "linear"])
precisions = pytest.mark.parametrize("dtype, rel", [("float64", 1e-10), ("float32", 1e-4)])


def texts(*lengths, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 48, (n,), generator=rng) for n in lengths]


def left_padded(prompts):
    longest = max(len(p) for p in prompts)
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.long)
    for i, p in enumerate(prompts):
        ids[i, longest - len(p) :], mask[i, longest - len(p) :] = p, 1
    return ids, mask


def alone(model, prompt, more):
    """Logits [1,1+n,vocab] after a prompt and after each of n more tokens, without a cache or a batch."""
    with torch.no_grad():
        return model(torch.cat([prompt, more]).unsqueeze(0)).logits[:, len(prompt) - 1 :]


@kinds
@precisions
@pytest.mark.parametrize("way", ["padded", "padded in pieces", "read one by one", "attention in blocks"])
def test_logits_of_a_batch_of_any_lengths_are_those_of_each_alone(kind, dtype, rel, way, monkeypatch):
    """Routing, windows, states, depth mixes, slots and pages of 8: after the prompt and after each of 12 tokens."""
    if way == "attention in blocks":
        monkeypatch.setattr(latent_attention, "BLOCK", 256)  # 16 tokens of this model
    model, prompts, more = random_model(tiny(kind, dtype=dtype)), texts(*LENGTHS), torch.stack(texts(*[12] * 7, seed=1))
    if way.startswith("padded"):
        ids, mask = left_padded(prompts)
        cache = model.new_cache(7, page_size=8)
        logits = prefill(model, ids, cache, mask, piece=1000 if way == "padded" else 5)
    else:
        logits, cache = read_batch(model, prompts, prefix=model.new_cache(page_size=8))
    got = [logits.unsqueeze(1)]
    with torch.no_grad():
        for t in range(12):
            got.append(model(more[:, t : t + 1], cache=cache).logits)
    for i, prompt in enumerate(prompts):
        assert_close(f"{len(prompt)} tokens", torch.cat(got, 1)[i : i + 1], alone(model, prompt, more[i]), rel)


@kinds
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_each_prompt_gets_the_tokens_it_gets_alone(kind, dtype):
    model, prompts = random_model(tiny(kind, dtype=dtype)), texts(*LENGTHS)
    want = [generate(model, p.unsqueeze(0), 12)[0] for p in prompts]
    for got in (generate_batch(model, prompts, 12), generate_batch(model, prompts[::-1], 12)[::-1]):
        assert [x.tolist() for x in got] == [x.tolist() for x in want]
    ids, mask = left_padded(prompts)
    assert torch.equal(generate(model, ids, 12, attention_mask=mask), torch.stack(want))


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}], ids=str)
def test_sampling_with_a_seed_for_each_is_sampling_alone(options):
    model, prompts = random_model(tiny("k3", dtype="float64")), texts(4, 9, 1, 9)
    options, seeds = {"temperature": 0.8} | options, [3, 1, 4, 1]
    got = generate_batch(model, prompts, 15, seeds=seeds, **options)
    for tokens, prompt, seed in zip(got, prompts, seeds, strict=True):
        want = generate(model, prompt.unsqueeze(0), 15, generator=torch.Generator().manual_seed(seed), **options)
        assert torch.equal(tokens, want[0])
    other = generate_batch(model, prompts, 15, seeds=[3, 1, 4, 2], **options)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], other[:3], strict=True))
    assert not torch.equal(got[3], other[3])


def test_each_stops_on_its_own():
    model, prompts = random_model(tiny("k3", dtype="float64")), texts(5, 12, 3, 7)
    free = generate_batch(model, prompts, 20)
    stops = (int(free[0][4]), int(free[1][9]))
    got = generate_batch(model, prompts, 20, stop_ids=stops)
    ends = [next((t + 1 for t, x in enumerate(tokens.tolist()) if x in stops), 20) for tokens in free]
    assert len(set(ends)) > 1, "otherwise nothing is tested"
    for tokens, whole, end in zip(got, free, ends, strict=True):
        assert torch.equal(tokens, whole[:end])
    assert [x.shape for x in generate_batch(model, prompts, 0)] == [(0,)] * 4


# ---- a prefix that is read once


@kinds
@pytest.mark.parametrize("shared", [1, 16, 19], ids=lambda n: f"prefix{n}")
def test_continuations_of_a_prefix_are_those_of_the_whole_text(kind, shared):
    model, (prefix, *prompts), more = (
        random_model(tiny(kind, dtype="float64")),
        texts(shared, 1, 2, 9, 6),
        texts(*[5] * 4),
    )
    snapshot = model.new_cache(page_size=8)
    prefill(model, prefix.unsqueeze(0), snapshot)
    kept = snapshot.layers[0].S.clone()
    logits, cache = read_batch(model, prompts, prefix=snapshot)
    got = [logits.unsqueeze(1)]
    with torch.no_grad():
        for t in range(5):
            got.append(model(torch.stack(more)[:, t : t + 1], cache=cache).logits)
    whole = [torch.cat([prefix, p]) for p in prompts]
    for i, text in enumerate(whole):
        assert_close(f"continuation {i}", torch.cat(got, 1)[i : i + 1], alone(model, text, more[i]), 1e-10)

    want = [x.tolist() for x in generate_batch(model, whole, 9)]
    for _ in range(2):  # the snapshot can be used again
        assert [x.tolist() for x in generate_batch(model, prompts, 9, prefix=snapshot)] == want
    assert torch.equal(snapshot.layers[0].S, kept) and snapshot.seen == shared and snapshot.mask is None
    same = torch.stack([whole[2][-9:]] * 3)
    assert generate(model, same, 9, cache=snapshot.fork(3)).tolist() == [want[2]] * 3


def test_shared_pages_are_held_once():
    """A prefix of 19 tokens is two full pages of 8 and one begun; 4 continuations hold two of it and two each."""
    model = random_model(tiny("k3"))
    snapshot = model.new_cache(page_size=8)
    pool = snapshot.pages.pool
    prefill(model, torch.stack(texts(19)), snapshot)
    _, cache = read_batch(model, texts(9, 9, 9, 9), prefix=snapshot)
    assert cache.reserved() == budget.paged_cache_bytes(
        model.config, 28, 4, page_size=8, shared=19, number_bytes=4, state_bytes=4
    )
    assert cache.reserved().latent == (2 + 4 * 2) * pool.page_bytes and cache.nbytes() == cache.reserved().total
    assert pool.pages - pool.free == 3 + 4 * 2, "and the snapshot's page that was begun"
    _, uneven = read_batch(model, texts(9, 1, 2, 9), prefix=snapshot)
    assert uneven.reserved() == cache.reserved() and uneven.nbytes() == cache.nbytes() + 4 * 28
    del cache, uneven
    assert pool.pages - pool.free == 3


# ---- what is refused


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts: got none, wanted at least one"),
        (texts(3, 0), {}, r"prompts: got shape \(0,\) as number 1, wanted \[T\] with a token or more"),
        ([torch.ones(1, 4, dtype=torch.long)], {}, r"prompts: got shape \(1, 4\) as number 0, wanted \[T\]"),
        (texts(3, 4), {"seeds": [1]}, "seeds: got 1, wanted one for each of 2 prompts"),
        (texts(3), {"temperature": -1.0}, "temperature: got -1"),
        ([torch.tensor([48])], {}, "input_ids: got ids 48..48, wanted 0..47"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_batches_that_are_refused(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate_batch(K3ForCausalLM(tiny("k3")), prompts, 3, **options)


def test_a_prefix_is_one_sequence():
    small = K3ForCausalLM(tiny("k3"))
    with pytest.raises(ValueError, match="prefix: got a cache of 2 sequences, wanted one"):
        generate_batch(small, texts(3), 3, prefix=small.new_cache(2))
