"""The controls of cache_explorer: a menu of models, and sliders that offer only what can be."""

from __future__ import annotations

import ipywidgets as w

from k3lite import budget
from k3lite.config import K3Config, presets
from widgets import common
from widgets.common import DEVICES, labelled, whole

CUSTOM = "custom"
PAGES = (1, 16, 64, 256, 1024, 6144)  # ours are 64; K3's report has blocks of 1,024 to 6,144 (k3-architecture §2.7)


def controls(
    preset: str, shape: dict[str, int], contexts: tuple[int, ...], tokens: int, device: str
) -> dict[str, w.Widget]:
    """By name, most of them as the arguments of compute(). contexts: where the slider of the context length stops."""
    titles = {"kimi-k3": "Kimi K3", "kimi-linear-48b": "Kimi Linear 48B"}
    models = sorted(presets(), key=lambda p: (list(titles).index(p) if p in titles else len(titles), p))
    stops = [(f"{n:,} tokens", n) for n in contexts]
    batches = [("1 sequence", 1)] + [(f"{2**k:,} sequences", 2**k) for k in range(1, 11)]
    windows = [(f"{2**k:,} tokens", 2**k) for k in range(7, 18)]
    pages = [(f"{n:,} token{'s' * (n > 1)}", n) for n in PAGES]
    widths = [("1 (fp8)", 1), ("2 (bf16, fp16)", 2), ("4 (fp32)", 4), ("8 (fp64)", 8)]
    slider, number = w.SelectionSlider, w.IntText
    # Sliders follow the hand (continuous_update, the default): an update takes some 25 ms.
    kda = labelled(slider, "KDA layers (number, share)", options=[0])
    kv = labelled(slider, "GQA KV heads (number)", options=[1])
    offer_kda_layers(kda, shape["layers"], shape["kda_layers"])
    offer_kv_heads(kv, shape["heads"], fresh=True)
    menu = [(titles.get(p, p), p) for p in models] + [(CUSTOM, CUSTOM)]
    devices = [(common.device_label(d), d) for d in DEVICES]
    return {
        "preset": labelled(w.Dropdown, "Model", options=menu, value=preset),
        "tokens": labelled(slider, "Context length (tokens)", options=stops, value=tokens),
        "batch": labelled(slider, "Batch (sequences)", options=batches, value=1),
        "number_bytes": labelled(w.Dropdown, "Cached number (bytes)", options=widths, value=shape["number_bytes"]),
        "device": labelled(w.Dropdown, "Device memory (vendor's GB)", options=devices, value=device),
        "layers": labelled(w.IntSlider, "Layers (number)", min=1, max=128, value=shape["layers"]),
        "kda_layers": kda,
        "heads": labelled(number, "Heads (number)", value=shape["heads"]),
        "kv_heads": kv,
        "head_dim": labelled(number, "Head width (numbers)", value=shape["head_dim"]),
        "latent_width": labelled(number, "MLA latent width (numbers)", value=shape["latent_width"]),
        "window": labelled(slider, "Sliding window (tokens)", options=windows, value=4096),
        "page_size": labelled(w.Dropdown, "Page (tokens)", options=pages, value=budget.PAGE_SIZE),
    }


def shape_of(preset: str) -> dict[str, int]:
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


def put_shape(c: dict[str, w.Widget], shape: dict[str, int]) -> None:
    for name in ("layers", "heads", "head_dim", "latent_width", "number_bytes"):
        c[name].value = shape[name]
    offer_kda_layers(c["kda_layers"], shape["layers"], shape["kda_layers"])
    offer_kv_heads(c["kv_heads"], shape["heads"], fresh=True)


def offer_kda_layers(control: w.SelectionSlider, layers: int, value: int) -> None:
    """Steps 0 to layers, each read out as a count and a share."""
    with control.hold_sync():
        control.options = [(f"{n} of {layers} = {n / layers:.1%}", n) for n in range(layers + 1)]
        control.value = value


def offer_kv_heads(control: w.SelectionSlider, heads: int, fresh: bool = False) -> str:
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
