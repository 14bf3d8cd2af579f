"""K3Config: the fields of the released `config.json`, under their released names.

One dataclass describes Kimi K3, Kimi Linear (which shares its `model_type`) and the small models of the
course. A field that Kimi Linear lacks defaults to what Kimi Linear does, so the presence of the K3 fields
is what makes a model K3. Sources: k3-architecture §1.1 (released text_config) and §1.2 (Kimi Linear 48B).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["kda", "mla"]
PRESET_DIR = Path(__file__).parent / "configs"
MX_BLOCK = 32  # weights that share one MXFP4 scale (OCP MX)


class ConfigError(ValueError):
    """A configuration that cannot describe a model; the message names the field, what came and what was wanted."""


@dataclass(frozen=True)
class LinearAttnConfig:
    """`linear_attn_config`: the KDA layers. Layer numbers count from 1, as released."""

    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    num_heads: int
    head_dim: int  # key width = value width, so the state of a head is head_dim x head_dim
    short_conv_kernel_size: int = 4
    use_full_rank_gate: bool = False  # K3: output gate from one full matrix; Kimi Linear: through head_dim
    gate_lower_bound: float | None = None  # K3: -5; None selects Kimi Linear's softplus gate


@dataclass(frozen=True)
class K3Config:
    """Sizes and switches of one model. Widths are counted in numbers, not bytes."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int  # dense MLP, layers before first_k_dense_replace
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # kept under this name, never rotated (mla_use_nope)
    v_head_dim: int
    linear_attn_config: LinearAttnConfig

    # MLA
    num_key_value_heads: int | None = None  # must equal num_attention_heads: MLA has no grouped heads
    q_lora_rank: int | None = None  # None: one plain q_proj
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False

    # Feed-forward
    hidden_act: str = "silu"  # "situ" in K3
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 0  # 0: every layer has a dense MLP
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    routed_expert_hidden_size: int | None = None  # latent width; None: experts work on hidden_size
    latent_moe_use_norm: bool = False
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    use_grouped_topk: bool = True
    num_expert_group: int = 1  # with one group, grouped top-k is plain top-k
    topk_group: int = 1
    topk_method: str = "noaux_tc"

    # Depth, norms, ends
    attn_res_block_size: float | None = None  # in decoder layers; 0.5, a sub-layer: Full AttnRes; None: residual sum
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1_048_576
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str = "float32"
    model_type: str = "kimi_linear"
    quantization_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _check(self)

    # ---- what follows from the fields

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, 0-based."""
        kda = set(self.linear_attn_config.kda_layers)
        return tuple("kda" if i + 1 in kda else "mla" for i in range(self.num_hidden_layers))

    @property
    def num_kda_layers(self) -> int:
        return len(self.linear_attn_config.kda_layers)

    @property
    def num_mla_layers(self) -> int:
        return len(self.linear_attn_config.full_attn_layers)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether 0-based `layer` holds experts (else a dense MLP)."""
        return self.num_experts > 0 and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def num_moe_layers(self) -> int:
        return sum(self.is_moe_layer(i) for i in range(self.num_hidden_layers))

    @property
    def kda_width(self) -> int:
        """Numbers in all KDA heads of a layer: num_heads * head_dim."""
        return self.linear_attn_config.num_heads * self.linear_attn_config.head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Numbers that an MLA layer caches for a token: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """Input and output width of a routed expert: the latent in K3, hidden_size in Kimi Linear."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def packs_mxfp4(self) -> bool:
        return bool(self.quantization_config) and "mxfp4" in str(self.quantization_config.get("format"))

    @property
    def rounds_expert_inputs(self) -> bool:
        """Whether `input_activations` asks for MXFP8; K3's is null. Raises ConfigError if it asks for anything else."""
        groups = (self.quantization_config or {}).get("config_groups") or {}
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise ConfigError(f"quantization_config.config_groups: got {groups!r}, wanted an object of objects")
        asked = [a for a in (group.get("input_activations") for group in groups.values()) if a is not None]
        for a in asked:
            if not isinstance(a, dict) or [a.get(n) for n in ("type", "num_bits", "group_size")] != ["float", 8, 32]:
                raise ConfigError(f"input_activations: got {a!r}, wanted null or float of 8 bits in groups of 32")
        return bool(asked)

    def all_mla_twin(self) -> K3Config:
        """The same model with an MLA layer wherever it has a KDA layer: what K3's cache is compared with."""
        every = tuple(range(1, self.num_hidden_layers + 1))
        attn = dataclasses.replace(self.linear_attn_config, kda_layers=(), full_attn_layers=every)
        return dataclasses.replace(self, linear_attn_config=attn)

    # ---- in and out

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> K3Config:
        """Read a released `config.json` (nested under `text_config` or flat). Raises ConfigError."""
        raw = raw.get("text_config", raw)
        if not isinstance(raw, dict):
            raise ConfigError(f"text_config: expected an object, got {type(raw).__name__}")
        fields = {k: v for k, v in raw.items() if k not in _NOT_MATHS}
        if "torch_dtype" in fields:  # the older spelling of the same field
            fields.setdefault("dtype", fields["torch_dtype"])
            del fields["torch_dtype"]
        if "model_max_length" in fields:  # Kimi Linear's spelling
            fields.setdefault("max_position_embeddings", fields["model_max_length"])
            del fields["model_max_length"]
        if fields.pop("attention_bias", False):
            raise ConfigError("attention_bias: got true, wanted false: no projection of K3 has a bias")
        attn = fields.get("linear_attn_config")
        if isinstance(attn, dict):
            attn = {k: tuple(v) if isinstance(v, list) else v for k, v in attn.items()}
            fields["linear_attn_config"] = _build(LinearAttnConfig, attn, "linear_attn_config.")
        for name in _NULL_MEANS_NONE:
            if fields.get(name, 0) is None:
                fields[name] = 0
        return _build(cls, fields, "")

    @classmethod
    def from_json(cls, path: str | Path) -> K3Config:
        """Read a JSON file, or `config.json` inside a folder."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(path.read_text())
        except OSError as e:
            raise ConfigError(f"{path}: cannot be read ({e.strerror})") from e
        except ValueError as e:
            raise ConfigError(f"{path}: not valid JSON ({e})") from e
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}")
        return cls.from_dict(raw)

    @classmethod
    def preset(cls, name: str) -> K3Config:
        """One of `presets()`: kimi-k3, kimi-linear-48b, or a small model of the course."""
        if name not in presets():
            raise ConfigError(f"preset: no {name!r}; there are {', '.join(presets())}")
        return cls.from_json(PRESET_DIR / f"{name}.json")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under the released names; from_dict reads it back to an equal config."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def presets() -> list[str]:
    """Names that K3Config.preset accepts."""
    return sorted(p.stem for p in PRESET_DIR.glob("*.json"))


# ---- checks: once, here at the edge, so that the layers need none

_REQUIRED_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size kv_lora_rank "
    "qk_nope_head_dim v_head_dim moe_layer_freq rms_norm_eps activation_situ_beta "
    "activation_situ_linear_beta max_position_embeddings"
).split()
_NON_NEGATIVE = (
    "qk_rope_head_dim first_k_dense_replace num_experts num_experts_per_token num_shared_experts "
    "moe_intermediate_size num_nextn_predict_layers"
).split()
# null in a released file stands for "none of it"
_NULL_MEANS_NONE = ("num_experts", "num_experts_per_token", "num_shared_experts")


def _build(cls, fields: dict[str, Any], prefix: str):
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(prefix + k for k in fields if k not in known)
    if unknown:
        raise ConfigError(f"unknown config field(s): {', '.join(unknown)}")
    missing = sorted(prefix + n for n, f in known.items() if n not in fields and f.default is dataclasses.MISSING)
    if missing:
        raise ConfigError(f"missing config field(s): {', '.join(missing)}")
    return cls(**fields)


def _check(c: K3Config) -> None:
    a = c.linear_attn_config
    if not isinstance(a, LinearAttnConfig):
        raise ConfigError(f"linear_attn_config: expected an object, got {type(a).__name__}")
    _check_types(c, "")
    _check_types(a, "linear_attn_config.")
    for name in _REQUIRED_POSITIVE:
        _want(getattr(c, name) > 0, name, getattr(c, name), "a positive number")
    for name in _NON_NEGATIVE:
        _want(getattr(c, name) >= 0, name, getattr(c, name), "zero or more")
    for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
        _want(getattr(a, name) > 0, f"linear_attn_config.{name}", getattr(a, name), "a positive number")
    for name in ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size"):
        value = getattr(c, name)
        _want(value is None or value > 0, name, value, "a positive number or null")
    block = c.attn_res_block_size
    _want(block is None or 2 * block % 1 == 0, "attn_res_block_size", block, "whole or half layers, or null")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(c, name)
        _want(
            value is None or 0 <= value < c.vocab_size, name, value, f"an id below vocab_size {c.vocab_size}, or null"
        )

    _check_layer_lists(a, c.num_hidden_layers)
    low = a.gate_lower_bound
    _want(
        low is None or low < 0,
        "linear_attn_config.gate_lower_bound",
        low,
        "a negative number, or null for the softplus gate",
    )
    kv = c.num_key_value_heads
    _want(
        kv in (None, c.num_attention_heads),
        "num_key_value_heads",
        kv,
        f"num_attention_heads ({c.num_attention_heads}): MLA shares one latent, not groups of heads",
    )
    _want(c.mla_use_nope is True, "mla_use_nope", c.mla_use_nope, "true (Kimi models rotate nothing)")
    _want(c.hidden_act in ("silu", "situ"), "hidden_act", c.hidden_act, "'silu' or 'situ'")
    _want(c.tie_word_embeddings is False, "tie_word_embeddings", c.tie_word_embeddings, "false, as released")
    _want(
        c.num_nextn_predict_layers == 0,
        "num_nextn_predict_layers",
        c.num_nextn_predict_layers,
        "0: the released files hold no MTP layer",
    )
    _want(
        c.dtype in ("float32", "float64", "bfloat16", "float16"),
        "dtype",
        c.dtype,
        "float32, float64, bfloat16 or float16",
    )
    if c.num_experts:
        _check_experts(c)


def _check_types(obj: Any, prefix: str) -> None:
    """JSON knows no int or bool from a string; a config that mixes them up fails here and not in a layer."""
    for f in dataclasses.fields(obj):
        value, kind = getattr(obj, f.name), str(f.type)
        if value is None and "None" in kind:
            continue
        if kind.startswith("int"):
            _want(isinstance(value, int) and not isinstance(value, bool), prefix + f.name, value, "a whole number")
        elif kind.startswith("float"):
            _want(isinstance(value, (int, float)) and not isinstance(value, bool), prefix + f.name, value, "a number")
        elif kind == "bool":
            _want(isinstance(value, bool), prefix + f.name, value, "true or false")
        elif kind == "str":
            _want(isinstance(value, str), prefix + f.name, value, "a text")
        elif kind.startswith("tuple"):
            whole = isinstance(value, tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
            _want(whole, prefix + f.name, value, "a list of whole numbers")
        elif kind.startswith("dict"):
            _want(isinstance(value, dict), prefix + f.name, value, "an object")


def _check_layer_lists(a: LinearAttnConfig, layers: int) -> None:
    listed = list(a.kda_layers) + list(a.full_attn_layers)
    twice = sorted({i for i in listed if listed.count(i) > 1})
    absent = sorted(set(range(1, layers + 1)) - set(listed))
    outside = sorted(set(listed) - set(range(1, layers + 1)))
    if twice or absent or outside:
        wrong = [
            f"{what} {nums}"
            for what, nums in (("listed twice", twice), ("in no list", absent), ("out of range", outside))
            if nums
        ]
        raise ConfigError(
            "linear_attn_config: kda_layers and full_attn_layers must together name each layer "
            f"1..{layers} once; {'; '.join(wrong)}"
        )


def _check_experts(c: K3Config) -> None:
    k = c.num_experts_per_token
    _want(1 <= k <= c.num_experts, "num_experts_per_token", k, f"1 to num_experts ({c.num_experts})")
    _want(c.moe_intermediate_size > 0, "moe_intermediate_size", c.moe_intermediate_size, "a positive number")
    _want(
        c.moe_router_activation_func == "sigmoid",
        "moe_router_activation_func",
        c.moe_router_activation_func,
        "'sigmoid'",
    )
    _want(
        c.num_expert_group == 1 and c.topk_group == 1,
        "num_expert_group, topk_group",
        (c.num_expert_group, c.topk_group),
        "1, 1 as released",
    )
    _want(c.topk_method == "noaux_tc", "topk_method", c.topk_method, "'noaux_tc'")
    if c.latent_moe_use_norm:
        _want(
            c.routed_expert_hidden_size is not None,
            "routed_expert_hidden_size",
            None,
            "a latent width, since latent_moe_use_norm is true",
        )
    if c.packs_mxfp4:
        latent = "routed_expert_hidden_size" if c.routed_expert_hidden_size else "hidden_size"
        for name, width in ((latent, c.expert_width), ("moe_intermediate_size", c.moe_intermediate_size)):
            _want(
                width % MX_BLOCK == 0,
                name,
                width,
                f"a multiple of {MX_BLOCK}: MXFP4 shares a scale among {MX_BLOCK} weights",
            )


def _want(ok: bool, name: str, got: Any, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"{name}: got {got!r}, wanted {wanted}")


# Fields of released files that change no formula: what transformers 4.56 writes for every model, how a
# file is loaded, and leftovers of other models. `head_dim` (72 or 74) is hidden_size // heads and no layer
# has that width; `rope_theta` and `rope_scaling` are defaults of newer loaders, and nothing is rotated. The last
# two lines are transformers 5.24's own copies of other fields, and what `released.py` lists beside the text model.
_NOT_MATHS = frozenset(
    """
    _name_or_path add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty
    max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    top_k top_p torchscript transformers_version typical_p use_bfloat16 use_cache attention_dropout
    head_dim rope_theta rope_scaling rope_parameters
    layer_types mlp_layer_types linear_head_dim linear_num_heads linear_conv_kernel_dim qk_head_dim
    output_router_logits pretraining_tp vision_config
    """.split()
)
