"""The job of all methods: what it writes, that it goes on where it stopped, and its table."""

import json
from pathlib import Path

import pytest
import torch

from k3lite.checkpoint import CheckpointError
from k3lite.tasks.balance_job import RESULT, TASK, Job, pick, run, steps_to_balance, text_table
from k3lite.tasks.balance_task import STEPS, Method


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def job(folder, **changes) -> Job:
    small = {"methods": (Method("none"), Method("quantile")), "data": ("skewed",), "seeds": (0, 1), "steps": 20}
    return Job(out=folder, **small | changes)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(job(tmp_path_factory.mktemp("balance")), progress=False)


def test_one_record_a_run(result):
    assert [(r["data"], r["method"], r["seed"]) for r in result["runs"]] == [
        ("skewed", m, s) for s in (0, 1) for m in ("none", "quantile")
    ]
    for r in result["runs"]:
        assert len(r["losses"]) == len(r["busiest"]) == 4 and len(r["loads"]) == 64
        assert r["dead"] == sum(x < 0.05 for x in r["loads"])
    none, quantile = (pick(result, "skewed", m) for m in ("none", "quantile"))
    assert all(n["held_out"]["busiest"] > 2 * q["held_out"]["busiest"] for n, q in zip(none, quantile, strict=True))


def test_a_stopped_job_goes_on(result, tmp_path, monkeypatch):
    half = job(tmp_path, seeds=(0,))
    run(half, progress=False)
    made = []
    real = run.__globals__["train_layer"]
    monkeypatch.setitem(run.__globals__, "train_layer", lambda *a: made.append(a[:3]) or real(*a))
    whole = run(job(tmp_path), progress=False)
    assert made == [("skewed", Method("none"), 1), ("skewed", Method("quantile"), 1)]
    assert whole["runs"] == result["runs"] == json.loads((tmp_path / RESULT).read_text())["runs"]
    made.clear()
    assert run(job(tmp_path), progress=False)["runs"] == result["runs"] and made == []


def test_what_is_there_must_be_of_this_job(tmp_path):
    (tmp_path / RESULT).write_text('{"task": "balance-1", "steps": 600, "runs": []}')
    with pytest.raises(CheckpointError, match="another task or number of steps"):
        run(job(tmp_path), progress=False)
    (tmp_path / RESULT).write_text('{"task": ')
    with pytest.raises(CheckpointError, match="not a result of this job"):
        run(job(tmp_path), progress=False)
    job(tmp_path).restart()
    assert not (tmp_path / RESULT).exists()


def test_the_table(result):
    lines = text_table(result, "skewed").splitlines()
    assert lines[0] == "data 'skewed', 20 steps, 2 seed(s), lowest to highest"
    assert lines[2].startswith("none") and lines[3].startswith("quantile") and "never" in lines[2]


def test_steps_to_balance_are_steps_of_training():
    assert steps_to_balance({"busiest": [7.0, 7.0, 2.0, 2.0, 2.0]}) == 10
    assert steps_to_balance({"busiest": [1.0] * 5}) == 0 and steps_to_balance({"busiest": [9.0] * 5}) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": ()}, "methods: got nothing"),
        ({"seeds": (0, 0)}, "seeds: got 0, 0, wanted some, each once"),
        ({"seeds": (-1,)}, "seeds: got -1"),
        ({"data": ("even",)}, "data: got 'even'"),
        ({"steps": 5}, "steps: got 5, wanted 20 or more"),
    ],
)
def test_bad_options_are_named_before_any_work(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(job(tmp_path, **changes), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_result_is_whole():
    shipped = json.loads((Path(__file__).parents[2] / "data" / "balance" / RESULT).read_text())
    assert (shipped["task"], shipped["steps"]) == (TASK, STEPS)
    wanted = [(d, str(m), s) for d, m, s in Job(out=Path()).runs()]
    assert [(r["data"], r["method"], r["seed"]) for r in shipped["runs"]] == wanted
