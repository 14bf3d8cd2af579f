"""Capacity of a state: each rule against K3's own operation, the theory against measurement, the pairs' statistics."""

import math

import pytest
import torch

from k3lite.ops.kda import kda
from k3lite.ops.linear_attention import linear_attention
from k3lite.tasks.capacity import RULES, draw_pairs, retrieval, step, theory, write_pairs
from tests.helpers import assert_close

LN_HALF = math.log(0.5)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def some_pairs(N=23, K=8, V=5, draws=3):
    keys, values = draw_pairs(N, K, V, 0.0, seeded(), draws=draws)
    return keys.double(), values.double()


# ---- the rules


@pytest.mark.parametrize(
    "rule, log_decay",
    [("delta", 0.0), ("gated delta", -0.3), ("kda", -0.3), ("kda", -torch.arange(8, dtype=torch.float64) / 4)],
    ids=["delta", "gated delta", "kda, one number", "kda"],
)
@pytest.mark.parametrize("beta", [1.0, 0.4])
@pytest.mark.parametrize("start", [False, True], ids=["zero", "state"])
def test_delta_rules_are_kda(rule, log_decay, beta, start):
    keys, values = some_pairs()
    S0 = torch.randn(3, 8, 5, generator=seeded(1), dtype=torch.float64) if start else None
    S = write_pairs(keys, values, rule, beta, log_decay, initial_state=S0)
    g = torch.as_tensor(log_decay, dtype=torch.float64).expand(3, 23, 1, 8)
    k, v = keys.unsqueeze(2), values.unsqueeze(2)
    start = None if S0 is None else S0.unsqueeze(1)
    _, want = kda(k, k, v, g, torch.full((3, 23, 1), beta, dtype=torch.float64), initial_state=start)
    assert_close("S", S, want[:, 0], 1e-12)


def test_the_sum_is_linear_attention():
    keys, values = some_pairs()
    k, v = keys.unsqueeze(2), values.unsqueeze(2)
    want = linear_attention(k, k, v)[1][:, 0]
    assert_close("S", write_pairs(keys, values, "sum"), want, 1e-12)
    assert_close("half as strong", write_pairs(keys, values, "sum", 0.5), want / 2, 1e-12)


def test_the_sum_with_decay_is_decayed_before_the_write():
    S = step(t([1, 2], [3, 4]), t(1, 0), t(1, -1), "sum", 0.5, LN_HALF)
    torch.testing.assert_close(S, t([1.0, 0.5], [1.5, 2.0]))


def test_t02_the_delta_reads_the_decayed_state():
    S = step(t([2, 0], [0, 4]), t(0.6, 0.8), t(1, 1), "kda", 0.5, t(LN_HALF, math.log(0.25)))
    torch.testing.assert_close(S, t([1.12, 0.06], [0.16, 1.08]))


def test_t04_the_state_is_key_by_value():
    S = step(t([1, 2], [3, 4]), t(0.8, 0.6), t(1, -1), "kda", 0.5, t(LN_HALF, math.log(0.9)))
    torch.testing.assert_close(t(0.6, 0.8) @ S / 2**0.5, t(1.393283, 1.116663), rtol=0, atol=5e-7)


def test_steps_are_the_writes_and_leave_the_old_state_alone():
    keys, values = some_pairs(draws=None)
    for rule in RULES:
        decay = 0.0 if rule == "delta" else -0.2
        S = torch.zeros(8, 5, dtype=torch.float64)
        for k, v in zip(keys, values, strict=True):
            old = S.clone()
            new = step(S, k, v, rule, 0.7, decay)
            assert torch.equal(S, old)
            S = new
        torch.testing.assert_close(S, write_pairs(keys, values, rule, 0.7, decay))


def test_draws_are_independent_states():
    keys, values = some_pairs()
    together = write_pairs(keys, values, "gated delta", 0.9, -0.1)
    for i in range(3):
        torch.testing.assert_close(together[i], write_pairs(keys[i], values[i], "gated delta", 0.9, -0.1))


def test_a_rewritten_key_is_replaced_by_the_delta_rule_and_blended_by_the_sum():
    k, first, second = t(0.6, 0.8), t(1, 0, 0), t(0, 1, 0)
    keys, values = torch.stack([k, k]), torch.stack([first, second])
    torch.testing.assert_close(k @ write_pairs(keys, values, "delta"), second)
    torch.testing.assert_close(k @ write_pairs(keys, values, "sum"), first + second)
    torch.testing.assert_close(k @ write_pairs(keys, values, "delta", 0.5), 0.25 * first + 0.5 * second)


