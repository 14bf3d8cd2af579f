"""Expert parallelism: each rank keeps some experts, and tokens travel to them and back.

    home(e)  = e // (E / R)                      R ranks, contiguous ranges of experts; everything else is on every rank
    load     = all-gather of [E] counts          load[r, e]: how often the tokens of rank r chose expert e
    dispatch   a row z for each chosen expert    uneven all-to-all, source -> home; K3's rows are latents
    E_i(z)     at home, grouped by expert
    combine    the same rows, the other way      weights come after w2, where the token lives: u = sum_i p_i E_i(z)

Backward, gradients take the same two roads in the other direction. So if rank r's loss is its share of the loss of the
whole batch, an expert's gradient is complete at its home, and all else is summed by one all-reduce: what comes out is
the dense model on the whole batch. Built on torch.distributed (gloo, or NCCL on GPUs), started by torchrun.
Sources: Kimi K3 report §5.2 (k3-architecture §2.7); GShard, arXiv 2006.16668 §3; Switch Transformer, arXiv 2101.03961.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3lite.budget import row_bytes
from k3lite.checkpoint import load_model, save_model
from k3lite.model import K3ForCausalLM
from k3lite.moe import Experts, LatentMoE, Router
from k3lite.ops.experts import grouped_experts
from k3lite.ops.pointwise import upcast
from k3lite.train import OneRank

TIMEOUT = 60.0  # seconds that a rank waits for the others before it gives up


class RankError(RuntimeError):
    """Another rank is gone, or silent for too long: this one cannot go on."""


# ---- the ranks


@contextlib.contextmanager
def start(wanted: int | None = None, *, device: str = "cpu", timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, and leave them at the end.

    wanted: how many there should be, None for any.   device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank).
    Raises ValueError, the same on every rank, where there are no ranks to join or another number of them.
    """
    if not dist.is_available():
        raise ValueError("ranks: this PyTorch was built without torch.distributed")
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("ranks: none to join; start with torchrun --standalone --nproc-per-node 2 -m k3lite.cli ...")
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    # Its functions keep the group that is there when they are first imported (torch does that when it pleases), and a
    # gloo thread that outlives `destroy_process_group` aborts the process at exit.
    importlib.import_module("torch.distributed.nn")
    backend = "nccl" if place.type == "cuda" else "gloo"
    with _others(timeout):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield Ranks(wanted, place, timeout)
    finally:
        dist.destroy_process_group()


