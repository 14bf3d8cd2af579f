"""The released tensor lists: totals as published, and tensor for tensor what k3lite's own models hold."""

import dataclasses
import json
from collections import Counter

import pytest
import torch

from k3lite import budget
from k3lite.checkpoint import parts, released_tensors
from k3lite.config import PRESET_DIR, ConfigError, K3Config
from k3lite.model import K3ForCausalLM
from k3lite.packed import PackedExperts
from k3lite.released import PREFIX, VisionConfig, released_files, tensor_list, text_parts
from k3lite.shards import make_head, make_index
from tests.helpers import tiny
from tests.tiny_released import tiny_config

K3, LINEAR = K3Config.preset("kimi-k3"), K3Config.preset("kimi-linear-48b")
FEWER = dataclasses.replace(K3, num_experts=16)  # of every layer, where each of 82,432 experts says the same
TOWER = json.loads((PRESET_DIR / "kimi-k3.json").read_text())["vision_config"]


@pytest.fixture(scope="module")
def k3():
    return list(tensor_list(K3, VisionConfig.preset("kimi-k3")))


def test_totals_of_kimi_k3(k3):
    """k3-architecture §3: as in the dump of the released files."""
    assert len(k3) == len({t.name for t in k3}) == 497_220
    assert sum(t.numel for t in k3) == 1_503_647_073_024
    assert sum(t.nbytes for t in k3) == 1_560_860_324_864
    sizes = {kind: sum(t.numel for t in k3 if t.kind == kind) for kind in ("vision_tower", "mm_projector")}
    assert sizes == {"vision_tower": 401_214_464, "mm_projector": 46_144_512}
    text = [t for t in k3 if t.name.startswith(PREFIX)]
    assert len(text) == 497_052 and len(k3) - len(text) == 27 * 6 + 3 + 3
    routed = sum(t.nbytes for t in text if t.kind in ("routed_experts", "expert_scales"))
    assert routed == 1_446_456_066_048 and sum(t.nbytes for t in text) - routed == 113_509_540_864


@pytest.fixture(scope="module")
def files():
    return released_files(K3, VisionConfig.preset("kimi-k3"))


def released_size(number: int) -> int:
    """Bytes of K3's file of this number, as Hugging Face lists moonshotai/Kimi-K3 at revision f831ab66.

    By the kind of the layer, and by the digits of its number, which is in every name of the header.
    """
    digits = len(str(number - 1)) - 1
    if number == 1:
        return 2_341_216_112
    if number > 93:
        return {94: 4_697_664_072, 95: 92_289_328, 96: 802_448_352}[number]
    if number % 4 == 0 or number == 93:
        return (16_567_501_776, 16_567_507_176)[digits]
    return (16_990_911_504, 16_990_916_912)[digits]


def test_every_file_is_as_large_as_the_real_one(files):
    """From the config alone, to the byte: which tensors lie together, their order, header, padding, no metadata."""
    assert list(files) == [f"model-{i:05d}-of-000096.safetensors" for i in range(1, 97)]
    sizes = [len(make_head(specs)[0]) + sum(t.nbytes for t in specs) for specs in files.values()]
    assert sizes == [released_size(number) for number in range(1, 97)]
    assert sum(sizes) == 1_560_936_091_448

    places = {t.name: file for file, specs in files.items() for t in specs}
    index = make_index(places, sum(t.nbytes for specs in files.values() for t in specs))
    assert len(index) == 59_764_096


def test_what_the_last_files_hold(files):
    """As a public census of the 96 headers has it: the tables and the last norm in the 94th, projector, tower."""
    *_, ends, projector, tower = files.values()
    assert Counter(t.kind for t in ends) == {"embed_tokens": 1, "lm_head": 1, "norms": 1, "attn_res": 2}
    assert {t.kind for t in projector} == {"mm_projector"} and {t.kind for t in tower} == {"vision_tower"}
    assert len(released_files(tiny_config())) == 4


