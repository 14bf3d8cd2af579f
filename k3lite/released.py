"""The released checkpoints by name: every tensor's name, shape and dtype, from a config alone. Standard library only.

Kimi K3: 497,220 tensors, 1,503,647,073,024 stored numbers, 1,560,860,324,864 bytes, vision tower and projector among
them. Kimi Linear 48B: 20,493 tensors, 98,245,528,576 bytes. The bounded decay (`gate_lower_bound`) tells the two
layouts apart:

              prefix             A_log                     dt_bias   conv, o_norm, correction bias
    K3        language_model.    [H padded to 128], fp32   fp32      fp32
    Linear    none               [1, 1, H, 1], fp32        fp32      the model's dtype

K3's 96 files: layer i in the (i+1)th; embedding, head, final norm and output_attn_res in the 94th; projector; tower.

Sources, none of which read the weights themselves here. Names, shapes, dtypes: k3-architecture §3, §4 (text); for the
vision part several public readers of the files, and `vision_config`, from which the shapes sum to the 447,358,976
parameters that the text part leaves. Files: public censuses of the headers say what lies in which. The size of each,
1,560,936,091,448 bytes together, is in a copy of Hugging Face's listing of moonshotai/Kimi-K3 at revision f831ab66; the
index's, 59,764,096, in a pin of ModelScope's. From the config alone the layout here has all 97 sizes to the byte. That
headers have no `__metadata__`, and tensors the safetensors library's order (`shards.make_head`), is inferred from those
sizes: with the one, or in order of names alone, the headers come out longer or shorter. Kimi Linear: `total_size` of its
index, and public notes that count 49,122,599,168 numbers in bf16 and 82,560 in fp32, the A_log and dt_bias of 20 layers.
Its 20 files hold several layers each; ours one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from k3lite.config import MX_BLOCK, PRESET_DIR, ConfigError, K3Config
from k3lite.shards import DTYPE_BYTES

PREFIX = "language_model."  # of the text model in K3's files
NOT_TEXT = ("vision_tower.", "mm_projector.")
A_LOG_PADDING = 128
CODES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}

Shapes = Iterator[tuple[str, tuple[int, ...]]]


class TensorSpec(NamedTuple):
    """One tensor of a released file. dtype: as safetensors spells it.   kind: a part of `budget.parameters`, or
    expert_scales, vision_tower, mm_projector."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class VisionConfig:
    """The fields of `vision_config` that decide shapes (k3-architecture §1.1)."""

    vt_hidden_size: int
    vt_intermediate_size: int
    vt_num_hidden_layers: int
    qkv_hidden_size: int
    patch_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    merge_kernel_size: tuple[int, int]
    text_hidden_size: int

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> VisionConfig:
        """Raises ConfigError that names a field which is missing, or of another kind of tower."""
        if not isinstance(raw, dict):
            raise ConfigError(f"vision_config: got {raw!r}, wanted an object")
        for name, wanted in _RELEASED_TOWER.items():
            if raw.get(name, wanted) != wanted:
                raise ConfigError(f"vision_config.{name}: got {raw[name]!r}, wanted {wanted!r}")
        for f in dataclasses.fields(cls):
            value = raw.get(f.name)
            numbers = value if isinstance(value, list) and len(value) == 2 else [value]
            if ("tuple" in f.type) != (len(numbers) == 2) or not all(type(n) is int and n > 0 for n in numbers):
                raise ConfigError(f"vision_config.{f.name}: got {value!r}, wanted {_WANTED['tuple' in f.type]}")
        fields = {f.name: raw[f.name] for f in dataclasses.fields(cls)}
        return cls(**fields | {"merge_kernel_size": tuple(fields["merge_kernel_size"])})

    @classmethod
    def from_json(cls, path: str | Path) -> VisionConfig | None:
        """`vision_config` of a config.json that K3Config can read, or of the folder with it; None if it has none."""
        path = Path(path)
        raw = json.loads((path / "config.json" if path.is_dir() else path).read_text()).get("vision_config")
        return None if raw is None else cls.from_dict(raw)

    @classmethod
    def preset(cls, name: str) -> VisionConfig | None:
        return cls.from_json(PRESET_DIR / f"{name}.json")


_WANTED = {False: "a positive whole number", True: "two positive whole numbers"}
# Another value would mean other tensors: biases, other norms, another projector.
_RELEASED_TOWER = {
    "attn_bias": False, "linear_bias": False, "patch_embed_proj_bias": False, "norm_type": "rmsnorm",
    "mlp_type": "mlp2", "mm_projector_type": "patchmergerv2", "pos_emb_type": "divided_fixed",
}  # fmt: skip


