"""The main job: train a small hybrid K3 on hidden facts, then measure where it finds them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from k3lite import budget
from k3lite.config import K3Config
from k3lite.generate import generate
from k3lite.model import K3ForCausalLM
from k3lite.tasks import trained
from k3lite.tasks.needle import (
    CHANCE,
    DIGITS,
    NEEDLE_BYTES,
    NeedleBatch,
    make_batch,
    shortest_length,
)
from k3lite.tasks.needle_report import write_report
from k3lite.tasks.text import haystack
from k3lite.tasks.trained import cell_seed, fresh_model, train_or_load
from k3lite.train import BatchAt, Recipe

PRESET = "needle"
TRAINING_LENGTH = 256  # bytes of the longest training document, questions included
TOKENS_PER_STEP = 4096
DENSE_SHARE = 0.4  # of the steps, before documents get long
QUESTIONS = 8  # at most, for each training document: more answers to learn from for the same reading
EVAL_TOKENS = 16_384  # tokens in one forward pass when measuring: bounds memory
RECIPE = Recipe(steps=400, lr=8e-3, task="needle-1")


# ---- training


def needle_model(seed: int, config: K3Config | None = None) -> K3ForCausalLM:
    """A fresh model of the preset, or of another config."""
    return fresh_model(K3Config.preset(PRESET) if config is None else config, seed)


def curriculum(text: Tensor, recipe: Recipe, tokens: int = TOKENS_PER_STEP) -> BatchAt:
    """Short documents full of needles first, then documents up to TRAINING_LENGTH with few or many.

    Dense documents teach the look-up quickly; the long ones teach to hold a fact through prose.
    """
    dense_steps = int(DENSE_SHARE * recipe.steps)

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        dense = step < dense_steps
        low, high = (48, 96) if dense else (64, TRAINING_LENGTH + 1)
        length = int(low * (high / low) ** float(torch.rand((), generator=g)))  # log-uniform
        most = max(1, (length - 20) // (NEEDLE_BYTES + DIGITS))
        needles = most if dense else int(torch.randint(1, most + 1, (), generator=g))
        questions = min(needles, QUESTIONS)
        length = max(length, shortest_length(needles, questions))
        batch = make_batch(text, max(1, tokens // length), length, needles, g, questions=questions)
        return batch.ids, batch.labels

    return batch_at


def train_needle_model(folder: Path, recipe: Recipe, progress: bool = True) -> K3ForCausalLM:
    """The trained model of `folder`; trains it, or goes on with it, unless it is finished already.

    Raises CheckpointError if the folder's model came from another recipe.
    """
    return train_or_load(
        folder,
        "needle: facts hidden in real text, bytes as tokens",
        K3Config.preset(PRESET),
        recipe,
        lambda: curriculum(haystack("train"), recipe),
        {"training_length": TRAINING_LENGTH},
        progress,
    )


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a finished needle model. Raises CheckpointError as in `trained.read_card`."""
    return trained.read_card(folder, "needle")


# ---- measuring


@dataclass(frozen=True)
class Record:
    """Exact-match recall of one cell: all DIGITS digits right, out of `trials` held-out documents."""

    model: str
    length: int
    depth: float
    needles: int
    recall: float
    trials: int
    chance: float = CHANCE


