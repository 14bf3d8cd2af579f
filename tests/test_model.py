"""The whole model: however a text is fed, the same logits; the cache's size and its snapshots; loss and errors."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from k3lite import budget
from k3lite.cache import K3Cache, KdaState, LatentCache
from k3lite.config import K3Config
from k3lite.kda import KimiDeltaAttention
from k3lite.mla import GatedMLA
from k3lite.mlp import RMSNorm
from k3lite.model import K3ForCausalLM
from tests.helpers import assert_all_close, assert_close, random_model, tiny

PRECISIONS = {"float64": 1e-10, "float32": 1e-4}
T = 50  # more than a chunk and a tile

kinds = pytest.mark.parametrize("kind", ["k3", "linear"])
precisions = pytest.mark.parametrize("dtype, rel", PRECISIONS.items(), ids=PRECISIONS)


def model_of(kind, dtype="float64", seed=0, **changes):
    return random_model(tiny(kind, dtype=dtype, **changes), seed)


def tokens(*shape, seed=0):
    return torch.randint(1, 48, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, ids, pieces, cache=None, mask=None):
    """Logits of ids fed piece by piece through one cache."""
    cache = model.new_cache(len(ids)) if cache is None else cache
    masks = [None] * len(pieces) if mask is None else mask.split(pieces, dim=1)
    parts = zip(ids.split(pieces, dim=1), masks, strict=True)
    return torch.cat([model(part, cache=cache, attention_mask=m).logits for part, m in parts], 1)


def tensors_of(cache):
    for layer in cache.layers:
        yield from (layer.S, *layer.conv) if isinstance(layer, KdaState) else (layer.latents,)


# ---- pieces, padding, packing


@kinds
@precisions
@pytest.mark.parametrize("pieces", [[T], [1] * T, [20, 1, 16, 13], [T - 1, 1], [1, T - 1]], ids=len)
def test_pieces_are_the_whole(kind, dtype, rel, pieces):
    model, ids = model_of(kind, dtype), tokens(3, T)
    with torch.no_grad():
        want = model(ids).logits
    assert_close("logits", feed(model, ids, pieces), want, rel)


@kinds
@precisions
@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_every_path_is_the_same_model(kind, dtype, rel, backend, form):
    model, ids = model_of(kind, dtype), tokens(2, T)
    with torch.no_grad():
        want = model(ids).logits
        for module in model.modules():
            if isinstance(module, KimiDeltaAttention):
                module.backend = backend
            if isinstance(module, GatedMLA):
                module.form = form
        assert_close("whole", model(ids).logits, want, rel)
    assert_close("decode", feed(model, ids, [40] + [1] * 10), want, rel)


@kinds
def test_rows_of_a_batch_do_not_meet(kind):
    model, ids = model_of(kind), tokens(3, 9)
    with torch.no_grad():
        for i in range(3):
            assert_close(f"row {i}", model(ids).logits[i : i + 1], model(ids[i : i + 1]).logits, 1e-12)


@kinds
def test_no_token_sees_the_next(kind):
    model, ids = model_of(kind), tokens(1, T)
    changed = ids.clone()
    changed[0, 30:] = tokens(T - 30, seed=1)
    with torch.no_grad():
        a, b = model(ids).logits, model(changed).logits
    assert_close("before", b[:, :30], a[:, :30], 1e-12)
    assert (a[:, 30:] - b[:, 30:]).abs().amax(-1).min() > 1e-3


def padded(ids, lengths):
    """Each row's last `lengths[i]` tokens, behind padding."""
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths).unsqueeze(-1)
    return ids.masked_fill(~mask, 0), mask.long()


@kinds
@precisions
@pytest.mark.parametrize("pieces", [None, [T], [20, 30], [2, 10, 5] + [1] * 33], ids=["no-cache", "1", "2", "many"])
def test_left_padding(kind, dtype, rel, pieces):
    """Padding is like the time before the text: in one piece, over several, and behind any cache."""
    model, lengths = model_of(kind, dtype), [T, 35, 41, 1]
    ids, mask = padded(tokens(4, T), lengths)
    with torch.no_grad():
        got = model(ids, attention_mask=mask).logits if pieces is None else feed(model, ids, pieces, mask=mask)
        for i, n in enumerate(lengths):
            assert_close(f"row {i}", got[i : i + 1, T - n :], model(ids[i : i + 1, T - n :]).logits, rel)
    assert torch.isfinite(got).all()


