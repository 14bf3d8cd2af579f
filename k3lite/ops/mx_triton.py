"""The product with packed MXFP4 weights as a Triton kernel: y = x W^T, W decoded a tile at a time and never stored.

A program makes a tile [BM, BN] of y. For each 32 * GROUPS columns of W it loads their bytes and scales, turns them into numbers by
their bits, and multiplies: even columns (low nibbles) with the even columns of x, odd with odd, so nothing is interleaved.

    code eem (e > 0) is the fp32 with exponent field e + 126 and mantissa m0...0, that is ((code & 7) << 22) + (126 << 23);
    the other two, 0 and 1, are 0 and 1/2.   scale byte s > 0 is the fp32 with exponent field s; 0 is 2^-127, 255 NaN.

Sums are fp32 (fp64 for fp64 inputs); bf16 inputs are multiplied in TF32 on a GPU, which is exact for a single product.
Run on a CPU with TRITON_INTERPRET=1, set before triton is imported. Only public names of Triton are used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BN, GROUPS = 64, 2  # rows of W in a tile; scales of a row taken at once: 32 bytes, the 32 that make a memory sector


@triton.jit
def _element(code, DTYPE: tl.constexpr):
    """E2M1 codes 0..15 as numbers."""
    magnitude = code & 7
    bits = tl.where(magnitude > 1, (magnitude << 22) + (126 << 23), magnitude * (126 << 23))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def _scale(byte, DTYPE: tl.constexpr):
    """E8M0 bytes as numbers."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def packed_linear_kernel(
    x, packed, scales, y, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    outs = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    live, wanted = (rows < M)[:, None], (outs < N)[None, :]
    total = tl.zeros([BM, BN], DTYPE)
    for start in range(0, K // 2, 16 * GROUPS):
        at = start + tl.arange(0, 16 * GROUPS)  # bytes of a row of W, each two columns
        inside = at < K // 2
        there = inside[:, None] & wanted
        byte = tl.load(packed + outs[None, :] * (K // 2) + at[:, None], mask=there, other=0).to(tl.int32)
        scale = tl.load(scales + outs[None, :] * (K // 32) + (at // 16)[:, None], mask=there, other=0).to(tl.int32)
        scale = _scale(scale, DTYPE)
        pair, read = x + rows[:, None] * K + 2 * at[None, :], live & inside[None, :]
        even, odd = tl.load(pair, mask=read, other=0.0).to(DTYPE), tl.load(pair + 1, mask=read, other=0.0).to(DTYPE)
        low, high = _element(byte & 15, DTYPE) * scale, _element(byte >> 4, DTYPE) * scale
        total += tl.dot(even, low, input_precision=PRECISION, out_dtype=DTYPE)
        total += tl.dot(odd, high, input_precision=PRECISION, out_dtype=DTYPE)
    tl.store(y + rows[:, None] * N + outs[None, :], total, mask=live & wanted)


INTERPRETED = not isinstance(packed_linear_kernel, triton.JITFunction)


def packed_linear_triton(x: Tensor, weight_packed: Tensor, weight_scale: Tensor) -> Tensor:
    """The "triton" backend of `packed.packed_linear`, which checks the arguments. x: [M, in] -> [M, out].

    Raises ValueError where neither a GPU nor the interpreter is there.
    """
    if not (x.is_cuda or INTERPRETED):
        raise ValueError(
            f"backend: 'triton' got tensors on {x.device}, wanted a GPU, or TRITON_INTERPRET=1 in the environment before "
            "triton is imported (it then runs on the CPU, slowly); 'auto' picks what runs here"
        )
    x, weight_packed, weight_scale = x.contiguous(), weight_packed.contiguous(), weight_scale.contiguous()
    (M, K), N = x.shape, weight_packed.shape[0]
    y = x.new_empty(M, N)
    if not y.numel():
        return y
    BM = min(64, max(16, triton.next_power_of_2(M)))  # tl.dot wants sixteen rows
    with torch.cuda.device_of(x):
        packed_linear_kernel[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
            x, weight_packed, weight_scale, y, M, N, K, BM=BM, BN=BN, GROUPS=GROUPS,
            DTYPE=tl.float64 if x.dtype == torch.float64 else tl.float32,
            PRECISION="tf32" if x.dtype == torch.bfloat16 else "ieee", num_warps=4, num_stages=2,
        )  # fmt: skip
    return y
