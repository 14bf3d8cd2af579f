"""The shipped language model is what its card, its history and its table say."""

import json

import pytest
import torch

from k3lite.budget import parameters
from k3lite.checkpoint import load_model
from k3lite.packed import PackedExperts
from k3lite.tasks.lm import ABLATIONS, PRESETS, lm_config, lm_model
from k3lite.tasks.lm_job import ABLATION_PRESET, TASK, Job
from k3lite.tasks.lm_watch import held_out, needle_recall, validation
from k3lite.tasks.text import DATA
from k3lite.tasks.trained import read_card

FOLDER = DATA / "models" / "lm"


@pytest.fixture(scope="module")
def shipped():
    torch.set_num_threads(1)
    return load_model(FOLDER), read_card(FOLDER, TASK)


def test_it_is_the_recipe_of_the_command(shipped):
    model, card = shipped
    job = Job(FOLDER, PRESETS["short"], seed=0)
    assert {name: card[name] for name in job.facts()} == job.facts()
    assert card["recipe"] == json.loads(json.dumps(vars(job.recipe("recall"))))
    assert model.config == lm_config()
    assert any(isinstance(m, PackedExperts) for m in model.modules())
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 3_000_000
    assert sum(parameters(lm_config()).values()) == sum(p.numel() for p in lm_model(0).parameters())


def test_its_loss_and_recall_are_those_of_the_card(shipped):
    model, card = shipped
    measured = card["measured"]
    # 64 of the 256 rows: another sample of the same books, whose mean may be off by a few hundredths.
    assert validation(model, held_out(64)) == pytest.approx(measured["nats_per_byte"], abs=0.08)
    for length in ("128", "256"):
        n = measured["recall_documents"]
        assert needle_recall(model, n, int(length)) == pytest.approx(measured["recall"][length], abs=1.5 / n)


def test_its_history_ends_where_its_card_says(shipped):
    _, card = shipped
    history = json.loads((FOLDER / "history.json").read_text())
    assert [r["step"] for r in history] == sorted({r["step"] for r in history})
    assert history[-1]["step"] == sum(card["steps"].values()) and history[-1]["stage"] == "recall"
    # The last record is of 16 rows before packing, the card's figure of 256 after it.
    assert history[-1]["validation"] == pytest.approx(card["measured"]["nats_per_byte"], abs=0.1)


def test_its_table_has_every_ablation_with_three_seeds_and_one_recipe():
    table = json.loads((FOLDER / "ablations.json").read_text())
    assert table["complete"] and table["preset"] == vars(ABLATION_PRESET)
    found = [(m["ablation"], m["seed"]) for m in table["models"]]
    assert sorted(found) == sorted((name, seed) for name in ("whole", *ABLATIONS) for seed in range(3))
