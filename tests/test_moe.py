"""Routing, balancing and the latent wiring (shared hazards T11-T16)."""

import pytest
import torch
from torch import nn

from k3lite.moe import LatentMoE, Router, choose, quantile_balanced_bias
from k3lite.ops.experts import experts_naive, grouped_experts
from k3lite.ops.pointwise import rms_norm, situ_glu, swiglu
from tests.helpers import assert_close, dims, randomise, tiny


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


# ---- experts


@dims("N E k", (1, 4, 2), (9, 4, 1), (9, 4, 4), (5, 16, 2), (40, 3, 2))
@pytest.mark.parametrize("act", [swiglu, situ_glu])
def test_grouped_equals_naive(N, E, k, act):
    """With outputs and gradients; in most of these some expert gets no token."""
    D, width = 6, 5
    leaves = [
        randn(N, D),
        randn(N, k, seed=1),
        *(randn(E, width, D, seed=s) for s in (2, 3)),
        randn(E, D, width, seed=4),
    ]
    leaves = [x.requires_grad_() for x in leaves]
    z, weights, w1, w3, w2 = leaves
    experts = torch.rand(N, E, generator=torch.Generator().manual_seed(5)).argsort()[:, :k]
    results = []
    for f in (grouped_experts, experts_naive):
        out = f(z, experts, weights, w1, w3, w2, act)
        results.append([out, *torch.autograd.grad((out * randn(N, D, seed=6)).sum(), leaves)])
    for name, got, want in zip(("out", "dz", "dp", "dw1", "dw3", "dw2"), *results, strict=True):
        assert_close(name, got, want, 1e-12)


def test_an_expert_without_tokens_gets_a_zero_gradient():
    leaves = [randn(4, 3, 6).requires_grad_(), randn(4, 3, 6, seed=1).requires_grad_(), randn(4, 6, 3).requires_grad_()]
    experts = torch.tensor([[0, 2], [2, 0]])
    grouped_experts(randn(2, 6), experts, torch.ones(2, 2), *leaves, swiglu).sum().backward()
    for w in leaves:
        assert [bool(g.any()) for g in w.grad] == [True, False, True, False]


def test_weighted_sum_is_fp32():
    """Experts answer in bf16; their sum is rounded once."""
    z, (w1, w3, w2) = randn(6, 8).bfloat16(), (randn(4, 8, 8, seed=s).bfloat16() for s in (1, 2, 3))
    experts, weights = torch.tensor([[0, 1, 2, 3]] * 6), torch.rand(6, 4, generator=torch.Generator().manual_seed(4))
    outputs = torch.stack([swiglu(z @ w1[e].T, z @ w3[e].T) @ w2[e].T for e in range(4)], 1)
    want = (weights.unsqueeze(-1) * outputs.float()).sum(1).bfloat16()
    assert torch.equal(grouped_experts(z, experts, weights, w1, w3, w2, swiglu), want)


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


def balanced(seed=0, N=8192, E=64, k=4):
    """Scores that leave some experts almost idle, and the loads after each update. Figures of shared sheet §2.4."""
    preference = 0.8 * randn(E, seed=seed, dtype=torch.float32)
    scores = torch.sigmoid(randn(N, E, seed=seed + 1, dtype=torch.float32) + preference)
    bias, loads = torch.zeros(E), []
    for _ in range(6):
        loads.append(choose(scores, bias, k).flatten().bincount(minlength=E).max().item() / (N * k / E))
        bias = quantile_balanced_bias(scores, bias, k)
    return loads, bias


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quantile_balancing_evens_the_load_in_five_updates(seed):
    loads, bias = balanced(seed)
    assert loads[0] > 3 and loads[5] < 1.1, loads
    assert abs(bias.mean()) < 1e-6


def test_quantile_is_the_share_that_an_expert_should_get():
    """Each new bias lets N k / E tokens pass the cutoffs of the old routing, and stops the next one."""
    N, E, k = 240, 12, 3
    scores, bias = torch.rand(N, E, generator=torch.Generator().manual_seed(0)), 0.1 * randn(E, dtype=torch.float32)
    new = quantile_balanced_bias(scores, bias, k)
    cutoff = (scores + bias).sort(descending=True).values[:, k : k + 1]
    # the mean was taken off all biases alike: put it back, found from expert 0
    shift = -(scores - cutoff)[:, 0].sort(descending=True).values[N * k // E] - new[0]
    margin = scores + new + shift - cutoff
    # Tokens whose cutoff is this expert itself all tie, so some of those at the edge may be on its other side.
    assert ((margin > 1e-6).sum(0) <= N * k // E).all() and ((margin > -1e-6).sum(0) > N * k // E).all()


def test_balancing_edge_cases():
    scores, bias = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4.0)
    assert quantile_balanced_bias(scores, bias, 4) is bias  # every expert is always chosen
    assert quantile_balanced_bias(scores[:0], bias, 2) is bias
    assert torch.isfinite(quantile_balanced_bias(scores[:1], bias, 2)).all()


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