def test_totals_of_kimi_linear():
    """`total_size` of its index; numbers by dtype from public notes on its headers."""
    specs = list(tensor_list(LINEAR, VisionConfig.preset("kimi-linear-48b")))
    assert len(specs) == len({t.name for t in specs}) == 20_493
    assert sum(t.numel for t in specs) == 49_122_681_728
    assert sum(t.nbytes for t in specs) == 98_245_528_576
    fp32 = [t for t in specs if t.dtype == "F32"]
    assert sum(t.numel for t in fp32) == 82_560 and {t.dtype for t in specs} == {"F32", "BF16"}
    assert {t.name.split(".")[-1] for t in fp32} == {"A_log", "dt_bias"}
    assert VisionConfig.preset("kimi-linear-48b") is None


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("language_model.model.embed_tokens.weight", (163_840, 7_168), "BF16"),
        ("language_model.model.output_attn_res_proj.weight", (1, 7_168), "BF16"),
        ("language_model.model.layers.0.mlp.down_proj.weight", (7_168, 33_792), "BF16"),
        ("language_model.model.layers.0.self_attn.A_log", (128,), "F32"),
        ("language_model.model.layers.90.self_attn.k_conv1d.weight", (12_288, 1, 4), "F32"),
        ("language_model.model.layers.90.self_attn.o_norm.weight", (128,), "F32"),
        ("language_model.model.layers.91.self_attn.kv_a_proj_with_mqa.weight", (576, 7_168), "BF16"),
        ("language_model.model.layers.92.self_attn.q_b_proj.weight", (18_432, 1_536), "BF16"),
        ("language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (896,), "F32"),
        ("language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_packed", (3_584, 1_536), "U8"),
        ("language_model.model.layers.92.block_sparse_moe.experts.895.w3.weight_scale", (3_072, 112), "U8"),
        ("vision_tower.encoder.blocks.26.wqkv.weight", (4_608, 1_024), "BF16"),
        ("vision_tower.patch_embed.pos_emb.weight", (64, 64, 1_024), "BF16"),
        ("mm_projector.proj.2.weight", (7_168, 4_096), "BF16"),
    ],
)
def test_single_tensors_of_kimi_k3(k3, name, shape, dtype):
    """k3-architecture §4; the vision part from public lists of the same files."""
    (spec,) = [t for t in k3 if t.name == name]
    assert (spec.shape, spec.dtype) == (shape, dtype)


def test_what_kimi_linear_stores_otherwise():
    specs = {t.name: (t.shape, t.dtype) for t in tensor_list(LINEAR)}
    layer = "model.layers.1."
    assert specs[f"{layer}self_attn.A_log"] == ((1, 1, 32, 1), "F32")
    assert specs[f"{layer}self_attn.q_conv1d.weight"] == ((4_096, 1, 4), "BF16")
    assert specs[f"{layer}self_attn.g_a_proj.weight"] == ((128, 2_304), "BF16")
    assert specs[f"{layer}block_sparse_moe.gate.e_score_correction_bias"] == ((256,), "BF16")
    assert specs[f"{layer}block_sparse_moe.experts.255.w1.weight"] == ((1_024, 2_304), "BF16")


def test_totals_of_the_tiny_layout():
    """k3-architecture §4.1: 126 tensors packed, 102 unpacked, 125,988 parameters, 107,556 of them active."""
    packed, plain = (list(tensor_list(tiny_config(packed))) for packed in (True, False))
    assert (len(packed), len(plain)) == (126, 102)
    padding = 2 * (128 - 2)
    assert sum(t.numel for t in plain) - padding == 125_988
    assert budget.active_parameters(tiny_config()) == 107_556


@pytest.mark.parametrize("c", [FEWER, LINEAR, tiny_config()], ids=["kimi-k3", "kimi-linear", "tiny"])
def test_kinds_are_the_parts_of_the_budget(c):
    numbers = Counter()
    for t in tensor_list(c):
        codes = 2 if t.name.endswith("weight_packed") else 1
        numbers[t.kind] += codes * (c.linear_attn_config.num_heads if t.name.endswith("A_log") else t.numel)
    del numbers["expert_scales"]
    assert numbers == {part: n for part, n in budget.parameters(c).items() if n}


