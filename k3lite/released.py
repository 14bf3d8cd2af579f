"""The released checkpoint by name: every tensor of a config with shape and dtype, and whether a folder holds just these.

    96 shards, model.safetensors.index.json        K3's text model under `language_model.`, layers from 0
    A_log      one number per head, padded with zeros to a multiple of 128      (Kimi Linear: [1, 1, H, 1])
    experts    weight_packed and weight_scale, uint8, if the config packs MXFP4; else weight
    fp32       convolutions, A_log, dt_bias, o_norm, e_score_correction_bias    (Kimi Linear: A_log and dt_bias)
    beside it  vision_tower and mm_projector, listed here and not built

Nothing is loaded to check a folder: the head of a safetensors file says what is in it. Standard library only.
Source: k3-architecture §4, §7.4; the vision tower's names as mlxcel and Paddle's converter spell them, its shapes worked out from the
published sizes (27 layers of width 1,024, qkv width 1,536, patches of 14) and equal to its published total.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3lite.config import K3Config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PREFIX = "language_model."
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1}
A_LOG_MULTIPLE = 128
BLOCK = 32  # of MXFP4
SHOWN = 12  # problems that an error spells out


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint. dtype: as safetensors spell it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numbers * BYTES[self.dtype]

    @property
    def layer(self) -> int | None:
        """Decoder layer, from 0; None for what belongs to none."""
        match = re.match(rf"(?:{re.escape(PREFIX)})?model\.layers\.(\d+)\.", self.name)
        return int(match[1]) if match else None

    @property
    def part(self) -> str:
        """What it belongs to, in words."""
        return next(words for fragment, words in _PARTS if fragment in self.name)


_PARTS = (
    ("vision_tower.", "vision tower"),
    ("mm_projector.", "projector"),
    (".experts.", "routed experts"),
    (".block_sparse_moe.", "router, latent, shared experts"),
    ("_res_", "AttnRes"),
    (".self_attn.", "attention"),
    (".mlp.", "dense MLP"),
    ("embed_tokens", "embedding and head"),
    ("lm_head", "embedding and head"),
    ("norm", "norms"),
    ("", "unknown"),
)


# ---- the list


def tensor_list(c: K3Config, vision: bool = False, pad_a_log: bool = True) -> Iterator[TensorSpec]:
    """All tensors of a model of this config in the released layout.

    vision: K3's vision tower and projector too.   pad_a_log: False stores it at its own length.
    """
    for name, shape, dtype in _text(c, pad_a_log):
        yield TensorSpec(_prefix(c) + name, shape, dtype or DTYPES[c.dtype])
    if vision:
        for name, shape in _vision(c.hidden_size):
            yield TensorSpec(name, shape, "BF16")


def is_k3(c: K3Config) -> bool:
    """Whether the layout is K3's and not Kimi Linear's: only K3 has experts in a latent space, or reads over depth."""
    return bool(c.routed_expert_hidden_size or c.attn_res_block_size)


def _prefix(c: K3Config) -> str:
    return PREFIX if is_k3(c) else ""


def a_log_shape(c: K3Config, pad: bool = True) -> tuple[int, ...]:
    heads = c.linear_attn_config.num_heads
    if not is_k3(c):
        return (1, 1, heads, 1)
    return (-(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE if pad else heads,)


Rows = Iterator[tuple[str, tuple[int, ...], str | None]]  # dtype None: the model's


def _text(c: K3Config, pad: bool) -> Rows:
    d = c.hidden_size
    yield "model.embed_tokens.weight", (c.vocab_size, d), None
    for i, kind in enumerate(c.layer_kinds):
        at = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", (d,), None
        if c.attn_res_block_size:
            for read in ("self_attention", "mlp"):
                yield f"{at}{read}_res_norm.weight", (d,), None
                yield f"{at}{read}_res_proj.weight", (1, d), None
        for rows, place in (
            (_kda(c, pad) if kind == "kda" else _mla(c), "self_attn."),
            (_moe(c), "block_sparse_moe.") if c.is_moe_layer(i) else (_mlp(d, c.intermediate_size), "mlp."),
        ):
            for name, shape, dtype in rows:
                yield at + place + name, shape, dtype
    yield "model.norm.weight", (d,), None
    if c.attn_res_block_size:
        yield "model.output_attn_res_norm.weight", (d,), None
        yield "model.output_attn_res_proj.weight", (1, d), None
    if not c.tie_word_embeddings:
        yield "lm_head.weight", (c.vocab_size, d), None


def _kda(c: K3Config, pad: bool) -> Rows:
    a, d, width = c.linear_attn_config, c.hidden_size, c.kda_width
    fp32 = "F32" if is_k3(c) else None
    for name in "qkv":
        yield f"{name}_proj.weight", (width, d), None
        yield f"{name}_conv1d.weight", (width, 1, a.short_conv_kernel_size), fp32
    if a.use_full_rank_gate:
        yield "g_proj.weight", (width, d), None
    else:
        yield "g_a_proj.weight", (a.head_dim, d), None
        yield "g_b_proj.weight", (width, a.head_dim), None
    yield "A_log", a_log_shape(c, pad), "F32"
    yield "dt_bias", (width,), "F32"
    yield "f_a_proj.weight", (a.head_dim, d), None
    yield "f_b_proj.weight", (width, a.head_dim), None
    yield "b_proj.weight", (a.num_heads, d), None
    yield "o_norm.weight", (a.head_dim,), fp32
    yield "o_proj.weight", (d, width), None


def _mla(c: K3Config) -> Rows:
    d, heads, values = c.hidden_size, c.num_attention_heads, c.num_attention_heads * c.v_head_dim
    if c.q_lora_rank:
        yield "q_a_proj.weight", (c.q_lora_rank, d), None
        yield "q_a_layernorm.weight", (c.q_lora_rank,), None
        yield "q_b_proj.weight", (heads * c.qk_head_dim, c.q_lora_rank), None
    else:
        yield "q_proj.weight", (heads * c.qk_head_dim, d), None
    yield "kv_a_proj_with_mqa.weight", (c.latent_width, d), None
    yield "kv_a_layernorm.weight", (c.kv_lora_rank,), None
    yield "kv_b_proj.weight", (heads * c.qk_nope_head_dim + values, c.kv_lora_rank), None
    if c.mla_use_output_gate:
        yield "g_proj.weight", (values, d), None
    yield "o_proj.weight", (d, values), None


def _moe(c: K3Config) -> Rows:
    d, width, latent = c.hidden_size, c.moe_intermediate_size, c.routed_expert_hidden_size
    yield "gate.weight", (c.num_experts, d), None
    yield "gate.e_score_correction_bias", (c.num_experts,), "F32" if is_k3(c) else None
    if latent:
        yield "routed_expert_down_proj.weight", (latent, d), None
        if c.latent_moe_use_norm:
            yield "routed_expert_norm.weight", (latent,), None
        yield "routed_expert_up_proj.weight", (d, latent), None
    if c.num_shared_experts:
        for name, shape, dtype in _mlp(d, c.num_shared_experts * width):
            yield f"shared_experts.{name}", shape, dtype
    matrices = {"w1": (width, c.expert_width), "w3": (width, c.expert_width), "w2": (c.expert_width, width)}
    for e in range(c.num_experts):
        for w, (out, columns) in matrices.items():
            if c.packs_mxfp4:
                yield f"experts.{e}.{w}.weight_packed", (out, columns // 2), "U8"
                yield f"experts.{e}.{w}.weight_scale", (out, columns // BLOCK), "U8"
            else:
                yield f"experts.{e}.{w}.weight", (out, columns), None


def _mlp(d: int, width: int) -> Rows:
    yield "gate_proj.weight", (width, d), None
    yield "up_proj.weight", (width, d), None
    yield "down_proj.weight", (d, width), None


def _vision(hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """MoonViT-V2 and the projector of K3; no other is known here."""
    width, qkv, wide, patch, grid, merged = 1024, 1536, 4096, 14, 64, 4096
    yield "vision_tower.patch_embed.proj.weight", (width, 3, patch, patch)
    yield "vision_tower.patch_embed.pos_emb.weight", (grid, grid, width)
    for i in range(27):
        at = f"vision_tower.encoder.blocks.{i}."
        yield f"{at}norm0.weight", (width,)
        yield f"{at}norm1.weight", (width,)
        yield f"{at}wqkv.weight", (3 * qkv, width)
        yield f"{at}wo.weight", (width, qkv)
        yield f"{at}mlp.fc0.weight", (wide, width)
        yield f"{at}mlp.fc1.weight", (width, wide)
    yield "vision_tower.encoder.final_layernorm.weight", (width,)
    yield "mm_projector.proj.0.weight", (merged, merged)
    yield "mm_projector.proj.2.weight", (hidden, merged)
    yield "mm_projector.post_norm.weight", (hidden,)


# ---- what a folder holds


@dataclass
class Found:
    """The heads of a folder's files. where: the file of each tensor. problems: everything wrong so far, a line each."""

    shards: list[Path]
    tensors: dict[str, TensorSpec]
    where: dict[str, Path]
    problems: list[str]


