"""What a model keeps for the tokens it has read: plain attention, grouped heads, a window, MLA, the KDA + MLA hybrid.

MHA, GQA   2 x layers x key-value heads x head width         numbers per token (GQA with one head is MQA)
window     GQA's numbers, of the last so many tokens only
MLA        layers x latent width                             numbers per token
hybrid     MLA layers x latent width                         numbers per token, and once per sequence
           KDA layers x heads x head width^2                 numbers of state, always fp32
           KDA layers x 3 x heads x head width x 3           convolution inputs (q, k, v; kernel 4)

What grows lies in pages of so many tokens, so that the last page of a sequence may be begun only. The bytes come from
k3lite.budget. Only the cache is counted: no weights, no workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

import ipywidgets as w
import plotly.graph_objects as go

from k3lite import budget
from k3lite.config import K3Config, LinearAttnConfig
from widgets import common
from widgets.cache_controls import CUSTOM, controls, offer_kda_layers, offer_kv_heads, put_shape, shape_of
from widgets.cache_figure import figure
from widgets.common import DEVICES, format_bytes, whole

__all__ = ["CURVE_TOKENS", "Comparison", "Scheme", "compute", "describe", "explorer", "figure"]

# Powers of two and the steps half-way between: where the curves are drawn and where the slider stops.
CURVE_TOKENS = tuple(n for k in range(10, 22) for n in (2**k, 3 * 2 ** (k - 1))) + (2**22,)
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
    parts: dict[str, int]  # total by kind: keys and values, or latents, state and conv
    unused: int  # bytes of the pages held that hold no token, on top of total
    window: int | None = None  # only so many tokens are kept (None: all)

    @property
    def fits_text(self) -> str:
        """'5,083,573 tokens', as in "fits 5,083,573 tokens"."""
        return "any context" if self.fits is None else f"{self.fits:,} tokens" if self.fits else "not one token"

    @property
    def reach_text(self) -> str:
        """What a caption says of its limits: the context that fits, or what a window has lost."""
        return "keeps nothing older" if self.window and self.fits is None else f"fits {self.fits_text}"


@dataclass(frozen=True)
class Comparison:
    """Result of compute(): the schemes at one setting. Bytes are for the whole batch."""

    curve_tokens: tuple[int, ...]
    tokens: int
    batch: int
    device: str
    device_bytes: int
    mha: Scheme
    gqa: Scheme
    window: Scheme
    mla: Scheme
    hybrid: Scheme
    page_size: int
    unused_next: int  # of the hybrid's pages after one token more, when it had begun none
    break_even: int | None  # up to so many tokens the hybrid keeps more than MLA everywhere (state and convolution)
    break_even_state: int | None  # the same counting the state alone, as usually published

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (self.mha, self.gqa, self.window, self.mla, self.hybrid)

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
    window: int = 4096,
    number_bytes: int = 2,
    tokens: int = 1_048_576,
    batch: int = 1,
    page_size: int = budget.PAGE_SIZE,
    device: str = "H200",
) -> Comparison:
    """Bytes of the five schemes for one model shape; the defaults are Kimi K3 at its full context.

    kv_heads: key-value heads of the GQA variant, a divisor of heads. window: tokens that the sliding window keeps, with
    GQA's heads. latent_width: numbers that MLA keeps per token and layer (K3: 512 + 64). number_bytes: bytes of a
    cached number; the KDA state is fp32 whatever it is. page_size: tokens. device: a key of common.DEVICES. Raises ValueError that names the value, what came and what was wanted.
    """
    whole("layers", layers, 1, 1024)
    whole("KDA layers", kda_layers, 0, layers)
    whole("heads", heads, 1, 1024)
    whole("key-value heads", kv_heads, 1, heads)
    whole("head width", head_dim, 1, 4096)
    whole("latent width", latent_width, 1, 2**16)
    whole("bytes per number", number_bytes, 1, 8)
    whole("window", window, 1, 2**30)
    whole("context length", tokens, 1, 2**30)
    whole("batch", batch, 1, 2**20)
    whole("page", page_size, 1, 2**20)
    if heads % kv_heads:
        raise ValueError(f"key-value heads: got {kv_heads}, wanted a divisor of {heads} heads.")
    if device not in DEVICES:
        raise ValueError(f"device: got {device!r}, wanted one of {', '.join(DEVICES)}.")
    config = _on_paper(layers, kda_layers, heads, head_dim, latent_width)

    def scheme(name: str, parts_at, window: int | None = None) -> Scheme:
        """parts_at(tokens): bytes by kind, of which the first token's show what grows."""

        def bytes_at(n: int) -> int:
            return sum(parts_at(n).values())

        fixed, kept = bytes_at(0), min(tokens, window or tokens)
        per_token = bytes_at(1) - fixed
        fits = budget.longest_context(DEVICES[device], per_token, fixed)
        if window and fits >= window:
            fits = None  # it grows no further
        curve = tuple(map(bytes_at, CURVE_TOKENS))
        unused = per_token * (budget.pages_of(kept, page_size) * page_size - kept)
        return Scheme(name, per_token, fixed, bytes_at(tokens), curve, fits, parts_at(tokens), unused, window)

    def plain(name: str, groups: int, window: int | None = None) -> Scheme:
        def parts_at(n: int) -> dict[str, int]:
            both = budget.mha_cache_bytes(layers, groups, head_dim, n, batch, number_bytes, window)
            return {"keys": both // 2, "values": both // 2}

        return scheme(name, parts_at, window)

    def latent(name: str, c: K3Config) -> Scheme:
        return scheme(name, lambda n: vars(budget.cache_bytes(c, n, batch, number_bytes)))

    def unused_at(n: int) -> int:
        paged = budget.paged_cache_bytes(config, n, batch, page_size=page_size, number_bytes=number_bytes)
        return paged.latent - budget.cache_bytes(config, n, batch, number_bytes).latent

    return Comparison(
        curve_tokens=CURVE_TOKENS,
        tokens=tokens,
        batch=batch,
        device=device,
        device_bytes=DEVICES[device],
        mha=plain(f"MHA, {heads} heads", heads),
        gqa=plain(f"GQA, {kv_heads} KV heads" if kv_heads > 1 else "MQA, 1 KV head", kv_heads),
        window=plain(f"window, last {window:,} tokens", kv_heads, window),
        mla=latent("MLA in every layer", config.all_mla_twin()),
        hybrid=latent(f"hybrid, {kda_layers} KDA + {layers - kda_layers} MLA", config),
        page_size=page_size,
        unused_next=unused_at(tokens + 1),
        break_even=budget.break_even_tokens(config, number_bytes, conv=True),
        break_even_state=budget.break_even_tokens(config, number_bytes),
    )


def describe(r: Comparison) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    ours = f"At {r.tokens:,} tokens the hybrid keeps {format_bytes(r.hybrid.total)} {r.whose}"
    rest = (
        f"The memory of one {common.device_label(r.device)}, has room for {r.hybrid.fits_text} of the hybrid's cache "
        f"and {r.mla.fits_text} of MLA's, with no weights in it. A window of the last {r.window.window:,} tokens keeps "
        f"{format_bytes(r.window.total)}{' and nothing older' * (r.tokens > r.window.window)}. {_of_pages(r)}"
    )
    if r.break_even is None:
        return f"{ours}, the same as MLA in every layer, because no layer is KDA. {rest}"
    return (
        f"{ours} where MLA in every layer would keep {format_bytes(r.mla.total)}: {r.verdict}. Up to {r.break_even:,} "
        f"tokens the hybrid costs more, because its state is there from the first token on ({r.break_even_state:,} "
        f"tokens if the convolution inputs are left out). {rest}"
    )


def _of_pages(r: Comparison) -> str:
    """What rounding up to pages costs the hybrid."""
    if not r.hybrid.per_token:
        return "Nothing of the hybrid lies in pages."
    pages = "one token" if r.page_size == 1 else f"{r.page_size:,} tokens"
    held = f"In pages of {pages} the hybrid holds {format_bytes(r.hybrid.total + r.hybrid.unused)}"
    if r.hybrid.unused:
        return f"{held}, {format_bytes(r.hybrid.unused)} of it unused."
    if not r.unused_next:
        return f"{held}, none of it unused."
    return (
        f"{held}, none of it unused; one token more would begin a page and leave {format_bytes(r.unused_next)} unused."
    )


def explorer(preset: str = "kimi-k3", tokens: int = 1_048_576, device: str = "H200") -> common.Explorer:
    """Fresh controls around the picture: choose a model, change its shape, see what its cache weighs.

    preset: one of k3lite.config.presets(). tokens: one of CURVE_TOKENS. device: a key of common.DEVICES.
    Moving a control that shapes the model turns the preset menu to "custom".
    """
    shape = shape_of(preset)
    c = controls(preset, shape, CURVE_TOKENS, tokens, device)
    share = shape["kda_layers"] / shape["layers"]  # kept exactly while the number of layers is dragged about

    def result() -> Comparison:
        return compute(**{name: control.value for name, control in c.items() if name != "preset"})

    def react(name: str) -> None:
        nonlocal share
        note = ""
        if name == "preset" and c["preset"].value != CUSTOM:
            shape = shape_of(c["preset"].value)
            share = shape["kda_layers"] / shape["layers"]
            put_shape(c, shape)
        elif name in SHAPE:
            c["preset"].value = CUSTOM
            if name == "layers":
                offer_kda_layers(c["kda_layers"], c["layers"].value, round(share * c["layers"].value))
            elif name == "kda_layers":
                share = c["kda_layers"].value / c["layers"].value
            elif name == "heads":
                note = offer_kv_heads(c["kv_heads"], c["heads"].value)
        r = result()
        common.redraw(drawn, figure(r))
        text.value = common.spoken(describe(r))
        message.show(note)

    first = result()
    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    text, message = w.HTML(common.spoken(describe(first))), common.Message()
    message.watch(c, react)
    columns = [[c[n] for n in ("preset", "tokens", "batch", "number_bytes", "device", "page_size")]]
    columns += [[c[n] for n in ("layers", "kda_layers", "heads", "kv_heads", "head_dim", "latent_width", "window")]]
    return common.Explorer("cache", c, drawn, text, message, [common.side_by_side(columns), message, drawn, text])


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
