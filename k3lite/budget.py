"""K3 on paper: parameters and cache bytes from a config alone. Standard library only.

Every figure is arithmetic on the released config; tests hold it to the model that is really built
(`model.parameter_parts`, `cache.nbytes`) and to the published totals. Source: k3-architecture §3.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3lite.config import K3Config

GIB = 2**30
MIB = 2**20
KIB = 2**10


# ---- parameters


def parameters(c: K3Config) -> dict[str, int]:
    """Parameters by part; the values sum to the whole text model (k3-architecture §3.2).

    `A_log` counts one number per head, without the padding to 128 of the released files.
    """
    d, moe = c.hidden_size, c.num_moe_layers
    dense_layers = c.num_hidden_layers - moe
    latent = c.routed_expert_hidden_size
    norm = latent if latent and c.latent_moe_use_norm else 0
    return {
        "embed_tokens": c.vocab_size * d,
        "lm_head": c.vocab_size * d,
        "kda": c.num_kda_layers * kda_layer_parameters(c),
        "mla": c.num_mla_layers * mla_layer_parameters(c),
        "norms": c.num_hidden_layers * 2 * d + d,
        "attn_res": (c.num_hidden_layers * 4 * d + 2 * d) if c.attn_res_block_size else 0,
        "dense_mlp": dense_layers * 3 * c.intermediate_size * d,
        "router": moe * (c.num_experts * d + c.num_experts),
        "latent": moe * (2 * latent * d + norm) if latent else 0,
        "shared_experts": moe * 3 * c.num_shared_experts * c.moe_intermediate_size * d,
        "routed_experts": moe * c.num_experts * expert_parameters(c),
    }


def active_parameters(c: K3Config, input_embedding: bool = False) -> int:
    """Parameters that one token meets: all but the experts it was not routed to.

    The published "active" figures leave out the input embedding, which is a look-up and no product.
    """
    parts = parameters(c)
    if c.num_experts:
        parts["routed_experts"] = parts["routed_experts"] * c.num_experts_per_token // c.num_experts
    if not input_embedding:
        del parts["embed_tokens"]
    return sum(parts.values())


def expert_parameters(c: K3Config) -> int:
    """One routed expert: gate, up and down matrices."""
    return 3 * c.moe_intermediate_size * c.expert_width


def kda_layer_parameters(c: K3Config) -> int:
    """One KDA attention layer (k3-architecture §2.3)."""
    a, d, width = c.linear_attn_config, c.hidden_size, c.kda_width
    qkv_o = 4 * width * d
    conv = 3 * width * a.short_conv_kernel_size
    decay = a.head_dim * d + width * a.head_dim + width + a.num_heads  # f_a, f_b, dt_bias, A_log
    gate = width * d if a.use_full_rank_gate else a.head_dim * d + width * a.head_dim
    return qkv_o + conv + decay + a.num_heads * d + gate + a.head_dim  # + b_proj, output gate, o_norm


def mla_layer_parameters(c: K3Config) -> int:
    """One MLA attention layer (k3-architecture §2.2)."""
    d, heads, rank = c.hidden_size, c.num_attention_heads, c.q_lora_rank
    q_out = heads * c.qk_head_dim
    query = rank * d + rank + q_out * rank if rank else q_out * d
    keys = c.latent_width * d + c.kv_lora_rank + heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    v_out = heads * c.v_head_dim
    gate = v_out * d if c.mla_use_output_gate else 0
    return query + keys + gate + d * v_out


# ---- cache


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that a batch of sequences keeps between two tokens."""

    latent: int  # grows with the tokens
    state: int  # does not
    conv: int  # does not

    @property
    def total(self) -> int:
        return self.latent + self.state + self.conv


def cache_bytes(c: K3Config, tokens: int, batch: int = 1, number_bytes: int = 2, state_bytes: int = 4) -> CacheBytes:
    """Bytes of the hybrid cache after `tokens` tokens in each of `batch` sequences.

    number_bytes: width of a cached latent or convolution input (the model's dtype; 2 = bf16).
    state_bytes: width of a KDA state number (4 = fp32, whatever the model's dtype).
    """
    a = c.linear_attn_config
    conv_numbers = 3 * c.kda_width * (a.short_conv_kernel_size - 1)
    return CacheBytes(
        latent=batch * tokens * c.num_mla_layers * c.latent_width * number_bytes,
        state=batch * c.num_kda_layers * a.num_heads * a.head_dim**2 * state_bytes,
        conv=batch * c.num_kda_layers * conv_numbers * number_bytes,
    )


def mha_cache_bytes(
    layers: int, kv_heads: int, head_dim: int, tokens: int, batch: int = 1, number_bytes: int = 2
) -> int:
    """Keys and values of plain attention; with kv_heads below the query heads this is GQA, with 1 MQA."""
    return 2 * batch * tokens * layers * kv_heads * head_dim * number_bytes


def break_even_tokens(c: K3Config, number_bytes: int = 2, state_bytes: int = 4, conv: bool = False) -> int | None:
    """Context below which the hybrid's constant state costs more than the latents that it saves
    against the all-MLA twin (floor, in tokens; K3: 5,461, with the convolution inputs 5,653).
    None where there is no KDA layer.
    """
    if not c.num_kda_layers:
        return None
    fixed = cache_bytes(c, 0, 1, number_bytes, state_bytes)
    saved = c.num_kda_layers * c.latent_width * number_bytes
    return (fixed.state + (fixed.conv if conv else 0)) // saved


def longest_context(memory: int, per_token: int, fixed: int = 0) -> int | None:
    """Tokens whose cache fits into `memory` bytes beside a `fixed` part. All three are bytes, for the whole batch.

    0 if not even the fixed part fits; None if nothing grows with the tokens, so that no context is too long.
    """
    if fixed > memory:
        return 0
    return (memory - fixed) // per_token if per_token else None
