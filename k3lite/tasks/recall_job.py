"""The experiment on gist and verbatim: siblings of equal size trained alike, then asked what they recall.

Siblings (tasks/siblings.py) differ in the memory of their layers. All are trained with one recipe on the same
documents (tasks/recall.py), several seeds each, and sit the same exam (tasks/recall_exam.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3lite.checkpoint import load_model
from k3lite.model import K3ForCausalLM
from k3lite.tasks.recall import KEYS, SLOT, STRING, STRING_SLOTS, VOCABULARY, make_documents
from k3lite.tasks.recall_exam import ASKED, CHANCE, DEPTHS, Score, exam_cells, measure
from k3lite.tasks.siblings import PATTERNS, make_sibling, sibling_cache_bytes, sibling_config
from k3lite.tasks.trained import extend_card, forget, read_card, run_models, train_or_load
from k3lite.train import BatchAt, Recipe

TASK = "recall"
TRAINED_LENGTH = 256  # tokens of the longest training document
TOKENS_PER_STEP = 2048
RECIPE = Recipe(steps=2400, lr=3e-3, task="recall-2")
RESULT = "recall.json"
WIDTH = 16  # of a KDA state
QUESTIONS, MOST_TOKENS = 480, 262_144  # of one cell: the first is wanted, the second is the most it may cost


# ---- training

DENSE_SHARE = 0.2  # of the steps, with documents that hold nothing but facts
GROWING_SHARE = 0.6  # of these, in which they become longer
STRING_SHARE, MIXED_SHARE = 0.3, 0.3  # of the later steps: with a string; with rewritten keys and rumours
FEW, SOME = 4, 16  # questions of a later document with a string and without, at most: others must weigh in the loss


def curriculum(recipe: Recipe, longest: int = TRAINED_LENGTH, tokens: int = TOKENS_PER_STEP) -> BatchAt:
    """Facts with nothing between them first, few and then more; then documents of all kinds, up to `longest`.

    The first part teaches the look-up, and ends with more facts than a small state holds. The data depend on the
    recipe's seed and steps alone: every sibling reads the same.
    """

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        dense = DENSE_SHARE * recipe.steps
        if step < dense:
            most = 2 * (longest / SLOT / 2) ** min(1.0, step / (GROWING_SHARE * dense))
            facts = questions = _log_uniform(max(2, most / 4), most, g)
            length, options = SLOT * facts, {"facts": facts}
        else:
            length, options = _later_document(longest, (step - dense) / (recipe.steps - dense), g)
            questions = min(options["facts"], FEW if "string" in options else SOME)
        row = length + 2 + 2 * questions + options.get("symbols", 0)
        documents = make_documents(max(1, tokens // row), length, generator=g, questions=questions, **options)
        return documents.ids, documents.labels

    return batch_at


def _later_document(longest: int, done: float, g: torch.Generator) -> tuple[int, dict[str, Any]]:
    """Length, and options of `make_documents`: lines from one to as many as fit, log-uniform.

    done: share of the later steps that are over. Strings grow from two symbols to all in the first half of them.
    """
    kind = _uniform(g)
    string = kind < STRING_SHARE
    length = SLOT * _log_uniform(min(longest, 32 if string else 64) // SLOT, longest // SLOT, g)
    lines = _log_uniform(1, length // SLOT - STRING_SLOTS * string, g)
    rewritten = rumours = 0
    if STRING_SHARE <= kind < STRING_SHARE + MIXED_SHARE:
        rewritten, rumours = int(lines / 2 * _uniform(g)), int(lines / 3 * _uniform(g))
    facts = max(1, lines - rewritten - rumours)
    rewritten = min(rewritten, facts)
    return length, {
        "facts": facts,
        "rewritten": rewritten,
        "rumours": min(rumours, facts - rewritten),
        **({"string": True, "symbols": min(STRING, 2 + int(2 * (STRING - 1) * done))} if string else {}),
    }


def _uniform(g: torch.Generator) -> float:
    return float(torch.rand((), generator=g))


def _log_uniform(low: float, high: float, g: torch.Generator) -> int:
    """A whole number from low to high."""
    return int(low * ((high + 1) / low) ** _uniform(g))


# ---- the job


@dataclass(frozen=True)
class Job:
    """Options of `k3lite train recall`."""

    out: Path
    recipe: Recipe = RECIPE  # its seed is not used
    variants: tuple[str, ...] = ("kda", "hybrid", "mla", "mla-conv", "mla-rotary")
    widths: tuple[int, ...] = (WIDTH,)
    layers: int = 4
    seeds: tuple[int, ...] = (0, 1, 2)
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    facts: tuple[int, ...] = (1, 4, 16, 64, 256)
    questions: int = QUESTIONS
    most_tokens: int = MOST_TOKENS
    trained_length: int = TRAINED_LENGTH
    step_tokens: int = TOKENS_PER_STEP

    def check(self) -> None:
        """Raise ValueError before any work if a model cannot be made or a cell not measured."""
        for name in ("variants", "widths", "seeds", "lengths", "facts"):
            values = getattr(self, name)
            if len(set(values)) < len(values) or not values:
                raise ValueError(f"{name}: got {', '.join(map(str, values))}, wanted one or more, each once")
        for variant in self.variants:
            for width in self.widths:
                sibling_config(variant, VOCABULARY, layers=self.layers, width=width)
        for seed in self.seeds:
            if seed < 0:
                raise ValueError(f"seeds: got {seed}, wanted 0 or more")
        for length in self.lengths:
            if length < SLOT or length % SLOT:
                raise ValueError(f"lengths: got {length}, wanted a multiple of {SLOT}")
        for n in self.facts:
            if not 1 <= n <= KEYS:
                raise ValueError(f"facts: got {n}, wanted 1 to {KEYS}, since keys differ")
        for name in ("questions", "most_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted 1 or more")

    def models(self) -> list[tuple[str, int, int, Path]]:
        """Variant, state width, seed and folder of each model; a seed with all its siblings comes before the next.

        A sibling without KDA comes once, whatever the widths.
        """
        kinds = [(v, w) for w in self.widths for v in self.variants if "K" in PATTERNS[v] or w == self.widths[0]]
        return [(v, w, seed, self.out / _name(v, w, self.layers, seed)) for seed in self.seeds for v, w in kinds]

    def documents(self, kind: str, length: int, facts: int) -> int:
        """How many documents measure a cell: so many that `questions` are asked, if they cost no more than `most_tokens`."""
        asked = 4 if kind == "string" else min(facts, ASKED)  # a string is one question, and a long one
        return max(2, min(self.questions // asked, self.most_tokens // length))

    def restart(self) -> None:
        """Let `run` train every model of the job anew."""
        for *_, folder in self.models():
            forget(folder)


def _name(variant: str, width: int, layers: int, seed: int) -> str:
    size = ("" if width == WIDTH or "K" not in PATTERNS[variant] else f"-w{width}") + (f"-l{layers}" * (layers != 4))
    return f"{variant.replace(':', '-')}{size}-s{seed}"


def train_sibling(
    folder: Path, variant: str, recipe: Recipe, *, width: int = WIDTH, layers: int = 4,
    longest: int = TRAINED_LENGTH, tokens: int = TOKENS_PER_STEP, progress: bool = True,
) -> K3ForCausalLM:  # fmt: skip
    """The trained sibling of folder/model, see `trained.train_or_load`."""
    return train_or_load(
        folder,
        f"{TASK}: facts, rumours and strings among words of a topic, and questions about them",
        sibling_config(variant, VOCABULARY, layers=layers, width=width),
        recipe,
        lambda: curriculum(recipe, longest, tokens),
        {"variant": variant, "width": width, "layers": layers, "trained_length": longest, "tokens_per_step": tokens},
        progress,
        functools.partial(make_sibling, variant),
    )


def load_sibling(folder: Path) -> K3ForCausalLM:
    """A finished sibling, of the variant that its card names. Raises CheckpointError as `trained.read_card`."""
    variant = read_card(folder, TASK)["variant"]
    return load_model(folder, make=functools.partial(make_sibling, variant))


def run(job: Job, progress: bool = True) -> dict[str, Any]:
    """Train (or find trained) and measure every model, and write recall.json under job.out, see `run_models`.

    What an earlier recall.json says of a model with the same weights is not measured again.
    """
    job.check()
    before = _scores_before(job.out / RESULT)
    result: dict[str, Any] = {
        "task": TASK,
        "chance": CHANCE,
        "depths": DEPTHS,
        "trained_length": job.trained_length,
        "layers": job.layers,
        "cache": [],
        "records": [],
    }

    def add(variant: str, width: int, seed: int, folder: Path) -> None:
        _add(result, before, job, variant, width, seed, folder, progress)

    return run_models(job.models(), result, add, job.out / RESULT, progress)


def _add(
    result: dict[str, Any], before: dict[tuple, Any], job: Job, variant: str, width: int, seed: int, folder: Path,
    progress: bool,
) -> None:  # fmt: skip
    """Train one model and append its entry, what its cache takes, and its records."""
    recipe = dataclasses.replace(job.recipe, seed=seed)
    model = train_sibling(
        folder, variant, recipe, width=width, layers=job.layers, longest=job.trained_length, tokens=job.step_tokens,
        progress=progress,
    )  # fmt: skip
    who = {"variant": variant, "width": width, "seed": seed}
    parameters = sum(p.numel() for p in model.parameters())
    digest = read_card(folder / "model", TASK)["sha256"]
    cells = [(*cell, job.documents(*cell)) for cell in exam_cells(job.lengths, job.facts)]
    scores = [before.get((digest, *cell)) or dataclasses.asdict(measure(model, *cell)) for cell in cells]
    measured = [score for score in scores if score["length"] <= job.trained_length]
    card = extend_card(folder / "model", TASK, {"measured": measured})
    result["models"].append({**who, "folder": folder.name, "parameters": parameters, "card": card})
    result["records"] += [{**who, **score} for score in scores]
    if seed == job.seeds[0]:
        result["cache"] += list(_cache(variant, width, model, job.lengths))


def _scores_before(path: Path) -> dict[tuple, dict[str, Any]]:
    """{(sha256 of the weights, kind, length, facts, documents): what `measure` found}, empty without a file of ours."""
    try:
        said = json.loads(path.read_text())
        digests = {(m["variant"], m["width"], m["seed"]): m["card"]["sha256"] for m in said["models"]}
        fields = [field.name for field in dataclasses.fields(Score)]
        return {
            (digests[r["variant"], r["width"], r["seed"]], *(r[f] for f in fields[:4])): {f: r[f] for f in fields}
            for r in said["records"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _cache(variant: str, width: int, model: K3ForCausalLM, lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for length in lengths:
        kept = sibling_cache_bytes(variant, model.config, length)
        yield {"variant": variant, "width": width, "length": length, **dataclasses.asdict(kept), "total": kept.total}