@torch.no_grad()
def right_answers(model: K3ForCausalLM, batch: NeedleBatch) -> Tensor:
    """[B] bool: would greedy decoding give every digit?

    One pass with the answer in place tells: greedy decoding makes the first digit from the same input, and each
    later one too as long as all before it were right (tests hold this to real decoding from the cache).
    """
    rows = max(1, EVAL_TOKENS // batch.ids.shape[1])
    guesses = [model(ids, logits_to_keep=DIGITS + 1).logits[:, :-1].argmax(-1) for ids in batch.ids.split(rows)]
    return (torch.cat(guesses) == batch.answers).all(-1)


def measure(
    model: K3ForCausalLM,
    lengths: Sequence[int],
    depths: Sequence[float],
    needles: Sequence[int],
    trials: int,
    seed: int,
    name: str = "hybrid",
) -> Iterator[Record]:
    """A record for each number of needles, length and depth, on held-out text."""
    text = haystack("heldout")
    for n in needles:
        for length in lengths:
            for depth in depths:
                g = torch.Generator().manual_seed(cell_seed(seed, n, length, int(depth * 100)))
                batch = make_batch(text, trials, length, n, g, depth=depth)
                yield Record(name, length, depth, n, right_answers(model, batch).double().mean().item(), trials)


def measure_control(model: K3ForCausalLM, length: int, trials: int, seed: int) -> Record:
    """The same question about a key that was never hidden, one other needle being there: scores chance, or the
    test leaks. The depth of a needle that is not there is given as -1.
    """
    g = torch.Generator().manual_seed(cell_seed(seed, 0, length, 0))
    batch = make_batch(haystack("heldout"), trials, length, 1, g, control=True)
    return Record("hybrid", length, -1.0, 0, right_answers(model, batch).double().mean().item(), trials)


def cache_row(model: K3ForCausalLM, length: int) -> dict[str, int]:
    """Bytes that one sequence of `length` tokens keeps: the model's own cache, read off a real one, beside what the
    same model with MLA in every layer would keep (on paper).
    """
    width = model.lm_head.weight.itemsize
    cache = model.new_cache()
    generate(model, torch.full((1, length), ord(" ")), 1, cache=cache)
    return {
        "length": length,
        "hybrid_bytes": cache.bytes().total,
        "all_mla_bytes": budget.cache_bytes(model.config.all_mla_twin(), length, number_bytes=width).total,
    }


# ---- the job


@dataclass(frozen=True)
class Job:
    """Options of `k3lite needle`."""

    out: Path
    recipe: Recipe = RECIPE
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    depths: tuple[float, ...] = (0, 25, 50, 75, 100)
    needles: tuple[int, ...] = (1,)
    trials: int = 20

    def check(self) -> None:
        """Raise ValueError before any work if a cell cannot be measured."""
        if self.trials < 1:
            raise ValueError(f"trials: got {self.trials}, wanted 1 or more")
        longest = len(haystack("heldout"))
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise ValueError(f"depth: got {depth:g}, wanted 0 to 100 percent")
        for n in self.needles:
            if n < 1:
                raise ValueError(f"needles: got {n}, wanted 1 or more")
            least = shortest_length(n)
            for length in self.lengths:
                if not least <= length <= longest:
                    raise ValueError(f"length: got {length} bytes for {n} needle(s), wanted {least} to {longest}")


def run(job: Job, progress: bool = True) -> dict[str, Any]:
    """Train (or find trained), measure, and write needle.json and needle.html under job.out.

    Both files are rewritten after every length, so that a job that is stopped keeps what it measured.
    """
    job.check()
    started = time.perf_counter()
    model = train_needle_model(job.out, job.recipe, progress)
    card = read_card(job.out / "model")
    result: dict[str, Any] = {
        "training_length": TRAINING_LENGTH,
        "complete": False,
        "chance": CHANCE,
        "parameters": sum(p.numel() for p in model.parameters()),
        "active_parameters": budget.active_parameters(model.config),
        "card": card,
        "records": [],
        "controls": [dataclasses.asdict(measure_control(model, job.lengths[0], max(50, job.trials), job.recipe.seed))],
        "cache": [cache_row(model, length) for length in job.lengths],
    }
    cells = len(job.lengths) * len(job.depths) * len(job.needles)
    records = measure(model, job.lengths, job.depths, job.needles, job.trials, job.recipe.seed)
    for i, record in enumerate(tqdm(records, total=cells, desc="measuring", disable=not progress), 1):
        result["records"].append(dataclasses.asdict(record))
        if i % len(job.depths) == 0:
            result["complete"] = i == cells
            result["seconds"] = round(time.perf_counter() - started, 1)
            write_report(job.out, result)
    return result
