"""`k3lite train qat`: every state measured, the same after a stop, and the shipped figures are what the chapter says."""

import dataclasses
import json

import pytest
import torch

from k3lite.cli import main
from k3lite.config import K3Config
from k3lite.mx import fake_quantize
from k3lite.qat import rounding_of
from k3lite.tasks import needle_job, qat, qat_job
from k3lite.tasks.picture import OURS, ROUNDINGS
from k3lite.tasks.qat import PARTS, experts_rounded, matrices, prose_and_needles, skill, weights_rounded
from k3lite.tasks.qat_job import Job, run, text_table
from k3lite.tasks.text import DATA
from k3lite.train import Recipe
from tests.helpers import random_model

TINY = K3Config.from_dict(K3Config.preset("k3-tiny").to_dict() | {"vocab_size": 256})
RECIPE, FINE = (
    Recipe(steps=6, lr=3e-2, warmup=1, task="qat-1"),
    Recipe(steps=2, lr=3e-2, warmup=1, task="qat-1, fine-tuning"),
)


@pytest.fixture
def small(monkeypatch):
    """Tiny models and exams, a picture of few steps: what is tested is the job."""
    torch.set_num_threads(1)
    for name, value in {"PROSE_ROWS": 2, "DOCUMENTS": 2, "PICTURE_STEPS": 1, "PICTURE_FINE_STEPS": 1}.items():
        monkeypatch.setattr(qat_job, name, value)
    monkeypatch.setattr(K3Config, "preset", classmethod(lambda cls, name: TINY))


@pytest.fixture
def job(tmp_path, small):
    return Job(tmp_path / "qat", RECIPE, FINE, seeds=(0, 1))


# ---- the task


def test_prose_and_needles_take_turns_and_a_continuation_goes_on():
    recipe = Recipe(steps=10, lr=1e-3, seed=3)
    batch_at = prose_and_needles(recipe)
    ids, labels = batch_at(0)
    assert ids.shape == (qat.PROSE_ROWS, qat.PROSE_LENGTH) and torch.equal(ids, labels)
    assert (batch_at(1)[1] == -100).any()
    want = needle_job.curriculum(qat.haystack("train"), dataclasses.replace(recipe, steps=5))
    assert torch.equal(batch_at(3)[0], want(1)[0])
    later = prose_and_needles(recipe, start=4)
    assert torch.equal(later(0)[0], batch_at(4)[0]) and not torch.equal(later(0)[0], ids)


def test_parts_are_all_matrices_but_convolutions_each_once():
    model = random_model(TINY)
    names = [name for part in PARTS for name, _ in matrices(model, part)]
    rest = [n for n, w in model.named_parameters() if w.dim() >= 2 and n not in names]
    assert len(set(names)) == len(names) and sorted(names) == sorted(n for n, _ in matrices(model, "everything"))
    assert rest and all("conv1d" in n or "res_proj" in n for n in rest), rest


def test_weights_are_rounded_within_and_whole_again_behind():
    model = random_model(TINY)
    before = {n: w.detach().clone() for n, w in model.named_parameters()}
    with weights_rounded(model, "attention", "ceil"):
        for n, w in model.named_parameters():
            mine = ".self_attn." in n and w.dim() >= 2 and "conv1d" not in n
            assert torch.equal(w, fake_quantize(before[n], scale_rule="ceil") if mine else before[n]), n
    assert all(torch.equal(w, before[n]) for n, w in model.named_parameters())
    with experts_rounded(model, "nearest"):
        assert rounding_of(model) == "nearest"
    assert rounding_of(model) is None


def test_skill_is_the_loss_on_prose_and_the_share_of_answers():
    model = random_model(TINY)
    measured = skill(model, rows=3, documents=5)
    prose = qat.haystack("heldout")[: 3 * qat.PROSE_LENGTH].view(3, -1)
    with torch.no_grad():
        assert measured.loss == pytest.approx(float(model(prose, labels=prose).loss))
    assert measured.recall == {"1": 0.0, "4": 0.0}


# ---- the job


def test_every_state_is_measured_and_a_stopped_job_goes_on(job):
    result = run(job, progress=False)
    assert result["complete"] and json.loads((job.out / "qat.json").read_text()) == result
    for m in result["models"]:
        assert set(m["parts"]) == {*PARTS, "everything"} and set(m["picture"]["rounded"]) == set(ROUNDINGS)
        assert m["base"]["loss"] != m["no routed experts"]["loss"] != m["rules"]["floor"]["loss"]
        assert m["fine"]["as it is"] != m["fine"]["rounded"]
        assert m["fine-rounded"]["rounded"] != m["fine"]["rounded"], "they learnt differently"
    (job.out / "s1" / "fine-rounded" / "model" / "card.json").unlink()
    again = run(job, progress=False)
    assert [m["fine-rounded"] for m in again["models"]] == [m["fine-rounded"] for m in result["models"]]
    table = text_table(result)
    assert "trained on with rounding" in table and OURS in table


def test_the_command_line(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(qat_job, "FINE", FINE)
    arguments = ["train", "qat", "--seeds", "4", "--steps", "1", "--threads", "1", "--out", str(tmp_path / "x")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "rounded afterwards, floor" in out and "qat.json" in out
    assert main([*arguments, "--seeds", "1,1"]) == 2 and "seeds: got 1, 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="seeds: got -1, wanted 0 or more"):
        Job(tmp_path, seeds=(-1,)).check()


# ---- what is shipped


def test_shipped_figures_say_what_the_chapter_says():
    """Sentences of chapter 10a, held to data/models/qat/qat.json."""
    models = json.loads((DATA / "models" / "qat" / "qat.json").read_text())["models"]
    assert [m["seed"] for m in models] == [0, 1, 2]
    for m in models:

        def more(state, base=m["base"]["loss"]):
            return state["loss"] - base

        assert m["card"]["recipe"] | {"seed": 0} == dataclasses.asdict(qat_job.RECIPE)
        assert all(abs(more(m["rules"][rule])) < 6e-4 for rule in m["rules"])
        assert 0.06 < more(m["no routed experts"]) < 0.08
        assert all(m["rules"][rule]["recall"]["1"] == 1 for rule in m["rules"])
        costly = [more(m["parts"][p]) for p in ("attention", "shared experts and dense MLP", "embedding and head")]
        assert min(costly) > 10 * more(m["parts"]["routed experts"])
        assert abs(m["fine"]["rounded"]["loss"] - m["fine-rounded"]["rounded"]["loss"]) < 6e-4
        p = m["picture"]
        lost = p["rounded"]["none"] - p["rounded"][OURS]
        assert lost > 30 and 11.5 < p["fine-rounded"][OURS] - p["rounded"][OURS] < 13
        assert p["fine"][OURS] - p["rounded"][OURS] < 1 < p["fine"]["none"] - p["rounded"]["none"]
