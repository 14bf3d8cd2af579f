"""Generation: greedy and sampled, streamed from the cache, the same alone as in a batch."""

import pytest
import torch

from k3lite.config import K3Config
from k3lite.generate import generate, pick, prefill, stream
from k3lite.model import K3ForCausalLM


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
