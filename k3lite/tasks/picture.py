"""A picture in a small network: the place where the damage of rounding can be seen.

The network maps a point to its brightness: sines and cosines of the point, then residual gated MLPs with K3's SiTU, then one
number. It is trained on the 4,096 points of one picture, so every digit of its weights is in use, which in an untroubled
language model of this size is not so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3lite.ops.pointwise import situ_glu
from k3lite.other_formats import round_fp8, round_int4
from k3lite.qat import round_input, round_weight

SIDE = 64
FREQUENCIES, WIDTH, HIDDEN, BLOCKS = 48, 96, 192, 2
STEPS, LR, FINE_STEPS, FINE_LR = 800, 4e-3, 200, 1e-3

Rounding = Callable[[Tensor], Tensor]


def as_it_is(x: Tensor) -> Tensor:
    return x


# What is done to the weights and to the inputs of the gated MLPs' matrices.
ROUNDINGS: dict[str, tuple[Rounding, Rounding]] = {
    "none": (as_it_is, as_it_is),
    "MXFP8 weights and inputs": (round_input, round_input),
    "MXFP4 weights": (round_weight, as_it_is),
    "MXFP4 weights, MXFP8 inputs": (round_weight, round_input),
    "INT4 weights, a scale a row": (round_int4, as_it_is),
    "INT4 weights, a scale for 32": (lambda w: round_int4(w, 32), as_it_is),
    "FP8 weights, one scale": (round_fp8, as_it_is),
}
OURS = "MXFP4 weights, MXFP8 inputs"  # what K3 does to its routed experts


def points() -> Tensor:
    """[SIDE^2, 2]: x and y of every pixel, row by row, -1 to 1 from edge to edge."""
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, SIDE)] * 2, indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1)


def picture() -> Tensor:
    """[SIDE, SIDE] brightness from -1 to 1: rings, a chequerboard, a disc and a slope, one in each quarter."""
    x, y = points().view(SIDE, SIDE, 2).unbind(-1)
    radius = ((x + 0.5) ** 2 + (y + 0.5) ** 2).sqrt()
    rings = (radius * 14 * math.pi).sin().sign()
    chequers = ((x * 8).floor() + (y * 8).floor()) % 2 * 2 - 1
    disc = (((x + 0.5) ** 2 + (y - 0.5) ** 2) < 0.13).float() * 1.6 - 0.8
    slope = (x + y - 1).clamp(-1, 1)
    top, bottom = torch.where(x < 0, rings, chequers), torch.where(x < 0, disc, slope)
    return torch.where(y < 0, top, bottom)


class PictureMLP(nn.Module):
    """Points [N, 2] in -1..1 -> brightness [N]. `rounding` is one of ROUNDINGS, for all matrices but the first and the last."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def matrix(out: int, width: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(out, width, generator=g) * gain / math.sqrt(width))

        self.register_buffer("frequencies", torch.randn(FREQUENCIES, 2, generator=g) * 10)
        self.first, self.last = matrix(WIDTH, 2 * FREQUENCIES), matrix(1, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ParameterDict(
                {"w1": matrix(HIDDEN, WIDTH), "w3": matrix(HIDDEN, WIDTH), "w2": matrix(WIDTH, HIDDEN, 0.5)}
            )
            for _ in range(BLOCKS)
        )
        self.rounding = "none"

    def forward(self, points: Tensor) -> Tensor:
        weight, inputs = ROUNDINGS[self.rounding]
        angles = points @ self.frequencies.T
        h = torch.cat([angles.sin(), angles.cos()], -1) @ self.first.T
        for w in self.blocks:
            x = inputs(F.rms_norm(h, (WIDTH,)))
            hidden = situ_glu(x @ weight(w["w1"]).T, x @ weight(w["w3"]).T)
            h = h + inputs(hidden) @ weight(w["w2"]).T
        return (h @ self.last.T).squeeze(-1)


@dataclass(frozen=True)
class Fit:
    """A picture as a network shows it: [SIDE, SIDE], and its likeness in dB (higher is better)."""

    shown: Tensor
    psnr: float


def fit_picture(model: PictureMLP, steps: int, lr: float) -> None:
    """Train in place on the whole picture, with the rounding that the model has; cosine to zero."""
    where, wanted = points(), picture().flatten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(where) - wanted).square().mean().backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def as_shown(model: PictureMLP, rounding: str) -> Fit:
    """What a model shows when its matrices are rounded so."""
    before, model.rounding = model.rounding, rounding
    shown, wanted = model(points()).view(SIDE, SIDE), picture()
    model.rounding = before
    error = (shown - wanted).square().mean()
    return Fit(shown, float(10 * (4 / error).log10()))  # brightness has a range of 2


def tuned(model: PictureMLP, rounding: str, steps: int = FINE_STEPS) -> PictureMLP:
    """A copy that was trained on, with or without rounding."""
    other = PictureMLP(0)
    other.load_state_dict(model.state_dict())
    other.rounding = rounding
    fit_picture(other, steps, FINE_LR)
    return other
