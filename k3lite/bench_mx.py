"""MXFP4 against its peers: packing and unpacking beside torchao and compressed-tensors, and the product with packed weights
beside the dense one in bf16.

All get the same matrix, w1 of one K3 expert, and take turns; medians count. compressed-tensors chooses its scales by another
rule (round up from 1.75), which is the same work. The peers are test-only packages; one that is missing is named in a remark.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from k3lite import bench
from k3lite.mx import BLOCK, encode, pack_mxfp4, unpack_mxfp4
from k3lite.packed import packed_linear

OUT, IN = 3072, 3584  # w1 of an expert
TOKENS = (1, 16, 256)  # rows of x
ROUNDS = 5
Works = dict[str, Callable[[], object]]


def cases(device: str) -> Iterator[bench.Row | str]:
    """Every row and remark of `k3lite bench mx`."""
    w = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    if device == "cpu":
        yield from conversions(w, ROUNDS)
    yield from products(w.to(device), TOKENS, ROUNDS, device)


def turns(works: Works, rounds: int, device: str = "cpu") -> dict[str, float]:
    """Median seconds of each work: all of them in turn, `rounds` times after one that is not counted."""
    taken = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(bench.seconds(work, device, repeats=1))
    return {name: statistics.median(times) for name, times in taken.items()}


# ---- packing and unpacking


def conversions(w: Tensor, rounds: int) -> Iterator[bench.Row | str]:
    """Pack fp32 weights, unpack them to bf16, and encode in MXFP8, on the CPU."""
    absent: list[str] = []
    peers = [peer for peer in (_torchao(w, absent), _compressed_tensors(w, absent)) if peer]
    yield from absent
    packed = pack_mxfp4(w)
    ours = {
        "pack fp32 to MXFP4": lambda: pack_mxfp4(w),
        "unpack MXFP4 to bf16": lambda: unpack_mxfp4(*packed, torch.bfloat16),
        "encode fp32 in MXFP8 E4M3": lambda: encode(w, "e4m3"),
    }
    for case, work in ours.items():
        theirs = {name: works[case] for name, works in peers if case in works}
        if theirs:
            took = turns({"ours": work} | theirs, rounds)
            for name in theirs:
                dtype = torch.bfloat16 if "bf16" in case else torch.float32
                yield bench.row("mx", f"{case} {list(w.shape)}", took["ours"], name, took[name], dtype)


def _torchao(w: Tensor, absent: list[str]) -> tuple[str, Works] | None:
    logging.disable(logging.WARNING)  # it says which of its GPU libraries it could not load
    try:
        ao = bench.imported("torchao.prototype.mx_formats.mx_tensor", absent)
    finally:
        logging.disable(logging.NOTSET)
    if ao is None:
        return None
    fp4, floor = torch.float4_e2m1fn_x2, ao.ScaleCalculationMode.FLOOR
    scales, codes = ao.to_mx(w, fp4, BLOCK, floor)
    return "torchao", {
        "pack fp32 to MXFP4": lambda: ao.to_mx(w, fp4, BLOCK, floor),
        "unpack MXFP4 to bf16": lambda: ao.to_dtype(codes, scales, fp4, BLOCK, torch.bfloat16),
        "encode fp32 in MXFP8 E4M3": lambda: ao.to_mx(w, torch.float8_e4m3fn, BLOCK, floor),
    }


def _compressed_tensors(w: Tensor, absent: list[str]) -> tuple[str, Works] | None:
    base = bench.imported("compressed_tensors.compressors.mxfp4.base", absent)
    if base is None:
        return None
    utils = bench.imported("compressed_tensors.quantization.utils.mxfp_utils", absent)
    scheme, compressor = compressed_tensors_scheme(base), base.MXFP4PackedCompressor

    def pack() -> dict[str, Tensor]:
        amax = w.unflatten(-1, (-1, BLOCK)).abs().amax(-1)
        scale = torch.exp2(utils.generate_mx_scales(amax) - 127)
        return compressor.compress({"weight": w, "weight_scale": scale}, scheme)

    packed = pack()
    unpack = lambda: compressor.decompress(packed, scheme)  # noqa: E731
    return "compressed-tensors", {"pack fp32 to MXFP4": pack, "unpack MXFP4 to bf16": unpack}


def compressed_tensors_scheme(base):
    """The released quantization_config's weights, as compressed-tensors wants them."""
    weights = base.QuantizationArgs(
        num_bits=4, type="float", group_size=BLOCK, strategy="group", symmetric=True, scale_dtype=torch.uint8
    )
    return base.QuantizationScheme(targets=["Linear"], weights=weights, format="mxfp4-pack-quantized")


# ---- products


def products(w: Tensor, tokens: tuple[int, ...], rounds: int, device: str) -> Iterator[bench.Row | str]:
    """`packed_linear` beside the product with the same weights held in bf16, for so many tokens at once."""
    packed = pack_mxfp4(w)
    dense = unpack_mxfp4(*packed, torch.bfloat16)
    held = sum(p.numel() for p in packed)
    yield f"weights {list(w.shape)}: {held:,} bytes packed, {2 * dense.numel():,} in bf16, {held / (2 * dense.numel()):.1%}"
    for n in tokens:
        x = torch.randn(n, w.shape[1], generator=torch.Generator().manual_seed(n)).to(device, torch.bfloat16)
        works = {"ours": lambda x=x: packed_linear(x, *packed), "dense bf16": lambda x=x: x @ dense.T}
        took = turns(works, rounds, device)
        case = f"packed product, {n} tokens {list(w.shape)}"
        yield bench.row("mx", case, took["ours"], "dense bf16", took["dense bf16"], torch.bfloat16, device)