@kinds
def test_decoding_after_padding_needs_no_mask(kind):
    """The cache remembers which tokens were real."""
    model, lengths = model_of(kind), [20, 9]
    ids, mask = padded(tokens(2, 20), lengths)
    more, cache = tokens(2, 5, seed=1), model.new_cache(2)
    feed(model, ids, [20], cache, mask)
    got = feed(model, more, [2, 1, 1, 1], cache)
    for i, n in enumerate(lengths):
        alone = torch.cat([ids[i : i + 1, 20 - n :], more[i : i + 1]], 1)
        with torch.no_grad():
            assert_close(f"row {i}", got[i : i + 1], model(alone).logits[:, -5:], 1e-10)


@kinds
def test_right_padding(kind):
    model, ids = model_of(kind), tokens(2, 20)
    mask = torch.ones(2, 20)
    mask[1, 12:] = 0
    with torch.no_grad():
        got = model(ids, attention_mask=mask).logits
        assert_close("row 0", got[:1], model(ids[:1]).logits, 1e-10)
        assert_close("row 1", got[1:, :12], model(ids[1:, :12]).logits, 1e-10)


def test_content_of_padding_does_not_matter():
    model, (ids, mask) = model_of("k3"), padded(tokens(2, 20), [20, 9])
    other = ids.masked_fill(mask == 0, 7)
    with torch.no_grad():
        a, b = (model(x, attention_mask=mask).logits for x in (ids, other))
    assert_close("logits", b[mask.bool()], a[mask.bool()], 1e-12)


@kinds
@precisions
@pytest.mark.parametrize("lengths", [(20, 0, 1, 29), (0, T), (T, 0), (1,) * T], ids=["4", "0-50", "50-0", "ones"])
def test_packed_is_each_text_alone(kind, dtype, rel, lengths):
    model, ids = model_of(kind, dtype), tokens(1, T)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    with torch.no_grad():
        want = torch.cat([model(part).logits for part in ids.split(lengths, dim=1) if part.shape[1]], 1)
        assert_close("logits", model(ids, cu_seqlens=starts).logits, want, rel)


@kinds
def test_logits_to_keep(kind):
    model, ids = model_of(kind), tokens(2, 9)
    with torch.no_grad():
        whole = model(ids).logits
        for n in (1, 4, 9):
            assert_close(f"last {n}", model(ids, logits_to_keep=n).logits, whole[:, -n:], 1e-12)


# ---- the cache


@kinds
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cache_is_as_large_as_predicted(kind, dtype):
    """Exactly, at every length: the state does not grow, the latents do by the token."""
    model = model_of(kind, dtype)
    width, cache, seen = 2 if dtype == "bfloat16" else 4, model.new_cache(2), 0
    for n in (0, 1, 1, 30, 1):
        if n:
            model(tokens(2, n), cache=cache)
        seen += n
        predicted = budget.cache_bytes(model.config, seen, batch=2, number_bytes=width)
        assert cache.seen == seen and cache.bytes() == predicted


def test_padding_costs_one_byte_a_token():
    model, (ids, mask) = model_of("k3"), padded(tokens(2, 20), [20, 9])
    cache = model.new_cache(2)
    model(ids, cache=cache, attention_mask=mask)
    assert cache.nbytes() == cache.reserved().total + 2 * 20


@kinds
def test_state_is_fp32_in_a_bf16_model(kind):
    model = model_of(kind, "bfloat16")
    cache = model.new_cache(1)
    for n in (30, 1):
        logits = model(tokens(1, n), cache=cache).logits
        assert logits.dtype == torch.float32
    for layer in cache.layers:
        if isinstance(layer, KdaState):
            assert layer.S.dtype == torch.float32 and {w.dtype for w in layer.conv} == {torch.bfloat16}
        else:
            assert layer.latents.dtype == torch.bfloat16


