"""Plain residuals, Full AttnRes and blocks of two sizes, trained alike with several seeds. Writes depth.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3lite.model import K3ForCausalLM
from k3lite.tasks.depth import (
    LAYERS,
    SIZES,
    depth_config,
    depth_exam,
    depth_model,
    loss_when_cut,
    measure,
    prose,
    size_name,
)
from k3lite.tasks.trained import forget, from_lowest, read_card, run_models, train_or_load
from k3lite.train import Recipe

TASK = "depth"
RECIPE = Recipe(steps=400, lr=8e-3, warmup=20, task="depth-1")
RESULT = "depth.json"
LOSS_ROWS = 256  # 16,384 held-out bytes
PROBE_ROWS = 64  # for sizes, gradients and shares
CUT_ROWS = 32  # a pass for each source


@dataclass(frozen=True)
class Job:
    """Options of `k3lite train depth`."""

    out: Path
    recipe: Recipe = RECIPE  # its seed is not used
    sizes: tuple[float | None, ...] = SIZES
    seeds: tuple[int, ...] = (0, 1, 2)

    def check(self) -> None:
        """Raise ValueError before any work if a model cannot be made."""
        for name in ("sizes", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: got {', '.join(map(str, values)) or 'nothing'}, wanted some, each once")
        for size in self.sizes:
            depth_config(size)
        if min(self.seeds) < 0:
            raise ValueError(f"seeds: got {min(self.seeds)}, wanted 0 or more")

    def models(self) -> list[tuple[float | None, int, Path]]:
        """Block size, seed and folder of each model; a seed with all its sizes comes before the next seed."""
        return [(b, s, self.out / f"{size_name(b)}-s{s}") for s in self.seeds for b in self.sizes]

    def restart(self) -> None:
        """Let `run` train every model of the job anew."""
        for *_, folder in self.models():
            forget(folder)


def train_depth_model(folder: Path, block_size: float | None, recipe: Recipe, progress: bool = True) -> K3ForCausalLM:
    """The trained model of folder/model, see `trained.train_or_load`."""
    return train_or_load(
        folder,
        f"{TASK}: the next byte of prose, {LAYERS} layers",
        depth_config(block_size),
        recipe,
        lambda: prose(recipe),
        {"block_size": block_size},
        progress,
        make=depth_model,
    )


def run(job: Job, progress: bool = True) -> dict[str, Any]:
    """Train (or find trained) and measure every model, and write depth.json under job.out, see `run_models`."""
    job.check()
    result: dict[str, Any] = {"task": TASK, "layers": LAYERS}

    def add(block_size: float | None, seed: int, folder: Path) -> None:
        recipe = dataclasses.replace(job.recipe, seed=seed)
        model = train_depth_model(folder, block_size, recipe, progress)
        card = read_card(folder / "model", TASK)
        result["models"].append({"block_size": block_size, "seed": seed, "card": card, **_measured(model)})

    return run_models(job.models(), result, add, job.out / RESULT, progress)


def _measured(model: K3ForCausalLM) -> dict[str, Any]:
    """Held-out loss; sizes, gradients and shares by depth; the loss with each source cut out."""
    probe, rows = measure(model, depth_exam(PROBE_ROWS)), depth_exam(CUT_ROWS)
    sources = range(max(map(len, probe.shares), default=0))
    with torch.no_grad():
        loss = float(model(depth_exam(LOSS_ROWS), labels=depth_exam(LOSS_ROWS)).loss)
    kept = dataclasses.asdict(probe) | {
        "loss": loss,
        "loss_whole": loss_when_cut(model, rows, None),
        "loss_without": [loss_when_cut(model, rows, source) for source in sources],
    }
    return {"parameters": sum(p.numel() for p in model.parameters())} | _rounded(kept)


def _rounded(x: Any) -> Any:
    """Five figures are more than any of it is good for, and keep the file small."""
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list) else float(f"{x:.5g}")


# ---- showing


def pick(result: dict[str, Any], block_size: float | None) -> list[dict[str, Any]]:
    """The models of one block size, by seed."""
    return sorted((m for m in result["models"] if m["block_size"] == block_size), key=lambda m: m["seed"])


def text_table(result: dict[str, Any]) -> str:
    """One row a block size, lowest to highest seed."""
    seeds = {m["seed"] for m in result["models"]}
    lines = [
        f"{result['layers']} layers, {len(seeds)} seed(s), lowest to highest; loss in nats per held-out byte",
        f"{'model':10}{'loss':>16}{'last / first output':>22}{'largest / smallest gradient':>30}",
    ]
    for size in dict.fromkeys(m["block_size"] for m in result["models"]):
        models = pick(result, size)
        cells = [
            from_lowest([m["loss"] for m in models], 3),
            from_lowest([growth(m) for m in models], 1),
            from_lowest([max(m["gradients"]) / min(m["gradients"]) for m in models], 1),
        ]
        lines.append(f"{size_name(size):10}" + "".join(f"{c:>{w}}" for c, w in zip(cells, (16, 22, 30), strict=True)))
    return "\n".join(lines)


def growth(model: dict[str, Any]) -> float:
    """Mean size of what the last four sub-layers add, over that of the first four."""
    return sum(model["output_rms"][-4:]) / sum(model["output_rms"][:4])
