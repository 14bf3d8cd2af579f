"""Microscaling (MX) numbers: blocks of 32 small floats that share one power of two.

An element is a small float (`minifloat.py`). A block's scale is one byte s (E8M0: eight bits of exponent and nothing
else), worth 2^(s - 127); 255 is NaN. A number is value * scale: 4 + 8/32 = 4.25 bits in MXFP4 (E2M1), 8.25 in MXFP8 (E4M3 or E5M2).

Encoding: choose the scale from the block's largest magnitude (`SCALE_RULES`), divide, round to the nearest value and on
a tie to the even code; what is larger than the largest value becomes the largest value (saturation, never inf).
* The sign of a zero is kept. A block of zeros has the scale byte 0, which is 2^-127 and not zero.
* A block that holds a NaN or an infinity becomes NaN as a whole: scale byte 255, codes 0. It is never quietly finite.
* Scales end at 2^-127 and 2^127: below, numbers lose bits and vanish in the end; above (fp64 only) they saturate.
* Blocks lie along one axis. If its length is no multiple of 32, the last block is short and has its own scale.

Source: OCP Microscaling Formats (MX) v1.0, as in k3-architecture §2.6; packing as in the released files (§4).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from k3lite.config import MX_BLOCK
from k3lite.minifloat import FORMATS, ElementFormat, nearest_codes
from k3lite.ops.pointwise import upcast

BLOCK = MX_BLOCK
SCALE_BIAS, SCALE_NAN = 127, 255
PIECE = 2048  # blocks worked on at once: what is made on the way stays in a core's cache
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

# From the largest magnitude in a block to the exponent of its scale. `largest` is the format's largest value (6 in
# E2M1) and e_max its exponent (2).
SCALE_RULES = {
    "floor": "floor(log2 amax) - e_max: OCP's. amax / scale is in [2^e_max, 2^(e_max + 1)): above `largest` it is clipped",
    "ceil": "ceil(log2(amax / largest)): the smallest scale with which nothing is clipped; the topmost numbers of fp32 "
    "and bf16 may then round up to 2^128, which is inf there",
    "nearest": "round(log2(amax / largest)): the power of two nearest to amax / largest in ratio; clips by up to sqrt(2)",
}


# ---- scales


def scale_bytes(amax: Tensor, f: ElementFormat, scale_rule: str) -> Tensor:
    """E8M0 bytes from the largest magnitudes of blocks (fp32 or fp64), by `SCALE_RULES`. uint8, shape of amax."""
    fraction, exponent = torch.frexp(amax)  # amax = fraction * 2^exponent, fraction in [1/2, 1)
    largest = math.frexp(f.largest)[0]
    exponent = exponent - 1 - f.e_max
    if scale_rule == "ceil":
        exponent = exponent + (fraction > largest).int()
    elif scale_rule == "nearest":
        exponent = exponent - (fraction.double() < largest * math.sqrt(0.5)).int()  # fp32 would move the border
    byte = (exponent + SCALE_BIAS).clamp(0, SCALE_NAN - 1).masked_fill(amax == 0, 0)
    return byte.masked_fill(~amax.isfinite(), SCALE_NAN).to(torch.uint8)


@functools.cache
def _scale_values(dtype: torch.dtype, inverse: bool = False) -> Tensor:
    """What each scale byte is worth (or one over it), [256]: exact in all of `DTYPES`."""
    sign = -1 if inverse else 1
    powers = [2.0 ** (sign * (s - SCALE_BIAS)) for s in range(SCALE_NAN)]
    return torch.tensor([*powers, math.nan], dtype=torch.float64, device="cpu").to(dtype)


def scale_values(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(s - 127) of E8M0 bytes; NaN for 255."""
    return _look_up(_scale_values(dtype), scales)


def _look_up(table: Tensor, bytes_: Tensor) -> Tensor:
    return table.to(bytes_.device).index_select(0, bytes_.flatten().int()).view(bytes_.shape)


# ---- blocks


