"""Training that can be stopped: AdamW, warm-up and cosine, a checkpoint every few steps.

A step's batch depends on its number alone, so a run that was killed goes on from its last checkpoint and ends
with the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from k3lite.checkpoint import CheckpointError, open_safetensors, write_atomically
from k3lite.model import K3ForCausalLM

STATE = "train_state.safetensors"
BatchAt = Callable[[int], tuple[Tensor, Tensor]]  # step -> input_ids [B,T], labels [B,T]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. Everything that decides the final weights, with the model's config and the data."""

    steps: int
    lr: float
    seed: int = 0
    warmup: int = 40
    final_lr: float = 0.05  # the cosine ends at this share of lr
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01  # on matrices only
    clip: float = 1.0
    task: str = ""  # names the data: a checkpoint of another task is not resumed

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, wanted 1 or more")
        if not self.lr > 0:
            raise ValueError(f"lr: got {self.lr:g}, wanted a positive number")

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then cosine from lr to final_lr * lr."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.lr * min(1.0, (step + 1) / self.warmup) * (self.final_lr + (1 - self.final_lr) * cosine)


class Stopped(Exception):
    """Training was interrupted after `step` steps; everything up to there is saved if a folder was given."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after {step} steps")
        self.step = step


def make_optimizer(model: K3ForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay on matrices; none on norms, gates (A_log, dt_bias) and convolutions (k3-architecture §2.3)."""
    decay, plain = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (decay if p.dim() >= 2 and "conv1d" not in name else plain).append(p)
    groups = [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2))


def train(
    model: K3ForCausalLM,
    batch_at: BatchAt,
    recipe: Recipe,
    *,
    folder: Path | None = None,
    save_every: int = 25,
    on_step: Callable[[int, float], None] | None = None,
    progress: bool = True,
) -> list[float]:
    """Train in place and return the loss of every step (nats per asked token).

    folder: where checkpoints go; a checkpoint of the same recipe found there is continued.
    on_step(step, loss): called after every step.   Ctrl-C ends the step in hand, saves, and raises Stopped.
    Raises CheckpointError if the folder holds a checkpoint of something else, or a damaged one.
    """
    optimizer = make_optimizer(model, recipe)
    losses = _resume(folder / STATE, model, optimizer, recipe) if folder else []
    model.train()
    with (
        _interrupts() as interrupted,
        tqdm(total=recipe.steps, initial=len(losses), desc="training", disable=not progress) as bar,
    ):
        for step in range(len(losses), recipe.steps):
            losses.append(_step(model, optimizer, batch_at(step), recipe, step))
            bar.update()
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            if on_step:
                on_step(step, losses[-1])
            done = step + 1
            if folder and (done % save_every == 0 or done == recipe.steps or interrupted()):
                _save(folder / STATE, model, optimizer, recipe, losses)
            if interrupted() and done < recipe.steps:
                raise Stopped(done)
    model.eval()
    return losses


def _step(
    model: K3ForCausalLM, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], recipe: Recipe, step: int
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr_at(step)
    ids, labels = batch
    loss = model(ids, labels=labels).loss
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"training: the loss became {loss.item()} at step {step}; lower lr (now {recipe.lr:g})")
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    model.balance_experts()
    return loss.item()


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, so that a step is never cut in two; a second one is immediate."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield flag.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def note(signum, frame) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield flag.is_set
    finally:
        signal.signal(signal.SIGINT, before)


# ---- checkpoints of a training in progress


def _identity(model: K3ForCausalLM, recipe: Recipe) -> str:
    return json.dumps({"config": model.config.to_dict(), "recipe": dataclasses.asdict(recipe)}, sort_keys=True)


def _tensors(model: K3ForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live tensors that a checkpoint holds: weights and both moments of AdamW."""
    tensors = {f"model.{name}": p for name, p in model.state_dict().items()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(params):
        for key, value in optimizer.state[p].items():
            tensors[f"optimizer.{i}.{key}"] = value
    return tensors


def _save(
    path: Path, model: K3ForCausalLM, optimizer: torch.optim.Optimizer, recipe: Recipe, losses: list[float]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().contiguous().clone() for k, v in _tensors(model, optimizer).items()}
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    write_atomically(path, lambda tmp: save_file(tensors, tmp, {"identity": _identity(model, recipe)}))


def _resume(path: Path, model: K3ForCausalLM, optimizer: torch.optim.Optimizer, recipe: Recipe) -> list[float]:
    """Load the checkpoint at `path`, if there is one, and return its losses; an empty list starts anew."""
    if not path.exists():
        return []
    with open_safetensors(path) as f:
        if (f.metadata() or {}).get("identity") != _identity(model, recipe):
            raise CheckpointError(f"{path}: belongs to another recipe, seed or model; choose another folder or restart")
        saved = {name: f.get_tensor(name) for name in f.keys()}
    losses = saved.pop("losses").tolist()
    # AdamW makes a parameter's moments when it first meets a gradient; make the same ones now, to be filled.
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if f"optimizer.{i}.step" in saved:
            moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros(()), **moments}
    live = _tensors(model, optimizer)
    if live.keys() != saved.keys():
        raise CheckpointError(f"{path}: does not hold the tensors of this training; restart")
    with torch.no_grad():
        for name, value in saved.items():
            live[name].copy_(value)
    return losses
