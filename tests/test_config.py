"""K3Config: released files are read as they are, and what cannot be a model is refused by name."""

import dataclasses
import json

import pytest

from k3lite.config import ConfigError, K3Config, presets
from tests.helpers import tiny

# What transformers writes into every text_config and what else the released files hold beside the maths
GENERIC = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
    "add_cross_attention": False,
    "attention_dropout": 0.0,
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "do_sample": False,
    "head_dim": 74,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "output_attentions": False,
    "return_dict": True,
    "rope_parameters": {"rope_type": "default"},
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "temperature": 1.0,
    "torchscript": False,
    "transformers_version": "4.56.2",
    "use_cache": True,
}


def released(name="kimi-k3", **changes):
    """config.json as released: the text model inside a wrapper, beside the vision tower."""
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "media_placeholder_token_id": 163605,
        "text_config": K3Config.preset(name).to_dict() | GENERIC | changes,
        "vision_config": {"model_type": "kimi_k3_vision", "vt_hidden_size": 1024},
    }


# ---- what is read


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear-48b", "k3-tiny"])
def test_released_file(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(released(name)))
    assert K3Config.from_json(path) == K3Config.from_json(tmp_path) == K3Config.preset(name)


def test_flat_file():
    assert K3Config.from_dict(released()["text_config"]) == K3Config.preset("kimi-k3")


@pytest.mark.parametrize("old, new", [("torch_dtype", "dtype"), ("model_max_length", "max_position_embeddings")])
def test_older_spellings(old, new):
    fields = K3Config.preset("kimi-linear-48b").to_dict()
    fields[old] = fields.pop(new)
    assert K3Config.from_dict(fields) == K3Config.preset("kimi-linear-48b")
    assert getattr(K3Config.from_dict(fields | {new: fields[old], old: "ignored"}), new) == fields[old]


def test_null_stands_for_none_of_it():
    fields = tiny("linear").to_dict()
    for name in ("num_experts", "num_experts_per_token", "num_shared_experts"):
        fields[name] = None
    config = K3Config.from_dict(fields)
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (0, 0, 0)
    assert config.num_moe_layers == 0
    assert tiny("k3").quantization_config is None and not tiny("k3").packs_mxfp4


@pytest.mark.parametrize("name", presets())
def test_round_trip(name, tmp_path):
    config = K3Config.preset(name)
    assert K3Config.from_dict(config.to_dict()) == config
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config.to_dict()))
    assert K3Config.from_json(path) == config


def test_presets():
    assert {"k3-tiny", "kimi-k3", "kimi-linear-48b"} <= set(presets())
    with pytest.raises(ConfigError, match="preset: no 'kimi-k4'; there are k3-tiny, kimi-k3, kimi-linear-48b"):
        K3Config.preset("kimi-k4")


def test_k3_fields():
    """The presence of K3's fields is what tells it from Kimi Linear, whose model_type it shares."""
    k3, linear = K3Config.preset("kimi-k3"), K3Config.preset("kimi-linear-48b")
    assert k3.model_type == linear.model_type == "kimi_linear"
    assert (k3.qk_head_dim, k3.latent_width, k3.kda_width, k3.expert_width) == (192, 576, 12_288, 3_584)
    assert (linear.qk_head_dim, linear.latent_width, linear.kda_width, linear.expert_width) == (192, 576, 4_096, 2_304)
    assert k3.linear_attn_config.gate_lower_bound == -5 and linear.linear_attn_config.gate_lower_bound is None
    assert k3.mla_use_output_gate and not linear.mla_use_output_gate
    assert (k3.attn_res_block_size, linear.attn_res_block_size) == (12, None)
    assert k3.packs_mxfp4 and not linear.packs_mxfp4


def test_layers_count_from_one():
    config = tiny("k3", layers=5, mla=[1, 4])
    assert config.layer_kinds == ("mla", "kda", "kda", "mla", "kda")
    assert config.all_mla_twin().layer_kinds == ("mla",) * 5
    assert config.all_mla_twin().num_kda_layers == 0


def test_moe_layers():
    config = tiny("k3", layers=8, first_k_dense_replace=3, moe_layer_freq=2)
    assert [config.is_moe_layer(i) for i in range(8)] == [False] * 4 + [True, False, True, False]
    assert config.num_moe_layers == 2


# ---- what is refused


def with_attn(**changes):
    return {"linear_attn_config": tiny().to_dict()["linear_attn_config"] | changes}


MXFP4 = {"quantization_config": {"format": "mxfp4-pack-quantized"}}