def encode(x: Tensor, format: str, axis: int = -1, scale_rule: str = "floor") -> tuple[Tensor, Tensor]:
    """Codes (one a byte) in the shape of x, and scales in that shape with ceil(n / 32) in place of the n along `axis`. uint8.

    x: fp32, bf16 or fp64.   format: "e2m1", "e4m3" or "e5m2".   scale_rule: one of `SCALE_RULES`.
    Raises ValueError for anything else.
    """
    f = _format(format)
    _check(x, axis, scale_rule)
    n = x.shape[axis]
    blocks = _blocks(x.movedim(axis, -1))
    codes = torch.empty(blocks.shape, dtype=torch.uint8, device=x.device)
    scales = codes.new_empty(blocks.shape[:-1])
    for piece, into, s in _pieces(blocks.view(-1, BLOCK), codes.view(-1, BLOCK), scales.view(-1)):
        into.copy_(_encode_blocks(piece, s, f, scale_rule))
    return codes.flatten(-2)[..., :n].movedim(-1, axis), scales.movedim(-1, axis)


def _encode_blocks(blocks: Tensor, scales: Tensor, f: ElementFormat, scale_rule: str) -> Tensor:
    """Codes of blocks [N, 32]; their scales are written into `scales` [N]."""
    wide = upcast(blocks)
    scales.copy_(scale_bytes(wide.abs().amax(-1), f, scale_rule))
    v = wide * _look_up(_scale_values(wide.dtype, inverse=True), scales).unsqueeze(-1)
    codes, lost = nearest_codes(v, f), scales == SCALE_NAN
    return codes.masked_fill_(lost.unsqueeze(-1), 0) if bool(lost.any()) else codes


def decode(
    codes: Tensor, scales: Tensor, format: str, axis: int = -1, dtype: torch.dtype = torch.float32
) -> Tensor:  # fmt: skip
    """The numbers that `encode` kept: value * scale, in `dtype`. Shapes as there; codes of other origin may be inf or NaN.

    The product is exact but for what lies beyond the smallest or largest number of `dtype`.
    Raises ValueError where shapes, dtypes or codes do not fit.
    """
    f = _format(format)
    _check_dtype("dtype", dtype)
    want = _scale_shape(codes.shape, axis)
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or tuple(scales.shape) != want:
        raise ValueError(
            f"codes, scales: got {codes.dtype} {tuple(codes.shape)} and {scales.dtype} {tuple(scales.shape)}, "
            f"wanted uint8 of that shape and uint8 {want}"
        )
    if f.bits < 8 and bool((codes >= 2 * f.sign).any()):
        raise ValueError(f"codes: got {int(codes.max())}, wanted 0..{2 * f.sign - 1} for {f.name}")
    n = codes.shape[axis]
    blocks = _blocks(codes.movedim(axis, -1))
    out = torch.empty(blocks.shape, dtype=dtype, device=codes.device)
    table, scale_of = f.values.to(dtype), scale_values(scales.movedim(axis, -1).reshape(-1, 1), dtype)
    for piece, into, s in _pieces(blocks.view(-1, BLOCK), out.view(-1, BLOCK), scale_of):
        torch.mul(_look_up(table, piece), s, out=into)
    return out.flatten(-2)[..., :n].movedim(-1, axis)


