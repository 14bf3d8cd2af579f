"""The main job: it learns, it measures what greedy decoding would say, and it keeps what it has."""

import dataclasses
import json
import math

import pytest
import torch

from k3lite import budget
from k3lite.checkpoint import CheckpointError, load_model
from k3lite.generate import generate
from k3lite.tasks.needle import CHANCE, DIGITS, make_batch
from k3lite.tasks.needle_ask import ask, prepare_document
from k3lite.tasks.needle_job import (
    RECIPE,
    TRAINING_LENGTH,
    Job,
    cache_row,
    curriculum,
    measure_control,
    needle_model,
    read_card,
    right_answers,
    run,
)
from k3lite.tasks.needle_report import heat_map, text_table
from k3lite.tasks.text import haystack
from k3lite.train import train

from ..small_needle import SMALL, SMALL_RECIPE, small_batches


@pytest.fixture(scope="module")
def learnt():
    """A smaller model, trained here and now."""
    model = needle_model(0, SMALL)
    train(model, small_batches(), SMALL_RECIPE, progress=False)
    return model


@pytest.mark.timeout(240)
def test_a_small_model_learns_to_find_needles(learnt):
    g = torch.Generator().manual_seed(5)
    recall = right_answers(learnt, make_batch(haystack("heldout"), 200, 64, 1, g)).double().mean().item()
    control = measure_control(learnt, 64, 200, seed=5)
    chance_of_luck = CHANCE + 4 * math.sqrt(CHANCE * (1 - CHANCE) / 200)
    assert recall > 0.5, "beats 1 in 10,000 by far"
    assert control.recall <= chance_of_luck, "and only because the needle is there"


@pytest.mark.timeout(240)
def test_one_pass_says_what_greedy_decoding_from_the_cache_says(learnt):
    g = torch.Generator().manual_seed(6)
    batch = make_batch(haystack("heldout"), 24, 80, 2, g)
    decoded = generate(learnt, batch.ids[:, :-DIGITS], DIGITS)
    right = (decoded == batch.answers).all(-1)
    assert torch.equal(right_answers(learnt, batch), right)
    assert 0 < right.sum() < 24, "the comparison has both kinds in it"


def test_a_fact_in_a_text_of_ones_own(learnt):
    document, facts = prepare_document(b"It was 1999, and nobody = asked why?", hide="qrs=8052", depth=30)
    assert facts == {"qrs": "8052"}
    assert "1999" not in document and "\nqrs=8052\n" in document
    answer, nbytes = ask(learnt, document, "qrs")
    assert len(answer) == DIGITS
    tokens = len(document) + len("?qrs=") + DIGITS - 1
    assert nbytes == budget.cache_bytes(SMALL, tokens, number_bytes=4).total


def test_own_facts_stay_and_the_last_value_of_a_key_counts():
    document, facts = prepare_document(b"x\nabc=1111\ny 22\nabc=2222\nd=5\n")
    assert document == "x\nabc=1111\ny \nabc=2222\nd\n"
    assert facts == {"abc": "2222"}


@pytest.mark.parametrize("fact", ["abcd=1", "ABC=1234", "abc=123", "abc 1234"])
def test_a_fact_of_another_form_is_refused(fact):
    with pytest.raises(ValueError, match="wanted three small letters, '=' and four digits"):
        prepare_document(b"text", hide=fact)


def test_the_curriculum_stays_within_the_training_length():
    recipe = dataclasses.replace(RECIPE, steps=40)
    batch_at = curriculum(haystack("train"), recipe, tokens=600)
    longest = max(batch_at(step)[0].shape[1] - DIGITS for step in range(40))
    assert 128 < longest <= TRAINING_LENGTH
    assert torch.equal(batch_at(7)[0], batch_at(7)[0])


@pytest.fixture
def tiny_job(tmp_path):
    recipe = dataclasses.replace(RECIPE, steps=2)
    return Job(out=tmp_path / "out", recipe=recipe, lengths=(32, 64), depths=(0, 100), needles=(1, 2), trials=3)


def test_a_job_writes_its_records_and_a_page_that_stands_alone(tiny_job):
    result = run(tiny_job, progress=False)
    on_disk = json.loads((tiny_job.out / "needle.json").read_text())
    assert on_disk == result and on_disk["complete"]
    assert on_disk["training_length"] == TRAINING_LENGTH
    assert len(on_disk["records"]) == 2 * 2 * 2
    assert on_disk["records"][0].keys() == {"model", "length", "depth", "needles", "recall", "trials", "chance"}
    page = (tiny_job.out / "needle.html").read_text()
    assert page == heat_map(result)
    assert "http" not in page and "<script" not in page, "opens without a network"
    assert "recall in % of 3 documents" in text_table(result)
    assert load_model(tiny_job.out / "model").config.num_hidden_layers == 4

    again = run(tiny_job, progress=False)  # a finished model is not trained again
    assert again["card"] == result["card"] and again["records"] == result["records"]


def test_the_cache_of_the_table_is_the_cache_of_the_model():
    model = needle_model(0)
    row = cache_row(model, 100)
    assert row["hybrid_bytes"] == budget.cache_bytes(model.config, 100, number_bytes=4).total
    assert row["all_mla_bytes"] == 4 * 100 * 4 * model.config.latent_width


def test_a_stopped_measurement_keeps_what_it_has(tiny_job, monkeypatch):
    from k3lite.tasks import needle_job

    real, calls = needle_job.right_answers, []

    def stop_after_three(model, batch):
        calls.append(1)
        if len(calls) > 4:  # the control, a whole row of two cells, and one of the next
            raise KeyboardInterrupt
        return real(model, batch)

    monkeypatch.setattr(needle_job, "right_answers", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_job, progress=False)
    kept = json.loads((tiny_job.out / "needle.json").read_text())
    assert not kept["complete"] and len(kept["records"]) == 2
    assert "Stopped before" in (tiny_job.out / "needle.html").read_text()


def test_a_model_of_another_recipe_or_damaged_weights_are_refused(tiny_job):
    run(tiny_job, progress=False)
    other = dataclasses.replace(tiny_job, recipe=dataclasses.replace(tiny_job.recipe, seed=1))
    with pytest.raises(CheckpointError, match="another recipe or seed"):
        run(other, progress=False)
    weights = tiny_job.out / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"12345678")
    with pytest.raises(CheckpointError, match="not the weights that card.json describes"):
        read_card(tiny_job.out / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depths": (120,)}, "depth: got 120"),
        ({"lengths": (20,)}, "length: got 20 bytes for 2 needle"),
        ({"trials": 0}, "trials: got 0"),
        ({"needles": (0,)}, "needles: got 0"),
    ],
)
def test_a_job_that_cannot_be_done_says_so_before_it_trains(tiny_job, change, message):
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(tiny_job, **change), progress=False)
    assert not tiny_job.out.exists()
