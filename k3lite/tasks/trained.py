"""Trained models in folders: weights, config, and a card that says what made them.

A folder with a card is finished: it is loaded and not trained again. Without one, training starts, or goes on from
the last checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from k3lite.checkpoint import WEIGHTS, CheckpointError, load_model, save_model, write_text
from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.train import STATE, BatchAt, Recipe, train

CARD = "card.json"


def fresh_model(config: K3Config, seed: int) -> K3ForCausalLM:
    """An untrained model. Embeddings start at unit size: under AttnRes they are a source beside sub-layer outputs."""
    model = K3ForCausalLM(config, seed=seed)
    with torch.no_grad():
        model.model.embed_tokens.weight.div_(config.initializer_range)
    return model


def train_or_load(
    folder: Path,
    about: str,
    config: K3Config,
    recipe: Recipe,
    batches: Callable[[], BatchAt],
    facts: dict[str, Any],
    progress: bool = True,
    make: Callable[[K3Config, int], K3ForCausalLM] = fresh_model,
) -> K3ForCausalLM:
    """The trained model of folder/model; trains it, or goes on with it, unless it is finished already.

    about: "task: what it is", for the card.   batches: called only if there is something to train.
    facts: what else the card should say; a finished model must agree with them and with the recipe.
    make: the untrained model of a config and a seed.
    Raises CheckpointError if the folder's model is another one.
    """
    target = folder / "model"
    if (target / CARD).exists():
        card = read_card(target, _task(about))
        if (card["recipe"], {name: card.get(name) for name in facts}) != (dataclasses.asdict(recipe), facts):
            raise CheckpointError(
                f"{target}: holds a model of another recipe or seed; choose another --out, or --restart"
            )
        return load_model(target, make=lambda config: make(config, recipe.seed))
    model = make(config, recipe.seed)
    resumed = (folder / STATE).exists()
    started = time.perf_counter()
    losses = train(model, batches(), recipe, folder=folder, progress=progress)
    save_model(model, target)
    write_card(target, about, recipe, facts, losses, None if resumed else time.perf_counter() - started)
    (folder / STATE).unlink(missing_ok=True)  # finished: the optimizer's moments are of no more use
    return model


def run_models(
    models: Sequence[tuple], result: dict[str, Any], add: Callable[..., None], target: Path, progress: bool
) -> dict[str, Any]:
    """A job of several models, each a tuple that ends with its folder: add(*model) trains one and puts what was
    measured into `result`, which is written to `target` after each, "complete" only with the last.

    A job that was stopped goes on: `train_or_load` finds what is trained, and that is only measured again.
    """
    started = time.perf_counter()
    result |= {"complete": False, "models": []}
    with tqdm(total=len(models), desc="models", disable=not progress) as bar:
        for model in models:
            bar.set_postfix_str(model[-1].name)
            add(*model)
            result["complete"] = len(result["models"]) == len(models)
            result["seconds"] = round(time.perf_counter() - started, 1)
            write_text(target, json.dumps(result, indent=1) + "\n")
            bar.update()
    return result


def forget(folder: Path) -> None:
    """Let the next `train_or_load` start anew: without its card a model is not finished. Nothing else is touched."""
    (folder / "model" / CARD).unlink(missing_ok=True)
    (folder / STATE).unlink(missing_ok=True)


def read_card(folder: Path, task: str) -> dict[str, Any]:
    """The card of a finished model of `task`. Raises CheckpointError if it is none, or if the weights are not the
    card's.
    """
    try:
        card = json.loads((folder / CARD).read_text())
        recipe, digest, about = card["recipe"], card["sha256"], card["task"]
        weights = (folder / WEIGHTS).read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{folder}: no finished {task} model ({e})") from e
    if hashlib.sha256(weights).hexdigest() != digest or not isinstance(recipe, dict):
        raise CheckpointError(f"{folder / WEIGHTS}: not the weights that {CARD} describes (damaged or replaced)")
    if _task(str(about)) != task:
        raise CheckpointError(f"{folder}: no finished {task} model ({CARD} says {about!r})")
    return card


def extend_card(folder: Path, task: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Let a finished model's card also say `facts`, like what was measured since; returns the card."""
    card = json.loads(json.dumps({**read_card(folder, task), **facts}))
    write_text(folder / CARD, json.dumps(card, indent=2) + "\n")
    return card


def cell_seed(*parts: int) -> int:
    """A seed for the documents of one measured cell, from whatever names it."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def from_lowest(values: Sequence[float], digits: int) -> str:
    """Lowest to highest of several seeds, as text."""
    low, high = (f"{f(values):.{digits}f}" for f in (min, max))
    return low if low == high else f"{low} - {high}"


def _task(about: str) -> str:
    return about.split(":")[0]


def write_card(
    folder: Path, about: str, recipe: Recipe, facts: dict[str, Any], losses: list[float], seconds: float | None
) -> None:
    """What made the weights in `folder`, so that anybody can make them again and see that they are the same.

    seconds: of the training, None where it was done in several sessions.
    """
    card = {
        "task": about,
        "recipe": dataclasses.asdict(recipe),
        **facts,
        "final_loss": round(sum(losses[-20:]) / len(losses[-20:]), 4),
        "training_seconds": None if seconds is None else round(seconds, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sha256": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
    }
    write_text(folder / CARD, json.dumps(card, indent=2) + "\n")
