"""The balancing task: same tokens for every method, what a run reports, and that the rules do what they promise."""

import math

import pytest
import torch

from k3lite.tasks.balance_task import (
    DATA,
    EXPERTS,
    METHODS,
    TOKENS,
    TOP_K,
    WIDTH,
    Clusters,
    Data,
    Method,
    balanced_from,
    dead,
    held_out,
    make_layer,
    thinned,
    train_layer,
)

STEPS, FEW = 40, 512


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def runs():
    return {str(m): train_layer("skewed", m, steps=STEPS, tokens=FEW) for m in METHODS}


def test_batches_depend_on_seed_and_step_alone():
    a, b = Clusters(DATA["shared"], 0), Clusters(DATA["shared"], 0)
    b.batch(7)
    assert all(torch.equal(x, y) for x, y in zip(a.batch(3), b.batch(3), strict=True))
    assert not torch.equal(a.batch(3)[0], a.batch(4)[0]) and not torch.equal(a.batch(3)[0], a.batch(-1)[0])
    assert a.batch(0)[0].shape == a.batch(0)[1].shape == (1, TOKENS, WIDTH)


def test_frequencies_follow_zipf_and_tokens_share_what_they_should():
    c = Clusters(Data(skew=1.5, common=0.0), 0)
    assert float(c.frequency[0] / c.frequency[3]) == pytest.approx(8)
    shared = Clusters(Data(skew=1.0, common=2.0), 0)
    assert float(shared.centres.mean(0).norm()) > 3 * float(c.centres.mean(0).norm())


def test_the_wanted_answer_is_the_clusters_own_function():
    c = Clusters(Data(skew=1.0, common=0.0), 0)
    c.functions[:] = torch.eye(WIDTH)
    x, y = c.batch(0, 50)
    assert torch.allclose(y, x.tanh(), atol=1e-6)


def test_the_same_seed_is_the_same_layer_whatever_the_method():
    a, b = make_layer(0, Method("none")), make_layer(0, Method("sign", 0.1))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert (a.gate.rule, b.gate.rule, b.gate.rate) == ("none", "sign", 0.1)
    assert make_layer(0, Method("auxiliary", 0.3)).gate.auxiliary_weight == 0.3
    assert isinstance(make_layer(0, latent_moe_use_norm=False).routed_expert_norm, torch.nn.Identity)


def test_a_run_counts_every_choice(runs):
    for run in runs.values():
        assert run.counts.shape == (STEPS, EXPERTS) and set(run.counts.sum(1).tolist()) == {FEW * TOP_K}
        assert len(run.losses) == len(run.busiest) == STEPS and sum(run.loads) == pytest.approx(EXPERTS)
        assert all(map(math.isfinite, run.losses)) and run.losses[-1] < run.losses[0]


def test_what_each_rule_moves(runs):
    bias = {name: run.layer.gate.e_score_correction_bias for name, run in runs.items()}
    assert all(not bias[name].any() for name in ("none", "auxiliary:0.01", "auxiliary:0.1"))
    steps = bias["sign:0.01"] / 0.01
    assert torch.allclose(steps, steps.round(), atol=1e-3) and 20 < float(steps.abs().max()) <= STEPS
    assert float((bias["quantile"] - bias["histogram"]).abs().max()) < 0.1 < float(bias["quantile"].abs().max())


def test_rules_that_move_the_bias_balance_and_the_rest_does_not(runs):
    """Large margins: on these tokens nothing done leaves 7 times the mean load on one expert."""
    at_end = {name: sum(run.busiest[-10:]) / 10 for name, run in runs.items()}
    assert at_end["none"] > 4 and at_end["quantile"] < 2 and at_end["histogram"] < 2
    assert at_end["quantile"] < at_end["sign:0.01"] < at_end["sign:0.001"]
    assert sum(runs["quantile"].busiest[5:15]) / 10 < 2.2 < sum(runs["sign:0.01"].busiest[5:15]) / 10


def test_the_auxiliary_loss_reaches_the_router_and_its_weight_counts():
    weights = [
        train_layer("skewed", m, steps=3).layer.gate.weight
        for m in (Method("none"), Method("auxiliary", 1e-9), Method("auxiliary", 10.0))
    ]
    assert torch.allclose(weights[0], weights[1], atol=1e-5)
    assert not torch.allclose(weights[0], weights[2], atol=1e-3)


def test_runs_are_repeatable():
    a, b = (train_layer("shared", Method("quantile"), seed=1, steps=4) for _ in range(2))
    assert a.losses == b.losses and torch.equal(a.counts, b.counts)


def test_on_step_is_told():
    seen = []
    run = train_layer("shared", Method("none"), steps=3, on_step=lambda step, loss: seen.append((step, loss)))
    assert seen == list(enumerate(run.losses))


def test_held_out_leaves_the_layer_as_it_is(runs):
    layer = runs["quantile"].layer
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    loss, loads = held_out(layer, Clusters(DATA["skewed"], 0), 512)
    assert 0 < loss < 2 and sum(loads) == pytest.approx(EXPERTS)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert held_out(layer, Clusters(DATA["skewed"], 0), 512) == (loss, loads)


# ---- what is read off a curve


def test_dead_experts():
    assert dead([0.0, 0.049, 0.05, 1.0]) == 2


@pytest.mark.parametrize(
    "busiest, first",
    [
        ([1.0] * 30, 0),
        ([5.0] * 30, None),
        ([6.0] * 10 + [1.0] * 20, 6),  # the mean over ten steps is 3.0 from here on
        ([1.0] * 20 + [9.0] * 10, None),
        ([1.0] * 5 + [99.0] + [1.0] * 24, 6),
    ],
)
def test_balanced_from(busiest, first):
    assert balanced_from(busiest) == first


def test_thinned():
    assert thinned([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [2.0, 6.0, 9.0]


# ---- bad input


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Method("best"), "rule: got 'best', wanted one of quantile"),
        (lambda: Method("sign"), "strength: got 0 for 'sign'"),
        (lambda: Method("none", 0.1), "strength: got 0.1 for 'none'"),
        (lambda: Method.parse("sign:much"), "method 'sign:much': could not convert"),
        (lambda: Method.parse("sine:0.1"), "method 'sine:0.1': rule: got 'sine'"),
        (lambda: train_layer("even", Method("none")), "data: got 'even', wanted one of shared, skewed"),
        (lambda: train_layer("shared", Method("none"), steps=0), "steps: got 0"),
    ],
)
def test_nonsense_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_methods_name_reads_back(method):
    assert Method.parse(str(method)) == method