@kinds
def test_bf16_stays_near_fp32(kind):
    """The same bf16 weights, computed in bf16 and in fp32: a tenth, after five layers of 8-bit mantissas. Without
    experts, as a near tie that falls the other way replaces a whole expert."""
    dense = {"num_experts": 0, "num_experts_per_token": 0, "num_shared_experts": 0, "latent_moe_use_norm": False}
    low, ids = model_of(kind, "bfloat16", **dense), tokens(2, T)
    high = K3ForCausalLM(dataclasses.replace(low.config, dtype="float32")).eval()
    high.load_state_dict(low.state_dict())
    with torch.no_grad():
        assert_close("logits", low(ids).logits, high(ids).logits, 0.25)


@kinds
def test_t08_a_snapshot_is_a_copy(kind):
    model, ids = model_of(kind), tokens(2, T)
    cache = model.new_cache(2)
    want = feed(model, ids, [20, 30])
    feed(model, ids[:, :20], [20], cache)
    snapshot, before = cache.copy(), [x.clone() for x in tensors_of(cache)]

    feed(model, tokens(2, 3, seed=9), [3], cache)  # a draft that gets rejected
    assert snapshot.seen == 20 and all(torch.equal(a, b) for a, b in zip(tensors_of(snapshot), before, strict=True))
    assert_close("after rolling back", feed(model, ids[:, 20:], [30], snapshot.copy()), want[:, 20:], 1e-10)
    assert_close("and again", feed(model, ids[:, 20:], [1] * 30, snapshot), want[:, 20:], 1e-10)


@kinds
def test_t08_nothing_is_written_in_place(kind):
    """Even an alias taken before a step keeps its values."""
    model, cache = model_of(kind), None
    cache = model.new_cache(1)
    feed(model, tokens(1, 20), [20], cache)
    aliases = list(tensors_of(cache))
    before = [x.clone() for x in aliases]
    feed(model, tokens(1, 5), [4, 1], cache)
    assert all(torch.equal(a, b) for a, b in zip(aliases, before, strict=True))
    for x in tensors_of(snapshot := cache.copy()):
        x.zero_()
    assert all(x.any() for x in tensors_of(cache)) and snapshot.seen == cache.seen


def test_t08_a_snapshot_remembers_the_padding():
    model, (ids, mask) = model_of("k3"), padded(tokens(2, 20), [20, 9])
    cache = model.new_cache(2)
    feed(model, ids, [20], cache, mask)
    snapshot = cache.copy()
    want = feed(model, tokens(2, 4, seed=1), [4], cache)
    assert snapshot.mask.shape == (2, 20) and cache.mask.shape == (2, 24)
    assert torch.equal(feed(model, tokens(2, 4, seed=1), [4], snapshot), want)


def test_cache_shapes():
    cache = K3Cache.empty(tiny("k3", layers=4, mla=[2]), 3, torch.float32)
    kda, mla = cache.layers[0], cache.layers[1]
    assert isinstance(kda, KdaState) and isinstance(mla, LatentCache) and cache.batch == 3
    assert kda.S.shape == (3, 2, 8, 8) and [w.shape for w in kda.conv] == [(3, 3, 16)] * 3
    assert mla.latents.shape == (3, 0, 16)


# ---- gradients and loss


NO_GRADIENT = {"model.layers.0.self_attention_res_norm.weight", "model.layers.0.self_attention_res_proj.weight"}


@kinds
def test_gradients_reach_every_parameter(kind):
    """All but the query of layer 0, which has nothing to choose from, and the correction biases."""
    model, ids = model_of(kind), tokens(2, T)
    model(ids, labels=ids).loss.backward()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    biases = {n for n, _ in model.named_parameters() if n.endswith("e_score_correction_bias")}
    assert without == biases | (NO_GRADIENT if kind == "k3" else set())
    assert len(biases) == 4


