"""Associative recall trained: how many pairs does a state of so many channels hold?

Models that differ in nothing but the width of their states are trained with one recipe and several seeds, then asked
for what they read in rows of more and more pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3lite.model import K3ForCausalLM
from k3lite.tasks.mqar import CHANCE, KEYS, make_batch, measure, mqar_config
from k3lite.tasks.trained import forget, fresh_model, read_card, run_models, train_or_load
from k3lite.train import BatchAt, Recipe, train

TASK = "mqar"
TRAINED_PAIRS = 128  # the most pairs of a training row
TOKENS_PER_STEP = 4096
GROWING_SHARE = 0.8  # of the steps, in which rows become longer
RECIPE = Recipe(steps=800, lr=8e-3, task="mqar-1")
RESULT = "mqar.json"

# A small one, for a notebook: 13 s of CPU time; rows of 8 pairs at 95 to 98 % in five seeds.
SMALL_WIDTH, SMALL_PAIRS, SMALL_TOKENS = 16, 16, 2048
SMALL_RECIPE = Recipe(steps=400, lr=1.5e-2, task="mqar, small")


# ---- training


def curriculum(recipe: Recipe, most: int, tokens: int) -> BatchAt:
    """Rows of 2 pairs at first, then of 2 up to a number that grows to `most`; every pair is asked.

    Few pairs teach the look-up, many teach to use the state sparingly. A model that meets many pairs at once learns
    the look-up late, a narrow one hardly at all.
    """

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        limit = 2 * (most / 2) ** min(1.0, step / (GROWING_SHARE * recipe.steps))
        pairs = int(2 * ((limit + 1) / 2) ** float(torch.rand((), generator=g)))  # log-uniform
        batch = make_batch(max(1, tokens // (3 * pairs)), pairs, g)
        return batch.ids, batch.labels

    return batch_at


def train_small(
    seed: int = 0,
    width: int = SMALL_WIDTH,
    *,
    pairs: int = SMALL_PAIRS,
    progress: bool = True,
    on_step: Callable[[int, float], None] | None = None,
) -> K3ForCausalLM:
    """A model trained here and now, on rows of up to `pairs` pairs, and kept nowhere."""
    recipe = dataclasses.replace(SMALL_RECIPE, seed=seed)
    model = fresh_model(mqar_config(width), seed)
    train(model, curriculum(recipe, pairs, SMALL_TOKENS), recipe, on_step=on_step, progress=progress)
    return model


# ---- the job


@dataclass(frozen=True)
class Job:
    """Options of `k3lite train mqar`."""

    out: Path
    recipe: Recipe = RECIPE  # its seed is not used
    widths: tuple[int, ...] = (8, 16, 32, 64)
    seeds: tuple[int, ...] = (0, 1, 2)
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    rows: int = 2048  # a cell; at least 8192 questions, so that a standard error stays below one point

    def check(self) -> None:
        """Raise ValueError before any work if a model cannot be made or a cell not measured."""
        for name in ("widths", "seeds", "pairs"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: got {', '.join(map(str, values))}, wanted each once")
        for width in self.widths:
            mqar_config(width)
        for seed in self.seeds:
            if seed < 0:
                raise ValueError(f"seeds: got {seed}, wanted 0 or more")
        for n in self.pairs:
            if not 1 <= n <= KEYS:
                raise ValueError(f"pairs: got {n}, wanted 1 to {KEYS}, since keys differ")
        if self.rows < 2:
            raise ValueError(f"rows: got {self.rows}, wanted 2 or more")

    def models(self) -> list[tuple[int, int, Path]]:
        """Width, seed and folder of each model; a seed with all its widths comes before the next seed."""
        return [(w, s, self.out / f"w{w}-s{s}") for s in self.seeds for w in self.widths]

    def restart(self) -> None:
        """Let `run` train every model of the job anew."""
        for _, _, folder in self.models():
            forget(folder)


def train_mqar_model(folder: Path, width: int, recipe: Recipe, progress: bool = True) -> K3ForCausalLM:
    """The trained model of folder/model, see `trained.train_or_load`."""
    return train_or_load(
        folder,
        f"{TASK}: pairs of a key and a value, then keys whose values are wanted",
        mqar_config(width),
        recipe,
        lambda: curriculum(recipe, TRAINED_PAIRS, TOKENS_PER_STEP),
        {"width": width, "trained_pairs": TRAINED_PAIRS},
        progress,
    )


def run(job: Job, progress: bool = True) -> dict[str, Any]:
    """Train (or find trained) and measure every model, and write mqar.json under job.out, see `run_models`."""
    job.check()
    result: dict[str, Any] = {
        "task": TASK,
        "chance": CHANCE,
        "trained_pairs": TRAINED_PAIRS,
        "records": [],
        "controls": [],
    }

    def add(width: int, seed: int, folder: Path) -> None:
        _add(result, job, width, seed, folder, progress)

    return run_models(job.models(), result, add, job.out / RESULT, progress)


def _add(result: dict[str, Any], job: Job, width: int, seed: int, folder: Path, progress: bool) -> None:
    """Train one model and append its entry, its records and its control."""
    model = train_mqar_model(folder, width, dataclasses.replace(job.recipe, seed=seed), progress)
    who = {"width": width, "seed": seed}
    parameters = sum(p.numel() for p in model.parameters())
    result["models"].append({**who, "parameters": parameters, "card": read_card(folder / "model", TASK)})
    for pairs in job.pairs:
        result["records"].append({**who, **dataclasses.asdict(measure(model, pairs, job.rows))})
    control = min(job.pairs[0], KEYS // 2)  # as many keys again must be left to ask for
    result["controls"].append({**who, **dataclasses.asdict(measure(model, control, job.rows, control=True))})


# ---- showing


def spread(result: dict[str, Any], width: int, pairs: int) -> list[float]:
    """Accuracies of one cell, one a seed, lowest first."""
    return sorted(r["accuracy"] for r in result["records"] if (r["width"], r["pairs"]) == (width, pairs))


def text_table(result: dict[str, Any]) -> str:
    """Accuracy by state width (rows) and number of pairs (columns), lowest and highest seed; then by age."""
    widths, numbers, seeds = (sorted({r[key] for r in result["records"]}) for key in ("width", "pairs", "seed"))
    heading = f"{'state':>9}" + "".join(f"{n:>14}" for n in numbers)
    lines = [
        f"accuracy in % by number of pairs, {len(seeds)} seed(s), lowest to highest (chance {100 * CHANCE:.1f} %)",
        heading,
    ]
    for width in widths:
        cells = [[100 * a for a in spread(result, width, n)] for n in numbers]
        lines.append(f"{f'{width} x {width}':>9}" + "".join(f"{f'{c[0]:.1f} - {c[-1]:.1f}':>14}" for c in cells))
    lines += ["", "the same by age, mean of the seeds: newest quarter of the pairs - oldest quarter", heading]
    for width in widths:
        cells = [_mean_by_age(result, width, n) for n in numbers]
        lines.append(
            f"{f'{width} x {width}':>9}" + "".join(f"{f'{100 * c[0]:.1f} - {100 * c[-1]:.1f}':>14}" for c in cells)
        )
    worst = max(result["controls"], key=lambda c: c["accuracy"])
    lines.append(f"\ncontrol, keys that were never written: at most {100 * worst['accuracy']:.1f} %")
    return "\n".join(lines)


def _mean_by_age(result: dict[str, Any], width: int, pairs: int) -> list[float]:
    rows = [r["by_age"] for r in result["records"] if (r["width"], r["pairs"]) == (width, pairs)]
    return [sum(group) / len(group) for group in zip(*rows, strict=True)]
