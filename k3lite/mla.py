"""The gated MLA layer: one compressed, addressable slot per token.

    q          = RMSNorm(x W_qa^T) W_qb^T           [q_n | q_r] per head;  Kimi Linear: q = x W_q^T
    [c | k_r]  = x W_kva^T,   c^ = RMSNorm(c)       cached: [c^ | k_r], shared by all heads
    o          = softmax attention over the slots   ops/latent_attention.py, expanded or absorbed
    y          = ( o * sigmoid(x W_g^T) ) W_o^T     Kimi Linear: no gate

No position is encoded: the "rope" numbers keep their released name and are never rotated (NoPE).
Both inner norms use eps 1e-6, the class default of the released code, not `rms_norm_eps`; llama.cpp and waste
use 1e-5 (k3-architecture §7.2). Source: Kimi K3 report §2.1.2; k3-architecture §2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3lite.cache import LatentCache
from k3lite.config import K3Config
from k3lite.mlp import RMSNorm, linear
from k3lite.ops.latent_attention import Form, latent_attention
from k3lite.ops.pointwise import upcast

INNER_NORM_EPS = 1e-6


class GatedMLA(nn.Module):
    """[B,T,hidden_size] -> [B,T,hidden_size], caching kv_lora_rank + qk_rope_head_dim numbers a token."""

    form: Form = "auto"

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        d, heads = config.hidden_size, config.num_attention_heads
        self.heads, self.nope_dim, self.rank = heads, config.qk_nope_head_dim, config.kv_lora_rank
        q_width, v_width = heads * config.qk_head_dim, heads * config.v_head_dim
        self.low_rank_query = config.q_lora_rank is not None
        if self.low_rank_query:
            self.q_a_proj = linear(d, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, INNER_NORM_EPS)
            self.q_b_proj = linear(config.q_lora_rank, q_width)
        else:
            self.q_proj = linear(d, q_width)
        self.kv_a_proj_with_mqa = linear(d, config.latent_width)
        self.kv_a_layernorm = RMSNorm(self.rank, INNER_NORM_EPS)
        self.kv_b_proj = linear(self.rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.output_gate = config.mla_use_output_gate
        if self.output_gate:
            self.g_proj = linear(d, v_width)
        self.o_proj = linear(v_width, d)

    def query(self, x: Tensor) -> Tensor:
        """[B,T,H,nope+rope]"""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank_query else self.q_proj(x)
        return q.unflatten(-1, (self.heads, -1))

    def latents(self, x: Tensor) -> Tensor:
        """[B,T,rank+rope]: what the cache keeps of x. The norm covers the rank part only."""
        c, k_r = self.kv_a_proj_with_mqa(x).tensor_split([self.rank], dim=-1)
        return torch.cat([self.kv_a_layernorm(c), k_r], dim=-1)

    def kv_b(self) -> Tensor:
        """[H, nope+V, rank]: how a latent becomes a head's key and value."""
        return self.kv_b_proj.weight.unflatten(0, (self.heads, -1))

    def forward(
        self, x: Tensor, cache: LatentCache | None = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """x: [B,T,d].   cache: grows by x.   mask: [B,L] over cached and new tokens, False for padding."""
        latents = self.latents(x)
        if cache is not None:
            latents = cache.append(latents)
        o = latent_attention(
            self.query(x), latents, self.kv_b(), self.nope_dim,
            key_mask=mask, cu_seqlens=cu_seqlens, form=self.form,
        ).flatten(-2)  # fmt: skip
        if self.output_gate:
            o = (upcast(o) * torch.sigmoid(upcast(self.g_proj(x)))).to(x.dtype)
        return self.o_proj(o)