# ---- retrieval


def test_retrieval_by_hand():
    S = t([1.0, 0.0], [0.0, 0.25])
    keys, values = t([1, 0], [0, 1], [0.6, 0.8]), t([1, 0], [0, 2], [0, 1])
    r = retrieval(S, keys, values)  # reads (1, 0), (0, .25), (.6, .2)
    torch.testing.assert_close(r.error, t(0, 1.75**2 / 4, 0.36 + 0.64))
    assert r.right.tolist() == [True, False, False]  # (0, .25) is nearer to (0, 1), (.6, .2) to (1, 0)


def test_equal_values_are_not_held_against_each_other():
    keys, values = torch.eye(3), torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert retrieval(write_pairs(keys, values, "delta"), keys, values).right.tolist() == [True] * 3


@pytest.mark.parametrize("rule", RULES)
def test_keys_at_right_angles_come_back_whole_and_one_more_does_not(rule):
    keys, values = torch.eye(16, dtype=torch.float64), some_pairs(17, 8, 16, None)[1]
    r = retrieval(write_pairs(keys, values[:16], rule), keys, values[:16])
    assert r.error.max() < 1e-20 and r.right.all()
    extra = torch.full((1, 16), 0.25, dtype=torch.float64)
    keys = torch.cat([keys, extra])
    assert retrieval(write_pairs(keys, values, rule), keys, values).error[:16].max() > 0.01


# ---- pairs


@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("width", [2, 16])
def test_the_expected_cosine_between_keys_is_the_correlation(correlation, width):
    keys, values = draw_pairs(20, width, 6, correlation, seeded(), draws=3000)
    assert keys.shape == (3000, 20, width) and values.shape == (3000, 20, 6)
    for x in (keys, values):
        torch.testing.assert_close(x.norm(dim=-1), torch.ones(3000, 20))
    cosines = (keys @ keys.mT)[:, ~torch.eye(20, dtype=torch.bool)]
    per_draw = cosines.mean(-1)
    assert abs(per_draw.mean() - correlation) < 5 * per_draw.std() / 3000**0.5 + 1e-6
    assert abs((values @ values.mT)[:, 0, 1:].mean()) < 0.01


