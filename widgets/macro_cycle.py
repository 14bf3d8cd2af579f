"""One macro-cycle of K3 on one page: its sub-layers in order, what each holds, remembers and does for a token.

A cycle ends with an MLA layer, the KDA layers before it come first. Each layer reads depths, mixes tokens, reads depths
again and goes through its experts. Figures are k3lite.budget's, a layer at a time:

    parameters     of the sub-layer with its norm; a read has a norm and a query
    remembered     bytes between two tokens: a slot for each token (MLA), or a state and a window whatever the length (KDA)
    FLOPs          of one token after so many others, a multiply-add is two; a read scores and mixes its sources
"""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from k3lite import budget
from k3lite.attn_res import sources_per_read
from k3lite.config import MX_BLOCK, K3Config
from k3lite.spell import format_bytes, format_si
from widgets import common
from widgets.common import whole

__all__ = ["Cycle", "Row", "compute", "cycles", "describe", "figure"]

WIDTHS = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}  # bits of a number
NAMES = {
    "read": "AttnRes read",
    "kda": "KDA",
    "mla": "gated MLA",
    "dense": "dense MLP",
    "moe": "router, latent, shared experts",
    "experts": "routed experts",
}


@dataclass(frozen=True)
class Row:
    """One sub-layer, or one half of a mixture of experts. Of one layer and one sequence."""

    layer: int  # counted from 0, as in the released names
    kind: str  # a key of NAMES
    parameters: int
    met: int  # parameters that a token meets
    bits: float  # of a stored weight, the few fp32 ones apart
    token_bytes: int  # remembered for each token
    fixed_bytes: int  # remembered whatever the length
    flops: int
    sources: int | None = None  # that a read mixes
    experts: tuple[int, int] | None = None  # at work, and in all

    @property
    def name(self) -> str:
        if self.kind == "read":
            return f"{NAMES['read']} of {self.sources} depth{'s' * (self.sources != 1)}"
        return NAMES[self.kind]


@dataclass(frozen=True)
class Cycle:
    """Result of compute()."""

    number: int  # counted from 1
    of: int
    tokens: int
    rows: tuple[Row, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row.layer for row in self.rows))


def cycles(c: K3Config) -> tuple[tuple[int, ...], ...]:
    """Layers of each cycle, counted from 0: up to an MLA layer and with it. Layers behind the last MLA layer are one more."""
    found, open_ = [], []
    for layer, kind in enumerate(c.layer_kinds):
        open_.append(layer)
        if kind == "mla":
            found.append(tuple(open_))
            open_ = []
    return (*found, tuple(open_)) if open_ else tuple(found)


def compute(c: K3Config, cycle: int = 2, tokens: int = 131_072) -> Cycle:
    """The sub-layers of one cycle, in order. The first cycle of K3 has the dense layer; the second is like most.

    tokens: read before. Raises ValueError that names the value.
    """
    every = cycles(c)
    whole("cycle", cycle, 1, len(every))
    whole("tokens", tokens, 0, 2**30)
    reads = sources_per_read(c.num_hidden_layers, c.attn_res_block_size) if c.attn_res_block_size else None
    rows = []
    for layer in every[cycle - 1]:
        first, second = reads[2 * layer : 2 * layer + 2] if reads else (None, None)
        rows += [*_read(c, layer, first), _attention(c, layer, tokens)]
        rows += [*_read(c, layer, second), *_feed_forward(c, layer)]
    return Cycle(cycle, len(every), tokens, tuple(rows))


def _read(c: K3Config, layer: int, sources: int | None) -> list[Row]:
    """A score and a weighted sum over the sources, both as wide as the model."""
    if sources is None:
        return []
    d = c.hidden_size
    return [Row(layer, "read", 2 * d, 2 * d, WIDTHS[c.dtype], 0, 0, 4 * d * sources, sources)]


