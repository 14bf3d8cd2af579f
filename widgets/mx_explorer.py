"""One block of 32 numbers in an MX format: its codes, its scale, what is kept, and a whole layer beside it.

value      what is to be kept: the slider times 2^shift
scale      one power of two for the block, from its largest magnitude by the scale rule
code       sign, exponent and mantissa bits of value / scale, rounded to the nearest
error      root mean square of kept - value, over that of value
beside     the same 32 numbers as INT4 and as FP8 whose scale may be any number

Nothing is made up: `mx.encode` and `mx.decode` do it, and the layer is that of data/models/needle (its routed experts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import ipywidgets as w
import plotly.graph_objects as go
import torch
from torch import Tensor

from k3lite.checkpoint import load_model
from k3lite.minifloat import FORMATS
from k3lite.moe import Experts
from k3lite.mx import BLOCK, SCALE_RULES, decode, encode, scale_values
from k3lite.other_formats import round_fp8, round_int4
from k3lite.tasks.text import DATA
from widgets import common
from widgets.common import labelled, whole
from widgets.mx_explorer_figure import figure

__all__ = ["BINS", "NAMES", "PRESETS", "RULES", "TOP", "Block", "compute", "describe", "explorer", "figure", "layer"]

NAMES = {"e2m1": "E2M1 (MXFP4)", "e4m3": "E4M3 (MXFP8)", "e5m2": "E5M2 (MXFP8)"}
RULES = {rule: {"floor": "floor (OCP)"}.get(rule, rule) for rule in SCALE_RULES}
TOP = 8.0  # of a slider, either way
STEP = 0.05
SHIFTS = 30  # powers of two, either way
BINS = 48  # of the layer's histogram
NEEDLE = DATA / "models" / "needle"


def _gauss() -> Tensor:
    return torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * 2


def _outlier() -> Tensor:
    x = torch.randn(BLOCK, generator=torch.Generator().manual_seed(1)) * 0.4
    x[11] = 7.5
    return x


@lru_cache(maxsize=1)
def layer() -> Tensor:
    """[N, 32] blocks of all routed experts of the needle model."""
    experts = [m for m in load_model(NEEDLE).modules() if isinstance(m, Experts)]
    return torch.cat([p.detach().reshape(-1, BLOCK) for m in experts for p in m.parameters()])


def _of_the_layer() -> Tensor:
    block = layer()[0]
    return block * (4 / block.abs().max())


PRESETS = {
    "Gaussian": _gauss,
    "one outlier": _outlier,
    "all alike": lambda: torch.full((BLOCK,), 3.0),
    "a slope": lambda: torch.linspace(-TOP, TOP, BLOCK),
    "zeros": lambda: torch.zeros(BLOCK),
    "from a trained expert": _of_the_layer,
}
CUSTOM = "your own"


@dataclass(frozen=True)
class Block:
    """Result of compute()."""

    format: str
    rule: str
    shift: int
    values: tuple[float, ...]
    kept: tuple[float, ...]
    codes: tuple[str, ...]  # bits
    scale_byte: int
    scale: float
    clipped: tuple[bool, ...]
    error: float  # relative; 0 for a block of zeros
    beside: dict[str, tuple[tuple[float, ...], float]]  # what other formats keep, and their error
    bytes: int  # of the block, scale and all
    shares: tuple[float, ...]  # of the layer's numbers, by |value| / scale, BINS up to twice the largest value
    layer_errors: dict[str, float]  # of the layer, by format
    layer_clipped: float  # share of its blocks whose largest number is clipped


def compute(
    *, values: tuple[float, ...] | None = None, format: str = "e2m1", rule: str = "floor", shift: int = 0
) -> Block:
    """Encode 32 numbers, each times 2^shift. values: None takes the Gaussian preset. Raises ValueError that names the value."""
    if format not in FORMATS:
        raise ValueError(f"format: got {format!r}, wanted one of {', '.join(FORMATS)}.")
    if rule not in SCALE_RULES:
        raise ValueError(f"scale rule: got {rule!r}, wanted one of {', '.join(SCALE_RULES)}.")
    whole("shift", shift, -SHIFTS, SHIFTS)
    values = tuple(preset("Gaussian")) if values is None else values
    if len(values) != BLOCK or not all(math.isfinite(v) and abs(v) <= TOP for v in values):
        raise ValueError(f"values: got {len(values)} numbers, wanted {BLOCK}, each from {-TOP:g} to {TOP:g}.")
    x = torch.tensor(values) * 2.0**shift
    codes, scales = encode(x, format, scale_rule=rule)
    kept, f = decode(codes, scales, format), FORMATS[format]
    others = {"INT4": round_int4(x), "FP8, E4M3": round_fp8(x)}
    shares, clipped = _histogram(format, rule)
    return Block(
        format, rule, shift, tuple(x.tolist()), tuple(kept.tolist()),
        codes=tuple(f"{c:0{f.bits}b}" for c in codes.tolist()),
        scale_byte=int(scales), scale=float(scale_values(scales)),
        clipped=tuple((x.abs() > f.largest * scale_values(scales)).tolist()),
        error=_error(kept, x),
        beside={name: (tuple(y.tolist()), _error(y, x)) for name, y in others.items()},
        bytes=(BLOCK * f.bits + 8) // 8,
        shares=shares, layer_errors=_layer_errors(rule), layer_clipped=clipped,
    )  # fmt: skip


def preset(name: str) -> list[float]:
    """A preset as the sliders can show it."""
    return [round(round(v / STEP) * STEP, 2) for v in PRESETS[name]().clamp(-TOP, TOP).tolist()]


def _near(values: tuple[float, ...], others: list[float]) -> bool:
    """The same but for last bits, in which a browser's sliders differ."""
    return max(abs(a - b) for a, b in zip(values, others, strict=True)) < STEP / 2