@kinds
def test_gradients_at_initialisation(kind):
    """As training begins: zero depth queries get a gradient and leave zero; their norms wait for them."""
    model, ids = K3ForCausalLM(tiny(kind)), tokens(2, T)
    model(ids, labels=ids).loss.backward()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert all("_res_norm" in n or "correction_bias" in n or n in NO_GRADIENT for n in without), without


@kinds
def test_training_and_evaluation_give_the_same_logits(kind):
    model, ids = model_of(kind), tokens(2, 20)
    with torch.no_grad():
        want = model(ids).logits
        assert torch.equal(model.train()(ids).logits, want)


@kinds
def test_gradient_against_finite_differences(kind):
    model, ids = model_of(kind, layers=3).double(), tokens(1, 12)  # double(): the fp32 parameters too
    model(ids, labels=ids).loss.backward()
    rng, step = torch.Generator().manual_seed(0), 1e-7
    for name, p in model.named_parameters():
        if p.grad is None or not p.grad.any():
            continue
        direction = torch.randn(p.shape, generator=rng, dtype=p.dtype)
        with torch.no_grad():
            loss = []
            for sign in (1, -1):
                p.add_(direction, alpha=sign * step)
                loss.append(model(ids, labels=ids).loss)
                p.sub_(direction, alpha=sign * step)
        want, got = (loss[0] - loss[1]) / (2 * step), (p.grad * direction).sum()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


@kinds
def test_balancing_moves_the_bias_in_training_only(kind):
    model, ids = model_of(kind), tokens(2, 20)
    biases = [p for n, p in model.named_parameters() if n.endswith("correction_bias")]
    before = [b.clone() for b in biases]
    model(ids)
    model.balance_experts()
    assert all(torch.equal(a, b) for a, b in zip(biases, before, strict=True))
    model.train()(ids)
    model.balance_experts()
    assert not any(torch.equal(a, b) for a, b in zip(biases, before, strict=True))


def mean_loss(logits, targets):
    """targets: {(row, t): id} of tokens predicted at t - 1."""
    picked = [F.cross_entropy(logits[i, t - 1], torch.tensor(x)) for (i, t), x in targets.items()]
    return torch.stack(picked).mean()


def test_loss():
    model, ids = model_of("k3"), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels)
    targets = {(i, t): int(ids[i, t]) for i in range(2) for t in range(1, 9) if i or t >= 4}
    torch.testing.assert_close(out.loss, mean_loss(out.logits, targets))
    assert model(ids).loss is None


def test_loss_does_not_cross_padding():
    """Neither from padding into the text nor out of it: row 0 is padded left, row 1 right."""
    model, ids = model_of("k3"), tokens(2, 9)
    mask = torch.ones(2, 9)
    mask[0, :3] = mask[1, 7:] = 0
    out = model(ids, attention_mask=mask, labels=ids)
    spans = {0: range(4, 9), 1: range(1, 7)}
    targets = {(i, t): int(ids[i, t]) for i, span in spans.items() for t in span}
    torch.testing.assert_close(out.loss, mean_loss(out.logits, targets))


@pytest.mark.parametrize("starts", [[0, 4, 4, 5, 9], [0, 0, 9], [0, 9, 9]], ids=str)
def test_loss_does_not_cross_texts(starts):
    model, ids = model_of("k3"), tokens(1, 9)
    out = model(ids, cu_seqlens=torch.tensor(starts), labels=ids)
    targets = {(0, t): int(ids[0, t]) for t in range(1, 9) if t not in starts}
    torch.testing.assert_close(out.loss, mean_loss(out.logits, targets))


def test_packed_and_padded_training_agree():
    """The same texts either way: one loss, one gradient."""
    lengths, ids = (7, 1, 12), tokens(1, 20)
    starts = torch.tensor([0, 7, 8, 20])
    rows = torch.zeros(3, 12, dtype=torch.long)
    mask = torch.zeros(3, 12)
    for i, part in enumerate(ids[0].split(lengths)):
        rows[i, 12 - len(part) :], mask[i, 12 - len(part) :] = part, 1
    results = []
    for arguments in ({"input_ids": ids, "cu_seqlens": starts}, {"input_ids": rows, "attention_mask": mask}):
        model = model_of("k3").train()
        loss = model(**arguments, labels=arguments["input_ids"]).loss
        loss.backward()
        model.balance_experts()
        results.append({"loss": loss} | {n: p if p.grad is None else p.grad for n, p in model.named_parameters()})
    assert_all_close(*results, 1e-9)