def read_heads(folder: Path) -> Found:
    """Names, shapes and dtypes of all tensors, and whether files and index are whole and agree. Loads no tensor."""
    index, problems = folder / INDEX, []
    where: dict[str, Any] = {}
    if index.exists():
        try:
            told = json.loads(index.read_text())
            where, size = dict(told["weight_map"]), (told.get("metadata") or {}).get("total_size")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            return Found([], {}, {}, [f"{INDEX}: not a safetensors index ({e})"])
        names = sorted({str(n) for n in where.values()})
        extra = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in names)
        problems += [f"{name}: not in the index" for name in extra]
    else:
        names, size = [SINGLE], None
    found = Found([folder / n for n in names], {}, {}, problems)
    for shard in found.shards:
        for spec in _head(shard, problems):
            if spec.name in found.where:
                problems.append(f"{spec.name}: twice, in {found.where[spec.name].name} and {shard.name}")
            elif where and where.get(spec.name) != shard.name:
                problems.append(f"{spec.name}: in {shard.name}, and the index says {where.get(spec.name, 'nothing')}")
            found.where[spec.name], found.tensors[spec.name] = shard, spec
    problems += [f"{n}: the index says {where[n]}, and it is not there" for n in where if n not in found.where]
    held = sum(s.nbytes for s in found.tensors.values())
    if size is not None and size != held:
        problems.append(f"{INDEX}: total_size {size:,}, and the files hold {held:,} bytes")
    return found