class Ranks(OneRank):
    """The ranks of the default process group, seen from one of them. Every method is called by all, in the same order."""

    def __init__(self, wanted: int | None = None, device: torch.device | str = "cpu", timeout: float = TIMEOUT) -> None:
        """timeout: seconds, as given to the process group; for messages only. Raises ValueError as `start` does."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device, self.timeout = torch.device(device), timeout
        self.first = self.rank == 0
        with self.agreed():
            if wanted not in (None, self.size):
                raise ValueError(f"ranks: {self.size} were started, wanted {wanted}")

    # -- exchanges

    def total(self, share: Tensor) -> Tensor:
        """Sum over ranks of tensors of one shape; whole numbers stay exact."""
        total = share.detach().contiguous().clone()
        with _others(self.timeout):
            dist.all_reduce(total)
        return total

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's x, in the order of ranks: x [n,...] -> [R n,...]; n may differ from rank to rank."""
        rows = x.new_zeros(self.size, dtype=torch.long)
        rows[self.rank] = len(x)
        received = self.total(rows).tolist()
        return self.exchange(x.repeat(self.size, *(1 for _ in x.shape[1:])), [len(x)] * self.size, received)

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Uneven all-to-all: sent[s] rows to rank s, in that order; received[s] rows from rank s. Differentiable."""
        return _Exchange.apply(rows, sent, received, self.timeout)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A ValueError that one rank's body raises is raised on every rank, so that nobody waits for it in vain."""
        problem, cause = "", None
        try:
            yield
        except ValueError as e:
            problem, cause = str(e) or type(e).__name__, e
        if not self.any(bool(problem)):
            return
        letters = torch.tensor(list(problem.encode()), dtype=torch.uint8, device=self.device)
        length = torch.zeros(self.size, dtype=torch.long, device=self.device)
        length[self.rank] = len(letters)
        texts = self.gather(letters).cpu().split(self.total(length).tolist())
        problems = {r: bytes(t.tolist()).decode() for r, t in enumerate(texts) if len(t)}
        if len(problems) == self.size and len(set(problems.values())) == 1:
            raise ValueError(problems[0]) from cause
        raise ValueError("; ".join(f"rank {r}: {text}" for r, text in problems.items())) from cause

    def any(self, flag: bool) -> bool:
        return bool(self.total(torch.tensor([int(flag)], device=self.device)))

    def same(self, name: str, number: int) -> None:
        numbers = self.gather(torch.tensor([number], device=self.device)).tolist()
        if len(set(numbers)) > 1:
            raise ValueError(f"{name}: {numbers} by rank, wanted the same on all (a folder that all ranks see)")

    # -- a batch, its loss and its gradients

    def part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's rows; the first ranks have one more where they do not divide.

        Raises ValueError on every rank if one has no row, or none of its labels asks for a token.
        """
        ids, labels = (x.tensor_split(self.size)[self.rank].to(self.device) for x in batch)
        if len(batch[0]) < self.size:
            raise ValueError(f"batch: got {len(batch[0])} row(s) for {self.size} ranks, wanted one each at least")
        with self.agreed():
            if not bool((labels[:, 1:] != -100).any()):
                raise ValueError("labels: no token is asked for in this rank's rows")
        return ids, labels

    def weigh(self, loss: Tensor, labels: Tensor) -> Tensor:
        """loss: mean over the tokens that this rank's labels [B,T] ask for (`K3ForCausalLM`, without a mask)."""
        asked = (labels[:, 1:] != -100).sum()
        return loss * (asked.to(loss.dtype) / self.total(asked))

    def sum_gradients(self, model: nn.Module) -> None:
        """One all-reduce (a dtype); experts' gradients are complete at home already."""
        grads: dict[torch.dtype, list[Tensor]] = {}
        for p in model.parameters():
            if p.grad is not None and not is_shared_out(p):
                grads.setdefault(p.grad.dtype, []).append(p.grad)
        for same_dtype in grads.values():
            total = self.total(torch.cat([g.flatten() for g in same_dtype]))
            for g, t in zip(same_dtype, total.split([g.numel() for g in same_dtype]), strict=True):
                g.copy_(t.view_as(g))

    def gradient_norm(self, model: nn.Module) -> Tensor:
        grads: dict[bool, list[Tensor]] = {True: [], False: []}
        for p in model.parameters():
            if p.grad is not None:
                grads[is_shared_out(p)].append(p.grad)
        here, everywhere = (torch.nn.utils.get_total_norm(grads[shared]).double() for shared in (True, False))
        return (self.total(here.square().to(self.device)) + everywhere.square()).sqrt()

    # -- what is shared out

    def experts(self, count: int) -> slice:
        """The experts at home here. Raises ValueError if `count` cannot be shared out evenly."""
        if self.size > count:
            raise ValueError(f"ranks: {self.size} for {count} experts, wanted no more ranks than experts")
        if count % self.size:
            raise ValueError(f"ranks: {self.size} do not divide {count} experts evenly")
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def whole(self, tensor: Tensor, owner: Tensor) -> Tensor:
        return self.gather(tensor) if is_shared_out(owner) and tensor.dim() else tensor

    def mine(self, tensor: Tensor, owner: Tensor) -> Tensor:
        return tensor[self.experts(len(tensor))] if is_shared_out(owner) and tensor.dim() else tensor


@contextlib.contextmanager
def _others(timeout: float) -> Iterator[None]:
    """Around an exchange: say plainly that it failed because of the others."""
    try:
        yield
    except RuntimeError as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise RankError(f"another rank is gone, or silent for {timeout:g} s ({reason})") from e