def fake_quantize(x: Tensor, format: str = "e2m1", axis: int = -1, scale_rule: str = "floor") -> Tensor:
    """decode(encode(x)) in x's shape and dtype. Arguments as in `encode`.

    The gradient is straight-through: it passes as if nothing had been rounded, for clipped numbers too (a clipped weight could
    never come back otherwise; hazards T22), and nothing flows through the scale.
    """
    return _FakeQuantize.apply(x, format, axis, scale_rule)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, format: str, axis: int, scale_rule: str) -> Tensor:
        return decode(*encode(x, format, axis, scale_rule), format, axis, x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, None, None


# ---- the released packing


def pack_mxfp4(w: Tensor, scale_rule: str = "floor") -> tuple[Tensor, Tensor]:
    """weight_packed [..., out, in/2] and weight_scale [..., out, in/32], uint8, of weights [..., out, in].

    Two E2M1 codes to a byte: the even column in the low nibble. A scale belongs to 32 columns of one row.
    Raises ValueError unless `in` is a multiple of 32: the released layout has no short blocks.
    """
    if w.dim() == 0 or w.shape[-1] % BLOCK:
        raise ValueError(f"weights: got shape {tuple(w.shape)}, wanted an input width that is a multiple of {BLOCK}")
    _check(w, -1, scale_rule)
    packed = torch.empty(*w.shape[:-1], w.shape[-1] // 2, dtype=torch.uint8, device=w.device)
    scales = packed.new_empty(*w.shape[:-1], w.shape[-1] // BLOCK)
    for piece, into, s in _pieces(_blocks(w).view(-1, BLOCK), packed.view(-1, BLOCK // 2), scales.view(-1)):
        codes = _encode_blocks(piece, s, FORMATS["e2m1"], scale_rule)
        pairs = codes.view(torch.int16)  # the even column in the low byte, the odd one in the high byte
        into.copy_(pairs.bitwise_or_(pairs >> 4).bitwise_and_(255))
    return packed, scales


def unpack_mxfp4(weight_packed: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights [..., out, in] of what `pack_mxfp4` made, in `dtype`. Raises ValueError where the two do not fit together."""
    check_packed(weight_packed, weight_scale)
    _check_dtype("dtype", dtype)
    *rows, half = weight_packed.shape
    out = torch.empty(*rows, 2 * half, dtype=dtype, device=weight_packed.device)
    table, scale_of = _byte_values(dtype), scale_values(weight_scale.reshape(-1, 1), dtype)
    for piece, into, s in _pieces(weight_packed.reshape(-1, BLOCK // 2), out.view(-1, BLOCK), scale_of):
        torch.mul(_look_up(table, piece).view(dtype), s, out=into)
    return out


def check_packed(weight_packed: Tensor, weight_scale: Tensor) -> None:
    """Raise ValueError unless they are uint8 [..., out, in/2] and [..., out, in/32]."""
    *rows, half = weight_packed.shape
    if {weight_packed.dtype, weight_scale.dtype} != {torch.uint8} or half % 16 or (
        tuple(weight_scale.shape) != (*rows, half // 16)
    ):  # fmt: skip
        raise ValueError(
            f"weight_packed, weight_scale: got {weight_packed.dtype} {tuple(weight_packed.shape)} and "
            f"{weight_scale.dtype} {tuple(weight_scale.shape)}, wanted uint8 [..., out, in/2] and [..., out, in/32]"
        )


@functools.cache
def _byte_values(dtype: torch.dtype) -> Tensor:
    """[256]: both E2M1 values of each byte side by side, as one number of twice the width, so that one look-up gets them."""
    byte = torch.arange(256, device="cpu")
    pair = FORMATS["e2m1"].values[torch.stack([byte & 15, byte >> 4], -1)].to(dtype)
    wide = {torch.bfloat16: torch.int32, torch.float32: torch.int64, torch.float64: torch.complex128}[dtype]
    return pair.view(wide).squeeze(-1)


# ---- inside


def _blocks(x: Tensor) -> Tensor:
    """[..., n] -> [..., ceil(n / 32), 32], contiguous; a short last block is filled up with zeros, which change nothing."""
    short = -x.shape[-1] % BLOCK
    whole = F.pad(x, (0, short)) if short else x
    return whole.unflatten(-1, (-1, BLOCK)).contiguous()


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of at most PIECE rows of each."""
    return zip(*(t.split(PIECE) for t in tensors), strict=True)


def _scale_shape(shape: torch.Size, axis: int) -> tuple[int, ...]:
    if not shape or not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis: got {axis} for shape {tuple(shape)}, wanted one of its axes")
    counts = list(shape)
    counts[axis] = -(-counts[axis] // BLOCK)
    return tuple(counts)


def _format(name: str) -> ElementFormat:
    if name not in FORMATS:
        raise ValueError(f"format: got {name!r}, wanted one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _check(x: Tensor, axis: int, scale_rule: str) -> None:
    _check_dtype("x", x.dtype)
    _scale_shape(x.shape, axis)
    check_scale_rule(scale_rule)


def check_scale_rule(scale_rule: str) -> None:
    """Raise ValueError for what is none of `SCALE_RULES`."""
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"scale_rule: got {scale_rule!r}, wanted one of {', '.join(SCALE_RULES)}")


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{name}: got {dtype}, wanted one of {', '.join(str(d) for d in DTYPES)}")
