"""K3 on paper: parameters, cache bytes and the work of a pass, from a config alone. Standard library only.

Every figure is arithmetic on the released config; tests hold it to the model that is really built
(`model.parameter_parts`, `cache.bytes`, `cache.nbytes`) and to the published totals. Source: k3-architecture §3.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3lite.config import MX_BLOCK, K3Config

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


def expert_bytes(c: K3Config, number_bytes: int = 2) -> int:
    """One routed expert: 4.25 bits a number if the config packs MXFP4 (half a byte, and a scale byte for 32), else number_bytes."""
    numbers = expert_parameters(c)
    return numbers // 2 + numbers // MX_BLOCK if c.packs_mxfp4 else numbers * number_bytes


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes of the tensors in a checkpoint of the text model, without the header of its files."""

    experts: int  # routed: MXFP4 codes, or plain numbers where nothing is packed
    scales: int  # of those codes
    rest: int

    @property
    def routed(self) -> int:
        return self.experts + self.scales

    @property
    def total(self) -> int:
        return self.routed + self.rest


def checkpoint_bytes(c: K3Config, number_bytes: int = 2) -> CheckpointBytes:
    """What `checkpoint.save_model` writes for a model of this config, its experts packed if the config packs MXFP4.

    number_bytes: width of a number in the model's dtype. Convolutions, decay rates, their biases, head norms and
    balancing biases are fp32 all the same, as in K3's files; those pad `A_log` to 128 numbers, 8,832 bytes that are
    not counted here.
    Source: k3-architecture §3.4, §4.
    """
    parts, experts = parameters(c), c.num_moe_layers * c.num_experts
    routed = parts.pop("routed_experts")
    scales = routed // MX_BLOCK if c.packs_mxfp4 else 0
    return CheckpointBytes(
        experts=experts * expert_bytes(c, number_bytes) - scales,
        scales=scales,
        rest=sum(parts.values()) * number_bytes + fp32_numbers(c) * (4 - number_bytes),
    )


def fp32_numbers(c: K3Config) -> int:
    """Parameters that are fp32 whatever the model's dtype (k3-architecture §4)."""
    a = c.linear_attn_config
    kda = (
        3 * c.kda_width * a.short_conv_kernel_size + a.num_heads + c.kda_width + a.head_dim
    )  # conv, A_log, dt_bias, o_norm
    return c.num_kda_layers * kda + c.num_moe_layers * c.num_experts


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


PAGE_SIZE = 64  # tokens in a page of latents, unless another size is asked for
TABLE_BYTES = 4  # of a page's number in a block table


