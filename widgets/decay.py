"""How fast a trained KDA layer forgets: the half-life of each channel, and what is left of one token after n more.

z          = x W_fa^T W_fb^T + dt_bias          from the layer's input x, one number per token, head and channel
g          = -5 sigmoid(e^A z)                  bounded gate, as trained;  softplus: -e^A softplus(z), on the same z
half-life  = ln(1/2) / mean of g over the text  tokens until half of a channel is gone
left       = e^(g[t+1] + ... + g[t+n])          share of what token t wrote that n more tokens leave

Only decay is counted. What the delta rule overwrites under similar keys comes on top.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import ipywidgets as w
import plotly.graph_objects as go
import torch
from torch import Tensor

from k3lite.checkpoint import load_model
from k3lite.kda import KimiDeltaAttention
from k3lite.model import K3ForCausalLM
from k3lite.ops.kda import bounded_gate, softplus_gate
from k3lite.ops.pointwise import upcast
from k3lite.tasks.text import DATA, decode, encode, haystack
from widgets import common
from widgets.common import labelled, whole
from widgets.decay_figure import figure

__all__ = ["Decay", "Reading", "compute", "describe", "explorer", "figure", "read"]

MODEL = DATA / "models" / "needle"
LONGEST = 256  # bytes of text; every one of them is a column of the picture
FAST, MEDIUM, SLOW = 2, 16, 100  # half-lives in tokens that sort the channels
GATES = ("bounded", "softplus")


@dataclass(frozen=True, eq=False)
class Reading:
    """What the gates of a model made of a text.

    text: its bytes, one a token.   z: {layer, counted from 1: decay logits [T, heads, channels]}.
    A_log: {layer: [heads]}.   lower_bound: of g per token, negative; the value that the model was trained with.
    """

    text: bytes
    z: dict[int, Tensor]
    A_log: dict[int, Tensor]
    lower_bound: float


@dataclass(frozen=True)
class Decay:
    """Result of compute(): one head of one layer. Channels are sorted, the fastest to forget first."""

    text: bytes
    layer: int
    head: int
    token: int
    steps: int
    gate: str
    channels: tuple[int, ...]  # the channels' own numbers, from 1
    half_life: tuple[float, ...]  # tokens
    kept: tuple[
        tuple[float, ...], ...
    ]  # per channel: share of token t left after 0, 1, 2 ... tokens, to the text's end

    @property
    def left(self) -> tuple[float, ...]:
        """Per channel: the share that is left after `steps` tokens."""
        return tuple(row[self.steps] for row in self.kept)

    def within(self, tokens: float) -> int:
        """How many channels forget half within so many tokens."""
        return sum(h <= tokens for h in self.half_life)


@lru_cache(maxsize=4)
def _model(folder: Path) -> K3ForCausalLM:
    return load_model(folder)


@lru_cache(maxsize=8)
def read(text: str, folder: Path = MODEL) -> Reading:
    """Run the model in `folder` over `text`, byte by byte, and keep what goes into its gates.

    Raises ValueError when the text has fewer than 2 or more than LONGEST bytes.
    """
    ids = encode(text)
    if not 2 <= len(ids) <= LONGEST:
        raise ValueError(f"text: got {len(ids)} bytes, wanted 2 to {LONGEST}.")
    model = _model(folder)
    layers = {i + 1: layer.self_attn for i, layer in enumerate(model.model.layers)}
    layers = {i: attn for i, attn in layers.items() if isinstance(attn, KimiDeltaAttention)}
    z: dict[int, Tensor] = {}

    def catch(i: int, attn: KimiDeltaAttention):
        def hook(_, given, out):
            z[i] = (upcast(out[0]) + attn.dt_bias).unflatten(-1, (attn.heads, attn.head_dim))

        return attn.f_b_proj.register_forward_hook(hook)

    hooks = [catch(i, attn) for i, attn in layers.items()]
    try:
        with torch.no_grad():
            model(ids[None])
    finally:
        for hook in hooks:
            hook.remove()
    A_log = {i: attn.A_log.detach() for i, attn in layers.items()}
    # A model of Kimi Linear's kind has no bound; K3's then stands in for the comparison.
    bound = next(iter(layers.values())).lower_bound
    return Reading(bytes(ids.tolist()), z, A_log, -5.0 if bound is None else bound)


def compute(
    reading: Reading, *, layer: int = 1, head: int = 1, token: int = 0, steps: int = 16, gate: str = "bounded"
) -> Decay:
    """Half-lives of one head, and what is left of one token.

    layer, head: counted from 1.   token: place in the text, from 0.   steps: tokens read after it.
    gate: "bounded" (K3) or "softplus" (Kimi Linear), both of the same z.   Raises ValueError that names the value.
    """
    T = len(reading.text)
    if layer not in reading.z:
        raise ValueError(f"layer: got {layer!r}, wanted one of the KDA layers {', '.join(map(str, reading.z))}.")
    whole("head", head, 1, reading.z[layer].shape[1])
    whole("token", token, 0, T - 2)
    whole("steps", steps, 0, T - 1 - token)
    if gate not in GATES:
        raise ValueError(f"gate: got {gate!r}, wanted {' or '.join(GATES)}.")
    z, A_log = reading.z[layer].double(), reading.A_log[layer]
    g = bounded_gate(z, A_log, reading.lower_bound) if gate == "bounded" else softplus_gate(z, A_log)
    g = g[:, head - 1]  # [T, channels]
    half_life = -math.log(2) / g.mean(0)
    order = half_life.argsort(stable=True)
    later = g[token + 1 :, order].cumsum(0).exp()
    kept = torch.cat([torch.ones(1, later.shape[1], dtype=later.dtype), later]).mT
    return Decay(
        reading.text, layer, head, token, steps, gate,
        channels=tuple((order + 1).tolist()),
        half_life=tuple(half_life[order].tolist()),
        kept=tuple(map(tuple, kept.tolist())),
    )  # fmt: skip


def describe(r: Decay) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    fast, medium, slow = r.within(FAST), r.within(MEDIUM), len(r.channels) - r.within(SLOW)
    gate = "" if r.gate == "bounded" else "With a softplus gate on the same numbers, which it was not trained with: "
    return (
        f"{gate}On this text {fast} of the {len(r.channels)} channels of layer {r.layer}, head {r.head} forget half "
        f"within {FAST} tokens, {medium} within {MEDIUM}, and {slow} keep half for more than {SLOW}. Of what was written "
        f"at token {r.token} ({_shown(r.text[r.token])}), {_count(r.steps)} later {sum(r.left) / len(r.left):.0%} is "
        f"left, averaged over the channels: more than half in {sum(x > 0.5 for x in r.left)} of them, less than 1 % in "
        f"{sum(x < 0.01 for x in r.left)}. What later tokens overwrite comes on top."
    )


def explorer(text: str | None = None, layer: int = 1, head: int = 1, folder: Path = MODEL) -> common.Explorer:
    """Fresh controls around the picture: type a text, choose a layer, a head and a token, see what is forgotten.

    text: 2 to LONGEST bytes; by default held-out prose of the haystack.   layer, head: counted from 1.
    folder: a model as k3lite.checkpoint.save_model writes it, with at least one KDA layer.
    """
    text = decode(haystack("heldout")[20_004:20_164]) if text is None else text
    reading = read(text, folder)
    first = compute(reading, layer=layer, head=head, steps=min(16, len(reading.text) - 1))
    c = _controls(text, first, reading)

    def react(_: str) -> None:
        reading = read(c["text"].value, folder)
        c["token"].max = len(reading.text) - 2  # ipywidgets draws a value in that lies beyond
        c["steps"].max = len(reading.text) - 1 - c["token"].value
        r = compute(reading, **{name: control.value for name, control in c.items() if name != "text"})
        common.redraw(drawn, figure(r))
        text_line.value, words.value = marked(r), common.spoken(describe(r))
        message.show("")

    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    text_line, words, message = w.HTML(marked(first)), w.HTML(common.spoken(describe(first))), common.Message()
    message.watch(c, react)
    columns = [[c[n] for n in ("layer", "head", "gate")], [c[n] for n in ("token", "steps")]]
    children = [c["text"], common.side_by_side(columns), message, text_line, drawn, words]
    return common.Explorer("decay", c, drawn, words, message, children)


def _controls(text: str, r: Decay, reading: Reading) -> dict[str, w.Widget]:
    heads = reading.z[r.layer].shape[1]
    names = {"bounded": "bounded, as trained", "softplus": "softplus, on the same z"}
    box = labelled(w.Textarea, f"Text (2 to {LONGEST} bytes)", value=text, rows=3, continuous_update=False)
    box.layout.max_width = f"{common.WIDTH}px"
    return {
        "text": box,
        "layer": labelled(w.Dropdown, "KDA layer (number)", options=list(reading.z), value=r.layer),
        "head": labelled(w.Dropdown, "Head (number)", options=list(range(1, heads + 1)), value=r.head),
        "gate": labelled(w.Dropdown, "Gate (formula)", options=[(names[g], g) for g in GATES], value=r.gate),
        # An update takes some 30 ms, so the sliders follow the hand.
        "token": labelled(w.IntSlider, "Written at (token)", min=0, max=len(r.text) - 2, value=r.token),
        "steps": labelled(w.IntSlider, "Read after (tokens)", min=0, max=len(r.text) - 1 - r.token, value=r.steps),
    }


def marked(r: Decay) -> str:
    """HTML of the text with the written token in a box and the tokens read after it underlined."""
    parts = []
    for i, byte in enumerate(r.text):
        style = "text-decoration:underline" if r.token < i <= r.token + r.steps else ""
        style = f"outline:2px solid {common.VERMILION};font-weight:bold" if i == r.token else style
        parts.append(f'<span style="{style}">{_letter(byte)}</span>' if style else _letter(byte))
    look = f"font-family:monospace;white-space:pre-wrap;line-height:1.5;margin:6px 10px;max-width:{common.WIDTH - 20}px"
    return f'<div style="{look}">{"".join(parts)}</div>'


def _letter(byte: int) -> str:
    """A byte as one letter of HTML; line breaks and what is not printable ASCII get a sign."""
    return "↵\n" if byte == 10 else html.escape(chr(byte)) if 32 <= byte < 127 else "·"


def _count(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _shown(byte: int) -> str:
    return {10: "line break", 32: "space"}.get(byte, f"'{chr(byte)}'" if 32 < byte < 127 else f"byte {byte}")
