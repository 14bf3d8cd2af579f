"""Routing, balancing and the latent wiring (shared hazards T11-T16)."""

import pytest
import torch
from torch import nn

from k3lite import balance
from k3lite.config import ConfigError
from k3lite.model import K3ForCausalLM
from k3lite.moe import BINS, RULES, LatentMoE, Router, choose
from k3lite.ops.experts import experts_naive
from k3lite.ops.pointwise import rms_norm, situ_glu, swiglu
from tests.helpers import assert_close, randomise, tiny


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def router(bias, k, **changes):
    """One whose logits are its input."""
    E = len(bias)
    r = Router(tiny("linear", hidden_size=E, num_experts=E, num_experts_per_token=k, **changes))
    with torch.no_grad():
        r.weight.copy_(torch.eye(E))
        r.e_score_correction_bias.copy_(torch.tensor(bias))
    return r


def moe(kind="k3", seed=0, **changes):
    """A layer with all weights random, in fp64 and eval mode."""
    layer = LatentMoE(tiny(kind, **changes)).double()
    randomise(layer.named_parameters(), seed)
    return layer.eval()


def check(pair, experts, weights):
    assert pair[0].tolist() == experts
    torch.testing.assert_close(pair[1], torch.tensor(weights), rtol=0, atol=5e-7)


# ---- routing


def test_t11_the_bias_chooses_and_never_weighs():
    logits = torch.tensor([[2.0, 1, 0, -1]])
    check(router([-1.0, 0, 0, 1], 2, routed_scaling_factor=1.0)(logits), [[3, 1]], [[0.268941, 0.731059]])


@pytest.mark.parametrize("E, k", [(4, 2), (8, 2), (896, 16)])
def test_t12_ties_go_to_the_lower_id(E, k):
    assert choose(torch.zeros(3, E), torch.zeros(E), k).tolist() == [list(range(k))] * 3
    scores = torch.zeros(1, E)
    scores[0, E - 1] = 1
    assert choose(scores, torch.zeros(E), k).tolist() == [[E - 1, *range(k - 1)]]


def test_choice_is_the_stable_sort_with_and_without_ties():
    """Also where the tie is between the last that is chosen and the first that is not, in some rows only."""
    rng = torch.Generator().manual_seed(0)
    for k in (1, 3, 12):
        scores = torch.rand(200, 12, generator=rng)
        scores[::2] = (scores[::2] * 6).round() / 6
        bias = (torch.rand(12, generator=rng) * 6).round() / 6
        want = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(choose(scores, bias, k), want)
    assert choose(scores[:0], bias, 3).shape == (0, 3)


@pytest.mark.parametrize("renormalize", [True, False])
def test_t15_scaling_with_and_without_renormalising(renormalize):
    logits = torch.tensor([[1.0, -1, -9, -9], [2.0, 2, -9, -9]])
    r = router([0.0] * 4, 2, moe_renormalize=renormalize, routed_scaling_factor=2.446)
    second = 2.446 / 2 if renormalize else 2.446 * 0.880797
    check(r(logits), [[0, 1], [0, 1]], [[1.788169, 0.657831], [second, second]])


def test_t15_the_shared_experts_are_not_scaled():
    layers = [moe("linear", routed_scaling_factor=s) for s in (1.0, 2.446)]
    x = randn(1, 5, 32)
    shared = layers[0].shared_experts(x)
    one, scaled = (layer(x) - shared for layer in layers)
    assert_close("routed", scaled, 2.446 * one, 1e-12)


def test_router_is_fp32():
    """A bf16 product would flip near ties: here experts 0 and 1 differ by less than bf16 can tell."""
    r = router([0.0, 0, 0, 0], 1).bfloat16()
    r.e_score_correction_bias.data = r.e_score_correction_bias.data.float()
    with torch.no_grad():
        r.weight[1] = torch.tensor([1.0, 1e-3, 0, 0])  # logits: x0, x0 + x1 / 1000
    chosen, weights = r(torch.tensor([[1.0, 1.0, 0, 0]]).bfloat16())
    assert chosen.tolist() == [[1]] and weights.dtype == torch.float32


def test_gradient_goes_through_the_scores_and_not_into_the_bias():
    r = router([0.1, 0.2, 0.0, 0.0], 2)
    x = torch.tensor([[2.0, 1, 0, -1]], requires_grad=True)
    (r(x)[1] * torch.tensor([[1.0, 2.0]])).sum().backward()
    assert r.weight.grad.any() and x.grad.any()
    assert r.e_score_correction_bias.grad is None and not r.e_score_correction_bias.requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_logits_are_one_error(bad):
    """An infinite input times a weight of zero is NaN as well."""
    x = torch.ones(5, 4)
    x[3, 1] = bad
    with pytest.raises(ValueError, match="router: got NaN as a logit of token 3; wanted numbers"):
        router([0.0] * 4, 2)(x)


