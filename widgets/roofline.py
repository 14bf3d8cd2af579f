"""Why decode waits for memory: work per byte of a pass, and what a machine of given speeds can do with it.

intensity   FLOPs of a pass / bytes that it must move           FLOP/B
ridge       FLOPs a second / bytes a second of the machine      FLOP/B
reached     min(1, intensity / ridge)                           share of the machine's arithmetic in use, at best

The work comes from k3lite.budget. The machine's two speeds are the reader's: those of all devices together that hold the
model. Activations, communication and everything that keeps a real machine from its data sheet are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log10

import ipywidgets as w
import plotly.graph_objects as go

from k3lite import budget
from k3lite.config import K3Config
from k3lite.spell import format_seconds
from widgets import common
from widgets.common import labelled, whole

__all__ = ["Pass", "Roofline", "compute", "describe", "explorer", "figure"]

STEPS = (1, 2, 5)
TFLOPS = tuple(m * 10**e for e in range(-1, 5) for m in STEPS) + (10**5,)  # 10^12 a second
TBYTES = tuple(m * 10**e for e in range(-2, 3) for m in STEPS) + (1000,)  # 10^12 bytes a second
CONTEXTS = tuple(2**k for k in range(7, 21))
BATCHES = tuple(2**k for k in range(13))
COLORS = (common.ORANGE, common.VERMILION, common.PURPLE, common.BLUE, common.GREEN, common.SKY)
SYMBOLS = ("square", "x", "triangle-up", "circle", "diamond", "cross")
EDGES = (0.3, 3e6)  # of the picture, FLOP per byte


@dataclass(frozen=True)
class Pass:
    """One kind of work on the machine."""

    name: str
    intensity: float  # FLOP per byte
    reached: float  # FLOPs a second, at best
    seconds: float | None = None  # of the whole pass, at least; None for parts of one


@dataclass(frozen=True)
class Roofline:
    """Result of compute(): the machine, and what it does with each kind of work."""

    flop_s: float
    byte_s: float
    tokens: int
    batch: int
    passes: tuple[
        Pass, ...
    ]  # prefill, decode alone, decode in a batch, then slots, states and plain rows by themselves

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on arithmetic is the limit."""
        return self.flop_s / self.byte_s


def compute(*, tflop_s: float = 1000.0, tbyte_s: float = 5.0, tokens: int = 32_768, batch: int = 64) -> Roofline:
    """K3's work at a context of `tokens` on a machine of so many 10^12 FLOPs and 10^12 bytes a second.

    batch: sequences that decode together. Raises ValueError that names the value, what came and what was wanted.
    """
    for name, speed in (("arithmetic", tflop_s), ("bandwidth", tbyte_s)):
        if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed < 1e9:
            raise ValueError(f"{name}: got {speed!r}, wanted a number above 0 (of 10^12 a second).")
    whole("context length", tokens, 1, 2**30)
    whole("batch", batch, 1, 2**20)
    flop_s, byte_s = tflop_s * 1e12, tbyte_s * 1e12
    K3 = K3Config.preset("kimi-k3")

    def at(name: str, flops: float, moved: float, whole_pass: bool = True) -> Pass:
        seconds = max(flops / flop_s, moved / byte_s)
        return Pass(name, flops / moved, flops / seconds, seconds if whole_pass else None)

    def of(name: str, work: budget.Work) -> Pass:
        return at(name, work.flops, work.bytes)

    a, heads, width = K3.linear_attn_config, K3.num_attention_heads, K3.v_head_dim
    slot = 2 * heads * (K3.latent_width + K3.kv_lora_rank), 2 * K3.latent_width
    state = 7 * a.head_dim**2, 2 * 4 * a.head_dim**2  # read and written, fp32
    row = 2 * heads * 2 * width, 2 * heads * 2 * width
    return Roofline(
        flop_s,
        byte_s,
        tokens,
        batch,
        (
            of(f"prefill of {tokens:,} tokens", budget.forward_work(K3, tokens)),
            of("decode, 1 sequence", budget.forward_work(K3, 1, tokens)),
            of(f"decode, batch of {batch:,}", budget.forward_work(K3, 1, tokens, batch)),
            at("a slot (MLA, 96 heads read it)", *slot, whole_pass=False),
            at("a state (KDA)", *state, whole_pass=False),
            at("a row of plain attention (MHA)", *row, whole_pass=False),
        ),
    )


def describe(r: Roofline) -> str:
    """The result in plain sentences."""
    prefill, alone, together = r.passes[:3]

    def limit(p: Pass) -> str:
        return "arithmetic is the limit" if p.intensity >= r.ridge else "memory is the limit"

    return (
        f"This machine can do {r.ridge:,.0f} FLOPs while it moves a byte. Prefill of {r.tokens:,} tokens asks for "
        f"{prefill.intensity:,.0f}: {limit(prefill)}, and it takes {format_seconds(prefill.seconds)} at least. Decode of one "
        f"sequence asks for {alone.intensity:,.1f}: {limit(alone)}, {_share(alone, r)} of the arithmetic can be used, a "
        f"token takes {format_seconds(alone.seconds)} at least. With a batch of {r.batch:,} it is {together.intensity:,.1f}, "
        f"{_share(together, r)} and {format_seconds(together.seconds)} for all {r.batch:,} tokens."
    )


