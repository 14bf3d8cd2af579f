"""Training that can be stopped: AdamW or Muon, warm-up and cosine, a checkpoint every few steps.

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
from k3lite.optim import MuonAdamW
from k3lite.qat import rounding_of

STATE = "train_state.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")  # of AdamW the first three, of Muon the last
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


@dataclass(frozen=True)
class MuonRecipe(Recipe):
    """A recipe with Muon for matrices and AdamW for the rest (`optim.MuonAdamW`). weight_decay: of Muon's matrices only."""

    momentum: float = 0.95


class OneRank:
    """What a training asks of the ranks that share it. Here there is one and nothing to do; several: `parallel.Ranks`."""

    first = True  # the rank that writes files and shows progress

    def part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's rows of a batch."""
        return batch

    def weigh(self, loss: Tensor, labels: Tensor) -> Tensor:
        """The mean over this rank's tokens as its share of the mean over all."""
        return loss

    def total(self, share: Tensor) -> Tensor:
        """Sum over ranks, without a gradient."""
        return share.detach()

    def sum_gradients(self, model: torch.nn.Module) -> None:
        """Sum over ranks the gradients of what every rank holds."""

    def gradient_norm(self, model: torch.nn.Module) -> Tensor:
        """Norm of the gradient of the whole model."""
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    def whole(self, tensor: Tensor, owner: Tensor) -> Tensor:
        """The whole of `tensor`, of which ranks hold parts if `owner`, its parameter, is shared out."""
        return tensor

    def mine(self, tensor: Tensor, owner: Tensor) -> Tensor:
        """The part that this rank holds of a whole tensor."""
        return tensor

    def agreed(self) -> contextlib.AbstractContextManager[None]:
        """Let a ValueError of one rank's body be raised on every rank. No other exchange may be inside."""
        return contextlib.nullcontext()

    def same(self, name: str, number: int) -> None:
        """Raise ValueError on every rank if `number` is not the same on all."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on some rank."""
        return flag


ONE_RANK = OneRank()


class Stopped(Exception):
    """Training was interrupted after `step` steps; everything up to there is saved if a folder was given."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after {step} steps")
        self.step = step


def make_optimizer(model: K3ForCausalLM, recipe: Recipe) -> torch.optim.AdamW | MuonAdamW:
    """Weight decay on matrices; none on norms, gates (A_log, dt_bias) and convolutions (k3-architecture §2.3)."""
    if isinstance(recipe, MuonRecipe):
        betas = (recipe.beta1, recipe.beta2)
        return MuonAdamW(model, recipe.lr, recipe.weight_decay, betas, recipe.momentum)
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
    ranks: OneRank = ONE_RANK,
) -> list[float]:
    """Train in place and return the loss of every step (nats per asked token).

    folder: where checkpoints go; a checkpoint of the same recipe found there is continued.
    on_step(step, loss): called after every step.   Ctrl-C ends the step in hand, saves, and raises Stopped.
    ranks: who shares the work. Each calls this alike, with the batches of all; a checkpoint fits any number of them.
    Raises CheckpointError if the folder holds a checkpoint of something else, or a damaged one.
    """
    if isinstance(recipe, MuonRecipe) and ranks is not ONE_RANK:
        raise ValueError(
            "recipe: got Muon on several ranks, wanted AdamW: a rank's views of experts are not shared out"
        )
    optimizer = make_optimizer(model, recipe)
    with ranks.agreed():
        losses = _resume(folder / STATE, model, optimizer, recipe, ranks) if folder else []
    ranks.same("finished steps in the folder", len(losses))
    model.train()
    with (
        _interrupts() as interrupted,
        tqdm(total=recipe.steps, initial=len(losses), desc="training", disable=not (progress and ranks.first)) as bar,
    ):
        for step in range(len(losses), recipe.steps):
            losses.append(_step(model, optimizer, batch_at(step), recipe, step, ranks))
            bar.update()
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            if on_step:
                on_step(step, losses[-1])
            done, stop = step + 1, ranks.any(interrupted())
            if folder and (done % save_every == 0 or done == recipe.steps or stop):
                _save(folder / STATE, model, optimizer, recipe, losses, ranks)
            if stop and done < recipe.steps:
                raise Stopped(done)
    model.eval()
    return losses


def _step(
    model: K3ForCausalLM,
    optimizer: torch.optim.AdamW | MuonAdamW,
    batch: tuple[Tensor, Tensor],
    recipe: Recipe,
    step: int,
    ranks: OneRank,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr_at(step)
    ids, labels = ranks.part(batch)
    share = ranks.weigh(model(ids, labels=labels).loss, labels)
    loss = ranks.total(share).item()
    if not math.isfinite(loss):
        raise ValueError(f"training: the loss became {loss} at step {step}; lower lr (now {recipe.lr:g})")
    optimizer.zero_grad()
    (share + ranks.weigh(model.auxiliary_loss(), labels)).backward()  # the losses reported leave the second out
    ranks.sum_gradients(model)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), recipe.clip, ranks.gradient_norm(model))
    optimizer.step()
    model.balance_experts()
    return loss


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
    identity = {"config": model.config.to_dict(), "recipe": dataclasses.asdict(recipe)}
    if rounding := rounding_of(model):  # a stage with rounding is not the same as one without
        identity["rounding"] = rounding
    return json.dumps(identity, sort_keys=True)


def _tensors(model: K3ForCausalLM, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What a checkpoint holds, weights and the moments of the optimizer: name, live tensor, the parameter it belongs to."""
    for name, p in model.state_dict(keep_vars=True).items():
        yield f"model.{name}", p, p
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(params):
        for key, value in optimizer.state[p].items():
            yield f"optimizer.{i}.{key}", value, p


def _save(
    path: Path,
    model: K3ForCausalLM,
    optimizer: torch.optim.AdamW | MuonAdamW,
    recipe: Recipe,
    losses: list[float],
    ranks: OneRank,
) -> None:
    live = _tensors(model, optimizer)
    tensors = {name: ranks.whole(value.detach(), owner).contiguous().clone() for name, value, owner in live}
    if not ranks.first:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    write_atomically(path, lambda tmp: save_file(tensors, tmp, {"identity": _identity(model, recipe)}))


def _resume(
    path: Path, model: K3ForCausalLM, optimizer: torch.optim.AdamW | MuonAdamW, recipe: Recipe, ranks: OneRank
) -> list[float]:
    """Load the checkpoint at `path`, if there is one, and return its losses; an empty list starts anew."""
    if not path.exists():
        return []
    with open_safetensors(path) as f:
        if (f.metadata() or {}).get("identity") != _identity(model, recipe):
            raise CheckpointError(f"{path}: belongs to another recipe, seed or model; choose another folder or restart")
        saved = {name: f.get_tensor(name) for name in f.keys()}
    losses = saved.pop("losses").tolist()
    # An optimizer makes a parameter's moments when it first meets a gradient; make the same ones now, to be filled.
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if keys := [key for key in MOMENTS if f"optimizer.{i}.{key}" in saved]:
            optimizer.state[p] = {key: torch.zeros(()) if key == "step" else torch.zeros_like(p) for key in keys}
    live = {name: (value, owner) for name, value, owner in _tensors(model, optimizer)}
    if live.keys() != saved.keys():
        raise CheckpointError(f"{path}: does not hold the tensors of this training; restart")
    with torch.no_grad():
        for name, value in saved.items():
            target, owner = live[name]
            target.copy_(ranks.mine(value, owner))
    return losses
