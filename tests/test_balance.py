"""Each rule against its definition, written out token by token; a histogram forgets no more than its bins' width."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lite.balance import (
    auxiliary_loss,
    histogram_balanced_bias,
    quantile_balanced_bias,
    score_histogram,
    sign_rule_bias,
)
from k3lite.moe import choose
from tests.helpers import dims

SHAPES = ((1, 4, 2), (9, 4, 1), (7, 5, 3), (240, 12, 3), (100, 7, 4), (64, 3, 2))  # N k / E whole and not


def drawn(N, E, seed=0, ties=False):
    """Scores between 0 and 1, in tenths if there shall be ties, and a bias."""
    rng = torch.Generator().manual_seed(seed)
    scores, bias = torch.rand(N, E, generator=rng, dtype=torch.float64), torch.randn(E, generator=rng).double() / 10
    return ((scores * 10).round() / 10, (bias * 10).round() / 10) if ties else (scores, bias)


def by_hand(scores, bias, k):
    """The exact rule of the report on lists: the largest bias with which at most q tokens pass their old cutoff."""
    N, E = scores.shape
    rows, b = scores.tolist(), bias.tolist()
    cutoffs = [sorted((s + b_j for s, b_j in zip(row, b, strict=True)), reverse=True)[k] for row in rows]
    new = []
    for j in range(E):
        margins = sorted((rows[i][j] - cutoffs[i] for i in range(N)), reverse=True)
        new.append(-margins[int(N * k / E)])  # the (q+1)-th largest
    return torch.tensor([x - sum(new) / E for x in new], dtype=torch.float64)


@dims("N E k", *SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_quantile_is_its_definition(N, E, k, ties):
    scores, bias = drawn(N, E, ties=ties)
    torch.testing.assert_close(quantile_balanced_bias(scores, bias, k), by_hand(scores, bias, k), rtol=0, atol=1e-12)


@dims("N E k", (240, 12, 3), (100, 7, 4), (64, 3, 2))
def test_each_expert_gets_its_share_of_the_old_cutoffs(N, E, k):
    """Under each new bias floor(N k / E) tokens pass; found again from the scores without the rule's own order."""
    scores, bias = drawn(N, E)
    new = quantile_balanced_bias(scores, bias, k)
    cutoff = (scores + bias).sort(descending=True).values[:, k : k + 1]
    shift = (cutoff - scores)[:, 0].sort().values[N * k // E] - new[0]  # the mean that was taken off
    margin = scores + new + shift - cutoff
    # Tokens whose cutoff is this expert itself all tie, so some of those at the edge may be on its other side.
    assert ((margin > 1e-9).sum(0) <= N * k // E).all() and ((margin > -1e-9).sum(0) > N * k // E).all()


@pytest.mark.parametrize("rule", ["quantile", "histogram"])
def test_nothing_to_balance(rule):
    def balanced(scores, bias, k):
        if rule == "quantile":
            return quantile_balanced_bias(scores, bias, k)
        return histogram_balanced_bias(score_histogram(scores, bias, k, 50), bias, k)

    scores, bias = drawn(5, 4)
    assert balanced(scores, bias, 4) is bias  # every expert is always chosen
    assert balanced(scores[:0], bias, 2) is bias
    assert torch.isfinite(balanced(scores[:1], bias, 2)).all()


@given(
    st.integers(1, 60), st.integers(2, 9), st.integers(1, 8), st.sampled_from([1, 3, 50, 1000]), st.booleans(),
    st.integers(0, 2**16),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_histogram_is_off_by_less_than_a_bin(N, E, k, bins, ties, seed):
    """Each value by less than a bin's width; so two of them, before the mean comes off, by less than two."""
    k = min(k, E - 1)
    scores, bias = drawn(N, E, seed, ties)
    width = float(bias.max() - bias.min() + 2) / bins
    error = histogram_balanced_bias(score_histogram(scores, bias, k, bins), bias, k)
    error = error - quantile_balanced_bias(scores, bias, k)
    assert float(error.max() - error.min()) < 2 * width


def test_histogram_becomes_exact():
    scores, bias = drawn(500, 16)
    want, errors = quantile_balanced_bias(scores, bias, 3), []
    for bins in (10, 1000, 100_000):
        got = histogram_balanced_bias(score_histogram(scores, bias, 3, bins), bias, 3)
        errors.append(float((got - want).abs().max()))
    assert errors[0] > 1e-2 > errors[1] > 1e-4 > errors[2], errors


def test_histogram_stands_where_q_tokens_would_be_below():
    """One expert beside another of constant need: q = 3.5 of 7 tokens, 2 bins below hold 3, the third holds 2."""
    histogram = torch.tensor([[1, 2, 2, 2], [0, 7, 0, 0]])
    bias = torch.zeros(2)  # bins of .5 over [-1, 1]
    want = torch.tensor([-1 + 0.5 * (2 + 0.5 / 2), -1 + 0.5 * (1 + 3.5 / 7)])
    torch.testing.assert_close(histogram_balanced_bias(histogram, bias, 1), want - want.mean())


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_histograms_of_parts_add_up(parts):
    scores, bias = drawn(103, 6)
    whole = score_histogram(scores, bias, 2, 40)
    assert whole.dtype == torch.long and whole.sum(1).tolist() == [103] * 6
    pieces = [*scores.tensor_split(parts), scores[:0]]  # a rank without tokens adds nothing
    assert torch.equal(sum(score_histogram(p, bias, 2, 40) for p in pieces), whole)


@pytest.mark.parametrize("rule", ["quantile", "histogram"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_load_is_even_after_five_updates(rule, seed):
    """Scores that leave some experts almost idle. Figures of the project's sheet §2.4."""
    N, E, k = 8192, 64, 4
    rng = torch.Generator().manual_seed(seed)
    scores = torch.sigmoid(torch.randn(N, E, generator=rng) + torch.randn(E, generator=rng))
    bias, loads = torch.zeros(E), []
    for _ in range(6):
        loads.append(choose(scores, bias, k).flatten().bincount(minlength=E).max().item() / (N * k / E))
        if rule == "quantile":
            bias = quantile_balanced_bias(scores, bias, k)
        else:
            bias = histogram_balanced_bias(score_histogram(scores, bias, k, 1000), bias, k)
    assert loads[0] > 3 and loads[5] < 1.1, loads
    assert abs(bias.mean()) < 1e-6 and bias.dtype == torch.float32


# ---- the sign rule (shared hazard T13)


def test_t13_sign_rule():
    bias = sign_rule_bias(torch.zeros(4), torch.tensor([10, 2, 0, 4]), 0.001)
    torch.testing.assert_close(bias, torch.tensor([-0.001, 0.001, 0.001, 0.0]), rtol=0, atol=0)


def test_t13_no_load_is_rounded_away():
    """40840 against a mean of 40960: in bf16 both are 40960."""
    counts = torch.tensor([40840, 40960, 41080])
    assert sign_rule_bias(torch.zeros(3), counts, 1.0).tolist() == [1, 0, -1]


def test_t13_a_thousand_updates_arrive():
    bias = torch.zeros(2)
    for _ in range(1000):
        bias = sign_rule_bias(bias, torch.tensor([0, 2]), 0.001)
    assert bias.tolist() == pytest.approx([1, -1], rel=1e-4)


def test_t13_when_an_expert_is_first_used():
    """Scores 5/8 and 1/2 for every token, k = 1. Two steps of 1/64 an update, exact in binary: 4 updates make a tie,
    which the lower number wins, so the other is used after the fifth.
    """
    scores, bias, updates = torch.tensor([[0.625, 0.5]] * 10), torch.zeros(2), 0
    while not (choose(scores, bias, 1) == 1).any():
        bias = sign_rule_bias(bias, torch.tensor([10, 0]), 1 / 64)
        updates += 1
    assert updates == 5


# ---- the auxiliary loss


@dims("N E k", *SHAPES)
def test_auxiliary_loss_by_its_formula(N, E, k):
    scores, bias = drawn(N, E)
    chosen = choose(scores, bias, k)
    want = 0.0
    for j in range(E):
        f = sum(j in row for row in chosen.tolist()) / (N * k)
        P = sum(float(s[j] / s.sum()) for s in scores) / N
        want += E * f * P
    got = auxiliary_loss(scores, chosen.flatten().bincount(minlength=E), k)
    assert float(got) == pytest.approx(want, rel=1e-12)


def test_auxiliary_loss_is_one_when_even_and_pushes_down_what_is_overloaded():
    scores = torch.full((6, 3), 0.4, requires_grad=True)
    assert auxiliary_loss(scores, torch.tensor([4, 4, 4]), 2).item() == pytest.approx(1)
    auxiliary_loss(scores, torch.tensor([6, 5, 1]), 2).backward()
    gradient = scores.grad.sum(0)
    assert gradient[0] > 0 > gradient[2] and gradient[0] > gradient[1]


def test_auxiliary_loss_of_no_token_is_zero():
    scores = torch.empty(0, 3, requires_grad=True)
    loss = auxiliary_loss(scores, torch.zeros(3, dtype=torch.long), 2)
    loss.backward()
    assert loss.item() == 0
