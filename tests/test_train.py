"""Training: it can be killed at any step and ends with the same weights; it never leaves half a file."""

import dataclasses
import json
import os
import signal

import pytest
import torch

from k3lite import train as train_module
from k3lite.checkpoint import CheckpointError
from k3lite.model import K3ForCausalLM
from k3lite.moe import Router
from k3lite.train import STATE, Recipe, Stopped, make_optimizer, train

from .small_needle import SMALL, small_batches

RECIPE = Recipe(steps=6, lr=5e-3, warmup=2, task="test")
BATCHES = small_batches(tokens=256)


def run(folder, *, recipe=RECIPE, batches=BATCHES, save_every=2):
    model = K3ForCausalLM(SMALL, seed=recipe.seed)
    losses = train(model, batches, recipe, folder=folder, save_every=save_every, progress=False)
    return model, losses


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tmp_path):
    whole, losses = run(tmp_path / "whole")

    def killed_at_step_5(step):
        if step == 5:
            raise SystemError("killed")  # after the checkpoint of step 4: step 5 is lost and done again
        return BATCHES(step)

    with pytest.raises(SystemError):
        run(tmp_path / "killed", batches=killed_at_step_5)
    resumed, resumed_losses = run(tmp_path / "killed")
    assert resumed_losses == losses
    assert same_weights(whole, resumed)
    assert not same_weights(whole, K3ForCausalLM(SMALL))


def test_the_auxiliary_loss_is_trained_on_and_not_reported():
    def one_step(rule):
        model = K3ForCausalLM(SMALL)
        routers = [m for m in model.modules() if isinstance(m, Router)]
        for r in routers:
            r.rule, r.auxiliary_weight = rule, 100.0
        losses = train(model, BATCHES, dataclasses.replace(RECIPE, steps=1), progress=False)
        return losses, [r.weight.detach() for r in routers]

    (plain, before), (reported, after) = one_step("none"), one_step("auxiliary")
    assert plain == reported and before
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_resuming_does_not_repeat_finished_steps(tmp_path):
    run(tmp_path)
    asked = []
    _, losses = run(tmp_path, batches=lambda step: asked.append(step) or BATCHES(step))
    assert asked == [] and len(losses) == RECIPE.steps


def test_ctrl_c_finishes_the_step_saves_and_stops(tmp_path):
    def interrupted_at_step_3(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return BATCHES(step)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match="stopped after 4 steps"):
        run(tmp_path, batches=interrupted_at_step_3, save_every=1000)
    assert signal.getsignal(signal.SIGINT) is before
    resumed, _ = run(tmp_path)
    assert same_weights(resumed, run(None)[0])


@pytest.mark.parametrize("change", [{"seed": 1}, {"lr": 1e-3}, {"steps": 7}, {"task": "other"}])
def test_a_checkpoint_of_another_recipe_is_not_continued(tmp_path, change):
    run(tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another recipe, seed or model"):
        run(tmp_path, recipe=dataclasses.replace(RECIPE, **change))


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None], ids=["empty", "foreign", "truncated"])
def test_a_damaged_checkpoint_is_one_clear_error(tmp_path, content):
    run(tmp_path)
    path = tmp_path / STATE
    path.write_bytes(path.read_bytes()[:5000] if content is None else content)
    with pytest.raises(CheckpointError, match=f"{STATE}: not a readable safetensors file"):
        run(tmp_path)


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    real, calls = train_module.save_file, []

    def full_at_the_second_save(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            with open(path, "wb") as f:
                f.write(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata)

    monkeypatch.setattr(train_module, "save_file", full_at_the_second_save)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [STATE], "no temporary file stays"
    monkeypatch.setattr(train_module, "save_file", real)
    assert same_weights(run(tmp_path)[0], run(None)[0])


def test_weight_decay_is_for_matrices_only():
    model = K3ForCausalLM(SMALL)
    decay, plain = ({id(p) for p in group["params"]} for group in make_optimizer(model, RECIPE).param_groups)
    names = {id(p): name for name, p in model.named_parameters()}
    assert any(names[p].endswith("A_log") for p in plain) and any("conv1d" in names[p] for p in plain)
    assert any("experts.w1" in names[p] for p in decay)
    assert not any(names[p].endswith(("A_log", "dt_bias", "norm.weight", "conv1d.weight")) for p in decay)
    frozen = {names[i] for i in names} - {names[i] for i in decay | plain}
    assert frozen and all(name.endswith("e_score_correction_bias") for name in frozen)


def test_schedule():
    recipe = Recipe(steps=100, lr=1.0, warmup=10, final_lr=0.05)
    assert recipe.lr_at(0) == pytest.approx(0.1)
    assert recipe.lr_at(50) == pytest.approx(0.05 + 0.95 * 0.5)
    assert 0.05 < recipe.lr_at(99) < 0.051


@pytest.mark.parametrize(("field", "value"), [("steps", 0), ("lr", 0.0), ("lr", float("nan"))])
def test_recipes_that_cannot_train_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: got"):
        dataclasses.replace(RECIPE, **{field: value})


def test_a_loss_that_is_not_finite_stops_the_run():
    model = K3ForCausalLM(SMALL)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the loss became nan at step 0"):
        train(model, BATCHES, RECIPE, progress=False)


def test_the_identity_names_config_and_recipe(tmp_path):
    run(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / STATE, "pt") as f:
        identity = json.loads(f.metadata()["identity"])
    assert identity["recipe"]["lr"] == RECIPE.lr and identity["config"]["hidden_size"] == SMALL.hidden_size