def _share(p: Pass, r: Roofline) -> str:
    return f"{p.reached / r.flop_s:.2g}" if p.reached < r.flop_s / 1000 else f"{p.reached / r.flop_s:.1%}"


def figure(r: Roofline) -> go.Figure:
    """FLOPs a second against FLOP per byte, log-log: the machine's roof and the kinds of work under it.

    Always the same traces in the same order, so that an explorer can redraw in place.
    """
    xs = (EDGES[0], r.ridge, EDGES[1])
    roof = {
        "type": "scatter", "mode": "lines", "name": "the machine's roof", "line": {"color": common.INK, "width": 2.5},
        "x": xs, "y": [min(r.flop_s, x * r.byte_s) for x in xs], "hoverinfo": "name",
    }  # fmt: skip
    dots = [
        {
            "type": "scatter", "mode": "markers", "name": p.name, "x": [p.intensity], "y": [p.reached],
            "marker": {"color": color, "size": 12, "symbol": symbol, "line": {"color": common.INK, "width": 1}},
            "text": [f"{p.name}: {p.intensity:,.1f} FLOP/B, {_share(p, r)} of the arithmetic"],
            "hovertemplate": "%{text}<extra></extra>",
        }
        for p, color, symbol in zip(r.passes, COLORS, SYMBOLS, strict=True)
    ]  # fmt: skip
    powers = [10.0**e for e in range(9, 21)]
    names = [f"10<sup>{e}</sup>" for e in range(9, 21)]
    top = 3 * r.flop_s
    axes = {
        "xaxis": common.axis(
            "work per byte moved (FLOP/B)", [10**e for e in range(7)], ["1", "10", "100", "1k", "10k", "100k", "1M"],
            type="log", range=[-0.5, 6.4],
        ),
        "yaxis": common.axis(
            "reached at best (FLOP/s)", powers, names, type="log",
            range=[log10(min(p.reached for p in r.passes) / 4), log10(top)],
        ),
    }  # fmt: skip
    ridge = {
        "xref": "x", "yref": "y", "x": log10(r.ridge), "y": log10(r.flop_s), "showarrow": False, "yanchor": "bottom",
        "text": f"{r.ridge:,.0f} FLOP/B", "xanchor": "center",
    }  # fmt: skip
    together = r.passes[2]
    verb = "fills" if together.intensity >= r.ridge else f"can use {_share(together, r)} of"
    title = f"<b>After {r.tokens:,} tokens, a batch of {r.batch:,} {verb} the machine's arithmetic</b>"
    look = common.layout(
        460, axes, title={"text": title, "x": 0, "xref": "paper", "font": {"size": 17}}, annotations=[ridge],
        margin={"l": 84, "r": 12, "t": 70, "b": 120}, showlegend=True,
        legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": [roof, *dots], "layout": look})


def explorer(tflop_s: float = 1000, tbyte_s: float = 5, tokens: int = 32_768, batch: int = 64) -> common.Explorer:
    """Fresh controls around the picture. The arguments are where they start: of TFLOPS, TBYTES, CONTEXTS, BATCHES."""
    slider = w.SelectionSlider
    c = {
        "tflop_s": labelled(slider, "Arithmetic (TFLOP/s)", options=_spelt(TFLOPS), value=tflop_s),
        "tbyte_s": labelled(slider, "Memory bandwidth (TB/s)", options=_spelt(TBYTES), value=tbyte_s),
        "tokens": labelled(slider, "Context length (tokens)", options=_spelt(CONTEXTS), value=tokens),
        "batch": labelled(slider, "Batch (sequences)", options=_spelt(BATCHES), value=batch),
    }

    def result() -> Roofline:
        return compute(**{name: control.value for name, control in c.items()})

    def react() -> None:
        r = result()
        common.redraw(drawn, figure(r))
        text.value = common.spoken(describe(r))
        message.show("")

    first = result()
    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    text, message = w.HTML(common.spoken(describe(first))), common.Message()
    for control in c.values():
        control.observe(lambda _: message.guard(react), "value")
    columns = [[c["tflop_s"], c["tbyte_s"]], [c["tokens"], c["batch"]]]
    return common.Explorer("roofline", c, drawn, text, message, [common.side_by_side(columns), message, drawn, text])


def _spelt(values: tuple[float, ...]) -> list[tuple[str, float]]:
    return [(f"{v:,g}" if v < 1 else f"{v:,}", v) for v in values]
