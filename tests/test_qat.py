"""Training with rounding: its arithmetic, its gradients, and that the packed model is the model that was trained."""

import copy
import os
import signal

import pytest
import torch

from k3lite.checkpoint import CheckpointError, load_model, save_model
from k3lite.config import K3Config
from k3lite.generate import generate
from k3lite.model import K3ForCausalLM
from k3lite.moe import Experts
from k3lite.mx import SCALE_RULES, decode, encode, pack_mxfp4, unpack_mxfp4
from k3lite.ops.experts import experts_naive
from k3lite.packed import PackedExperts, pack_experts, unpack_experts
from k3lite.qat import round_weight, rounding_of, set_rounding
from k3lite.train import Recipe, Stopped, train
from tests.helpers import assert_all_close, assert_close, random_model

TINY = K3Config.preset("k3-tiny")
IDS = torch.arange(1, 19).view(2, 9)
RECIPE = Recipe(steps=6, lr=1e-2, warmup=2, task="ids")


def experts_of(model):
    return [m for m in model.modules() if isinstance(m, (Experts, PackedExperts))]


def batches(step):
    ids = torch.randint(TINY.vocab_size, (2, 9), generator=torch.Generator().manual_seed(step))
    return ids, ids


class Plain(torch.autograd.Function):
    """A tensor given as it is; the gradient goes to the one it was made from."""

    @staticmethod
    def forward(ctx, source, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def by_definition(experts, z, chosen, weights, rule):
    """Token by token, each rounding written out with encode/decode and pack/unpack."""

    def mxfp8(x):
        return Plain.apply(x, decode(*encode(x.detach(), "e4m3", scale_rule=rule), "e4m3", dtype=x.dtype))

    w = [Plain.apply(p, unpack_mxfp4(*pack_mxfp4(p.detach(), rule), p.dtype)) for p in experts.parameters()]
    act = experts.act
    return experts_naive(mxfp8(z), chosen, weights, *w, lambda gate, up: mxfp8(act(gate, up)))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_outputs_and_every_gradient_are_the_definition(rule):
    experts = experts_of(random_model(TINY).double())[0]
    E, _, D = experts.w1.shape
    g = torch.Generator().manual_seed(1)
    z = torch.randn(7, D, generator=g, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(E, generator=g)[:2] for _ in range(7)])
    weights, direction = (torch.rand(shape, generator=g, dtype=torch.float64) for shape in ((7, 2), (7, D)))
    set_rounding(experts, True, rule)
    results = []
    for run in (experts, lambda *x: by_definition(experts, *x, rule)):
        leaves = [z.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = run(leaves[0], chosen, leaves[1])
        grads = torch.autograd.grad((y * direction).sum(), [*leaves, *experts.parameters()])
        results.append(dict(zip(("y", "dz", "dp", "dw1", "dw3", "dw2"), (y, *grads), strict=True)))
    assert_all_close(*results, 1e-12)
    set_rounding(experts, False)
    assert not torch.equal(experts(z, chosen, weights), results[0]["y"])


def test_clipped_weights_learn_like_the_others():
    """T22: 7.5 under a scale of 1 is clipped to 6, and its gradient is the input, as for any weight."""
    experts = experts_of(random_model(TINY))[0]
    with torch.no_grad():
        experts.w2[0].fill_(0.5)[:, 0] = 7.5
        experts.w1.fill_(1.0), experts.w3.fill_(1.0)
    set_rounding(experts)
    z = torch.ones(1, experts.w1.shape[2])
    experts(z, torch.tensor([[0]]), torch.ones(1, 1)).sum().backward()
    grad = experts.w2.grad[0]
    assert float(grad[0, 0]) != 0 and torch.equal(grad, grad[:1, :1].expand_as(grad))


def test_only_routed_experts_round():
    model = random_model(TINY)
    names = [name for name, m in model.named_modules() if hasattr(m, "rounding")]
    assert names == [f"model.layers.{i}.block_sparse_moe.experts" for i in range(1, TINY.num_hidden_layers)]
    before = {name: p.clone() for name, p in model.named_parameters()}
    set_rounding(model)
    assert rounding_of(model) == "floor"
    model(IDS)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "master weights stay"
    set_rounding(model, False)
    assert rounding_of(model) is None


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_the_packed_model_is_the_one_that_was_trained(rule, tmp_path):
    model = random_model(TINY)
    set_rounding(model, True, rule)
    train(model, batches, RECIPE, progress=False)
    want, said = model(IDS).logits, generate(model, IDS, 12)
    packed = copy.deepcopy(model)
    pack_experts(packed)
    save_model(packed, tmp_path)
    loaded = load_model(tmp_path)
    assert rounding_of(packed) == rule and rounding_of(loaded) is None, "a loaded model rounds weights alone"
    assert not torch.equal(loaded(IDS).logits, want)
    set_rounding(loaded, True, rule)
    for other in (packed, loaded):
        assert_close("logits", other(IDS).logits, want, 1e-5)
        assert torch.equal(generate(other, IDS, 12), said)
    unpack_experts(packed)
    assert rounding_of(packed) == rule and isinstance(experts_of(packed)[0], Experts)


def asking(inputs):
    groups = {"group_0": {"input_activations": inputs}}
    raw = {"format": "mxfp4-pack-quantized", "config_groups": groups}
    return K3Config.from_dict(TINY.to_dict() | {"quantization_config": raw})


def test_a_config_can_ask_for_rounded_inputs(tmp_path):
    model = random_model(asking({"type": "float", "num_bits": 8, "group_size": 32}))
    set_rounding(model)
    want = model(IDS).logits
    pack_experts(model)
    save_model(model, tmp_path)
    assert rounding_of(load_model(tmp_path)) == "floor"
    assert_close("logits", load_model(tmp_path)(IDS).logits, want, 1e-5)
    assert not asking(None).rounds_expert_inputs and not TINY.rounds_expert_inputs
    with pytest.raises(ValueError, match="input_activations: got .*'num_bits': 4.*, wanted null or float of 8 bits"):
        assert asking({"type": "float", "num_bits": 4, "group_size": 32}).rounds_expert_inputs
    with pytest.raises(ValueError, match="input_activations: got 'mxfp8', wanted null or float of 8 bits"):
        assert asking("mxfp8").rounds_expert_inputs
    for groups in ([1], {"group_0": 3}):
        raw = {"format": "mxfp4-pack-quantized", "config_groups": groups}
        odd = K3Config.from_dict(TINY.to_dict() | {"quantization_config": raw})
        with pytest.raises(ValueError, match="config_groups: got .*, wanted an object of objects"):
            assert odd.rounds_expert_inputs


def values_moved(steps):
    """How many rounded weights so many small steps change."""
    model = random_model(TINY)
    set_rounding(model)
    weights = list(experts_of(model)[0].parameters())
    start = [round_weight(w.detach()) for w in weights]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    return sum(int((round_weight(w.detach()) != a).sum()) for w, a in zip(weights, start, strict=True))


def test_small_steps_add_up_in_the_master_weights():
    assert 20 <= values_moved(60) > 4 * values_moved(1)


def test_a_killed_training_with_rounding_ends_the_same_and_is_not_taken_for_one_without(tmp_path):
    def fresh(rounding=True):
        model = K3ForCausalLM(TINY, seed=3)
        set_rounding(model, rounding)
        return model

    def stop(step, loss):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    whole = fresh()
    train(whole, batches, RECIPE, progress=False)
    with pytest.raises(Stopped):
        train(fresh(), batches, RECIPE, folder=tmp_path, on_step=stop, progress=False)
    with pytest.raises(CheckpointError, match="another recipe"):
        train(fresh(rounding=False), batches, RECIPE, folder=tmp_path, progress=False)
    resumed = fresh()
    train(resumed, batches, RECIPE, folder=tmp_path, progress=False)
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_what_cannot_round_is_refused():
    with pytest.raises(ValueError, match="got a Linear without routed experts, wanted some to round"):
        set_rounding(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="scale_rule: got 'up', wanted one of floor, ceil, nearest"):
        set_rounding(random_model(TINY), True, "up")