# ---- construction


def test_released_sizes_of_k3_tiny():
    model = K3ForCausalLM(K3Config.preset("k3-tiny"))
    assert sum(p.numel() for p in model.parameters()) == 125_988
    assert model(tokens(1, 5)).logits.shape == (1, 5, 96)


@pytest.mark.parametrize("kind", ["k3", "linear"])
def test_what_each_kind_has(kind):
    names = {n.split(".", 3)[-1] for n, _ in K3ForCausalLM(tiny(kind)).named_parameters()}
    k3_only = {
        "self_attn.g_proj.weight", "self_attn.q_a_proj.weight", "self_attention_res_proj.weight",
        "block_sparse_moe.routed_expert_norm.weight",
    }  # fmt: skip
    linear_only = {"self_attn.g_a_proj.weight", "self_attn.g_b_proj.weight"}
    assert (k3_only <= names) is (kind == "k3") and bool(k3_only & names) is (kind == "k3")
    assert (linear_only <= names) is (kind == "linear")


@kinds
def test_same_seed_same_weights(kind):
    torch.manual_seed(1)
    a = K3ForCausalLM(tiny(kind), seed=3).state_dict()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    b = K3ForCausalLM(tiny(kind), seed=3).state_dict()
    other = K3ForCausalLM(tiny(kind), seed=4).state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["lm_head.weight"], other["lm_head.weight"])
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # and nobody else's random numbers are used up


