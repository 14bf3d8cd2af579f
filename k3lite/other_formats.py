"""Formats that K3 does not use, to hold MX beside: whole numbers of four bits, and an 8-bit float with one scale a tensor.

    INT4 : round(x / s) in -7..7,  s = amax / 7    one fp16 scale for a row, or for a group of columns
    FP8  : E4M3(x / s),            s = amax / 448  one fp32 scale for the whole tensor

Both scales are any number, not a power of two, so that the largest magnitude is met and nothing is clipped, as far as
fp16 reaches: numbers above 7 * 65504 saturate, and scales below 2^-14 lose bits and vanish in the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3lite.minifloat import FORMATS, nearest_codes

INT4_LARGEST = 7  # symmetric: -8 is left out


def round_int4(x: Tensor, group: int | None = None) -> Tensor:
    """x [..., n] as symmetric INT4 would keep it. group: columns that share a scale; None: the whole row.

    Raises ValueError if n is no multiple of the group.
    """
    n = x.shape[-1]
    if group is not None and (group < 1 or n % group):
        raise ValueError(f"group: got {group} for {n} columns, wanted a divisor")
    parts = x.unflatten(-1, (-1, group or n))
    scale = parts.abs().amax(-1, keepdim=True).float() / INT4_LARGEST
    scale = scale.clamp(max=torch.finfo(torch.float16).max)  # an infinite one would make NaN of everything
    scale = scale.to(torch.float16).to(x.dtype)
    scale = scale.masked_fill(scale == 0, 1)  # of zeros, and of numbers below what fp16 has
    return ((parts / scale).round().clamp(-INT4_LARGEST, INT4_LARGEST) * scale).flatten(-2)


def round_fp8(x: Tensor) -> Tensor:
    """x of any shape as E4M3 with one scale would keep it."""
    f = FORMATS["e4m3"]
    scale = x.abs().max().float() / f.largest
    scale = scale.masked_fill(scale == 0, 1)
    return (f.values[nearest_codes(x.float() / scale, f).long()] * scale).to(x.dtype)
