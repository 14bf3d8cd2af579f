"""Grouped experts against their definition: every dtype, any split of the tokens, and only what was chosen is read."""

import pytest
import torch

from k3lite.ops.experts import experts_naive, grouped_experts
from k3lite.ops.pointwise import situ_glu, swiglu
from tests.helpers import assert_close, dims


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@dims("N E k", (1, 4, 2), (9, 4, 1), (9, 4, 4), (5, 16, 2), (40, 3, 2), (30, 64, 3))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@dims("E k", (1, 1), (5, 1), (5, 5), (16, 4))
def test_a_token_alone_is_what_it_is_in_a_group(E, k, dtype):
    """Without gradients one token takes a way of its own."""
    z, w1, w3, w2 = (
        randn(*s, seed=i).to(dtype) for i, s in enumerate([(1, 24), (E, 10, 24), (E, 10, 24), (E, 24, 10)])
    )
    experts, weights = (
        torch.rand(1, E, generator=torch.Generator().manual_seed(5)).argsort()[:, :k],
        randn(1, k, seed=6).float(),
    )
    grouped = grouped_experts(z, experts, weights, w1, w3, w2, situ_glu)
    with torch.no_grad():
        alone = grouped_experts(z, experts, weights, w1, w3, w2, situ_glu)
    assert alone.dtype == dtype and alone.shape == (1, 24)
    # another order of the same sums at most
    assert_close("out", alone, grouped, {torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-14}[dtype])


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


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 2e-2), (torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_every_dtype(dtype, limit):
    """Against the definition in fp64, outputs and gradients in the dtype of the weights."""
    leaves = [randn(*s, seed=i).to(dtype) for i, s in enumerate([(33, 24), (8, 16, 24), (8, 16, 24), (8, 24, 16)])]
    leaves = [x.requires_grad_() for x in leaves]
    experts = torch.rand(33, 8, generator=torch.Generator().manual_seed(5)).argsort()[:, :3]
    weights = randn(33, 3, seed=6)
    p = weights if dtype == torch.float64 else weights.float()
    out = grouped_experts(leaves[0], experts, p, *leaves[1:], situ_glu)
    precise = [x.detach().double().requires_grad_() for x in leaves]
    want = experts_naive(precise[0], experts, p.double(), *precise[1:], situ_glu)
    assert_close("out", out.double(), want, limit)
    got = torch.autograd.grad(out.sum(), leaves)
    for name, g, w in zip(("dz", "dw1", "dw3", "dw2"), got, torch.autograd.grad(want.sum(), precise), strict=True):
        assert g.dtype == dtype
        assert_close(name, g.double(), w, limit)


def test_no_token_at_all():
    """As a rank may get them."""
    z, weights = randn(0, 6).requires_grad_(), randn(0, 2).requires_grad_()
    leaves = [randn(4, 3, 6).requires_grad_(), randn(4, 3, 6).requires_grad_(), randn(4, 6, 3).requires_grad_()]
    out = grouped_experts(z, torch.empty(0, 2, dtype=torch.long), weights, *leaves, swiglu)
    out.sum().backward()
    assert out.shape == z.grad.shape == (0, 6)
    assert all(w.grad.shape == w.shape and not w.grad.any() for w in leaves)


def test_experts_that_nobody_chose_are_not_read():
    """NaN in them changes no output and no gradient."""
    z, weights, experts = randn(3, 6).requires_grad_(), torch.rand(3, 2), torch.tensor([[0, 5], [5, 2], [2, 0]])
    results = []
    for poison in (0.0, float("nan")):
        leaves = [randn(8, 3, 6, seed=1), randn(8, 3, 6, seed=2), randn(8, 6, 3, seed=3)]
        for w in leaves:
            w[[1, 3, 4, 6, 7]] = poison
            w.requires_grad_()
        out = grouped_experts(z, experts, weights, *leaves, swiglu)
        results.append([out, *torch.autograd.grad(out.sum(), [z, *leaves])])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("tokens", [1, 3])  # one token takes another way
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"z": randn(2, 7)}, r"z: got shape \(2, 7\), wanted \(\d, 6\)"),
        ({"weights": randn(3, 1)}, r"weights: got shape \(3, 1\), wanted \(\d, 2\)"),
        ({"w3": randn(4, 6, 5)}, r"w3: got shape \(4, 6, 5\), wanted \(4, 5, 6\)"),
        ({"w2": randn(3, 6, 5)}, r"w2: got shape \(3, 6, 5\), wanted \(4, 6, 5\)"),
        ({"w1": randn(5, 6)}, r"w1, experts: got shapes \(5, 6\)"),
        ({"w1": randn(4, 5, 6).float()}, "w1: got torch.float32, wanted torch.float64 as z"),
        ({"experts": 0.0}, "experts: got torch.float32, wanted whole numbers"),
        ({"experts": 4}, "experts: got ids from 4 to 4, wanted 0 to 3"),
        ({"experts": -1}, "experts: got ids from -1 to -1, wanted 0 to 3"),
    ],
)
def test_what_does_not_fit_is_one_error(tokens, wrong, message):
    experts = torch.full((tokens, 2), wrong["experts"]) if "experts" in wrong else torch.tensor([[0, 3]] * tokens)
    given = {"z": randn(tokens, 6), "experts": experts, "weights": randn(tokens, 2)}
    given |= {"w1": randn(4, 5, 6), "w3": randn(4, 5, 6), "w2": randn(4, 6, 5)}
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        grouped_experts(**given | {n: x for n, x in wrong.items() if n != "experts"}, act=swiglu)