def _attention(c: K3Config, layer: int, tokens: int) -> Row:
    kind, width = c.layer_kinds[layer], WIDTHS[c.dtype]
    of_kind, kept = budget.parameters(c)[kind], budget.cache_bytes(c, 1, 1, width // 8)
    layers = c.num_kda_layers if kind == "kda" else c.num_mla_layers
    n = of_kind // layers + c.hidden_size
    slots = budget.mla_attention_flops(c, 1, tokens)
    if kind == "mla":
        return Row(layer, kind, n, n, width, kept.latent // layers, 0, 2 * n + slots)
    memories = budget.forward_work(c, 1, tokens).memory_flops - c.num_mla_layers * slots
    return Row(layer, kind, n, n, width, 0, (kept.state + kept.conv) // layers, 2 * n + memories // layers)


def _feed_forward(c: K3Config, layer: int) -> list[Row]:
    parts, d, width = budget.parameters(c), c.hidden_size, WIDTHS[c.dtype]
    if not c.is_moe_layer(layer):
        n = parts["dense_mlp"] // (c.num_hidden_layers - c.num_moe_layers) + d
        return [Row(layer, "dense", n, n, width, 0, 0, 2 * n)]
    n = sum(parts[part] for part in ("router", "latent", "shared_experts")) // c.num_moe_layers + d
    routed, met = (budget.expert_parameters(c) * k for k in (c.num_experts, c.num_experts_per_token))
    bits = 4 + 8 / MX_BLOCK if c.packs_mxfp4 else width
    return [
        Row(layer, "moe", n, n, width, 0, 0, 2 * n),
        Row(layer, "experts", routed, met, bits, 0, 0, 2 * met, experts=(c.num_experts_per_token, c.num_experts)),
    ]


def describe(cycle: Cycle) -> str:
    """The picture in plain sentences, a line a sub-layer."""
    layers = cycle.layers
    span = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    head = f"Cycle {cycle.number} of {cycle.of}, {span}, one token after {cycle.tokens:,} others:"
    return "\n".join([head, *(f"layer {row.layer}: {_words(row)}" for row in cycle.rows)])


def _words(row: Row) -> str:
    held = f"{_counted(row.parameters)} parameters"
    if row.met != row.parameters:
        held += f" of which a token meets {_counted(row.met)}"
    return f"{row.name}; {held}, {row.bits:g} bits each; {_memory(row)}; {format_si(row.flops, 'FLOP')}"


def _counted(n: int) -> str:
    """443740384 -> '443.7M', as such models are named; 'B' for 10^9."""
    return format_si(n, "").replace(" ", "").replace("G", "B")


def _memory(row: Row) -> str:
    if row.token_bytes:
        return f"keeps {row.token_bytes:,} B a token"
    return f"keeps {format_bytes(row.fixed_bytes, short=True)}, always" if row.fixed_bytes else "keeps nothing"


# ---- the picture

COLORS = {
    "read": common.SKY, "kda": common.GREEN, "mla": common.ORANGE, "dense": common.PURPLE, "moe": common.BLUE, "experts": common.BLUE,
}  # fmt: skip
HEIGHTS = {"read": 0.55, "kda": 1.3, "mla": 1.3, "dense": 2.7, "moe": 1.2, "experts": 1.5}
GAP, HALF = 0.3, 0.41  # between boxes; half of a box's width, where columns are 1 apart


def figure(cycle: Cycle) -> go.Figure:
    """A column a layer, to be read upwards, then on at the foot of the next. Hatched: weights of few bits."""
    boxes = [box for column, layer in enumerate(cycle.layers) for box in _column(cycle, column, layer)]
    top = max(high for *_, high in boxes)
    traces = [_box(*box) for box in boxes]
    for number, trace in enumerate(traces):  # one entry in the legend for each kind
        trace["showlegend"] = trace["name"] not in [t["name"] for t in traces[:number]]
    hidden = {"visible": False, "fixedrange": True}
    axes = {
        "xaxis": hidden | {"range": [-0.55, len(cycle.layers) - 0.45]},
        "yaxis": hidden | {"range": [-0.75, top + 0.45]},
    }
    look = common.layout(
        640, axes,
        title={"text": _title(cycle), "x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 17}},
        annotations=[a for box in boxes for a in _captions(*box)] + _arrows(boxes) + _feet(cycle),
        margin={"l": 8, "r": 8, "t": 60, "b": 60},
        legend={"orientation": "h", "x": 0, "y": -0.01, "yanchor": "top", "font": {"size": 12}},
    )  # fmt: skip
    return go.Figure({"data": traces, "layout": look})


def _column(cycle: Cycle, column: int, layer: int) -> list[tuple[Row, int, float, float]]:
    """Row, x and both heights of each box of a layer. The two halves of a mixture touch."""
    boxes, low = [], 0.0
    for row in cycle.rows:
        if row.layer == layer:
            low -= GAP if row.kind == "experts" else 0.0
            boxes.append((row, column, low, low + HEIGHTS[row.kind]))
            low += HEIGHTS[row.kind] + GAP
    return boxes


def _legend(row: Row) -> str:
    name = NAMES[row.kind]
    return f"{name}, {row.bits:g} bits" if row.kind == "experts" else name


def _box(row: Row, x: int, low: float, high: float) -> dict:
    hatch = {
        "fillpattern": {
            "shape": "/",
            "fgcolor": _faint(COLORS[row.kind]),
            "bgcolor": "rgba(0,0,0,0)",
            "size": 6,
            "solidity": 0.5,
        }
    }
    fill = hatch if row.bits < 8 else {"fillcolor": _faint(COLORS[row.kind])}
    return {
        "type": "scatter", "mode": "lines", "fill": "toself", "name": _legend(row), "legendgroup": _legend(row),
        "x": [x - HALF, x + HALF, x + HALF, x - HALF, x - HALF], "y": [low, low, high, high, low],
        "line": {"color": COLORS[row.kind], "width": 2}, "hoveron": "fills", "hoverinfo": "text",
        "text": f"layer {row.layer}: {_words(row)}",
    } | fill  # fmt: skip


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.12)"


def _captions(row: Row, x: int, low: float, high: float) -> list[dict]:
    """What stands in a box."""
    lines = [f"<b>{row.name}</b>"] if row.kind != "moe" else ["<b>router, latent,</b>", "<b>shared experts</b>"]
    if row.experts:
        lines.append(f"{row.experts[0]:,} of {row.experts[1]:,}, {row.bits:g} bits")
    if row.kind != "read":
        lines.append(f"{_counted(row.parameters)} parameters")
        lines.append(format_si(row.flops, "FLOP"))
    if row.token_bytes or row.fixed_bytes:
        lines.append(_memory(row))
    at = {"x": x, "y": (low + high) / 2, "xref": "x", "yref": "y", "showarrow": False, "font": {"size": 11}}
    return [at | {"text": "<br>".join(lines)}]


def _arrows(boxes: list[tuple[Row, int, float, float]]) -> list[dict]:
    """From box to box, upwards."""
    head = {"arrowhead": 2, "arrowwidth": 1.5, "arrowcolor": common.INK, "showarrow": True, "text": ""}
    places = {"xref": "x", "yref": "y", "axref": "x", "ayref": "y"}
    return [
        head | places | {"x": x, "y": low, "ax": x, "ay": low - GAP}
        for row, x, low, _ in boxes
        if row.kind != "experts"
    ]


def _feet(cycle: Cycle) -> list[dict]:
    at = {"y": -0.34, "xref": "x", "yref": "y", "showarrow": False, "yanchor": "top", "font": {"size": 13}}
    return [at | {"x": x, "text": f"layer {layer}"} for x, layer in enumerate(cycle.layers)]


def _title(cycle: Cycle) -> str:
    kinds = [row.kind for row in cycle.rows]
    mix = f"{kinds.count('kda')} KDA, {kinds.count('mla')} MLA"
    return f"<b>Cycle {cycle.number} of {cycle.of}: {mix}; one token after {cycle.tokens:,} others</b>"