def _head(shard: Path, problems: list[str]) -> list[TensorSpec]:
    """What one file says that it holds; a line in `problems` for what cannot be."""
    try:
        with shard.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            size = shard.stat().st_size
            if not 2 <= length <= size - 8:
                raise ValueError(f"a head of {length:,} bytes in a file of {size:,}")
            head = json.loads(f.read(length))
        head.pop("__metadata__", None)
        specs, ends = [], [0]
        for name, told in head.items():
            spec = TensorSpec(name, tuple(told["shape"]), told["dtype"])
            begin, end = told["data_offsets"]
            if spec.dtype in BYTES and end - begin != spec.nbytes:
                problems.append(f"{name}: {end - begin:,} bytes in {shard.name}, wanted {spec.nbytes:,} for its shape")
            specs.append(spec)
            ends.append(end)
    except FileNotFoundError:
        problems.append(f"{shard.name}: no such file")
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        problems.append(f"{shard.name}: not a readable safetensors file ({e})")
        return []
    if size != 8 + length + max(ends):
        wanted = 8 + length + max(ends)
        problems.append(f"{shard.name}: not a readable safetensors file ({size:,} bytes, wanted {wanted:,}: cut off?)")
    return specs


def compare(found: Found, wanted: Iterator[TensorSpec]) -> list[str]:
    """`found.problems`, and every tensor that is missing, unknown, or of another shape or dtype. A line each."""
    specs, problems = {spec.name: spec for spec in wanted}, list(found.problems)
    for name, spec in specs.items():
        got = found.tensors.get(name)
        if got is None:
            problems.append(f"{name}: missing")
        elif got.shape != spec.shape:
            problems.append(f"{name}: shape {list(got.shape)}, wanted {list(spec.shape)}")
        elif got.dtype != spec.dtype:
            problems.append(f"{name}: dtype {got.dtype}, wanted {spec.dtype}")
    return problems + [f"{name}: unknown" for name in found.tensors if name not in specs]


def listed(problems: list[str]) -> str:
    """Problems as one text, bounded."""
    more = len(problems) - SHOWN
    return "\n".join(f"  {p}" for p in problems[:SHOWN]) + (f"\n  and {more:,} more" if more > 0 else "")


def totals(specs: Iterator[TensorSpec]) -> dict[str, tuple[int, int, int]]:
    """Tensors, stored numbers and bytes by part, in the order in which parts come."""
    counts: dict[str, Counter] = {}
    for s in specs:
        counts.setdefault(s.part, Counter()).update(tensors=1, numbers=s.numbers, bytes=s.nbytes)
    return {part: (c["tensors"], c["numbers"], c["bytes"]) for part, c in counts.items()}
