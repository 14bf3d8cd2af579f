"""`k3lite train lm`: two stages that can be stopped, a packed model with its card, a history; and the shipped one."""

import dataclasses
import json

import pytest
import torch

from k3lite.checkpoint import CheckpointError, load_model
from k3lite.packed import PackedExperts
from k3lite.qat import rounding_of
from k3lite.tasks import lm, lm_job
from k3lite.tasks.lm import Preset, lm_config, stage_recipe
from k3lite.tasks.lm_job import HISTORY, Job, run, run_ablations, text_card, text_table, train_stages
from k3lite.tasks.lm_watch import Monitor, held_out, loads, needle_recall, norms, validation
from k3lite.train import train
from tests.small_lm import shrink

PRESET = Preset(text=3, recall=2)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch)


@pytest.fixture
def job(tmp_path):
    c = lm_config()
    attn = dataclasses.replace(c.linear_attn_config, kda_layers=(1,), full_attn_layers=(2,))
    return Job(
        tmp_path / "lm", PRESET, every=2, config=dataclasses.replace(c, num_hidden_layers=2, linear_attn_config=attn)
    )


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_job_packs_measures_and_is_found_finished(job, monkeypatch):
    card = run(job, progress=False)
    model = load_model(job.model_folder)
    packed = [m for m in model.modules() if isinstance(m, PackedExperts)]
    assert packed and rounding_of(model) == "floor", "it reads its inputs rounded, as it was trained"
    assert card["measured"]["nats_per_byte"] == pytest.approx(validation(model, held_out(2)), abs=1e-3)
    assert set(card["measured"]["recall"]) == {"128", "256"} and card["steps"] == {"text": 3, "recall": 2}
    history = json.loads((job.out / HISTORY).read_text())
    assert [(r["step"], r["stage"]) for r in history] == [(2, "text"), (3, "text"), (5, "recall")]
    assert [r["length"] for r in history[:2]] == [128, 256]
    assert not list(job.out.glob("*/*.safetensors.tmp")) and not (job.out / "text" / "train_state.safetensors").exists()
    monkeypatch.setattr(lm_job, "train", None)
    assert run(job, progress=False) == card, "not trained again"
    assert "nats per byte" in text_card(card)
    with pytest.raises(CheckpointError, match="another recipe or seed"):
        run(dataclasses.replace(job, seed=1), progress=False)
    job.restart()
    assert not (job.model_folder / "card.json").exists()


@pytest.mark.parametrize("stage, step", [("text", 2), ("recall", 1)])
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(job, monkeypatch, stage, step):
    whole, _ = train_stages(job, progress=False)
    real, killed = lm_job.batches, dataclasses.replace(job, out=job.out.parent / "killed")

    def killing(name, recipe):
        batch_at = real(name, recipe)

        def until(n):
            if (name, n) == (stage, step):
                raise SystemError("killed")
            return batch_at(n)

        return until

    monkeypatch.setattr(lm_job, "train", lambda *args, **options: train(*args, save_every=1, **options))
    monkeypatch.setattr(lm_job, "batches", killing)
    with pytest.raises(SystemError):
        train_stages(killed, progress=False)
    monkeypatch.setattr(lm_job, "batches", real)
    again, _ = train_stages(killed, progress=False)
    assert same(whole, again)
    assert json.loads((killed.out / HISTORY).read_text()) == json.loads((job.out / HISTORY).read_text())


def test_watching_changes_nothing(job):
    recipe = stage_recipe("text", PRESET, 0)
    batch_at = lm.batches("text", recipe)

    def trained(watched):
        model = lm.lm_model(0, None, job.config)
        train(
            model,
            batch_at,
            recipe,
            progress=False,
            on_step=Monitor(model, "text", recipe, batch_at, 1) if watched else None,
        )
        return model

    assert same(trained(True), trained(False))


def test_what_is_recorded_is_what_is_there(job):
    recipe, records = stage_recipe("text", PRESET, 0), []
    model, batch_at = lm.lm_model(0, None, job.config), lm.batches("text", recipe)
    monitor = Monitor(model, "text", recipe, batch_at, 3, first_step=10, on_record=records.append)
    losses = train(model, batch_at, recipe, progress=False, on_step=monitor)
    (row,) = monitor.history
    assert records and row["step"] == 13 and row["loss"] == pytest.approx(losses[-1], rel=1e-4)
    assert row["validation"] == pytest.approx(validation(model, held_out(2)), rel=1e-4)
    assert row["lr"] == pytest.approx(recipe.lr_at(2), rel=1e-4) and row["recall"] == needle_recall(model, 2, 128)
    assert row["weights"] == pytest.approx(norms(model), rel=1e-4)
    assert sum(x**2 for x in row["gradients"].values()) ** 0.5 <= recipe.clip * 1.001
    (layer,) = loads(model)
    assert layer["max_over_mean"] >= 1 and row["loads"] == [pytest.approx(layer, rel=1e-4)]
    assert len(row["hidden"]) == 4 and set(row["weights"]) >= {"attention", "experts", "latent", "router", "attn_res"}


def test_the_table_of_ablations(tmp_path, monkeypatch):
    result = run_ablations(tmp_path, (None, "no-conv"), (0, 1), PRESET, progress=False)
    assert result["complete"] and json.loads((tmp_path / lm_job.TABLE).read_text()) == result
    assert [(m["ablation"], m["seed"]) for m in result["models"]] == [
        ("whole", 0), ("no-conv", 0), ("whole", 1), ("no-conv", 1)
    ]  # fmt: skip
    assert [line.split()[0] for line in text_table(result).splitlines()[2:]] == ["whole", "no-conv"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ablation": "no-head"}, "ablation: got 'no-head'"),
        ({"seed": -1}, "seed: got -1"),
        ({"preset": Preset(0, 5)}, "text: got 0 steps"),
        ({"preset": Preset(5, 0)}, "recall: got 0 steps"),
    ],
)
def test_nonsense_is_refused_before_any_work(job, change, message):
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(job, **change), progress=False)
    assert not job.out.exists()


def test_rounding_begins_with_the_second_stage(job, monkeypatch):
    seen = []

    def noted(model, *args, **options):
        seen.append({rounding_of(model)})
        return train(model, *args, **options)

    monkeypatch.setattr(lm_job, "train", noted)
    train_stages(job, progress=False)
    assert seen == [{None}, {"floor"}]