class _Exchange(torch.autograd.Function):
    """The public all_to_all_single has no gradient (its differentiable twin is deprecated for a private module)."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], timeout: float) -> Tensor:
        ctx.splits, ctx.timeout = (sent, received), timeout
        out = rows.new_empty(sum(received), *rows.shape[1:])
        with _others(timeout):
            dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.splits
        return _Exchange.apply(grad, received, sent, ctx.timeout), None, None, None


# ---- the layer


@dataclass(frozen=True, eq=False)
class Traffic:
    """What one dispatch sends; the combine sends as much back, and a backward pass both again."""

    load: Tensor  # [R,E] rows by source rank and expert
    width: int  # numbers in a row

    @property
    def rows(self) -> Tensor:
        """[R,R] rows from each rank to each home."""
        return self.load.unflatten(1, (len(self.load), -1)).sum(-1)

    @property
    def wire_rows(self) -> int:
        """Rows that leave their rank."""
        return int(self.rows.sum() - self.rows.trace())

    def wire_bytes(self, number: str, width: int | None = None) -> int:
        """Bytes that leave their rank, for `number` as in `budget.row_bytes`, at this width or another."""
        return self.wire_rows * row_bytes(self.width if width is None else width, number)


class RankExperts(nn.Module):
    """The experts of one rank in the place of `moe.Experts`: [N,D] of its tokens -> [N,D], N as each rank likes."""

    def __init__(self, experts: Experts, ranks: Ranks) -> None:
        """Keeps a copy of this rank's part: w1, w3 [E/R,I,D], w2 [E/R,D,I]. Raises ValueError for experts that round."""
        super().__init__()
        if experts.rounding is not None:
            raise ValueError("rounding: experts on several ranks do not round; qat.set_rounding(model, False) first")
        self.count, self.ranks, self.act = len(experts.w1), ranks, experts.act
        home = ranks.experts(self.count)
        for name in ("w1", "w3", "w2"):
            part = nn.Parameter(getattr(experts, name).detach()[home].clone())
            part.shared_out = True
            setattr(self, name, part)
        self.traffic: Traffic | None = None  # of the last forward pass

    def forward(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As `ops.experts.grouped_experts`. Raises ValueError on every rank if one has an expert id or a top-k out of range."""
        with self.ranks.agreed():
            if not 1 <= chosen.shape[1] <= self.count:
                raise ValueError(f"top-k: got {chosen.shape[1]} experts a token, wanted 1 to {self.count}")
            if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.count:
                raise ValueError(
                    f"experts: got ids {int(chosen.min())}..{int(chosen.max())}, wanted 0..{self.count - 1}"
                )
        N, k = chosen.shape
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by home
        load = self.ranks.gather(chosen.flatten().bincount(minlength=self.count).unsqueeze(0))
        self.traffic = Traffic(load.cpu(), z.shape[1])
        sent, received = (self.traffic.rows[self.ranks.rank].tolist(), self.traffic.rows[:, self.ranks.rank].tolist())

        rows = self.ranks.exchange(z[order // k], sent, received)
        back = self.ranks.exchange(self._at_home(rows, load), received, sent)

        out = back[order.argsort()].unflatten(0, (N, k))
        return (weights.unsqueeze(-1) * upcast(out)).sum(1).to(z.dtype)

    def _at_home(self, rows: Tensor, load: Tensor) -> Tensor:
        """Each row through its expert. Rows come rank by rank, within a rank by expert, so `load` tells whose they are."""
        here = load[:, self.ranks.experts(self.count)]
        ids = torch.arange(here.shape[1], device=rows.device).repeat(len(here)).repeat_interleave(here.flatten())
        ones = upcast(rows.new_ones(len(rows), 1))
        return grouped_experts(rows, ids.unsqueeze(1), ones, self.w1, self.w3, self.w2, self.act)


class RankRouter(Router):
    """A router among several: errors are everybody's, and balance is kept over the tokens of all ranks."""

    ranks: Ranks

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with self.ranks.agreed():
            return super().forward(x, real)


def share_experts(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Leave on each rank its part of the experts of every LatentMoE in `model`, in place.

    The model must be the same on all ranks (same seed or same file). Raises ValueError as `Ranks.experts` does.
    """
    for layer in [m for m in model.modules() if isinstance(m, LatentMoE)]:
        if layer.gate.rule == "auxiliary":
            raise ValueError("rule: got 'auxiliary', a loss over the tokens of one rank; on several choose another")
        layer.experts = RankExperts(layer.experts, ranks)
        layer.gate.__class__, layer.gate.ranks = RankRouter, ranks
        layer.gate.reduce, layer.gate.gather = ranks.total, ranks.gather
    return model


def is_shared_out(p: Tensor) -> bool:
    """Whether ranks hold different parts of this parameter, cut along its first axis."""
    return getattr(p, "shared_out", False)


# ---- checkpoints: files hold the whole model, whatever number of ranks wrote it


def whole_model(model: K3ForCausalLM, ranks: Ranks) -> K3ForCausalLM:
    """The dense model, on every rank, in eval mode."""
    live = model.state_dict(keep_vars=True).items()
    with torch.device("meta"):
        dense = K3ForCausalLM(model.config)
    dense.load_state_dict({name: ranks.whole(p.detach(), p).clone() for name, p in live}, assign=True)
    return dense.eval()


def save_shared(model: K3ForCausalLM, folder: str | Path, ranks: Ranks) -> None:
    """`checkpoint.save_model` of the whole model, written by the first rank; returns when it is there."""
    dense = whole_model(model, ranks)
    with ranks.agreed():
        if ranks.first:
            save_model(dense, folder)


def load_shared(folder: str | Path, ranks: Ranks) -> K3ForCausalLM:
    """A model that any number of ranks wrote, or one, shared out over these. Raises CheckpointError's text on all."""
    with ranks.agreed():
        model = load_model(folder)
    return share_experts(model.to(ranks.device), ranks)