def is_k3(c: K3Config) -> bool:
    """Whether the files are laid out as Kimi K3's, else as Kimi Linear's."""
    return c.linear_attn_config.gate_lower_bound is not None


def tensor_list(c: K3Config, vision: VisionConfig | None = None) -> Iterator[TensorSpec]:
    """Every tensor of a released checkpoint of this config; with `vision`, of the tower and its projector too.

    Experts are packed if the config packs MXFP4.
    """
    for _, specs in text_parts(c):
        yield from specs
    if vision:
        yield from _vision_part(c, "vision_tower", _tower(vision))
        yield from _vision_part(c, "mm_projector", _projector(vision))


def _vision_part(c: K3Config, kind: str, shapes: Shapes) -> list[TensorSpec]:
    return [TensorSpec(f"{kind}.{name}", shape, CODES[c.dtype], kind) for name, shape in shapes]


def text_parts(c: K3Config) -> Iterator[tuple[str, list[TensorSpec]]]:
    """The text model in the pieces that are loaded and saved one at a time: embedding, each layer, norm and head.

    Each with the start of its names in k3lite ("model.layers.0.", "" for the last); the specs have the files' names.
    """
    d, code = c.hidden_size, CODES[c.dtype]
    before = PREFIX if is_k3(c) else ""
    yield (
        "model.embed_tokens.",
        [TensorSpec(f"{before}model.embed_tokens.weight", (c.vocab_size, d), code, "embed_tokens")],
    )
    for i in range(c.num_hidden_layers):
        here = f"model.layers.{i}."
        yield here, [TensorSpec(f"{before}{here}{name}", *rest) for name, *rest in _layer(c, i)]
    ends = [("model.norm.weight", (d,), code, "norms")]
    if c.attn_res_block_size is not None:
        ends += [(f"model.output_attn_res_{name}.weight", shape, code, "attn_res") for name, shape in _mix(d)]
    ends += [("lm_head.weight", (c.vocab_size, d), code, "lm_head")]
    yield "", [TensorSpec(f"{before}{name}", *rest) for name, *rest in ends]


def shard_of(c: K3Config, part: str) -> int:
    """Number, from 1, of the file of a part of `text_parts`: a file a layer, then one for embedding, norm and head."""
    return int(part.split(".")[2]) + 1 if part.startswith("model.layers.") else c.num_hidden_layers + 1


def shard_name(number: int, count: int) -> str:
    """Name of the file of this number, from 1, of `count`."""
    return f"model-{number:05d}-of-{count:06d}.safetensors"


def released_files(c: K3Config, vision: VisionConfig | None = None) -> dict[str, list[TensorSpec]]:
    """Every file of a released checkpoint of this config, and its tensors (in no order; see `shards.make_head`)."""
    numbered: dict[int, list[TensorSpec]] = {}
    for part, specs in text_parts(c):
        numbered.setdefault(shard_of(c, part), []).extend(specs)
    last = len(numbered)
    if vision:
        numbered[last + 1] = _vision_part(c, "mm_projector", _projector(vision))
        numbered[last + 2] = _vision_part(c, "vision_tower", _tower(vision))
    return {shard_name(number, len(numbered)): numbered[number] for number in sorted(numbered)}


def _mix(d: int) -> Shapes:
    yield "norm", (d,)
    yield "proj", (1, d)


