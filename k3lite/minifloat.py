"""Small floats from their bits: the elements of MX formats, one number at a time (`mx.py` has the blocks).

A code of b bits is sign | exponent field E | mantissa field M (m bits). With the format's bias its value is

    E = 0:   (-1)^sign * 2^(1 - bias) * M / 2^m                  zero and the subnormals
    E > 0:   (-1)^sign * 2^(E - bias) * (1 + M / 2^m)

The magnitudes rise with their codes, so rounding is counting: how many codes up from zero is the nearest value?

Source: OCP Microscaling Formats (MX) v1.0, as in k3-architecture §2.6.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ElementFormat:
    """A small float, sign bit first. `infinity` and `nans` are the codes, without sign, that are no numbers."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinity: int | None
    nans: tuple[int, ...]

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign(self) -> int:
        """The sign bit; codes below it are the magnitudes, in rising order."""
        return 1 << (self.bits - 1)

    @functools.cached_property
    def largest_code(self) -> int:
        """The largest finite magnitude's."""
        return max(c for c in range(self.sign) if math.isfinite(self.value(c)))

    @property
    def largest(self) -> float:
        return self.value(self.largest_code)

    @property
    def e_max(self) -> int:
        """floor(log2 largest)."""
        return math.frexp(self.largest)[1] - 1

    def value(self, code: int) -> float:
        """What a code stands for: the formula at the head of this file."""
        sign = -1.0 if code & self.sign else 1.0
        magnitude = code & (self.sign - 1)
        if magnitude in self.nans:
            return math.nan
        if magnitude == self.infinity:
            return sign * math.inf
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        fraction = mantissa / (1 << self.mantissa_bits)
        return sign * (
            2.0 ** (exponent - self.bias) * (1 + fraction) if exponent else 2.0 ** (1 - self.bias) * fraction
        )

    @functools.cached_property
    def values(self) -> Tensor:
        """Of all codes in order, fp64."""
        return torch.tensor([self.value(c) for c in range(2 * self.sign)], dtype=torch.float64, device="cpu")


FORMATS = {
    f.name: f
    for f in (
        ElementFormat("e2m1", 2, 1, bias=1, infinity=None, nans=()),  # MXFP4: 0 .5 1 1.5 2 3 4 6
        ElementFormat("e4m3", 4, 3, bias=7, infinity=None, nans=(0x7F,)),  # MXFP8: up to 448
        ElementFormat("e5m2", 5, 2, bias=15, infinity=0x7C, nans=(0x7D, 0x7E, 0x7F)),  # MXFP8: up to 57344, coarser
    )
}


def nearest_codes_naive(v: Tensor, f: ElementFormat) -> Tensor:
    """The definition: of the finite values the nearest one's code, of two equally near ones the even code. uint8."""
    grid = f.values[: f.largest_code + 1].to(v.device)
    distance = (v.abs().double().clamp(max=f.largest).unsqueeze(-1) - grid).abs()
    even_first = torch.tensor([*range(0, len(grid), 2), *range(1, len(grid), 2)], device=v.device)
    code = even_first[distance[..., even_first].sort(dim=-1, stable=True).indices[..., 0]]
    return (code + f.sign * v.signbit()).to(torch.uint8)


def nearest_codes(v: Tensor, f: ElementFormat) -> Tensor:
    """`nearest_codes_naive` by the bits of fp32 or fp64: finite v of any shape -> codes, uint8.

    A magnitude with exponent e (not below that of the smallest normal, e_min) is a whole number of steps of 2^(e - m). Magnitude codes
    count such steps: code = steps + (e - e_min) 2^m. One step too many is the first code of the next exponent, as it should be.
    """
    integer, mantissa, bias = (torch.int64, 52, 1023) if v.dtype == torch.float64 else (torch.int32, 23, 127)
    m, smallest = f.mantissa_bits, bias + 1 - f.bias
    a = v.abs().clamp_(max=f.largest)
    exponent = a.view(integer).bitwise_and(-1 << mantissa).clamp_(min=smallest << mantissa)  # still in its place
    steps = a.mul_((((2 * bias + m) << mantissa) - exponent).view(v.dtype)).round_()  # times 2^(m - e), exact
    code = steps.to(integer).add_(exponent.bitwise_right_shift_(mantissa - m)).sub_(smallest << m)
    sign = v.view(integer).bitwise_right_shift(v.element_size() * 8 - f.bits).bitwise_and_(f.sign)
    return code.bitwise_or_(sign).to(torch.uint8)