def _error(kept: Tensor, x: Tensor) -> float:
    size = float(x.norm())
    return float((kept - x).norm()) / size if size else 0.0


@lru_cache(maxsize=16)
def _histogram(format: str, rule: str) -> tuple[tuple[float, ...], float]:
    """Shares of |value| / scale over the layer, and the share of blocks that are clipped."""
    x, largest = layer(), FORMATS[format].largest
    ratio = (x / scale_values(encode(x, format, scale_rule=rule)[1])).abs()
    counts = torch.histc(ratio, BINS, 0, 2 * largest)
    return tuple((counts / ratio.numel()).tolist()), float((ratio.amax(-1) > largest).float().mean())


@lru_cache(maxsize=8)
def _layer_errors(rule: str) -> dict[str, float]:
    """Relative error over the layer. A row of an expert is one block here or two, so INT4 is given blocks as rows."""
    x = layer()
    errors = {NAMES[f]: _error(decode(*encode(x, f, scale_rule=rule), f), x) for f in FORMATS}
    return errors | {"INT4, a scale for 32": _error(round_int4(x), x), "FP8 E4M3, one scale": _error(round_fp8(x), x)}


def describe(b: Block) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    bits = 8 * b.bytes / BLOCK
    words = (
        f"{NAMES[b.format]}, rule {b.rule}: the scale is byte {b.scale_byte}, {power(b.scale_byte)}. "
        f"The block takes {b.bytes} bytes ({bits:g} bits a number; 64 bytes in bf16) and is kept with an error of {b.error:.1%}"
    )
    lost = sum(b.clipped)
    words += f"; {lost} of {BLOCK} numbers {'is' if lost == 1 else 'are'} clipped." if lost else "; nothing is clipped."
    other = "; ".join(f"{name} {error:.1%}" for name, (_, error) in b.beside.items())
    return f"{words} With a scale that may be any number: {other}. Over the trained layer, {b.layer_clipped:.0%} of the blocks have a clipped number."


def power(scale_byte: int) -> str:
    """'2^-3': what a scale byte is worth."""
    return f"2^{scale_byte - 127}"


def explorer(format: str = "e2m1", rule: str = "floor", shift: int = 0, start: str = "Gaussian") -> common.Explorer:
    """Fresh controls around the picture: 32 sliders, one for each number, and what is to become of them."""
    if start not in PRESETS:
        raise ValueError(f"start: got {start!r}, wanted one of {', '.join(PRESETS)}.")
    first = compute(values=tuple(preset(start)), format=format, rule=rule, shift=shift)
    c, sliders = _controls(first, start), _sliders(preset(start))
    controls = c | sliders

    def react(name: str) -> None:
        if name == "start" and c["start"].value != CUSTOM:
            for slider, value in zip(sliders.values(), preset(c["start"].value), strict=True):
                slider.value = value
        values = tuple(slider.value for slider in sliders.values())
        if name in sliders and c["start"].value != CUSTOM and not _near(values, preset(c["start"].value)):
            c["start"].value = CUSTOM
        b = compute(values=values, **{n: c[n].value for n in ("format", "rule", "shift")})
        common.redraw(drawn, figure(b))
        spoken.value = common.spoken(describe(b))
        message.show("")

    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    spoken, message = w.HTML(common.spoken(describe(first))), common.Message()
    message.watch(controls, react)
    columns = common.side_by_side([[c["format"], c["rule"]], [c["start"], c["shift"]]])
    row = w.HBox(list(sliders.values()), layout={"width": f"{common.WIDTH}px", "padding": "0 0 0 64px"})
    return common.Explorer("mx", controls, drawn, spoken, message, [columns, message, row, drawn, spoken])


def _controls(b: Block, start: str) -> dict[str, w.Widget]:
    def choice(names: dict[str, str]) -> list[tuple[str, str]]:
        return [(text, key) for key, text in names.items()]

    return {
        "format": labelled(w.Dropdown, "Format of an element", options=choice(NAMES), value=b.format),
        "rule": labelled(w.Dropdown, "Scale rule", options=choice(RULES), value=b.rule),
        "start": labelled(w.Dropdown, "Numbers", options=[*PRESETS, CUSTOM], value=start),
        "shift": labelled(w.IntSlider, "All times 2^n (n)", min=-SHIFTS, max=SHIFTS, value=b.shift),
    }  # fmt: skip


def _sliders(values: list[float]) -> dict[str, w.Widget]:
    """One slim slider a number, over its place in the picture."""
    return {
        f"value {i}": w.FloatSlider(
            value=value, min=-TOP, max=TOP, step=STEP, orientation="vertical", readout=False,
            description=str(i), style={"description_width": "25px"},
            layout={"height": "150px", "width": "25.6px", "margin": "0"},
        )
        for i, value in enumerate(values)
    }  # fmt: skip