def _layer(c: K3Config, i: int) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    d, code, kind = c.hidden_size, CODES[c.dtype], c.layer_kinds[i]
    own = "F32" if is_k3(c) else code
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (d,), code, "norms"
    if c.attn_res_block_size is not None:
        for where in ("self_attention_res", "mlp_res"):
            yield from ((f"{where}_{name}.weight", shape, code, "attn_res") for name, shape in _mix(d))
    for name, shape in _kda(c) if kind == "kda" else _mla(c):
        always = name in ("A_log", "dt_bias")
        dtype = "F32" if always else own if "conv1d" in name or name.startswith("o_norm") else code
        yield f"self_attn.{name}", shape, dtype, kind
    if not c.is_moe_layer(i):
        yield from ((f"mlp.{name}", shape, code, "dense_mlp") for name, shape in _mlp(d, c.intermediate_size))
        return
    moe = "block_sparse_moe"
    yield f"{moe}.gate.weight", (c.num_experts, d), code, "router"
    yield f"{moe}.gate.e_score_correction_bias", (c.num_experts,), own, "router"
    if latent := c.routed_expert_hidden_size:
        yield f"{moe}.routed_expert_down_proj.weight", (latent, d), code, "latent"
        yield f"{moe}.routed_expert_up_proj.weight", (d, latent), code, "latent"
        if c.latent_moe_use_norm:
            yield f"{moe}.routed_expert_norm.weight", (latent,), code, "latent"
    if shared := c.num_shared_experts * c.moe_intermediate_size:
        yield from ((f"{moe}.shared_experts.{name}", shape, code, "shared_experts") for name, shape in _mlp(d, shared))
    for e in range(c.num_experts):
        for name, (out, width) in _expert(c):
            weight = f"{moe}.experts.{e}.{name}.weight"
            if c.packs_mxfp4:
                yield f"{weight}_packed", (out, width // 2), "U8", "routed_experts"
                yield f"{weight}_scale", (out, width // MX_BLOCK), "U8", "expert_scales"
            else:
                yield weight, (out, width), code, "routed_experts"


def _kda(c: K3Config) -> Shapes:
    a, d, width = c.linear_attn_config, c.hidden_size, c.kda_width
    heads, dim = a.num_heads, a.head_dim
    for x in "qkv":
        yield f"{x}_proj.weight", (width, d)
        yield f"{x}_conv1d.weight", (width, 1, a.short_conv_kernel_size)
    padded = -(-heads // A_LOG_PADDING) * A_LOG_PADDING
    yield "A_log", (padded,) if is_k3(c) else (1, 1, heads, 1)
    yield "dt_bias", (width,)
    yield "f_a_proj.weight", (dim, d)
    yield "f_b_proj.weight", (width, dim)
    yield "b_proj.weight", (heads, d)
    if a.use_full_rank_gate:
        yield "g_proj.weight", (width, d)
    else:
        yield "g_a_proj.weight", (dim, d)
        yield "g_b_proj.weight", (width, dim)
    yield "o_norm.weight", (dim,)
    yield "o_proj.weight", (d, width)


def _mla(c: K3Config) -> Shapes:
    d, heads, rank = c.hidden_size, c.num_attention_heads, c.q_lora_rank
    q_out, v_out = heads * c.qk_head_dim, heads * c.v_head_dim
    if rank:
        yield "q_a_proj.weight", (rank, d)
        yield "q_a_layernorm.weight", (rank,)
        yield "q_b_proj.weight", (q_out, rank)
    else:
        yield "q_proj.weight", (q_out, d)
    yield "kv_a_proj_with_mqa.weight", (c.latent_width, d)
    yield "kv_a_layernorm.weight", (c.kv_lora_rank,)
    yield "kv_b_proj.weight", (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    if c.mla_use_output_gate:
        yield "g_proj.weight", (v_out, d)
    yield "o_proj.weight", (d, v_out)


def _mlp(d: int, width: int) -> Shapes:
    yield "gate_proj.weight", (width, d)
    yield "up_proj.weight", (width, d)
    yield "down_proj.weight", (d, width)


def _expert(c: K3Config) -> Shapes:
    hidden, width = c.moe_intermediate_size, c.expert_width
    yield "w1", (hidden, width)
    yield "w3", (hidden, width)
    yield "w2", (width, hidden)


def _tower(v: VisionConfig) -> Shapes:
    d, width = v.vt_hidden_size, v.vt_intermediate_size
    yield "patch_embed.proj.weight", (d, 3, v.patch_size, v.patch_size)
    yield "patch_embed.pos_emb.weight", (v.init_pos_emb_height, v.init_pos_emb_width, d)
    for i in range(v.vt_num_hidden_layers):
        block = f"encoder.blocks.{i}"
        yield f"{block}.norm0.weight", (d,)
        yield f"{block}.norm1.weight", (d,)
        yield f"{block}.wqkv.weight", (3 * v.qkv_hidden_size, d)
        yield f"{block}.wo.weight", (d, v.qkv_hidden_size)
        yield f"{block}.mlp.fc0.weight", (width, d)
        yield f"{block}.mlp.fc1.weight", (d, width)
    yield "encoder.final_layernorm.weight", (d,)


def _projector(v: VisionConfig) -> Shapes:
    merged = v.vt_hidden_size * math.prod(v.merge_kernel_size)
    yield "proj.0.weight", (merged, merged)
    yield "proj.2.weight", (v.text_hidden_size, merged)
    yield "post_norm.weight", (v.text_hidden_size,)