@pytest.mark.parametrize(
    "change, message",
    [
        # names
        ({"hidden_sise": 1, "extra": 2}, r"unknown config field\(s\): extra, hidden_sise"),
        (with_attn(lower_bound=-5), r"unknown config field\(s\): linear_attn_config.lower_bound"),
        # types
        ({"hidden_size": "32"}, "hidden_size: got '32', wanted a whole number"),
        ({"hidden_size": 32.0}, "hidden_size: got 32.0, wanted a whole number"),
        ({"hidden_size": None}, "hidden_size: got None, wanted a whole number"),
        ({"num_experts": True}, "num_experts: got True, wanted a whole number"),
        ({"q_lora_rank": False}, "q_lora_rank: got False, wanted a whole number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: got '1e-5', wanted a number"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor: got None, wanted a number"),
        ({"mla_use_output_gate": 1}, "mla_use_output_gate: got 1, wanted true or false"),
        ({"hidden_act": 3}, "hidden_act: got 3, wanted a text"),
        ({"quantization_config": "mxfp4"}, "quantization_config: got 'mxfp4', wanted an object"),
        ({"linear_attn_config": None}, "linear_attn_config: expected an object, got NoneType"),
        ({"linear_attn_config": [1]}, "linear_attn_config: expected an object, got list"),
        (with_attn(kda_layers=3), "linear_attn_config.kda_layers: got 3, wanted a list of whole numbers"),
        (with_attn(kda_layers=["1"]), r"linear_attn_config.kda_layers: got \('1',\), wanted a list of whole numbers"),
        (with_attn(gate_lower_bound="-5"), "linear_attn_config.gate_lower_bound: got '-5', wanted a number"),
        # sizes
        ({"vocab_size": 0}, "vocab_size: got 0, wanted a positive number"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: got 0.0, wanted a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan, wanted a positive number"),
        ({"moe_layer_freq": 0}, "moe_layer_freq: got 0, wanted a positive number"),
        ({"qk_rope_head_dim": -1}, "qk_rope_head_dim: got -1, wanted zero or more"),
        ({"q_lora_rank": 0}, "q_lora_rank: got 0, wanted a positive number or null"),
        ({"attn_res_block_size": 0}, "attn_res_block_size: got 0, wanted a positive number or null"),
        ({"pad_token_id": 48}, "pad_token_id: got 48, wanted an id below vocab_size 48, or null"),
        (with_attn(head_dim=0), "linear_attn_config.head_dim: got 0, wanted a positive number"),
        (with_attn(gate_lower_bound=5.0), "gate_lower_bound: got 5.0, wanted a negative number, or null"),
        # layer lists
        (with_attn(kda_layers=[1, 2, 3, 4]), r"each layer 1..5 once; listed twice \[4\]$"),
        (with_attn(kda_layers=[1, 2]), r"in no list \[3\]$"),
        (with_attn(kda_layers=[0, 1, 2]), r"in no list \[3\]; out of range \[0\]$"),
        (with_attn(full_attn_layers=[4, 5, 6]), r"out of range \[6\]$"),
        # what no Kimi model does
        ({"num_key_value_heads": 1}, r"num_key_value_heads: got 1, wanted num_attention_heads \(2\)"),
        ({"mla_use_nope": False}, "mla_use_nope: got False, wanted true"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', wanted 'silu' or 'situ'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: got True, wanted false"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: got 1, wanted 0"),
        ({"dtype": "int8"}, "dtype: got 'int8', wanted float32, float64, bfloat16 or float16"),
        # experts
        ({"num_experts_per_token": 7}, r"num_experts_per_token: got 7, wanted 1 to num_experts \(6\)"),
        ({"num_experts_per_token": 0}, r"num_experts_per_token: got 0, wanted 1 to num_experts \(6\)"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: got 0, wanted a positive number"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func: got 'softmax', wanted 'sigmoid'"),
        ({"num_expert_group": 2}, r"num_expert_group, topk_group: got \(2, 1\), wanted 1, 1"),
        ({"topk_method": "greedy"}, "topk_method: got 'greedy', wanted 'noaux_tc'"),
        ({"routed_expert_hidden_size": None}, "routed_expert_hidden_size: got None, wanted a latent width"),
        (MXFP4, "routed_expert_hidden_size: got 24, wanted a multiple of 32"),
        (MXFP4 | {"routed_expert_hidden_size": 32}, "moe_intermediate_size: got 16, wanted a multiple of 32"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(tiny().to_dict() | change)


def test_mxfp4_asks_nothing_of_a_model_without_experts():
    none = {"num_experts": 0, "num_experts_per_token": 0, "latent_moe_use_norm": False}
    K3Config.from_dict(tiny().to_dict() | MXFP4 | none)


def test_missing_fields():
    fields = tiny().to_dict()
    del fields["hidden_size"], fields["v_head_dim"]
    with pytest.raises(ConfigError, match=r"missing config field\(s\): hidden_size, v_head_dim"):
        K3Config.from_dict(fields)
    fields = tiny().to_dict()
    del fields["linear_attn_config"]["num_heads"]
    with pytest.raises(ConfigError, match=r"missing config field\(s\): linear_attn_config.num_heads"):
        K3Config.from_dict(fields)


def test_replacing_a_field_is_checked_too():
    with pytest.raises(ConfigError, match="hidden_size"):
        dataclasses.replace(tiny(), hidden_size=0)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "c.json: not valid JSON"),
        ("[1]", "c.json: expected a JSON object, got list"),
        ('{"text_config": 3}', "text_config: expected an object, got int"),
        ("\xff", "c.json: not valid JSON"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "c.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        K3Config.from_json(path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.json: cannot be read"):
        K3Config.from_json(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="config.json: cannot be read"):
        K3Config.from_json(tmp_path)


def test_a_bias_that_the_model_does_not_have_is_refused():
    raw = K3Config.preset("k3-tiny").to_dict()
    assert K3Config.from_dict({**raw, "attention_bias": False}) == K3Config.preset("k3-tiny")
    with pytest.raises(ConfigError, match="attention_bias: got true, wanted false"):
        K3Config.from_dict({**raw, "attention_bias": True})