@dataclass(frozen=True)
class PagedCacheBytes(CacheBytes):
    """Bytes that are held for a batch whose latents lie in pages. `latent` counts whole pages."""

    table: int  # the block table: one entry a page and sequence

    @property
    def total(self) -> int:
        return self.latent + self.state + self.conv + self.table


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens need: the last may be begun only."""
    return -(-tokens // page_size)


def paged_cache_bytes(
    c: K3Config, tokens: int, batch: int = 1, *, page_size: int = PAGE_SIZE, shared: int = 0,
    number_bytes: int = 2, state_bytes: int = 4,
) -> PagedCacheBytes:  # fmt: skip
    """Bytes held after `tokens` tokens in each of `batch` sequences: `cache_bytes` with latents rounded up to pages.

    page_size: tokens in a page.   shared: the first so many tokens were read once and the cache then copied for each
    sequence: full pages are held once, and the one that was begun is everybody's own once all go on from there.
    Raises ValueError where more is shared than there is. Other arguments as in `cache_bytes`.
    """
    if not 0 <= shared <= tokens:
        raise ValueError(f"shared: got {shared} tokens, wanted 0 to {tokens}, what a sequence has")
    plain, whole = cache_bytes(c, tokens, batch, number_bytes, state_bytes), pages_of(tokens, page_size)
    common = whole if shared == tokens else shared // page_size
    page_bytes = page_size * c.num_mla_layers * c.latent_width * number_bytes
    return PagedCacheBytes(
        latent=(common + batch * (whole - common)) * page_bytes,
        state=plain.state,
        conv=plain.conv,
        table=batch * whole * TABLE_BYTES if c.num_mla_layers else 0,
    )


def mha_cache_bytes(
    layers: int, kv_heads: int, head_dim: int, tokens: int, batch: int = 1, number_bytes: int = 2,
    window: int | None = None,
) -> int:  # fmt: skip
    """Keys and values of plain attention; with kv_heads below the query heads this is GQA, with 1 MQA.

    window: a sliding window: only the last so many tokens are kept (None: all).
    """
    kept = tokens if window is None else min(tokens, window)
    return 2 * batch * kept * layers * kv_heads * head_dim * number_bytes


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


# ---- work


@dataclass(frozen=True)
class Work:
    """The least that a forward pass asks of a machine: products, and bytes that go through its memory once.

    A multiply-add is two FLOPs. Activations are left out of the bytes: at best they never leave the chip.
    """

    weight_flops: int  # products with weights
    memory_flops: int  # attention over slots; forgetting, correcting and reading states
    weight_bytes: int  # of the weights that the pass meets, for all its tokens together
    cache_bytes: int  # slots, states and windows read, and what is written

    @property
    def flops(self) -> int:
        return self.weight_flops + self.memory_flops

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def seconds(self, flop_s: float, byte_s: float) -> float:
        """Roofline time of a machine with so many FLOPs and bytes a second: the larger of its two parts."""
        return max(self.flops / flop_s, self.bytes / byte_s)


def forward_work(
    c: K3Config, new: int, tokens: int = 0, batch: int = 1, number_bytes: int = 2, state_bytes: int = 4
) -> Work:  # fmt: skip
    """Of a pass over `new` tokens in each of `batch` sequences, with `tokens` tokens in each cache before it.

    Decode is new = 1, prefill a large `new`. Logits are made for the last token only.
    number_bytes, state_bytes: as in `cache_bytes`. Raises ValueError where there is no new token.
    """
    if new < 1 or tokens < 0 or batch < 1:
        raise ValueError(f"forward_work: got new={new}, tokens={tokens}, batch={batch}, wanted at least 1, 0, 1")
    widths = {"number_bytes": number_bytes, "state_bytes": state_bytes}
    old, grown = (cache_bytes(c, n, batch, **widths) for n in (tokens, tokens + new))
    a, head = c.linear_attn_config, parameters(c)["lm_head"]
    every_token = active_parameters(c) - head
    slots = c.num_mla_layers * mla_attention_flops(c, new, tokens)
    states = c.num_kda_layers * new * 7 * a.num_heads * a.head_dim**2  # fade 1, look up 2, write 2, read 2
    return Work(
        weight_flops=2 * batch * (new * every_token + head),
        memory_flops=batch * (slots + states),
        weight_bytes=weight_bytes(c, batch * new, number_bytes),
        cache_bytes=grown.total + (old.state + old.conv if tokens else 0),  # slots once, states in and out
    )


def mla_attention_flops(c: K3Config, new: int, tokens: int) -> int:
    """One MLA layer, one sequence: `new` tokens look at the `tokens` slots before them and at each other, causally.

    The smaller of the two forms of `latent_attention`: expanded must unfold the earlier slots again, absorbed has
    wider products. Folding and unfolding of the new tokens are products with weights and counted there.
    """
    heads, pairs = c.num_attention_heads, new * tokens + new * (new + 1) // 2
    unfold = heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank * tokens
    expanded = heads * (c.qk_head_dim + c.v_head_dim) * pairs + unfold
    absorbed = heads * (c.latent_width + c.kv_lora_rank) * pairs
    return 2 * min(expanded, absorbed)


def experts_met(c: K3Config, rows: int) -> float:
    """Experts of a layer that at least one of `rows` tokens is sent to: the mean, if choices are like fair draws."""
    return c.num_experts * (1 - (1 - c.num_experts_per_token / c.num_experts) ** rows) if c.num_experts else 0.0


def weight_bytes(c: K3Config, rows: int, number_bytes: int = 2) -> int:
    """Bytes of the weights that a pass over `rows` tokens in all reads once.

    All of them but the input embedding, and of the routed experts `experts_met`. Experts in MXFP4 take 4.25 bits a
    number, everything else number_bytes (the few tensors that K3 keeps in fp32, 0.02 %, too).
    """
    parts = parameters(c)
    everywhere = sum(parts.values()) - parts["embed_tokens"] - parts["routed_experts"]
    return everywhere * number_bytes + round(c.num_moe_layers * experts_met(c, rows) * expert_bytes(c, number_bytes))


NUMBERS = {"fp64": 8, "fp32": 4, "bf16": 2, "mxfp8": 1}  # bytes of a number on the wire


def row_bytes(width: int, number: str) -> int:
    """Bytes of a row of `width` numbers between ranks; MXFP8 adds a scale of one byte for every 32 (k3-architecture §2.7)."""
    if number not in NUMBERS:
        raise ValueError(f"number: got {number!r}, wanted one of {', '.join(NUMBERS)}")
    return width * NUMBERS[number] + (-(-width // MX_BLOCK) if number == "mxfp8" else 0)