@pytest.mark.parametrize("k", [0, 7])
def test_top_k_out_of_range(k):
    with pytest.raises(ConfigError, match=rf"num_experts_per_token.*{k}.*1 to num_experts \(6\)"):
        tiny("k3", num_experts_per_token=k)


# ---- the layer


def test_latent_moe_by_its_formula():
    layer, x = moe("k3"), randn(2, 7, 32)
    tokens = x.flatten(0, 1)
    scores = (tokens @ layer.gate.weight.T).sigmoid()
    chosen = (scores + layer.gate.e_score_correction_bias).topk(2, sorted=True).indices
    p = scores.gather(1, chosen)
    p = p / p.sum(-1, keepdim=True)
    e = layer.experts
    u = experts_naive(tokens @ layer.routed_expert_down_proj.weight.T, chosen, p, e.w1, e.w3, e.w2, situ_glu)
    routed = rms_norm(u, layer.routed_expert_norm.weight, 1e-5) @ layer.routed_expert_up_proj.weight.T
    s = layer.shared_experts
    shared = situ_glu(x @ s.gate_proj.weight.T, x @ s.up_proj.weight.T) @ s.down_proj.weight.T
    assert_close("y", layer(x), routed.view_as(x) + shared, 1e-12)


def test_plain_moe_by_its_formula():
    layer, x = moe("linear"), randn(2, 7, 32)
    tokens = x.flatten(0, 1)
    chosen, p = layer.gate(tokens)
    e = layer.experts
    routed = experts_naive(tokens, chosen, p, e.w1, e.w3, e.w2, swiglu)
    assert_close("y", layer(x), routed.view_as(x) + layer.shared_experts(x), 1e-12)


def test_without_shared_experts():
    layer, x = moe("linear", num_shared_experts=0), randn(1, 3, 32)
    assert layer.shared_experts is None and layer(x).shape == x.shape


def test_t16_the_router_and_the_shared_experts_see_what_the_latent_does_not():
    """A direction that the down-projection maps to zero moves the routing and the shared output, and no expert's input."""
    layer, x = moe("k3"), randn(1, 6, 32)
    hidden_direction = torch.linalg.svd(layer.routed_expert_down_proj.weight).Vh[-1]
    moved = x + 3 * hidden_direction
    seen = []
    layer.experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    layer(x), layer(moved)
    (z, chosen, weights), (z_moved, chosen_moved, weights_moved) = seen
    assert_close("experts' input", z_moved, z, 1e-12)
    assert not torch.equal(weights, weights_moved) and not torch.equal(chosen, chosen_moved)
    assert (layer.shared_experts(moved) - layer.shared_experts(x)).abs().max() > 0.1


def test_t16_the_norm_comes_after_the_sum():
    """Then a common factor on all routed weights disappears (but for eps)."""
    a, b = moe("k3"), moe("k3", routed_scaling_factor=1000.0)
    x = randn(1, 6, 32)
    assert_close("y", b(x), a(x), 1e-3)


# ---- balancing


def train_step(r, x, real=None):
    r.train()
    r(x, real)
    before = r.e_score_correction_bias.clone()
    r.balance()
    return before, r.e_score_correction_bias.clone()


def test_t14_padding_is_not_counted():
    r = router([0.0] * 4, 1).train()
    one_hot = torch.eye(4)[[0, 0, 0, 1, 2, 2, 2, 2]]
    r(one_hot, torch.arange(8) < 4)
    assert r.seen_counts.tolist() == [3, 1, 0, 0] and not r.seen_counts.is_floating_point()
    assert r.seen_scores.shape == (4, 4)
    without, padded = router([0.0] * 4, 1), router([0.0] * 4, 1)
    train_step(without, one_hot[:4])
    train_step(padded, one_hot, torch.arange(8) < 4)
    assert torch.equal(without.e_score_correction_bias, padded.e_score_correction_bias)


def test_t14_evaluation_counts_nothing_and_moves_nothing():
    r, x = router([0.0] * 4, 2), randn(50, 4, dtype=torch.float32)
    before, after = train_step(r, x)
    assert not torch.equal(before, after)
    r.eval()
    r(x + 1)
    r.balance()
    assert torch.equal(r.e_score_correction_bias, after)
    assert r.seen_scores is None


