"""`k3lite train ep`: two ranks train as one does, the job says so in its exit status, and it ends when a rank dies."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from k3lite.checkpoint import load_model
from k3lite.cli import main
from k3lite.tasks import ep_job
from k3lite.train import STATE

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--batch", "3", "--length", "16"]


def torchrun(ranks: int, *options: str) -> subprocess.Popen:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "k3lite.cli", "train", "ep", *QUICK, *options]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def alone(monkeypatch):
    """The environment that torchrun gives the only rank of a job."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))


def test_two_ranks_train_as_one(tmp_path):
    job = torchrun(2, "--steps", "3", "--ranks", "2", "--out", str(tmp_path))
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    assert "training on 2 rank(s), then on one, 3 steps" in out and ": equal" in out
    result = json.loads((tmp_path / ep_job.RESULT).read_text())
    assert result["equal"] and result["difference"] < 1e-12
    assert len(result["losses"]) == len(result["one_rank_losses"]) == 3
    # 3 rows of 16 bytes, top-2: the first rank has two rows
    assert [sum(row) for row in result["traffic"]["rows"]] == [2 * 32, 2 * 16]
    assert load_model(tmp_path / "model").config == ep_job.Job(tmp_path).config()


def test_a_rank_that_dies_ends_the_job(tmp_path):
    job = torchrun(2, "--steps", "1000000", "--timeout", "20", "--out", str(tmp_path))
    job.stdout.readline()  # "training on 2 rank(s), ...": both have joined
    workers = [int(p) for p in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    job.communicate(timeout=100)
    assert job.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers), "nobody is left behind"


def test_a_job_goes_on_where_it_was(alone, tmp_path, capsys):
    options = ["train", "ep", *QUICK, "--steps", "2", "--out", str(tmp_path)]
    assert main(options) == 0
    first = (tmp_path / ep_job.RESULT).read_text()
    states = [tmp_path / folder / STATE for folder in ("ranks", "one")]
    before = [path.stat().st_mtime_ns for path in states]
    assert main(options) == 0 and not dist.is_initialized()
    assert [path.stat().st_mtime_ns for path in states] == before, "nothing is trained again"
    assert (tmp_path / ep_job.RESULT).read_text() == first
    assert main([*options, "--restart"]) == 0
    assert [path.stat().st_mtime_ns for path in states] != before
    assert "largest difference" in capsys.readouterr().out


def test_curves_that_part_are_status_1(alone, tmp_path, capsys, monkeypatch):
    real = ep_job.train_on

    def skewed(ranks, *args, **kwargs):
        model, losses = real(ranks, *args, **kwargs)
        return model, [loss + 1e-8 * (ranks is ep_job.ONE_RANK) for loss in losses]

    monkeypatch.setattr(ep_job, "train_on", skewed)
    assert main(["train", "ep", *QUICK, "--steps", "1", "--out", str(tmp_path)]) == 1
    assert "largest difference 1.0e-08, allowed 1e-09: NOT equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "2"], "ranks: 1 were started, wanted 2"),
        (["--dtype", "float16"], "dtype: got 'float16', wanted one of float32, float64"),
        (["--batch", "0"], "batch: got 0 rows, wanted 1 or more"),
        (["--length", "1"], "length: got 1 bytes, wanted 2 or more"),
        (["--steps", "0"], "steps: got 0, wanted 1 or more"),
    ],
)
def test_mistakes_are_one_line(alone, tmp_path, capsys, options, message):
    assert main(["train", "ep", *options, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"k3lite: {message}\n"
    assert not any(tmp_path.iterdir())


def test_without_torchrun_it_says_how(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["train", "ep", "--out", str(tmp_path)]) == 2
    assert "start with torchrun --standalone --nproc-per-node 2" in capsys.readouterr().err


def test_windows_are_the_same_for_every_rank_and_differ_by_step():
    text = torch.arange(50)
    batch_at = ep_job.windows(text, ep_job.RECIPE, rows=4, length=8)
    ids, labels = batch_at(3)
    assert torch.equal(ids, labels) and ids.shape == (4, 8)
    assert torch.equal(ids, ids[:, :1] + torch.arange(8))
    assert torch.equal(ids, batch_at(3)[0]) and not torch.equal(ids, batch_at(4)[0])
