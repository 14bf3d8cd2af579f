"""Why the design may change: what K3's five choices cost on a machine of the reader's, and where one more costs nothing.

    token   ( max( bytes / bandwidth, FLOPs / arithmetic ) + rows to experts / links ) / batch       seconds, all devices
    bytes   weights read once for the batch (of the experts those that somebody is sent to), and each sequence's cache
    fits    weights and caches of the batch lie in the memory of the devices

Each curve changes one choice of K3 and leaves the other four. All of it is `k3lite.budget` on configs made by
`dataclasses.replace`; the machine is a data sheet of `k3lite.devices`, faster or slower by the reader's factors.

A budget knows what things cost and not what they are worth. The cheapest model of all is therefore a bad one, and the
reader sets floors below which no choice may go. What the budget does know: which choice is hidden under another's cost.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import ipywidgets as w
import numpy as np
import plotly.graph_objects as go

from k3lite.devices import Device, find_device, read_devices
from k3lite.spell import format_seconds
from widgets import common
from widgets.common import labelled, whole
from widgets.design_space_cost import AXES, CONTEXTS, FILL, FLOORS, K3, K3_CHOICE, Choice, Demand, combined, demand
from widgets.design_space_figure import figure

__all__ = ["AXES", "FILL", "HIDDEN", "K3_CHOICE", "Choice", "Space", "compute", "describe", "explorer", "figure"]

FACTORS = ("bandwidth", "arithmetic", "memory", "interconnect")
HIDDEN = 0.1  # a choice is hidden while a token costs at most so much more than at the cheapest value of its axis


@dataclass(frozen=True)
class Point:
    """One design on the machine. Seconds are for a token, all devices together; None where not even one sequence fits."""

    value: object  # on its axis
    fits: bool
    batch: int
    seconds: float | None
    memory: float | None
    arithmetic: float | None
    link: float | None

    @property
    def limit(self) -> str:
        """What the token waits for: memory or arithmetic (the links come on top)."""
        return "memory" if self.memory >= self.arithmetic else "arithmetic"


@dataclass(frozen=True)
class Axis:
    """One of the five choices, the others as in K3."""

    name: str
    points: tuple[Point, ...]
    k3: object  # K3's value
    floor: object | None  # the reader's
    cheapest: object | None  # value that fits, not below the floor
    hidden: (
        object | None
    )  # largest value that fits and is hidden: a token costs at most HIDDEN more than at the cheapest
    turn: object | None  # first value at which the other one of memory and arithmetic is the limit
    one_more: float | None  # share of a token's cost that one more of it costs, at K3's value


@dataclass(frozen=True)
class Space:
    """Result of compute()."""

    machine: Device  # all devices together
    tokens: int
    asked_batch: int  # FILL or a number
    k3: Point
    axes: dict[str, Axis]
    floors: dict[str, int]
    cheapest: Choice | None  # of all combinations not below the floors; None: nothing fits
    cheapest_point: Point | None
    contexts: dict[str, tuple[float | None, ...]]  # seconds of a token at CONTEXTS, for K3 and both extremes


def compute(
    *,
    device: str = "H200",
    devices: int = 32,
    bandwidth: float = 1,
    arithmetic: float = 1,
    memory: float = 1,
    interconnect: float = 1,
    batch: int = 256,
    tokens: int = 131_072,
    mla_layers: int = 0,
    latent: int = 64,
    experts: int = 64,
    top_k: int = 1,
) -> Space:
    """Costs around K3's design on `devices` devices, when `batch` sequences decode after `tokens` tokens each.

    bandwidth, arithmetic, memory, interconnect: factors on the device's data sheet.   batch: FILL for as many as fit.
    mla_layers, latent, experts, top_k: floors, values of AXES.   Raises ValueError that names the value.
    """
    for name, factor in zip(FACTORS, (bandwidth, arithmetic, memory, interconnect), strict=True):
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e6:
            raise ValueError(f"{name}: got {factor!r}, wanted a factor above 0.")
    whole("devices", devices, 1, 4096)
    whole("batch", batch, FILL, 2**20)
    whole("context length", tokens, 1, 2**22)
    floors = dict(zip(FLOORS, (mla_layers, latent, experts, top_k), strict=True))
    for name, floor in floors.items():
        if floor not in AXES[name]:
            raise ValueError(f"floor of {name}: got {floor!r}, wanted one of {', '.join(map(str, AXES[name]))}.")
    one = find_device(device)
    machine = dataclasses.replace(
        one,
        memory=one.memory * memory,
        memory_bandwidth=one.memory_bandwidth * bandwidth,
        bf16=one.bf16 * arithmetic,
        link=one.link * interconnect,
    ).times(devices)
    cheapest, point = _cheapest(floors, machine, batch, tokens)
    return Space(
        machine=machine,
        tokens=tokens,
        asked_batch=batch,
        k3=_point("K3", demand(K3_CHOICE, tokens), machine, batch),
        axes={name: _axis(name, floors.get(name), machine, batch, tokens) for name in AXES},
        floors=floors,
        cheapest=cheapest,
        cheapest_point=point,
        contexts=_contexts(machine, batch),
    )


def _point(value: object, d: Demand, machine: Device, batch: int) -> Point:
    rows = int(d.batch(batch, machine.memory))
    if not rows:
        return Point(value, False, 0, None, None, None, None)
    step = d.step(rows, machine)
    parts = (step.seconds, step.memory, step.arithmetic, step.link)
    return Point(value, bool(d.fits(rows, machine.memory)), rows, *(float(x) / rows for x in parts))


def _axis(name: str, floor: object | None, machine: Device, batch: int, tokens: int) -> Axis:
    points = []
    for value in AXES[name]:
        choice = dataclasses.replace(K3_CHOICE, **{name: value})
        points.append(_point(value, demand(choice, tokens), machine, batch))
    there = AXES[name].index(getattr(K3_CHOICE, name))
    fitting = [p for p in points if p.fits]
    allowed = [p for p in fitting if floor is None or p.value >= floor]
    near = [p for p in fitting if p.seconds <= (1 + HIDDEN) * min(q.seconds for q in fitting)]
    ordered = [p for p in points if p.seconds is not None]
    turns = [p.value for p in ordered if p.limit != ordered[0].limit]
    return Axis(
        name=name,
        points=tuple(points),
        k3=points[there].value,
        floor=floor,
        cheapest=min(allowed, key=lambda p: p.seconds).value if allowed else None,
        hidden=near[-1].value if near and name != "precision" else None,
        turn=turns[0] if turns and name != "precision" else None,
        one_more=None if name == "precision" else _slope(*points[there : there + 2]),
    )


def _slope(here: Point, there: Point) -> float | None:
    if here.seconds is None or there.seconds is None:
        return None
    return (there.seconds / here.seconds - 1) / (there.value - here.value)


def _contexts(machine: Device, batch: int) -> dict[str, tuple[float | None, ...]]:
    designs = {"K3": K3_CHOICE} | {
        name: dataclasses.replace(K3_CHOICE, mla_layers=n)
        for name, n in (("MLA everywhere", K3.num_hidden_layers), ("KDA everywhere", 0))
    }
    return {
        name: tuple(_point(n, demand(choice, n), machine, batch).seconds for n in CONTEXTS)
        for name, choice in designs.items()
    }


def _cheapest(floors: dict[str, int], machine: Device, batch: int, tokens: int) -> tuple[Choice | None, Point | None]:
    """Of all combinations of AXES that are not below the floors, and of those that cost the same the smallest."""
    allowed = {name: [v for v in values if v >= floors.get(name, v)] for name, values in AXES.items()}
    attention = [(m, r) for m in allowed["mla_layers"] for r in allowed["latent"]]
    mixtures = [(e, k, p) for e in allowed["experts"] for k in allowed["top_k"] for p in allowed["precision"] if k <= e]
    d = combined(attention, mixtures, tokens)
    size = np.broadcast_to(d.batch(batch, machine.memory), d.stored.shape)
    fits, safe = d.fits(size, machine.memory), np.maximum(size, 1)
    step = d.step(safe, machine)
    seconds = np.where(fits, (np.maximum(step.memory, step.arithmetic) + step.link) / safe, np.inf)
    if not fits.any():
        return None, None
    alike = np.round(seconds / seconds.min(), 9)  # sums of the same numbers in another order are no difference
    i, j = np.unravel_index(np.lexsort((d.stored.ravel(), alike.ravel()))[0], seconds.shape)
    choice = Choice(*attention[i], *mixtures[j])
    return choice, _point(choice, demand(choice, tokens), machine, batch)


# ---- words and controls


def describe(s: Space) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    where = f"{s.machine.count} {s.machine.name} ({s.machine.ridge:,.0f} FLOPs a byte), {s.tokens:,} tokens"
    if s.k3.seconds is None:
        return f"{where}: K3 does not fit, not even with one sequence. More devices or more memory would hold it."
    share = s.k3.arithmetic / s.k3.memory
    words = (
        f"{where}, a batch of {s.k3.batch:,}: a token of K3 takes {format_seconds(s.k3.seconds)} of all devices together. "
        f"It waits for {s.k3.limit}; FLOPs take {share:.2g} times as long as bytes."
    )
    if not s.k3.fits:
        words += " But weights and caches do not fit."
    costs = [f"one more {what} {_signed(s.axes[name].one_more)}" for name, what in ONE_MORE.items()]
    words += f" At K3's choice, {', '.join(costs)}."
    hidden = [f"{what} up to {s.axes[name].hidden:,}" for name, what in MANY.items() if s.axes[name].hidden is not None]
    if hidden:
        words += f" Hidden (at most {HIDDEN:.0%} over the cheapest of the axis): {', '.join(hidden)}."
    return f"{words} {_cheapest_words(s)}"


ONE_MORE = {"mla_layers": "MLA layer instead of a KDA layer costs", "experts": "expert", "top_k": "expert a token"}
MANY = {"mla_layers": "MLA layers", "latent": "latents", "experts": "experts", "top_k": "experts a token"}


def _signed(share: float | None) -> str:
    return "nothing that could be said" if share is None else f"{share:+.2%}"


def _cheapest_words(s: Space) -> str:
    if s.cheapest is None:
        return "No design that is not below the floors fits."
    c, layers = s.cheapest, K3.num_hidden_layers
    design = (
        f"{layers - c.mla_layers} KDA to {c.mla_layers} MLA layers, a latent of {c.latent:,}, {c.top_k} of {c.experts:,} "
        f"experts in {c.precision}"
    )
    words = f"The cheapest that is not below the floors has {design}; a token costs {s.cheapest_point.seconds / s.k3.seconds:.1%} of K3's."
    free = [name for name in FLOORS if s.floors[name] == AXES[name][0]]
    if free:
        words += " A budget knows no quality: where no floor is set, it takes what costs least, however small."
    return words


BATCHES = (FILL, *(2**k for k in range(13)))
DEVICE_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 72, 128, 256, 512)
TIMES = tuple(2.0**k for k in range(-4, 5))
LABELS = {
    "bandwidth": "Bandwidth (× data sheet)",
    "arithmetic": "Arithmetic (× data sheet)",
    "memory": "Memory (× data sheet)",
    "interconnect": "Interconnect (× data sheet)",
    "mla_layers": "At least (MLA layers)",
    "latent": "At least (latent width)",
    "experts": "At least (experts a layer)",
    "top_k": "At least (experts a token)",
}


def explorer(device: str = "H200", devices: int = 32, batch: int = 256, tokens: int = 131_072) -> common.Explorer:
    """Fresh controls around the picture: a machine, faster or slower, and floors that no choice may go below.

    device: of k3lite.devices.   devices, batch, tokens: where the controls start; of DEVICE_COUNTS, BATCHES, CONTEXTS.
    """
    first = compute(device=device, devices=devices, batch=batch, tokens=tokens)
    c = _controls(first, device)

    def react(_: str) -> None:
        s = compute(**{name: control.value for name, control in c.items()})
        common.redraw(drawn, figure(s))
        text.value = common.spoken(describe(s))
        message.show("")

    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    text, message = w.HTML(common.spoken(describe(first))), common.Message()
    message.watch(c, react)
    columns = [
        [c[n] for n in ("device", "devices", "tokens", "batch", *FACTORS[:2])],
        [c[n] for n in (*FACTORS[2:], *FLOORS)],
    ]
    return common.Explorer(
        "design_space", c, drawn, text, message, [common.side_by_side(columns), message, drawn, text]
    )


def _controls(s: Space, device: str) -> dict[str, w.Widget]:
    """By name, as the arguments of compute()."""
    slider = w.SelectionSlider
    sheets = [
        (f"{d.name}: {d.memory_bandwidth / 1e12:.3g} TB/s, {d.bf16 / 1e12:,.3g} TFLOP/s", d.name)
        for d in read_devices().values()
    ]
    batches = [("as many as fit" if n == FILL else f"{n:,} sequence{'s' * (n > 1)}", n) for n in BATCHES]
    c = {
        "device": labelled(w.Dropdown, "Device (data sheet)", options=sheets, value=find_device(device).name),
        "devices": labelled(slider, "Devices (number)", options=[(f"{n:,}", n) for n in DEVICE_COUNTS], value=s.machine.count),
        "tokens": labelled(slider, "Context length (tokens)", options=[(f"{n:,}", n) for n in CONTEXTS], value=s.tokens),
        "batch": labelled(slider, "Batch (sequences)", options=batches, value=s.asked_batch),
    }  # fmt: skip
    for name in FACTORS:
        steps = [(f"{t:g} ×" if t >= 1 else f"1/{1 / t:g} ×", t) for t in TIMES]
        c[name] = labelled(slider, LABELS[name], options=steps, value=1.0)
    for name in FLOORS:
        c[name] = labelled(slider, LABELS[name], options=[(f"{v:,}", v) for v in AXES[name]], value=s.floors[name])
    return c
