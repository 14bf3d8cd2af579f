"""Siblings: small models of equal size, trained alike, that differ in nothing but the memory of their layers.

    kda           KDA in every layer: a state of fixed size each
    hybrid        three KDA layers, then one MLA layer, as in K3
    1:1, 7:1      other ratios of KDA to MLA
    mla           MLA in every layer, as K3 has it: without positions
    mla-conv      the same with KDA's short convolution in front of each layer, which sees three tokens back
    mla-rotary    the same with DeepSeek's decoupled rotary positions on the `qk_rope_head_dim` numbers

The last two are not K3. They are there because MLA without positions cannot tell, alone, which token followed which,
and a comparison with it would say nothing about slots. They read whole sequences only, without a cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from k3lite import budget
from k3lite.budget import CacheBytes
from k3lite.config import K3Config, LinearAttnConfig
from k3lite.kda import ShortConv
from k3lite.mla import GatedMLA
from k3lite.model import K3ForCausalLM
from k3lite.tasks.trained import fresh_model

PATTERNS = {"kda": "K", "hybrid": "KKKM", "1:1": "KM", "7:1": "KKKKKKKM"}
PATTERNS |= {"mla": "M", "mla-conv": "M", "mla-rotary": "M"}
VARIANTS = tuple(PATTERNS)
HIDDEN = 64
KDA_HEADS, MLA_HEADS = 1, 2
MLP_START = 0.3  # of the usual size of `down_proj`: the wide MLPs of siblings with states stay out of the way at first
ROTARY_BASE = 10_000.0


def sibling_config(variant: str, vocabulary: int, *, layers: int = 4, width: int = 16) -> K3Config:
    """A KDA head with a state of width x width, or two MLA heads; no AttnRes, no experts.

    States are small, so that short documents fill them. A KDA layer has fewer parameters than an MLA layer, and what
    is missing goes into the MLPs: all siblings of as many layers have as many parameters as all-MLA with MLPs of
    width 1 (to within a percent), up to a width of 48; with wider states there are more.
    Raises ValueError for an unknown variant, or a number of layers that its pattern does not divide.
    """
    if variant not in PATTERNS:
        raise ValueError(f"variant: got {variant!r}, wanted one of {', '.join(VARIANTS)}")
    pattern = PATTERNS[variant]
    if layers < 1 or layers % len(pattern):
        raise ValueError(f"layers: got {layers}, wanted a multiple of {len(pattern)} for {variant}")

    def parameters(kinds: str, variant: str, mlp: int) -> int:
        with torch.device("meta"):
            model = make_sibling(variant, _config(kinds, vocabulary, width, mlp))
        return sum(p.numel() for p in model.parameters())

    kinds = pattern * (layers // len(pattern))
    one, two = (parameters(kinds, variant, mlp) for mlp in (1, 2))
    mlp = 1 + round((parameters("M" * layers, "mla", 1) - one) / (two - one))
    return _config(kinds, vocabulary, width, max(1, mlp))


def _config(kinds: str, vocabulary: int, width: int, mlp: int) -> K3Config:
    layers = {kind: tuple(i for i, k in enumerate(kinds, 1) if k == kind) for kind in "KM"}
    return K3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_hidden_layers=len(kinds),
        num_attention_heads=MLA_HEADS,
        intermediate_size=mlp,
        kv_lora_rank=48,
        qk_nope_head_dim=32,
        qk_rope_head_dim=8,
        v_head_dim=32,
        mla_use_output_gate=True,
        hidden_act="situ",
        initializer_range=HIDDEN**-0.5,
        linear_attn_config=LinearAttnConfig(
            kda_layers=layers["K"],
            full_attn_layers=layers["M"],
            num_heads=KDA_HEADS,
            head_dim=width,
            use_full_rank_gate=True,
            gate_lower_bound=-5.0,
        ),
    )


def make_sibling(variant: str, config: K3Config, seed: int = 0) -> K3ForCausalLM:
    """A fresh model of the variant. Embeddings start at unit size."""
    model = fresh_model(config, seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(MLP_START)
    if variant in ("mla-conv", "mla-rotary"):
        kind = ConvMLA if variant == "mla-conv" else RotaryMLA
        generator = None if model.lm_head.weight.is_meta else torch.Generator().manual_seed(seed)
        for layer in model.model.layers:
            layer.self_attn = kind.from_mla(layer.self_attn, config, generator)
    return model


def sibling_cache_bytes(variant: str, config: K3Config, tokens: int) -> CacheBytes:
    """Bytes of one sequence in fp32. For "mla-conv" on paper: its layers keep the last inputs of their convolutions."""
    kept = budget.cache_bytes(config, tokens, number_bytes=4)
    if variant != "mla-conv":
        return kept
    window = config.linear_attn_config.short_conv_kernel_size - 1
    return replace(kept, conv=4 * config.num_hidden_layers * window * config.hidden_size)


class ConvMLA(GatedMLA):
    """Gated MLA behind a short convolution."""

    @classmethod
    def from_mla(cls, mla: GatedMLA, config: K3Config, generator: torch.Generator | None) -> ConvMLA:
        """The layer `mla` itself, with a convolution added."""
        mla.__class__ = cls
        mla.conv1d = ShortConv(config.hidden_size, config.linear_attn_config.short_conv_kernel_size)
        if generator is not None:
            bound = config.linear_attn_config.short_conv_kernel_size**-0.5
            nn.init.uniform_(mla.conv1d.weight, -bound, bound, generator=generator)
        return mla

    def forward(self, x: Tensor, cache=None, mask=None, cu_seqlens: Tensor | None = None) -> Tensor:
        _whole(cache, mask)
        return super().forward(self.conv1d(x, None, cu_seqlens)[0], cu_seqlens=cu_seqlens)


class RotaryMLA(GatedMLA):
    """MLA with positions as in DeepSeek-V2 (arXiv 2405.04434 §2.1.3): the shared rope key and each head's rope query are turned
    by an angle that grows with the position; the latent part is not.
    """

    @classmethod
    def from_mla(cls, mla: GatedMLA, config: K3Config, generator: torch.Generator | None) -> RotaryMLA:
        """The layer `mla` itself, with its rope numbers turned."""
        mla.__class__ = cls
        return mla

    def query(self, x: Tensor) -> Tensor:
        q_n, q_r = super().query(x).tensor_split([self.nope_dim], dim=-1)
        return torch.cat([q_n, rotate(q_r.transpose(1, 2)).transpose(1, 2)], -1)

    def latents(self, x: Tensor) -> Tensor:
        c, k_r = super().latents(x).tensor_split([self.rank], dim=-1)
        return torch.cat([c, rotate(k_r)], -1)

    def forward(self, x: Tensor, cache=None, mask=None, cu_seqlens: Tensor | None = None) -> Tensor:
        _whole(cache, mask)
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens: this sibling counts positions from the start of a row")
        return super().forward(x)


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of numbers (2i, 2i + 1) of x [..., T, D] at position t by t / base^(2i/D)."""
    T, D = x.shape[-2:]
    rate = ROTARY_BASE ** (-torch.arange(0, D, 2, device=x.device) / D)
    angle = torch.arange(T, device=x.device).unsqueeze(-1) * rate
    turn = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turn).flatten(-2).to(x.dtype)


def _whole(cache: object, mask: object) -> None:
    if cache is not None or mask is not None:
        raise ValueError("cache: this sibling reads whole sequences only, without padding")
