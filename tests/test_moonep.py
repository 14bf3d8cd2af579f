"""The plan of redundant experts: exact balance and its bound, in hard cases and in whatever hypothesis finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3lite.moonep import Plan, home_ranks, most_redundant, plan_at_home, plan_balanced


def verify(counts: Tensor, plan: Plan) -> None:
    """Every token is computed once, by an expert of its choice; nobody computes more; the bound holds."""
    R, E = counts.shape
    assert torch.equal(plan.sent.sum(1), counts), "each rank's tokens all go somewhere"
    assert torch.equal(plan.sent.sum(0), plan.share), "and arrive where they are planned"
    assert int(plan.sent.min()) >= 0
    assert torch.equal(plan.sent.diagonal().T, counts.minimum(plan.share)), "nothing travels that could stay"
    assert plan.loads.tolist() == [int(counts[0].sum())] * R
    assert int(plan.redundant.max()) <= -(-E // R)
    by_hand = [sum(int(plan.share[r, e]) > 0 and int(plan.home[e]) != r for e in range(E)) for r in range(R)]
    assert plan.redundant.tolist() == by_hand


def one_hot(R: int, E: int, S: int) -> Tensor:
    counts = torch.zeros(R, E, dtype=torch.int64)
    counts[:, E // 2] = S
    return counts


def each_its_own(R: int, E: int, S: int) -> Tensor:
    """All tokens of a rank go to one expert; all of these experts live on the last rank where there is room."""
    counts = torch.zeros(R, E, dtype=torch.int64)
    for r in range(R):
        counts[r, E - 1 - r % (E // R)] = S
    return counts


def spread(R: int, E: int, S: int, weights: Tensor, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.multinomial(weights, S, replacement=True, generator=g).bincount(minlength=E) for _ in range(R)]
    return torch.stack(rows)


def even_but_one(R: int, E: int) -> Tensor:
    """The first rank's experts get nothing, the others the same: the case that makes the lower bound."""
    block = E // R
    total = (R - 1) * block * R  # tokens of each busy expert: R, so that every rank brings (R - 1) block
    counts = torch.ones(R, E, dtype=torch.int64)
    counts[:, :block] = 0
    assert int(counts.sum()) == total
    return counts


SHAPES = [(1, 4), (2, 2), (2, 7), (3, 8), (4, 16), (5, 17), (8, 896), (7, 7)]


@pytest.mark.parametrize("R, E", SHAPES, ids=lambda n: str(n))
@pytest.mark.parametrize("S", [1, 13, 256])
def test_hard_cases(R, E, S):
    zipf = 1 / torch.arange(1, E + 1, dtype=torch.float64)
    cases = [
        one_hot(R, E, S),
        each_its_own(R, E, S),
        spread(R, E, S, zipf),
        spread(R, E, S, zipf**3),
        spread(R, E, S, torch.ones(E)),
        torch.zeros(R, E, dtype=torch.int64),
    ]
    for counts in cases:
        verify(counts, plan_balanced(counts))


@st.composite
def any_counts(draw) -> Tensor:
    R = draw(st.integers(1, 6))
    E = draw(st.integers(R, 20))
    S = draw(st.integers(0, 40))
    cuts = st.lists(st.integers(0, S), min_size=E - 1, max_size=E - 1).map(sorted)
    rows = []
    for _ in range(R):
        ends = [0, *draw(cuts), S]
        rows.append([b - a for a, b in zip(ends, ends[1:], strict=False)])
    return torch.tensor(rows)


@settings(max_examples=300, deadline=None)
@given(any_counts())
def test_the_bound_holds_whatever_comes(counts):
    verify(counts, plan_balanced(counts))


@pytest.mark.parametrize("R, E", [(2, 8), (4, 64), (8, 896), (16, 896), (32, 896)])
def test_in_the_worst_case_it_needs_no_more_than_any_plan_must(R, E):
    counts = even_but_one(R, E)
    plan = plan_balanced(counts)
    verify(counts, plan)
    least, most = most_redundant(E, R)
    assert int(plan.redundant.max()) == least <= most


@pytest.mark.parametrize("R, most, least", [(8, 112, 98), (16, 56, 53), (32, 28, 28)])
def test_bounds_of_k3(R, most, least):
    """k3-architecture §2.7: ceil(E (R - 1) / R^2) and E/R, for 896 experts."""
    assert most_redundant(896, R) == (least, most)


def test_at_home_nothing_is_copied_and_the_busiest_rank_sets_the_pace():
    counts = torch.tensor([[6, 0, 1, 1], [2, 2, 4, 0]])
    plan = plan_at_home(counts)
    assert plan.loads.tolist() == [10, 6] and plan.redundant.tolist() == [0, 0]
    assert plan.traffic.tolist() == [[6, 2], [4, 4]]
    assert plan.slowest == pytest.approx(10 / 8)


def test_a_plan_by_hand():
    """Rank 0 has two too many and lends expert 0, its busiest; tokens of rank 1 for expert 0 then stay on rank 1."""
    plan = plan_balanced(torch.tensor([[6, 0, 1, 1], [2, 2, 4, 0]]))
    assert plan.share.tolist() == [[6, 2, 0, 0], [2, 0, 5, 1]]
    assert plan.redundant.tolist() == [0, 1]
    assert plan.traffic.tolist() == [[6, 2], [2, 6]] and plan.slowest == 1


def test_nothing_travels_that_could_stay():
    counts = torch.full((4, 8), 3)
    assert torch.equal(plan_balanced(counts).traffic, torch.full((4, 4), 6))
    own = torch.zeros(4, 8, dtype=torch.int64)
    own[range(4), range(0, 8, 2)] = 5
    assert torch.equal(plan_balanced(own).traffic, 5 * torch.eye(4, dtype=torch.int64))


def test_homes_are_contiguous_and_even():
    assert home_ranks(8, 2).tolist() == [0] * 4 + [1] * 4
    for E, R in [(7, 2), (17, 5), (896, 3)]:
        home = home_ranks(E, R)
        sizes = home.bincount(minlength=R)
        assert torch.equal(home, home.sort().values) and int(sizes.max() - sizes.min()) <= 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: plan_balanced(torch.ones(2, 4)), r"counts: got torch.float32 of shape \(2, 4\), wanted int64 \[R,E\]"),
        (lambda: plan_balanced(torch.ones(4, dtype=torch.int64)), r"counts: got torch.int64 of shape \(4,\)"),
        (lambda: plan_balanced(torch.tensor([[1, -1]])), "wanted int64 .* of 0 or more"),
        (lambda: plan_balanced(torch.tensor([[1, 0], [1, 1]])), r"the ranks bring \[1, 2\] tokens"),
        (lambda: plan_at_home(torch.ones(3, 2, dtype=torch.int64)), "ranks: got 3 for 2 experts, wanted 1 to 2"),
        (lambda: home_ranks(4, 0), "ranks: got 0 for 4 experts"),
    ],
)
def test_nonsense_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