def test_pairs_depend_on_the_generator_alone():
    a, b, c = (draw_pairs(5, 4, 3, 0.3, seeded(s)) for s in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and not torch.equal(a[0], c[0])
    assert a[0].shape == (5, 4) and a[1].shape == (5, 3)


# ---- theory


def measured(rule, N, d, beta, log_decay, correlation, draws):
    keys, values = draw_pairs(N, d, 6, correlation, seeded(7), draws=draws)
    error = retrieval(write_pairs(keys, values, rule, beta, log_decay), keys, values).error.double()
    return error.mean(0), error.std(0) / draws**0.5


@pytest.mark.parametrize(
    "rule, N, d, beta, log_decay, correlation",
    [
        ("sum", 30, 8, 1.0, 0.0, 0.0),
        ("sum", 30, 8, 0.7, -0.1, 0.0),
        ("sum", 20, 16, 1.0, 0.0, 0.3),
        ("sum", 12, 2, 1.0, -0.2, 0.6),
        ("delta", 30, 8, 1.0, 0.0, 0.0),
        ("delta", 40, 16, 0.4, 0.0, 0.0),
        ("delta", 2, 2, 1.0, 0.0, 0.0),
        ("delta", 6, 2, 1.0, 0.0, 0.0),
        ("gated delta", 6, 2, 0.5, -0.3, 0.0),
        ("gated delta", 30, 8, 1.0, -0.1, 0.0),
        ("gated delta", 30, 8, 0.6, -0.05, 0.0),
        ("gated delta", 30, 8, 1.5, -0.03, 0.0),
        ("kda", 30, 8, 0.9, -0.1, 0.0),
    ],
)
def test_theory_is_what_is_measured_for_every_age(rule, N, d, beta, log_decay, correlation):
    mean, deviation = measured(rule, N, d, beta, log_decay, correlation, draws=200_000 // N // d)
    want = theory(rule, N, d, beta, log_decay, correlation)
    assert want.shape == (N,)
    assert ((mean - want).abs() <= 4.5 * deviation + 1e-6).all(), (mean - want) / deviation
    assert abs(float(mean.mean() / want.mean()) - 1) < 0.02


@pytest.mark.parametrize("N, d", [(1, 4), (16, 32), (256, 64)])
def test_closed_forms(N, d):
    torch.testing.assert_close(theory("sum", N, d), torch.full((N,), (N - 1) / d, dtype=torch.float64))
    delta = theory("delta", N, d)
    assert delta[-1].abs() < 1e-12  # the last write is read back exactly
    if N == 256:  # a state that has long been full: 2 (1 - (1 - 1/d)^age)
        age = torch.arange(N - 1, -1, -1, dtype=torch.float64)
        torch.testing.assert_close(delta[128:], (2 * (1 - (1 - 1 / d) ** age))[128:], rtol=0.03, atol=0.01)


@pytest.mark.parametrize("d", [2, 3, 64])
def test_two_pairs_by_hand(d):
    """With c the cosine of the keys the first reads back as (1 - c^2) v_1 + c v_2: squared error c^4 + c^2."""
    assert float(theory("delta", 2, d)[0]) == pytest.approx(3 / (d * (d + 2)) + 1 / d)


def test_nothing_written_is_an_error_of_one():
    for rule in RULES:
        torch.testing.assert_close(theory(rule, 9, 4, beta=0.0), torch.ones(9, dtype=torch.float64))


def test_no_theory_where_no_closed_form_is_known():
    assert theory("delta", 8, 4, correlation=0.1) is None
    assert theory("kda", 8, 4, log_decay=-torch.arange(4.0)) is None
    same = torch.full((4,), -0.2)
    torch.testing.assert_close(
        theory("kda", 8, 4, log_decay=same), theory("gated delta", 8, 4, log_decay=float(same[0]))
    )


# ---- bad input


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("product",), "rule: got 'product', wanted one of 'sum', 'delta', 'gated delta', 'kda'"),
        (("delta", -0.1), "beta: got -0.1, wanted a number of 0 or more"),
        (("delta", math.nan), "beta: got nan, wanted a number of 0 or more"),
        (("gated delta", 1.0, 0.1), "log_decay: got 0.1 as its largest, wanted 0 or less"),
        (("kda", 1.0, torch.full((8,), math.nan)), "log_decay: got nan as its largest, wanted 0 or less"),
        (("delta", 1.0, -0.1), "log_decay: got -0.1, but 'delta' forgets nothing; 'gated delta' does"),
        (
            ("gated delta", 1.0, torch.zeros(8)),
            r"log_decay: got shape \(8,\) for rule 'gated delta', wanted one number",
        ),
        (("kda", 1.0, torch.zeros(5)), r"log_decay: got shape \(5,\) for rule 'kda', wanted one number or \[8\]"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    keys, values = some_pairs(4, draws=None)
    S = torch.zeros(8, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        write_pairs(keys, values, *arguments)
    with pytest.raises(ValueError, match=message):
        step(S, keys[0], values[0], *arguments)
    with pytest.raises(ValueError, match=message):
        theory(arguments[0], 4, 8, *arguments[1:])


def test_shapes_that_do_not_fit_are_named():
    keys, values = some_pairs(4, draws=None)
    with pytest.raises(ValueError, match=r"values: got shape \(3, 5\) for keys \(4, 8\), wanted \[..., N, V\]"):
        write_pairs(keys, values[:3], "sum")
    with pytest.raises(ValueError, match=r"initial_state: got shape \(5, 8\), wanted \(8, 5\)"):
        write_pairs(keys, values, "sum", initial_state=torch.zeros(5, 8))
    with pytest.raises(ValueError, match=r"S: got shape \(5, 8\) for a key of 8 and a value of 5"):
        step(torch.zeros(5, 8), keys[0], values[0], "sum")
    with pytest.raises(ValueError, match="correlation: got 1.5, wanted 0 to 1"):
        draw_pairs(4, 8, 8, 1.5, seeded())
    with pytest.raises(ValueError, match="key_width: got 1, wanted 2 or more"):
        draw_pairs(4, 1, 8, 0.0, seeded())
