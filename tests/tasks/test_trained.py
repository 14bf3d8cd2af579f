"""Models in folders: the card says what made them, and what it does not describe is refused."""

import dataclasses
import json

import pytest
import torch

from k3lite.checkpoint import CheckpointError
from k3lite.tasks.mqar import mqar_config
from k3lite.tasks.mqar_job import curriculum
from k3lite.tasks.trained import CARD, cell_seed, forget, fresh_model, read_card, train_or_load
from k3lite.train import STATE, Recipe

RECIPE = Recipe(steps=2, lr=1e-3, task="two steps")


def make(folder, *, recipe=RECIPE, about="toy: a model", facts=None, batches=None):
    batches = batches or (lambda: curriculum(recipe, 2, 60))
    return train_or_load(folder, about, mqar_config(4), recipe, batches, facts or {"size": 4}, progress=False)


def no_training():
    raise AssertionError("trained again")


def test_a_finished_model_is_loaded_with_its_card(tmp_path):
    model = make(tmp_path)
    card = read_card(tmp_path / "model", "toy")
    assert list(card) == [
        "task", "recipe", "size", "final_loss", "training_seconds", "threads", "torch", "sha256",
    ]  # fmt: skip
    assert card["recipe"] == dataclasses.asdict(RECIPE) and card["size"] == 4
    assert not (tmp_path / STATE).exists(), "no optimizer's moments are left behind"
    again = make(tmp_path, batches=no_training)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("change", [{"recipe": dataclasses.replace(RECIPE, seed=1)}, {"facts": {"size": 5}}])
def test_another_model_in_the_folder_is_refused(tmp_path, change):
    make(tmp_path)
    with pytest.raises(CheckpointError, match="another recipe or seed; choose another --out, or --restart"):
        make(tmp_path, **change)


def test_a_model_of_another_task_is_refused(tmp_path):
    make(tmp_path)
    with pytest.raises(CheckpointError, match="no finished needle model .card.json says 'toy: a model'"):
        read_card(tmp_path / "model", "needle")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": {}, "sha256": ""}', '{"task": "toy", "recipe": {}}'])
def test_a_card_that_is_none_is_refused(tmp_path, text):
    make(tmp_path)
    (tmp_path / "model" / CARD).write_text(text)
    with pytest.raises(CheckpointError, match="no finished toy model"):
        read_card(tmp_path / "model", "toy")


def test_weights_that_are_not_the_cards_are_refused(tmp_path):
    make(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"1234")
    with pytest.raises(CheckpointError, match="not the weights that card.json describes"):
        make(tmp_path, batches=no_training)


def test_forget_leaves_everything_else_alone(tmp_path):
    make(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    forget(tmp_path)
    forget(tmp_path)  # nothing left to forget
    assert (tmp_path / "notes.txt").read_text() == "mine"
    make(tmp_path, recipe=dataclasses.replace(RECIPE, seed=1))
    assert json.loads((tmp_path / "model" / CARD).read_text())["recipe"]["seed"] == 1


def test_embeddings_start_at_unit_size():
    weight = fresh_model(mqar_config(8), 0).model.embed_tokens.weight
    assert float(weight.detach().std()) == pytest.approx(1, abs=0.03)


def test_seeds_of_cells_differ_and_stay():
    assert cell_seed("a", 1) == cell_seed("a", 1) != cell_seed("a", 2)
    assert cell_seed(0, 1, 256, 0) == 66044294372927562, "the shipped figures were measured with it"
