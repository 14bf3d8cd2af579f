"""`k3lite train lm`: train the whole small model, pack its experts, measure it. And its ablations, a table of them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3lite.checkpoint import CheckpointError, load_model, save_model, write_text
from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.packed import pack_experts
from k3lite.qat import set_rounding
from k3lite.tasks.lm import PRESETS, STAGES, Preset, ablated_config, batches, lm_model, stage_recipe
from k3lite.tasks.lm_watch import Monitor, held_out, needle_recall, rounded, validation
from k3lite.tasks.needle_job import TRAINING_LENGTH
from k3lite.tasks.trained import CARD, from_lowest, read_card, run_models, write_card
from k3lite.train import STATE, MuonRecipe, train

TASK = "lm"
ABOUT = f"{TASK}: the whole small model, prose byte by byte and facts hidden in it"
HISTORY, TABLE = "history.json", "ablations.json"
EXAM_ROWS = 256  # 65,536 held-out bytes
RECALL_LENGTHS = (128, 256, 512, 1024, 2048)
RECALL_DOCUMENTS = 50
ABLATION_PRESET = Preset(text=240, recall=30)  # recall comes up between steps 75 and 150 of the whole recipe


@dataclass(frozen=True)
class Job:
    """Options of `k3lite train lm`. config: another shape than the task's, for tests."""

    out: Path
    preset: Preset = PRESETS["short"]
    seed: int = 0
    ablation: str | None = None
    every: int = 25  # steps between records of the history
    config: K3Config | None = None

    def check(self) -> None:
        """Raise ValueError before any work if it cannot be done."""
        ablated_config(self.ablation)
        if self.seed < 0:
            raise ValueError(f"seed: got {self.seed}, wanted 0 or more")
        for name, value in (("text", self.preset.text), ("recall", self.preset.recall), ("every", self.every)):
            if value < 1:
                raise ValueError(f"{name}: got {value} steps, wanted 1 or more")

    @property
    def model_folder(self) -> Path:
        return self.out / "model"

    def recipe(self, stage: str) -> MuonRecipe:
        return stage_recipe(stage, self.preset, self.seed, self.ablation)

    def facts(self) -> dict[str, Any]:
        """What the card says beside the recipe of the last stage."""
        return {
            "training_length": TRAINING_LENGTH,
            "ablation": self.ablation,
            "steps": {"text": self.preset.text, "recall": self.preset.recall},
            "text_recipe": dataclasses.asdict(self.recipe("text")),
        }

    def restart(self) -> None:
        """Let the next `run` start anew."""
        for path in (self.model_folder / CARD, self.out / HISTORY, *(self.out / s / STATE for s in STAGES)):
            path.unlink(missing_ok=True)


def run(job: Job, progress: bool = True, on_record: Callable[[list[dict]], None] | None = None) -> dict[str, Any]:
    """Train (or go on, or find trained), pack, measure. Returns the card.

    Writes model/ (packed, with its card) and history.json under job.out. Checkpoints of both stages stay until the
    model is whole, so a run that was stopped goes on. on_record: called with the history after each new row.
    Raises CheckpointError if the folder holds a model of another recipe.
    """
    job.check()
    if (job.model_folder / CARD).exists():
        return _finished(job)
    resumed = any((job.out / stage / STATE).exists() for stage in STAGES)
    started = time.perf_counter()
    model, losses = train_stages(job, progress, on_record)
    pack_experts(model)
    save_model(model, job.model_folder)
    seconds = None if resumed else time.perf_counter() - started
    facts = job.facts() | {"measured": measure(load_model(job.model_folder))}  # as it will be read back
    write_card(job.model_folder, ABOUT, job.recipe("recall"), facts, losses, seconds)
    for stage in STAGES:
        (job.out / stage / STATE).unlink(missing_ok=True)
    return read_card(job.model_folder, TASK)


def _finished(job: Job) -> dict[str, Any]:
    card = read_card(job.model_folder, TASK)
    wanted = job.facts() | {"recipe": dataclasses.asdict(job.recipe("recall"))}
    if {name: card.get(name) for name in wanted} != wanted:
        raise CheckpointError(
            f"{job.model_folder}: holds a model of another recipe or seed; choose another --out, or --restart"
        )
    return card