@kinds
def test_initial_values(kind):
    model = K3ForCausalLM(tiny(kind, hidden_size=64, vocab_size=500))
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all(), name
        if name.endswith("res_proj.weight") or name.endswith("correction_bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        elif "A_log" in name:
            assert not p.any() if kind == "k3" else (p >= 0).all() and (p <= 2.7726).all(), name
        elif "dt_bias" in name:
            dt = F.softplus(p)
            assert (dt > 0.999e-3).all() and (dt < 0.1001).all(), name
        elif "conv1d" not in name and p.numel() > 1000:
            assert p.std().item() == pytest.approx(0.02, rel=0.15), name
    assert F.cross_entropy(model(tokens(4, 30)).logits.flatten(0, 1), tokens(120)).item() == pytest.approx(
        6.21, abs=0.1
    )


@kinds
def test_eps_of_every_norm(kind):
    """rms_norm_eps but for the two inside MLA, whose 1e-6 is the class default of the released code."""
    model = K3ForCausalLM(tiny(kind, rms_norm_eps=3e-4))
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            assert module.eps == (1e-6 if name.endswith(("q_a_layernorm", "kv_a_layernorm")) else 3e-4), name


def test_default_dtype_is_left_alone():
    before = torch.get_default_dtype()
    model = K3ForCausalLM(tiny("k3", dtype="bfloat16"))
    assert torch.get_default_dtype() == before
    fp32 = {n.rsplit(".", 2)[-2] if n.endswith("weight") else n.rsplit(".", 1)[-1]
            for n, p in model.named_parameters() if p.dtype == torch.float32}  # fmt: skip
    assert fp32 == {"q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias", "o_norm", "e_score_correction_bias"}


# ---- wrong arguments


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input_ids": torch.ones(5, dtype=torch.long)}, r"input_ids: got torch.int64 of shape \(5,\), wanted whole"),
        ({"input_ids": torch.ones(1, 5)}, r"input_ids: got torch.float32 of shape \(1, 5\)"),
        ({"input_ids": torch.tensor([[1, 48]])}, r"input_ids: got ids 1..48, wanted 0..47"),
        ({"input_ids": torch.tensor([[-1, 3]])}, r"input_ids: got ids -1..3, wanted 0..47"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask: got shape \(2, 5\), wanted \(2, 4\) like input_ids"),
        ({"labels": torch.ones(2, 3)}, r"labels: got shape \(2, 3\), wanted \(2, 4\) like input_ids"),
        ({"logits_to_keep": 0}, "logits_to_keep: got 0, wanted 1..4"),
        ({"logits_to_keep": 5}, "logits_to_keep: got 5, wanted 1..4"),
        ({"logits_to_keep": 1, "labels": tokens(2, 4)}, "logits_to_keep: the loss needs all logits"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens: packed sequences need B = 1, got B = 2"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, r"cu_seqlens: got torch.float32 of shape \(2,\), wanted whole"),
        (
            {"input_ids": torch.zeros(2, 0, dtype=torch.long)},
            r"input_ids: got torch.int64 of shape \(2, 0\), wanted at least",
        ),
        ({"input_ids": torch.ones(2, 4, dtype=torch.bool)}, r"input_ids: got torch.bool"),
        ({"labels": torch.full((2, 4), 48)}, "labels: wanted 0..47, or -100"),
        ({"labels": torch.full((2, 4), -100)}, "labels: no token is left to predict"),
        ({"cache": K3ForCausalLM(tiny("k3", mla=[1, 2])).new_cache(2)}, "cache: made for a model with other layers"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        K3ForCausalLM(tiny("k3"))(**{"input_ids": tokens(2, 4)} | arguments)


def test_packed_takes_neither_cache_nor_mask():
    model, starts = K3ForCausalLM(tiny("k3")), torch.tensor([0, 4])
    for other in ({"cache": model.new_cache(1)}, {"attention_mask": torch.ones(1, 4)}):
        with pytest.raises(ValueError, match="cu_seqlens: packed sequences take no cache"):
            model(tokens(1, 4), cu_seqlens=starts, **other)


@pytest.mark.parametrize("mla", [[4, 5], [1, 2, 3, 4, 5], []], ids=["both", "mla", "kda"])
@pytest.mark.parametrize("starts", [[0, 3], [1, 4], [0, 3, 2, 4]], ids=str)
def test_wrong_starts(starts, mla):
    with pytest.raises(ValueError, match="cu_seqlens"):
        K3ForCausalLM(tiny("k3", mla=mla))(tokens(1, 4), cu_seqlens=torch.tensor(starts))


def test_no_loss_to_train_on_through_a_cache():
    model, ids = K3ForCausalLM(tiny("k3")), tokens(1, 4)
    with pytest.raises(ValueError, match="labels: no gradient flows through a cache"):
        model(ids, cache=model.new_cache(1), labels=ids)
    with torch.no_grad():
        assert model(ids, cache=model.new_cache(1), labels=ids).loss == model(ids, labels=ids).loss


def test_cache_of_another_batch():
    model = K3ForCausalLM(tiny("k3"))
    with pytest.raises(ValueError, match="cache: made for batch 3, got input_ids with batch 2"):
        model(tokens(2, 4), cache=model.new_cache(3))


def test_padding_after_a_text_has_begun():
    """A cached text cannot pause: refused in the same piece and in a later one, and the cache stays as it was."""
    model = K3ForCausalLM(tiny("k3"))
    for before, mask in ((0, [[1, 0, 1, 1]]), (0, [[1, 1, 1, 0]]), (3, [[0, 1, 1, 1]]), (3, [[1, 1, 0, 1]])):
        cache = model.new_cache(1)
        if before:
            model(tokens(1, before), cache=cache)
        with pytest.raises(ValueError, match="attention_mask: with a cache, padding may only come before"):
            model(tokens(1, 4), cache=cache, attention_mask=torch.tensor(mask))
        assert cache.seen == before


def test_padding_after_a_pause():
    """Only `K3Cache.pause` leaves the convolution's window where it is; padding that is passed in would push it out."""
    model = K3ForCausalLM(tiny("k3"))
    cache = model.new_cache(1)
    model(tokens(1, 3), cache=cache)
    cache.pause(2)
    with pytest.raises(ValueError, match="attention_mask: with a cache, padding may only come before"):
        model(tokens(1, 2), cache=cache, attention_mask=torch.tensor([[0, 1]]))
