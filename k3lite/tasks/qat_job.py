"""Rounding after training against training with rounding, on a small language model and on a picture. Writes qat.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.moe import Experts
from k3lite.mx import SCALE_RULES
from k3lite.qat import set_rounding
from k3lite.tasks import picture
from k3lite.tasks.needle_job import PRESET
from k3lite.tasks.picture import OURS, ROUNDINGS, PictureMLP
from k3lite.tasks.qat import PARTS, experts_rounded, prose_and_needles, skill, weights_rounded
from k3lite.tasks.trained import forget, fresh_model, from_lowest, read_card, run_models, train_or_load
from k3lite.train import Recipe

TASK = "qat"
RECIPE = Recipe(steps=1000, lr=8e-3, task="qat-1")
FINE = Recipe(steps=100, lr=1e-3, warmup=10, task="qat-1, fine-tuning")
RESULT = "qat.json"
PROSE_ROWS, DOCUMENTS = 256, 200  # 32,768 held-out bytes; documents for each number of needles
PICTURE_STEPS, PICTURE_FINE_STEPS = picture.STEPS, picture.FINE_STEPS


@dataclass(frozen=True)
class Job:
    """Options of `k3lite train qat`."""

    out: Path
    recipe: Recipe = RECIPE  # its seed is not used
    fine: Recipe = FINE
    seeds: tuple[int, ...] = (0, 1, 2)

    def check(self) -> None:
        """Raise ValueError before any work if a model cannot be made."""
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: got {', '.join(map(str, self.seeds)) or 'nothing'}, wanted some, each once")
        if min(self.seeds) < 0:
            raise ValueError(f"seeds: got {min(self.seeds)}, wanted 0 or more")

    def models(self) -> list[tuple[int, Path]]:
        """Seed and folder of each base model."""
        return [(s, self.out / f"s{s}") for s in self.seeds]

    def restart(self) -> None:
        """Let `run` train every model of the job anew."""
        for _, folder in self.models():
            for part in (folder, *_fine_folders(folder).values()):
                forget(part)


def _fine_folders(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in ("fine", "fine-rounded")}


def run(job: Job, progress: bool = True) -> dict[str, Any]:
    """Train (or find trained) and measure everything, and write qat.json under job.out, see `run_models`."""
    job.check()
    result: dict[str, Any] = {"task": TASK, "prose_bytes": PROSE_ROWS * 128, "documents": DOCUMENTS}

    def add(seed: int, folder: Path) -> None:
        result["models"].append({"seed": seed, **_language(job, seed, folder, progress), "picture": _picture(seed)})

    return run_models(job.models(), result, add, job.out / RESULT, progress)


# ---- the language model


def _language(job: Job, seed: int, folder: Path, progress: bool) -> dict[str, Any]:
    """What the base model and both of its continuations can do, rounded and not."""
    recipe, fine = (dataclasses.replace(r, seed=seed) for r in (job.recipe, job.fine))
    base = _trained(folder, recipe, 0, lambda config, s: fresh_model(config, s), progress)
    measured: dict[str, Any] = {"card": read_card(folder / "model", TASK), "base": _skill(base)}
    measured["rules"] = {rule: _rounded(base, rule) for rule in SCALE_RULES}
    measured["parts"] = {}
    for part in (*PARTS, "everything"):
        with weights_rounded(base, part):
            measured["parts"][part] = _skill(base)
    measured["no routed experts"] = _skill(_without_experts(base))
    for name, where in _fine_folders(folder).items():
        model = _trained(where, fine, recipe.steps, _continue(base, name == "fine-rounded"), progress)
        set_rounding(model, False)
        measured[name] = {"as it is": _skill(model), "rounded": _rounded(model, "floor")}
    return measured


def _trained(
    folder: Path, recipe: Recipe, start: int, make: Callable[[K3Config, int], K3ForCausalLM], progress: bool
) -> K3ForCausalLM:
    return train_or_load(
        folder,
        f"{TASK}: prose and hidden facts, bytes as tokens",
        K3Config.preset(PRESET),
        recipe,
        lambda: prose_and_needles(recipe, start),
        {"start": start},
        progress,
        make=make,
    )


def _continue(base: K3ForCausalLM, rounding: bool) -> Callable[[K3Config, int], K3ForCausalLM]:
    """Makes a copy of the base model, which may round its experts from its first step on."""

    def make(config: K3Config, seed: int) -> K3ForCausalLM:
        model = fresh_model(config, seed)
        model.load_state_dict(base.state_dict())
        set_rounding(model, rounding)
        return model

    return make


def _without_experts(base: K3ForCausalLM) -> K3ForCausalLM:
    """A copy in which routed experts add nothing: what there is to lose by rounding them."""
    model = _continue(base, False)(base.config, 0).eval()
    with torch.no_grad():
        for experts in (m for m in model.modules() if isinstance(m, Experts)):
            experts.w2.zero_()
    return model


def _skill(model: K3ForCausalLM) -> dict[str, Any]:
    measured = dataclasses.asdict(skill(model, PROSE_ROWS, DOCUMENTS))
    return {**measured, "loss": round(measured["loss"], 5)}


def _rounded(model: K3ForCausalLM, rule: str) -> dict[str, Any]:
    with experts_rounded(model, rule):
        return _skill(model)


# ---- the picture


def _picture(seed: int) -> dict[str, Any]:
    """dB of each rounding, after training and after both ways of going on."""
    model = PictureMLP(seed)
    picture.fit_picture(model, PICTURE_STEPS, picture.LR)
    measured = {"rounded": {name: _psnr(model, name) for name in ROUNDINGS}}
    for name, rounding in (("fine", "none"), ("fine-rounded", OURS)):
        other = picture.tuned(model, rounding, PICTURE_FINE_STEPS)
        measured[name] = {r: _psnr(other, r) for r in ("none", OURS)}
    return measured


def _psnr(model: PictureMLP, rounding: str) -> float:
    return round(picture.as_shown(model, rounding).psnr, 2)


# ---- showing


def text_table(result: dict[str, Any]) -> str:
    """Loss and recall of each state of the language model, and the picture's dB, lowest to highest seed."""
    models = result["models"]
    lines = [
        f"{len(models)} seed(s), lowest to highest; loss in nats per held-out byte, recall in % of {result['documents']} documents",
        f"{'':42}{'loss':>16}{'1 needle':>12}{'4 needles':>12}",
    ]
    rows = {"as trained": lambda m: m["base"], "routed experts left out": lambda m: m["no routed experts"]}
    rows |= {f"rounded afterwards, {rule}": lambda m, rule=rule: m["rules"][rule] for rule in SCALE_RULES}
    rows |= {f"weights alone: {part}": lambda m, part=part: m["parts"][part] for part in (*PARTS, "everything")}
    rows |= {"trained on": lambda m: m["fine"]["as it is"], "... then rounded": lambda m: m["fine"]["rounded"]}
    rows |= {"trained on with rounding": lambda m: m["fine-rounded"]["rounded"]}
    for name, get in rows.items():
        states = [get(m) for m in models]
        cells = [from_lowest([s["loss"] for s in states], 4)]
        cells += [from_lowest([100 * s["recall"][n] for s in states], 0) for n in ("1", "4")]
        lines.append(f"{name:42}" + "".join(f"{c:>{w}}" for c, w in zip(cells, (16, 12, 12), strict=True)))
    lines += ["", f"{'the picture, in dB (higher is better)':42}{'likeness':>16}"]
    pictures = [m["picture"] for m in models]
    rows = {name: [p["rounded"][name] for p in pictures] for name in ROUNDINGS}
    rows |= {f"trained on, {r}": [p["fine"][r] for p in pictures] for r in ("none", OURS)}
    rows |= {f"with rounding: {OURS}": [p["fine-rounded"][OURS] for p in pictures]}
    return "\n".join([*lines, *(f"{name:42}{from_lowest(values, 1):>16}" for name, values in rows.items())])
