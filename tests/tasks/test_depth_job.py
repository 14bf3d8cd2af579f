"""`k3lite train depth`: every model once, the same table after a stop, and nonsense refused before any work."""

import dataclasses
import json

import pytest
import torch

from k3lite.checkpoint import CheckpointError
from k3lite.tasks import depth, depth_job
from k3lite.tasks.depth_job import Job, growth, pick, run, text_table
from k3lite.train import Recipe

RECIPE = Recipe(steps=2, lr=1e-3, task="depth-1")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Four layers and short exams: what is tested is the job."""
    torch.set_num_threads(1)
    for module in (depth, depth_job):
        monkeypatch.setattr(module, "LAYERS", 4)
    four = depth.depth_config
    monkeypatch.setattr(depth_job, "depth_config", lambda size: four(size, layers=4))
    for name in ("LOSS_ROWS", "PROBE_ROWS", "CUT_ROWS"):
        monkeypatch.setattr(depth_job, name, 2)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path / "depth", RECIPE, sizes=(None, 0.5, 2), seeds=(0, 1))


def test_every_model_once_with_what_was_measured(job):
    result = run(job, progress=False)
    assert result["complete"] and json.loads((job.out / "depth.json").read_text()) == result
    assert [(m["block_size"], m["seed"]) for m in result["models"]] == [(b, s) for s in (0, 1) for b in (None, 0.5, 2)]
    sources = {None: 0, 0.5: 9, 2: 3}
    for m in result["models"]:
        assert len(m["loss_without"]) == sources[m["block_size"]] and m["card"]["recipe"]["seed"] == m["seed"]
        assert max(map(len, m["shares"]), default=0) == sources[m["block_size"]]
        assert len(m["gradients"]) == 4 and len(m["output_rms"]) == 8
        assert m["loss"] == pytest.approx(m["loss_whole"], abs=1e-3)  # here the rows are the same
    table = text_table(result)
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["plain", "full", "block-2"]
    first = pick(result, None)
    assert growth(first[0]) == pytest.approx(sum(first[0]["output_rms"][-4:]) / sum(first[0]["output_rms"][:4]))


def test_goes_on_where_it_stopped(job, monkeypatch):
    whole = run(job, progress=False)
    trained = []
    monkeypatch.setattr(depth_job, "prose", lambda recipe: trained.append(recipe.seed) or depth.prose(recipe))
    depth_job.forget(job.out / "full-s1")
    again = run(job, progress=False)
    assert trained == [1], "the others are found finished"
    for a, b in zip(whole["models"], again["models"], strict=True):
        assert a["loss"] == b["loss"] and a["card"]["sha256"] == b["card"]["sha256"]


def test_another_recipe_does_not_overwrite(job):
    one = dataclasses.replace(job, sizes=(2,), seeds=(0,))
    run(one, progress=False)
    with pytest.raises(CheckpointError, match="another recipe or seed"):
        run(dataclasses.replace(one, recipe=dataclasses.replace(RECIPE, lr=2e-3)), progress=False)
    one.restart()
    run(dataclasses.replace(one, recipe=dataclasses.replace(RECIPE, lr=2e-3)), progress=False)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sizes": ()}, "sizes: got nothing, wanted some, each once"),
        ({"seeds": (1, 1)}, "seeds: got 1, 1, wanted some, each once"),
        ({"seeds": (-1,)}, "seeds: got -1, wanted 0 or more"),
        ({"sizes": (0.3,)}, "attn_res_block_size: got 0.3, wanted whole or half layers"),
    ],
)
def test_nonsense_is_refused_before_any_work(job, changes, message):
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(job, **changes), progress=False)
    assert not job.out.exists()
