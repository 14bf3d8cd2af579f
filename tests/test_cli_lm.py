"""`k3lite train lm` and `k3lite generate` as a user types them."""

import json

import pytest
import torch

from k3lite import budget
from k3lite.checkpoint import load_model, save_model
from k3lite.cli import main
from k3lite.generate import generate, metered
from k3lite.model import K3ForCausalLM
from k3lite.tasks import lm, lm_job
from k3lite.tasks.text import decode, encode

from .small_lm import shrink
from .small_needle import SMALL


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    save_model(K3ForCausalLM(SMALL), tmp_path / "model")
    return tmp_path / "model"


def test_train_lm_says_what_it_does_and_finds_a_finished_model(tmp_path, capsys):
    command = ["train", "lm", "--steps", "1,1", "--ablate", "no-conv", "--out", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "training for 1 + 1 steps" in out and "nats per byte" in out and "recall of one needle" in out
    card = json.loads((tmp_path / "model" / "card.json").read_text())
    assert card["ablation"] == "no-conv" and card["recipe"]["task"] == "lm-recall-1 no-conv"
    assert main(command) == 0
    assert "is trained already" in capsys.readouterr().out


def test_the_table_of_ablations(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lm, "ABLATIONS", {"no-conv": lm.ABLATIONS["no-conv"]})
    assert main(["train", "lm", "--table", "0", "--steps", "1,1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1 + 1 steps" in out and "no-conv" in out and (tmp_path / lm_job.TABLE).exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "lm", "--steps", "5"], "steps: got 5, wanted two numbers, like 60,60"),
        (["train", "lm", "--steps", "0,1"], "text: got 0 steps, wanted 1 or more"),
        (["train", "lm", "--seed", "-1"], "seed: got -1"),
        (["generate", "--model", "{model}", "--prompt", ""], "prompt: got nothing"),
        (["generate", "--model", "{model}", "--prompt", "a", "--temperature", "-1"], "temperature: got -1"),
        (["generate", "--model", "{model}/none", "--prompt", "a"], "none"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, folder, capsys, command, message):
    command = [part.format(model=folder) for part in command]
    out = ["--out", str(tmp_path / "out")] if command[0] == "train" else []
    assert main([*command, *out]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("k3lite")]
    assert message in line and not (tmp_path / "out").exists()


def test_generate_prints_the_models_bytes(folder, capsys):
    assert main(["generate", "--model", str(folder), "--prompt", "In the", "--tokens", "5"]) == 0
    assert capsys.readouterr().out == f"In the{decode(generate(load_model(folder), encode('In the')[None], 5)[0])}\n"


def test_the_meter_shows_the_cache_that_each_byte_was_made_from(folder, capsys):
    assert main(["generate", "--model", str(folder), "--prompt", "In the", "--tokens", "3", "--meter"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
    for n, row in zip((6, 7, 8), rows, strict=True):
        want = budget.cache_bytes(SMALL, n, number_bytes=4)
        assert int(row[0]) == n
        assert [int(cell.replace(",", "")) for cell in row[-4:]] == [want.state, want.conv, want.latent, want.total]


def test_metered_is_stream_with_the_bytes_of_a_batch(folder):
    model, ids = load_model(folder), torch.arange(10).view(2, 5) + 60
    steps = list(metered(model, ids, 3))
    assert torch.equal(torch.stack([token for token, _ in steps], 1), generate(model, ids, 3))
    assert [held for _, held in steps] == [budget.cache_bytes(SMALL, n, batch=2, number_bytes=4) for n in (5, 6, 7)]