def train_stages(
    job: Job, progress: bool = True, on_record: Callable[[list[dict]], None] | None = None
) -> tuple[K3ForCausalLM, list[float]]:
    """The trained model, not packed yet, and the losses of the last stage. on_record: called with the history so far."""
    model, before = lm_model(job.seed, job.ablation, job.config), 0
    history = _read_history(job.out)
    losses: list[float] = []

    def record(history: list[dict]) -> None:
        job.out.mkdir(parents=True, exist_ok=True)
        write_text(job.out / HISTORY, json.dumps(history) + "\n")
        if on_record:
            on_record(history)

    for stage in STAGES:
        recipe = job.recipe(stage)
        batch_at = batches(stage, recipe)
        set_rounding(model, stage == "recall")
        monitor = Monitor(model, stage, recipe, batch_at, job.every, before, history, record)
        losses = train(model, batch_at, recipe, folder=job.out / stage, on_step=monitor, progress=progress)
        before += recipe.steps
    return model, losses


def _read_history(out: Path) -> list[dict]:
    """Of a run that goes on; the rows of an unfinished stage are overwritten as they are made again."""
    path = out / HISTORY
    try:
        return json.loads(path.read_text()) if path.exists() else []
    except ValueError as e:
        raise CheckpointError(f"{path}: not valid JSON ({e})") from e


def measure(model: K3ForCausalLM) -> dict[str, Any]:
    """Held-out loss, and recall of one needle by document length."""
    return rounded(
        {
            "nats_per_byte": validation(model, held_out(EXAM_ROWS)),
            "recall": {str(n): needle_recall(model, RECALL_DOCUMENTS, n) for n in RECALL_LENGTHS},
            "recall_documents": RECALL_DOCUMENTS,
        }
    )


# ---- ablations


def run_ablations(
    out: Path,
    ablations: Sequence[str | None],
    seeds: Sequence[int],
    preset: Preset = ABLATION_PRESET,
    progress: bool = True,
) -> dict[str, Any]:
    """Train the whole model (None) and models with one thing changed, alike, and write ablations.json under `out`."""
    jobs = [Job(out / f"{a or 'whole'}-s{s}", preset, s, a, every=10**6) for s in seeds for a in ablations]
    for job in jobs:
        job.check()
    result: dict[str, Any] = {"preset": dataclasses.asdict(preset), "threads": torch.get_num_threads()}

    def add(ablation: str | None, seed: int, folder: Path) -> None:
        card = run(Job(folder, preset, seed, ablation, every=10**6), progress)
        row = {"ablation": ablation or "whole", "seed": seed, "seconds": card["training_seconds"]}
        row["text_loss"] = _read_history(folder)[0]["validation"]  # at the end of the text stage
        result["models"].append(row | card["measured"])

    return run_models([(j.ablation, j.seed, j.out) for j in jobs], result, add, out / TABLE, progress)


def text_table(result: dict[str, Any]) -> str:
    """One row an ablation, lowest to highest seed."""
    lines = [
        f"{result['preset']['text']} + {result['preset']['recall']} steps; lowest to highest of its seeds",
        f"{'model':16}{'seeds':>6}{'nats per byte':>18}{'recall at 128, %':>18}{'at 256, %':>12}",
    ]
    for name in dict.fromkeys(m["ablation"] for m in result["models"]):
        models = [m for m in result["models"] if m["ablation"] == name]
        cells = [from_lowest([m["nats_per_byte"] for m in models], 3)]
        cells += [from_lowest([100 * m["recall"][n] for m in models], 0) for n in ("128", "256")]
        lines.append(f"{name:16}{len(models):>6}{cells[0]:>18}{cells[1]:>18}{cells[2]:>12}")
    return "\n".join(lines)


def text_card(card: dict[str, Any]) -> str:
    """What the trained model can do, in a few lines."""
    m = card["measured"]
    cells = ", ".join(f"{100 * share:.0f} % at {n}" for n, share in m["recall"].items())
    took = "in several sessions" if card["training_seconds"] is None else f"{card['training_seconds']:.0f} s"
    return (
        f"held-out prose: {m['nats_per_byte']:.3f} nats per byte; trained {took}, {card['threads']} CPU thread(s)\n"
        f"recall of one needle, {m['recall_documents']} documents each: {cells} bytes "
        f"(trained on up to {card['training_length']})"
    )
