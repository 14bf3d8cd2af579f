"""Associative recall trained: it learns, a stopped job goes on, and the shipped figures are those of the shipped models."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from k3lite.checkpoint import CheckpointError, load_model
from k3lite.tasks import mqar_job
from k3lite.tasks.mqar import CHANCE, KEYS, measure, mqar_config
from k3lite.tasks.mqar_job import RECIPE, TRAINED_PAIRS, Job, curriculum, run, spread, text_table
from k3lite.tasks.trained import fresh_model, read_card
from k3lite.train import STATE, Recipe, train

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "models" / "mqar"
RESULT = json.loads((SHIPPED / "mqar.json").read_text())
WIDTHS = (8, 16, 32, 64)


# ---- learning


@pytest.mark.timeout(240)
def test_a_small_model_learns_to_recall():
    recipe = Recipe(steps=250, lr=1.5e-2, warmup=20)
    model = fresh_model(mqar_config(16), 0)
    train(model, curriculum(recipe, 8, 1024), recipe, progress=False)
    few, many = measure(model, 4, 400), measure(model, 32, 100)
    control = measure(model, 4, 400, control=True)
    assert few.accuracy > 0.7, "chance is .03"
    assert many.accuracy < few.accuracy - 0.3, "more pairs than it was trained on, and than its states hold"
    assert many.by_age[0] > many.by_age[-1] + 0.1, "the newest pairs are the ones that are left"
    assert control.accuracy < CHANCE + 4 * (CHANCE / control.questions) ** 0.5


def test_rows_grow_from_few_pairs_to_many():
    batch_at = curriculum(dataclasses.replace(RECIPE, steps=100), TRAINED_PAIRS, 600)
    pairs = [(batch_at(step)[0].shape[1] - 1) // 3 for step in range(100)]
    assert pairs[0] == 2 and max(pairs[:20]) < 8
    assert 64 < max(pairs) <= TRAINED_PAIRS
    assert min(pairs[80:]) < 8, "few pairs are still asked at the end"
    assert torch.equal(batch_at(7)[0], batch_at(7)[0])


def test_the_one_for_a_notebook_follows_its_options(monkeypatch):
    monkeypatch.setattr(mqar_job, "SMALL_RECIPE", Recipe(steps=3, lr=1e-2))
    steps = []
    model = mqar_job.train_small(4, 8, pairs=4, progress=False, on_step=lambda step, loss: steps.append(step))
    assert steps == [0, 1, 2]
    assert model.config == mqar_config(8) and not model.training
    other = mqar_job.train_small(5, 8, pairs=4, progress=False)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight), "seeds differ"


# ---- the job


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(mqar_job, "TRAINED_PAIRS", 4)
    monkeypatch.setattr(mqar_job, "TOKENS_PER_STEP", 120)
    recipe = dataclasses.replace(RECIPE, steps=30, task="tiny")
    return Job(out=tmp_path / "out", recipe=recipe, widths=(2, 4), seeds=(0, 1), pairs=(2, 4), rows=10)


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_job_writes_models_cards_and_records(tiny):
    result = run(tiny, progress=False)
    assert json.loads((tiny.out / "mqar.json").read_text()) == json.loads(json.dumps(result))
    assert result["complete"] and result["chance"] == CHANCE
    assert [(m["width"], m["seed"]) for m in result["models"]] == [(2, 0), (4, 0), (2, 1), (4, 1)]
    assert len(result["records"]) == 4 * 2 and len(result["controls"]) == 4
    assert list(result["records"][0]) == [
        "width", "seed", "pairs", "accuracy", "standard_error", "questions", "by_age", "chance",
    ]  # fmt: skip
    for entry, (width, seed, folder) in zip(result["models"], tiny.models(), strict=True):
        assert entry["card"] == read_card(folder / "model", "mqar")
        assert entry["card"]["width"] == width and entry["card"]["recipe"]["seed"] == seed
        assert entry["card"]["trained_pairs"] == 4
        assert entry["parameters"] == sum(p.numel() for p in load_model(folder / "model").parameters())
    assert len({entry["card"]["sha256"] for entry in result["models"]}) == 4


def test_a_stopped_job_goes_on_to_the_same_models(tiny, monkeypatch):
    """Killed in the middle of the second model: the first is kept, the second goes on from its checkpoint."""
    from k3lite import train as training

    whole = dataclasses.replace(tiny, out=tiny.out.parent / "whole")
    run(whole, progress=False)

    real, steps = training._step, []

    def killed(*args):
        if len(steps) == 30 + 28:
            raise KeyboardInterrupt
        steps.append(1)
        return real(*args)

    monkeypatch.setattr(training, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, progress=False)
    (_, _, first), (_, _, second), (_, _, third), _ = tiny.models()
    kept = json.loads((tiny.out / "mqar.json").read_text())
    assert not kept["complete"] and [m["width"] for m in kept["models"]] == [2]
    assert (second / STATE).exists() and not (second / "model").exists() and not third.exists()

    steps.clear()
    monkeypatch.setattr(training, "_step", lambda *args: (steps.append(1), real(*args))[1])
    assert run(tiny, progress=False)["complete"]
    assert len(steps) == 5 + 30 + 30, "five steps after the checkpoint of step 25, and the models not begun"
    for (_, _, a), (_, _, b) in zip(tiny.models(), whole.models(), strict=True):
        assert weights(a) == weights(b)
    assert read_card(second / "model", "mqar")["training_seconds"] is None, "its first part was not timed"


def test_finished_models_are_measured_and_not_trained_unless_restarted(tiny):
    run(tiny, progress=False)
    folder = tiny.models()[0][2]
    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    more = dataclasses.replace(tiny, pairs=(2, 3, 4))
    assert len(run(more, progress=False)["records"]) == 4 * 3
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == before
    other = dataclasses.replace(tiny, recipe=dataclasses.replace(tiny.recipe, lr=1e-3))
    with pytest.raises(CheckpointError, match="another recipe or seed"):
        run(other, progress=False)
    other.restart()
    assert run(other, progress=False)["models"][0]["card"]["recipe"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": (8, 0)}, "width: got 0, wanted a whole number, 1 or more"),
        ({"widths": (8, 8)}, "widths: got 8, 8, wanted each once"),
        ({"seeds": (-1,)}, "seeds: got -1, wanted 0 or more"),
        ({"pairs": (4, 300)}, f"pairs: got 300, wanted 1 to {KEYS}"),
        ({"rows": 1}, "rows: got 1, wanted 2 or more"),
    ],
)
def test_a_job_that_cannot_be_done_says_so_before_it_trains(tiny, change, message):
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(tiny, **change), progress=False)
    assert not tiny.out.exists()


def test_every_number_of_pairs_can_be_measured(tiny):
    widest = dataclasses.replace(tiny, widths=(2,), seeds=(0,), pairs=(KEYS, 1))
    assert [r["pairs"] for r in run(widest, progress=False)["records"]] == [KEYS, 1]


def test_the_table_shows_the_lowest_and_the_highest_seed():
    def record(seed, accuracy, by_age):
        return {"width": 8, "seed": seed, "pairs": 4, "accuracy": accuracy, "by_age": by_age}

    result = {
        "records": [record(0, 0.5, [0.75, 0.25]), record(1, 0.25, [0.5, 0.0]), record(2, 0.3, [0.6, 0.0])],
        "controls": [{"accuracy": 0.031}, {"accuracy": 0.029}],
    }
    assert spread(result, 8, 4) == [0.25, 0.3, 0.5]
    table = text_table(result)
    assert "8 x 8   25.0 - 50.0" in table and "8 x 8    61.7 - 8.3" in table
    assert "at most 3.1 %" in table


# ---- what is shipped


def test_the_shipped_figures_are_complete():
    assert RESULT["complete"] and RESULT["trained_pairs"] == TRAINED_PAIRS
    wanted = {(w, s) for w in WIDTHS for s in (0, 1, 2)}
    assert {(m["width"], m["seed"]) for m in RESULT["models"]} == wanted
    cells = {(r["width"], r["seed"], r["pairs"]) for r in RESULT["records"]}
    assert cells == {(w, s, n) for w, s in wanted for n in Job.pairs} and len(cells) == len(RESULT["records"])
    for r in RESULT["records"]:
        assert 0 < r["standard_error"] < 0.01 or r["accuracy"] > 0.99
    for c in RESULT["controls"]:
        assert c["accuracy"] < CHANCE + 4 * (CHANCE / c["questions"]) ** 0.5


def test_every_shipped_model_was_made_by_the_recipe_of_the_command():
    for entry in RESULT["models"]:
        assert entry["card"]["recipe"] == dataclasses.asdict(dataclasses.replace(RECIPE, seed=entry["seed"]))
        assert entry["card"]["width"] == entry["width"] and entry["card"]["trained_pairs"] == TRAINED_PAIRS


@pytest.mark.parametrize("width", WIDTHS)
def test_the_shipped_model_is_the_measured_one(width):
    (entry,) = (m for m in RESULT["models"] if (m["width"], m["seed"]) == (width, 0))
    folder = SHIPPED / f"w{width}-s0"
    assert read_card(folder, "mqar") == entry["card"]
    model = load_model(folder)
    assert model.config == mqar_config(width), "what the command would make today"
    assert sum(p.numel() for p in model.parameters()) == entry["parameters"]
    (record,) = (r for r in RESULT["records"] if (r["width"], r["seed"], r["pairs"]) == (width, 0, 16))
    again = measure(model, 16, 200, seed=1)  # other rows
    error = 4 * (again.standard_error**2 + record["standard_error"] ** 2) ** 0.5
    assert again.accuracy == pytest.approx(record["accuracy"], abs=max(error, 0.01))


def test_a_wider_state_holds_more_for_every_seed():
    for pairs in (16, 32, 64, 128):
        narrow_to_wide = [spread(RESULT, width, pairs) for width in WIDTHS]
        for narrow, wide in zip(narrow_to_wide, narrow_to_wide[1:], strict=False):
            assert narrow[-1] < wide[0] or narrow[-1] > 0.98


def test_the_shipped_folder_stays_small():
    assert sum(p.stat().st_size for p in SHIPPED.rglob("*") if p.is_file()) < 1.5e6