def test_t14_a_second_forward_of_the_same_batch_counts_once():
    """As activation checkpointing does."""
    x = randn(50, 4, dtype=torch.float32)
    once, twice = router([0.0] * 4, 2), router([0.0] * 4, 2).train()
    twice(x)
    assert torch.equal(train_step(once, x)[1], train_step(twice, x)[1])


def test_t13_bias_is_fp32_and_belongs_to_the_checkpoint():
    r = Router(tiny("k3"))
    assert r.e_score_correction_bias.dtype == torch.float32
    assert isinstance(r.e_score_correction_bias, nn.Parameter) and "e_score_correction_bias" in r.state_dict()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_moves_the_bias_by_its_function(rule):
    r, x = router([0.3, -0.1, 0.0, -0.2], 2), randn(50, 4, dtype=torch.float32)
    r.rule = rule
    before, after = train_step(r, x)
    scores, counts = x.sigmoid(), choose(x.sigmoid(), before, 2).flatten().bincount(minlength=4)
    want = {
        "quantile": balance.quantile_balanced_bias(scores, before, 2),
        "histogram": balance.histogram_balanced_bias(balance.score_histogram(scores, before, 2, BINS), before, 2),
        "sign": balance.sign_rule_bias(before, counts, r.rate),
    }.get(rule, before)
    assert torch.equal(after, want)
    assert torch.equal(after, before) == (rule in ("auxiliary", "none"))
    r.balance()  # nothing was trained on since
    assert torch.equal(r.e_score_correction_bias, after)


def test_an_unknown_rule_is_an_error():
    r = router([0.0] * 4, 2)
    r.rule = "quantiles"
    with pytest.raises(
        ValueError, match="rule: got 'quantiles', wanted one of quantile, histogram, sign, auxiliary, none"
    ):
        train_step(r, randn(5, 4, dtype=torch.float32))


@pytest.mark.parametrize("rule", ["quantile", "histogram", "sign"])
@pytest.mark.parametrize("split", [(25, 25), (0, 50), (7, 43)])
def test_ranks_that_join_their_statistics_get_the_bias_of_the_whole_batch(rule, split):
    x, bias = randn(50, 4, dtype=torch.float32), [0.3, -0.1, 0.0, -0.2]
    whole, ranks = router(bias, 2), [router(bias, 2).train() for _ in split]
    whole.rule = rule
    want = train_step(whole, x)[1]
    seen = {"reduce": [], "gather": []}
    for r, part in zip(ranks, x.split(split), strict=True):
        r.rule = rule
        r(part)
        r.reduce, r.gather = (lambda t, name=n: seen[name].append(t) or t for n in ("reduce", "gather"))
        r.balance()
    summed, joined = sum(seen["reduce"]), torch.cat(seen["gather"]) if seen["gather"] else None
    for r, part in zip(ranks, x.split(split), strict=True):
        r.e_score_correction_bias.data = torch.tensor(bias)
        r(part)
        r.reduce, r.gather = (lambda t: summed), (lambda t: joined)
        r.balance()
        assert torch.equal(r.e_score_correction_bias, want)


def test_the_auxiliary_loss_reaches_the_router_and_padding_does_not_count():
    x, real = randn(12, 4, dtype=torch.float32), torch.arange(12) < 8
    r = router([0.0] * 4, 2).train()
    r.rule, r.auxiliary_weight = "auxiliary", 0.5
    r(x, real)
    want = balance.auxiliary_loss(x[:8].sigmoid(), r.seen_counts, 2)
    assert r.auxiliary.item() == pytest.approx(0.5 * want.item()) and r.seen_counts.sum() == 16
    r.auxiliary.backward()
    assert r.weight.grad.any() and r.e_score_correction_bias.grad is None
    r.balance()
    assert r.auxiliary is None


def test_the_model_adds_up_what_its_routers_ask_for():
    model = K3ForCausalLM(tiny("k3")).train()
    ids = torch.randint(0, 48, (1, 9), generator=torch.Generator().manual_seed(0))
    model(ids)
    assert model.auxiliary_loss() == 0
    routers = [m for m in model.modules() if isinstance(m, Router)]
    for r in routers:
        r.rule = "auxiliary"
    model(ids)
    loss = model.auxiliary_loss()
    assert loss.item() == pytest.approx(sum(r.auxiliary.item() for r in routers)) and loss > 0
    loss.backward()
    assert all(r.weight.grad.any() for r in routers)
