"""What a model keeps for the tokens it has read: plain attention, grouped heads, MLA, and the KDA + MLA hybrid.

MHA, GQA   2 x layers x key-value heads x head width         numbers per token
MLA        layers x latent width                             numbers per token
hybrid     MLA layers x latent width                         numbers per token, and once per sequence
           KDA layers x heads x head width^2                 numbers of state, always fp32
           KDA layers x 3 x heads x head width x 3           convolution inputs (q, k, v; kernel 4)

The bytes come from k3lite.budget. Only the cache is counted: no weights, no workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

import ipywidgets as w
import plotly.graph_objects as go

from k3lite import budget
from k3lite.config import K3Config, LinearAttnConfig, presets
from widgets import common
from widgets.cache_figure import figure
from widgets.common import DEVICES, format_bytes, labelled, whole

__all__ = ["CURVE_TOKENS", "Comparison", "Scheme", "compute", "describe", "explorer", "figure"]

# Powers of two and the steps half-way between: where the curves are drawn and where the slider stops.
CURVE_TOKENS = tuple(n for k in range(10, 22) for n in (2**k, 3 * 2 ** (k - 1))) + (2**22,)
CUSTOM = "custom"
SHAPE = ("layers", "kda_layers", "heads", "head_dim", "latent_width")  # what makes a preset that preset


@dataclass(frozen=True)
class Scheme:
    """One way to remember. All bytes are for the whole batch."""

    name: str
    per_token: int  # bytes for one more token in every sequence
    fixed: int  # bytes that are there before the first token
    total: int  # bytes at the chosen context
    curve: tuple[int, ...]  # bytes at CURVE_TOKENS
    fits: int | None  # longest context (tokens) whose cache alone fits the device; None: every length fits

    @property
    def fits_text(self) -> str:
        return "any context" if self.fits is None else f"{self.fits:,} tokens" if self.fits else "not one token"


@dataclass(frozen=True)
class Comparison:
    """Result of compute(): the four schemes at one setting. Bytes are for the whole batch."""

    curve_tokens: tuple[int, ...]
    tokens: int
    batch: int
    device: str
    device_bytes: int
    mha: Scheme
    gqa: Scheme
    mla: Scheme
    hybrid: Scheme
    parts: budget.CacheBytes  # of the hybrid at the chosen context
    break_even: int | None  # up to so many tokens the hybrid keeps more than MLA everywhere (state and convolution)
    break_even_state: int | None  # the same counting the state alone, as usually published

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (self.mha, self.gqa, self.mla, self.hybrid)

    @property
    def whose(self) -> str:
        return "per sequence" if self.batch == 1 else f"for a batch of {self.batch:,} sequences"

    @property
    def verdict(self) -> str:
        """The hybrid against MLA in every layer: '3.8 times less'."""
        small, large = sorted((self.hybrid.total, self.mla.total))
        if small == large:
            return "as much"
        ratio = f"{large / small:,.1f}" if large < 10 * small else f"{large / small:,.0f}"
        if ratio == "1.0":
            return "about as much"
        return f"{ratio} times {'less' if self.hybrid.total < self.mla.total else 'more'}"


def compute(
    *,
    layers: int = 93,
    kda_layers: int = 69,
    heads: int = 96,
    kv_heads: int = 8,
    head_dim: int = 128,
    latent_width: int = 576,
    number_bytes: int = 2,
    tokens: int = 1_048_576,
    batch: int = 1,
    device: str = "H200",
) -> Comparison:
    """Bytes of the four schemes for one model shape; the defaults are Kimi K3 at its full context.

    kv_heads: key-value heads of the GQA variant, a divisor of heads. latent_width: numbers that MLA keeps per token
    and layer (K3: 512 + 64). number_bytes: bytes of a cached number; the KDA state is fp32 whatever it is.
    device: a key of common.DEVICES. Raises ValueError that names the value, what came and what was wanted.
    """
    whole("layers", layers, 1, 1024)
    whole("KDA layers", kda_layers, 0, layers)
    whole("heads", heads, 1, 1024)
    whole("key-value heads", kv_heads, 1, heads)
    whole("head width", head_dim, 1, 4096)
    whole("latent width", latent_width, 1, 2**16)
    whole("bytes per number", number_bytes, 1, 8)
    whole("context length", tokens, 1, 2**30)
    whole("batch", batch, 1, 2**20)
    if heads % kv_heads:
        raise ValueError(f"key-value heads: got {kv_heads}, wanted a divisor of {heads} heads.")
    if device not in DEVICES:
        raise ValueError(f"device: got {device!r}, wanted one of {', '.join(DEVICES)}.")
    config = _on_paper(layers, kda_layers, heads, head_dim, latent_width)

    def scheme(name: str, bytes_at) -> Scheme:
        fixed = bytes_at(0)
        per_token = bytes_at(1) - fixed
        fits = budget.longest_context(DEVICES[device], per_token, fixed)
        return Scheme(name, per_token, fixed, bytes_at(tokens), tuple(map(bytes_at, CURVE_TOKENS)), fits)

    def plain(name: str, groups: int) -> Scheme:
        return scheme(name, lambda n: budget.mha_cache_bytes(layers, groups, head_dim, n, batch, number_bytes))

    def latent(name: str, c: K3Config) -> Scheme:
        return scheme(name, lambda n: budget.cache_bytes(c, n, batch, number_bytes).total)

    return Comparison(
        curve_tokens=CURVE_TOKENS,
        tokens=tokens,
        batch=batch,
        device=device,
        device_bytes=DEVICES[device],
        mha=plain(f"MHA, {heads} heads", heads),
        gqa=plain(f"GQA, {kv_heads} KV head{'s' * (kv_heads > 1)}", kv_heads),
        mla=latent("MLA in every layer", config.all_mla_twin()),
        hybrid=latent(f"hybrid, {kda_layers} KDA + {layers - kda_layers} MLA", config),
        parts=budget.cache_bytes(config, tokens, batch, number_bytes),
        break_even=budget.break_even_tokens(config, number_bytes, conv=True),
        break_even_state=budget.break_even_tokens(config, number_bytes),
    )


def describe(r: Comparison) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    ours = f"At {r.tokens:,} tokens the hybrid keeps {format_bytes(r.hybrid.total)} {r.whose}"
    fits = (
        f"The memory of one {common.device_label(r.device)}, has room for {r.hybrid.fits_text} of the hybrid's cache "
        f"and {r.mla.fits_text} of MLA's, with no weights in it."
    )
    if r.break_even is None:
        return f"{ours}, the same as MLA in every layer, because no layer is KDA. {fits}"
    return (
        f"{ours} where MLA in every layer would keep {format_bytes(r.mla.total)}: {r.verdict}. Up to {r.break_even:,} "
        f"tokens the hybrid costs more, because its state is there from the first token on ({r.break_even_state:,} "
        f"tokens if the convolution inputs are left out). {fits}"
    )


def explorer(preset: str = "kimi-k3", tokens: int = 1_048_576, device: str = "H200") -> common.Explorer:
    """Fresh controls around the picture: choose a model, change its shape, see what its cache weighs.

    preset: one of k3lite.config.presets(). tokens: one of CURVE_TOKENS. device: a key of common.DEVICES.
    Moving a control that shapes the model turns the preset menu to "custom".
    """
    shape = _shape(preset)
    c = _controls(preset, shape, tokens, device)
    share = shape["kda_layers"] / shape["layers"]  # kept exactly while the number of layers is dragged about
    busy = False  # while one change moves several controls, only the end is drawn

    def result() -> Comparison:
        return compute(**{name: control.value for name, control in c.items() if name != "preset"})

    def react(name: str) -> None:
        nonlocal share
        note = ""
        if name == "preset" and c["preset"].value != CUSTOM:
            shape = _shape(c["preset"].value)
            share = shape["kda_layers"] / shape["layers"]
            _put_shape(c, shape)
        elif name in SHAPE:
            c["preset"].value = CUSTOM
            if name == "layers":
                _offer_kda_layers(c["kda_layers"], c["layers"].value, round(share * c["layers"].value))
            elif name == "kda_layers":
                share = c["kda_layers"].value / c["layers"].value
            elif name == "heads":
                note = _offer_kv_heads(c["kv_heads"], c["heads"].value)
        r = result()
        common.redraw(drawn, figure(r))
        text.value = common.spoken(describe(r))
        message.show(note)

    def changed(change) -> None:
        nonlocal busy
        if not busy:
            busy = True
            message.guard(lambda: react(names[change.owner]))
            busy = False

    first = result()
    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    text, message = w.HTML(common.spoken(describe(first))), common.Message()
    names = {control: name for name, control in c.items()}
    for control in c.values():
        control.observe(changed, "value")
    columns = [[c[n] for n in ("preset", "tokens", "batch", "number_bytes", "device")]]
    columns += [[c[n] for n in ("layers", "kda_layers", "heads", "kv_heads", "head_dim", "latent_width")]]
    return common.Explorer("cache", c, drawn, text, message, [common.side_by_side(columns), message, drawn, text])


def _controls(preset: str, shape: dict[str, int], tokens: int, device: str) -> dict[str, w.Widget]:
    titles = {"kimi-k3": "Kimi K3", "kimi-linear-48b": "Kimi Linear 48B"}
    models = sorted(presets(), key=lambda p: (list(titles).index(p) if p in titles else len(titles), p))
    contexts = [(f"{n:,} tokens", n) for n in CURVE_TOKENS]
    batches = [("1 sequence", 1)] + [(f"{2**k:,} sequences", 2**k) for k in range(1, 11)]
    widths = [("1 (fp8)", 1), ("2 (bf16, fp16)", 2), ("4 (fp32)", 4), ("8 (fp64)", 8)]
    slider, number = w.SelectionSlider, w.IntText
    # Sliders follow the hand (continuous_update, the default): an update takes some 15 ms.
    kda = labelled(slider, "KDA layers (number, share)", options=[0])
    kv = labelled(slider, "GQA KV heads (number)", options=[1])
    _offer_kda_layers(kda, shape["layers"], shape["kda_layers"])
    _offer_kv_heads(kv, shape["heads"], fresh=True)
    menu = [(titles.get(p, p), p) for p in models] + [(CUSTOM, CUSTOM)]
    devices = [(common.device_label(d), d) for d in DEVICES]
    return {
        "preset": labelled(w.Dropdown, "Model", options=menu, value=preset),
        "tokens": labelled(slider, "Context length (tokens)", options=contexts, value=tokens),
        "batch": labelled(slider, "Batch (sequences)", options=batches, value=1),
        "number_bytes": labelled(w.Dropdown, "Cached number (bytes)", options=widths, value=shape["number_bytes"]),
        "device": labelled(w.Dropdown, "Device memory (vendor's GB)", options=devices, value=device),
        "layers": labelled(w.IntSlider, "Layers (number)", min=1, max=128, value=shape["layers"]),
        "kda_layers": kda,
        "heads": labelled(number, "Heads (number)", value=shape["heads"]),
        "kv_heads": kv,
        "head_dim": labelled(number, "Head width (numbers)", value=shape["head_dim"]),
        "latent_width": labelled(number, "MLA latent width (numbers)", value=shape["latent_width"]),
    }


def _shape(preset: str) -> dict[str, int]:
    """The arguments of compute() that a preset fixes. Raises ConfigError for an unknown name."""
    p = K3Config.preset(preset)
    return {
        "layers": p.num_hidden_layers,
        "kda_layers": p.num_kda_layers,
        "heads": p.num_attention_heads,
        "head_dim": p.v_head_dim,
        "latent_width": p.latent_width,
        "number_bytes": {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[p.dtype],
    }


def _put_shape(c: dict[str, w.Widget], shape: dict[str, int]) -> None:
    for name in ("layers", "heads", "head_dim", "latent_width", "number_bytes"):
        c[name].value = shape[name]
    _offer_kda_layers(c["kda_layers"], shape["layers"], shape["kda_layers"])
    _offer_kv_heads(c["kv_heads"], shape["heads"], fresh=True)


def _offer_kda_layers(control: w.SelectionSlider, layers: int, value: int) -> None:
    """Steps 0 to layers, each read out as a count and a share."""
    with control.hold_sync():
        control.options = [(f"{n} of {layers} = {n / layers:.1%}", n) for n in range(layers + 1)]
        control.value = value


def _offer_kv_heads(control: w.SelectionSlider, heads: int, fresh: bool = False) -> str:
    """Offer the divisors of `heads` only. Keeps the value if it can; else takes the next lower one and says so.

    fresh: choose anew, 8 or what is left of a quarter of the heads.
    """
    whole("heads", heads, 1, 1024)
    divisors = [d for d in range(1, heads + 1) if heads % d == 0]
    before = control.value
    value = max(d for d in divisors if d <= (max(1, min(8, heads // 4)) if fresh else before))
    with control.hold_sync():
        control.options = [(f"{d} of {heads}", d) for d in divisors]
        control.value = value
    if fresh or value == before:
        return ""
    return f"Key-value heads set from {before} to {value}: they must divide the {heads} heads."


def _on_paper(layers: int, kda_layers: int, heads: int, head_dim: int, latent_width: int) -> K3Config:
    """A config with these cache sizes. Its other widths, and which layers are KDA, change no byte of a cache."""
    attn = LinearAttnConfig(
        kda_layers=tuple(range(1, kda_layers + 1)),
        full_attn_layers=tuple(range(kda_layers + 1, layers + 1)),
        num_heads=heads,
        head_dim=head_dim,
    )
    cached = {"kv_lora_rank": latent_width, "qk_nope_head_dim": head_dim, "qk_rope_head_dim": 0, "v_head_dim": head_dim}
    rest = {"vocab_size": 1, "hidden_size": 1, "intermediate_size": 1}
    return K3Config(num_hidden_layers=layers, num_attention_heads=heads, linear_attn_config=attn, **cached, **rest)