def test_bytes_are_those_of_the_budget(k3):
    """But for the padding of A_log, which the budget leaves out."""
    padding = 69 * (128 - 96) * 4
    assert sum(t.nbytes for t in k3 if t.name.startswith(PREFIX)) - padding == budget.checkpoint_bytes(K3).total


DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
NO_LATENT = {"routed_expert_hidden_size": None, "latent_moe_use_norm": False}


@pytest.mark.parametrize(
    "c",
    [
        FEWER,
        dataclasses.replace(LINEAR, num_experts=8),
        tiny_config(dtype="bfloat16"),
        tiny("k3"),
        tiny("linear"),
        tiny("k3", q_lora_rank=None, mla_use_output_gate=False, attn_res_block_size=None),
        tiny("k3", num_shared_experts=0, **NO_LATENT),
        tiny("linear", num_experts=0, num_experts_per_token=0),
        tiny("k3", layers=3, mla=(), first_k_dense_replace=2, moe_layer_freq=2),
    ],
    ids="kimi-k3 linear-48b tiny-bf16 k3 linear plain-mla no-latent dense odd-layers".split(),
)
def test_lists_what_the_model_holds(c):
    """Name for name, in pieces and as a whole; shapes but for A_log, dtypes but for Kimi Linear's bf16 fp32 parts."""
    with torch.device("meta"):
        model = K3ForCausalLM(c)
        if c.packs_mxfp4:
            for layer in model.model.layers:
                if layer.moe:
                    layer.block_sparse_moe.experts = PackedExperts(layer.block_sparse_moe.experts)
    listed = dict(text_parts(c))
    pieces = dict(parts(model))
    assert list(listed) == list(pieces)
    k3 = c.linear_attn_config.gate_lower_bound is not None
    for before, piece in pieces.items():
        held = dict(released_tensors(piece, before))
        specs = {t.name.removeprefix(PREFIX): t for t in listed[before]}
        assert held.keys() == specs.keys()
        for name, p in held.items():
            spec = specs[name]
            assert spec.name.startswith(PREFIX) == k3
            assert spec.shape == tuple(p.shape) or name.endswith("A_log")
            if k3:
                assert spec.dtype == DTYPES[p.dtype], name
    assert sum(map(len, listed.values())) == len(dict(released_tensors(model)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"attn_bias": True}, "vision_config.attn_bias: got True, wanted False"),
        ({"mm_projector_type": "patchmerger"}, "mm_projector_type: got 'patchmerger', wanted 'patchmergerv2'"),
        ({"patch_size": None}, "patch_size: got None, wanted a positive whole number"),
        ({"vt_hidden_size": "1024"}, "vt_hidden_size: got '1024', wanted a positive whole number"),
        ({"merge_kernel_size": 2}, "merge_kernel_size: got 2, wanted two positive whole numbers"),
        ({"merge_kernel_size": [2, 0]}, r"merge_kernel_size: got \[2, 0\], wanted two"),
        ({"patch_size": [14, 14]}, r"patch_size: got \[14, 14\], wanted a positive whole number"),
    ],
)
def test_another_tower_is_refused(change, message):
    assert VisionConfig.from_dict(TOWER) == VisionConfig.preset("kimi-k3")
    with pytest.raises(ConfigError, match=message):
        VisionConfig.from_dict(TOWER | change)


@pytest.mark.parametrize("raw", [[], 3, "moonvit"])
def test_a_tower_that_is_no_object(tmp_path, raw):
    (tmp_path / "config.json").write_text(json.dumps(LINEAR.to_dict() | {"vision_config": raw}))
    with pytest.raises(ConfigError, match="vision_config: got .*, wanted an object"):
        VisionConfig.from_json(tmp_path)


def test_the_text_model_does_not_mind_the_tower():
    raw = json.loads((PRESET_DIR / "kimi-k3.json").read_text())
    tower = raw.pop("vision_config")
    assert K3Config.from_dict({"text_config": raw, "vision_config": tower}) == K3
    assert dataclasses.asdict(K3).keys() >= raw.keys()
