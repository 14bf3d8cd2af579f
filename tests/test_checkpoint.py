"""Checkpoints: what is written reads back bit for bit, what is wrong is listed, and no half file is left behind."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import k3lite.checkpoint
import k3lite.shards
from k3lite import budget
from k3lite.checkpoint import CheckpointError, load_model, released_tensors, save_model, write_text
from k3lite.config import ConfigError, K3Config
from k3lite.generate import generate
from k3lite.packed import PackedExperts, pack_experts
from tests.helpers import random_model, tiny

IDS = torch.arange(1, 9).unsqueeze(0)
FP32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")  # in a bf16 model too


@pytest.fixture(params=["k3", "linear"])
def model(request):
    return random_model(tiny(request.param))


@pytest.fixture
def saved(tmp_path):
    """A checkpoint folder to damage, and its tensors."""
    save_model(random_model(tiny("k3")), tmp_path)
    return tmp_path, read(tmp_path)


def read(folder):
    """Copies: load_file's tensors are views of the file, which the tests write over."""
    return {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


# ---- what is written


def test_round_trip(model, tmp_path):
    save_model(model, tmp_path / "a" / "b")
    loaded = load_model(tmp_path / "a" / "b")
    assert loaded.config == model.config and not loaded.training
    for (name, p), (other, q) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q) and p.dtype == q.dtype and p.requires_grad == q.requires_grad
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)


def test_bf16_model(tmp_path):
    """bf16 weights beside fp32 convolutions, gates and biases: each in its own dtype, in the file and in the model."""
    model = random_model(tiny("k3", dtype="bfloat16"))
    save_model(model, tmp_path)
    for name, t in read(tmp_path).items():
        assert t.dtype == (torch.float32 if name.endswith(FP32) else torch.bfloat16), name
    loaded = load_model(tmp_path)
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)


def test_names_of_the_tiny_released_layout(tmp_path):
    """Shared sheet §4.1: 102 tensors unpacked."""
    save_model(random_model(K3Config.preset("k3-tiny")), tmp_path)
    shapes = {n: tuple(t.shape) for n, t in read(tmp_path).items()}
    layer = {
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
        "self_attention_res_norm.weight": (64,),
        "self_attention_res_proj.weight": (1, 64),
        "mlp_res_norm.weight": (64,),
        "mlp_res_proj.weight": (1, 64),
    }
    kda = {
        **{f"self_attn.{x}_proj.weight": (32, 64) for x in "qkvg"},
        **{f"self_attn.{x}_conv1d.weight": (32, 1, 4) for x in "qkv"},
        "self_attn.A_log": (2,),
        "self_attn.dt_bias": (32,),
        "self_attn.f_a_proj.weight": (16, 64),
        "self_attn.f_b_proj.weight": (32, 16),
        "self_attn.b_proj.weight": (2, 64),
        "self_attn.o_norm.weight": (16,),
        "self_attn.o_proj.weight": (64, 32),
    }
    mla = {
        "self_attn.q_a_proj.weight": (32, 64),
        "self_attn.q_a_layernorm.weight": (32,),
        "self_attn.q_b_proj.weight": (48, 32),
        "self_attn.kv_a_proj_with_mqa.weight": (32, 64),
        "self_attn.kv_a_layernorm.weight": (24,),
        "self_attn.kv_b_proj.weight": (64, 24),
        "self_attn.g_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 32),
    }
    dense = {"mlp.gate_proj.weight": (96, 64), "mlp.up_proj.weight": (96, 64), "mlp.down_proj.weight": (64, 96)}
    moe = {
        "gate.weight": (4, 64),
        "gate.e_score_correction_bias": (4,),
        "routed_expert_down_proj.weight": (32, 64),
        "routed_expert_norm.weight": (32,),
        "routed_expert_up_proj.weight": (64, 32),
        **{f"shared_experts.{x}_proj.weight": (64, 64) for x in ("gate", "up", "down")},
        **{f"experts.{e}.w{n}.weight": (32, 32) for e in range(4) for n in (1, 2, 3)},
    }
    moe = {f"block_sparse_moe.{n}": shape for n, shape in moe.items()}
    wanted = {
        "model.embed_tokens.weight": (96, 64),
        "lm_head.weight": (96, 64),
        "model.norm.weight": (64,),
        "model.output_attn_res_norm.weight": (64,),
        "model.output_attn_res_proj.weight": (1, 64),
    }
    for i, parts in enumerate([kda | dense, kda | moe, mla | moe]):
        wanted |= {f"model.layers.{i}.{n}": shape for n, shape in (layer | parts).items()}
    assert len(wanted) == 102 and shapes == wanted
    assert sum(torch.Size(s).numel() for s in shapes.values()) == 125_988


def test_names_of_the_tiny_released_layout_packed(tmp_path):
    """Shared sheet §4.1: 126 tensors packed; each expert weight becomes two, nothing else changes."""
    model = random_model(K3Config.preset("k3-tiny"))
    save_model(model, tmp_path / "plain")
    pack_experts(model)
    save_model(model, tmp_path / "packed")
    plain, packed = read(tmp_path / "plain"), read(tmp_path / "packed")
    experts = {n for n in plain if ".experts." in n}
    assert len(plain) == 102 and len(experts) == 24 and len(packed) == 126
    for name in experts:
        codes, scales = packed.pop(f"{name}_packed"), packed.pop(f"{name}_scale")
        assert codes.dtype == scales.dtype == torch.uint8 and codes.shape == (32, 16) and scales.shape == (32, 1)
    assert packed.keys() == plain.keys() - experts
    assert all(torch.equal(t, plain[n]) for n, t in packed.items())


@pytest.mark.parametrize("dtype, number_bytes", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
def test_bytes_on_disk_are_what_the_budget_says(tmp_path, dtype, number_bytes, pack):
    config = dataclasses.replace(K3Config.preset("k3-tiny"), dtype=dtype)
    model = random_model(config)
    if pack:
        pack_experts(model)
    else:
        config = dataclasses.replace(config, quantization_config=None)
    save_model(model, tmp_path)
    want = budget.checkpoint_bytes(config, number_bytes)
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") + 8
    assert (tmp_path / "model.safetensors").stat().st_size - header == want.total
    held = {n: t.numel() * t.element_size() for n, t in read(tmp_path).items()}
    assert sum(b for n, b in held.items() if ".experts." in n) == want.routed
    assert sum(b for n, b in held.items() if n.endswith("weight_scale")) == want.scales


def test_metadata(model, tmp_path):
    save_model(model, tmp_path, {"steps": "12"})
    with k3lite.checkpoint.open_safetensors(tmp_path / "model.safetensors") as f:
        assert f.metadata() == {"format": "pt", "steps": "12"}
    assert json.loads((tmp_path / "config.json").read_text()) == model.config.to_dict()


@pytest.mark.parametrize("failing", ["save_file", "replace"])
def test_a_failed_save_leaves_the_old_checkpoint(model, tmp_path, monkeypatch, failing):
    save_model(model, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def half(_tensors, path, _metadata):
        with open(path, "wb") as f:
            f.write(b"half a file")
        raise OSError("disk full")

    def stopped(*_):
        raise KeyboardInterrupt

    if failing == "save_file":
        monkeypatch.setattr(k3lite.checkpoint, "save_file", half)
    else:
        monkeypatch.setattr(k3lite.shards.os, "replace", stopped)
    with pytest.raises((OSError, KeyboardInterrupt)):
        save_model(random_model(model.config, seed=1), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_failed_first_save_leaves_nothing(model, tmp_path, monkeypatch):
    def half(_tensors, path, _metadata):
        with open(path, "wb") as f:
            f.write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(k3lite.checkpoint, "save_file", half)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_written_files_can_be_read_by_others(tmp_path):
    write_text(tmp_path / "a.json", "{}")
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o644


# ---- what is read


def test_prefix_and_padded_decay_rates(saved):
    """As K3's files have it."""
    folder, tensors = saved
    want = load_model(folder)(IDS).logits
    for name in list(tensors):
        t = tensors.pop(name)
        if name.endswith("A_log"):
            t = torch.cat([t, torch.zeros(126)])
        tensors[f"language_model.{name}"] = t
    rewrite(folder, tensors)
    assert torch.equal(load_model(folder)(IDS).logits, want)


def test_decay_rates_of_kimi_linear(tmp_path):
    model = random_model(tiny("linear"))
    save_model(model, tmp_path)
    tensors = read(tmp_path)
    rewrite(tmp_path, {n: t.view(1, 1, -1, 1) if n.endswith("A_log") else t for n, t in tensors.items()})
    assert torch.equal(load_model(tmp_path)(IDS).logits, model(IDS).logits)


def test_shards(saved):
    folder, tensors = saved
    want = load_model(folder)(IDS).logits
    (folder / "model.safetensors").unlink()
    shards, weight_map = ({}, {}), {}
    for i, (name, t) in enumerate(tensors.items()):
        shards[i % 2][name] = t
        weight_map[name] = f"model-{i % 2}.safetensors"
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load_model(folder)(IDS).logits, want)

    shards[1]["lm_head.weight"] = shards[0]["lm_head.weight"] = tensors["lm_head.weight"]
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"model-{i}.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight: twice, in model-0.safetensors and model-1.safetensors"):
        load_model(folder)

    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-1.safetensors: no such file"):
        load_model(folder)


def test_a_name_with_and_without_prefix_is_twice(saved):
    folder, tensors = saved
    rewrite(folder, tensors | {"language_model.lm_head.weight": tensors["lm_head.weight"].clone()})
    with pytest.raises(CheckpointError, match="lm_head.weight: twice"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_bad_index(saved, text):
    folder, _ = saved
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index.json: not a safetensors index"):
        load_model(folder)


def test_all_problems_are_listed(saved):
    folder, tensors = saved
    del tensors["lm_head.weight"], tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    tensors["model.norm.weight"] = torch.ones(31)
    tensors["model.extra"] = torch.ones(1)
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError) as e:
        load_model(folder)
    for problem in (
        "model.extra: unknown",
        "model.norm.weight: shape (31,), wanted (32,)",
        "lm_head.weight: missing",
        "model.layers.1.block_sparse_moe.experts.3.w2.weight: missing",
    ):
        assert problem in str(e.value)
    assert str(folder) in str(e.value) and "more" not in str(e.value)


def test_a_long_list_is_cut(saved):
    folder, tensors = saved
    rewrite(folder, {"model.norm.weight": tensors["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=rf"and {len(tensors) - 1 - 8} more$"):
        load_model(folder)


@pytest.mark.parametrize("shape", [(1,), (3,), (64,), (2, 64), (2, 2)], ids=str)
def test_wrong_decay_rates(saved, shape):
    """Two heads here: neither fewer numbers, nor more, nor a padding that is not one to 128."""
    folder, tensors = saved
    tensors["model.layers.0.self_attn.A_log"] = torch.zeros(shape)
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.A_log: shape .*, wanted \(2,\)"):
        load_model(folder)


def test_transposed_matrix_of_equal_width(saved):
    folder, tensors = saved
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    tensors[name] = tensors[name].T.contiguous()
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match=r"experts.0.w1.weight: shape \(24, 16\), wanted \(16, 24\)"):
        load_model(folder)


def test_checkpoint_of_another_config(saved):
    folder, _ = saved
    with pytest.raises(CheckpointError, match="not a checkpoint of this config"):
        load_model(folder, tiny("linear"))
    assert load_model(folder, tiny("k3")).config == tiny("k3")


@pytest.mark.parametrize("keep", [0, 7, 100, -1], ids=["empty", "header", "in-header", "one-byte-short"])
def test_truncated_file(saved, keep):
    folder, _ = saved
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model.safetensors: not a readable safetensors file"):
        load_model(folder)


def test_pickle_is_not_read(saved):
    folder, tensors = saved
    torch.save(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_model(folder)


def test_missing_files(saved, tmp_path):
    folder, _ = saved
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors: no such file"):
        load_model(folder)
    with pytest.raises(ConfigError, match="nowhere: cannot be read"):
        load_model(tmp_path / "nowhere")


def test_every_expert_is_a_tensor_of_its_own(model):
    tensors = dict(released_tensors(model))
    stacked = model.model.layers[1].block_sparse_moe.experts.w1
    for e in range(6):
        assert torch.equal(tensors[f"model.layers.1.block_sparse_moe.experts.{e}.w1.weight"], stacked[e])
    assert not any(n.endswith(("experts.w1", "experts.w2", "experts.w3")) for n in tensors)


# ---- packed experts


@pytest.fixture
def saved_packed(tmp_path):
    """A packed checkpoint to damage, its tensors, and the model."""
    model = random_model(K3Config.preset("k3-tiny"))
    pack_experts(model)
    save_model(model, tmp_path)
    return tmp_path, read(tmp_path), model


def test_packed_round_trip(saved_packed):
    folder, tensors, model = saved_packed
    loaded = load_model(folder)
    assert not any(m.training for m in loaded.modules())
    for (name, p), (other, q) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other and torch.equal(p, q) and p.dtype == q.dtype
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    assert torch.equal(generate(model, IDS, 8), generate(loaded, IDS, 8))
    save_model(loaded, folder)
    assert all(torch.equal(t, tensors[n]) for n, t in read(folder).items())


def test_the_tensors_decide_and_not_the_config(saved_packed):
    """The config's list does not name what K3's files leave unpacked (k3-architecture §7.12), so it is not asked."""
    folder, tensors, model = saved_packed
    plain = dataclasses.replace(model.config, quantization_config=None)
    assert torch.equal(load_model(folder, plain)(IDS).logits, model(IDS).logits)
    first = "model.layers.1.block_sparse_moe.experts."  # this layer plain, the other one packed
    dense = random_model(model.config)
    mixed = {n: t for n, t in tensors.items() if not n.startswith(first)}
    rewrite(folder, mixed | {n: t.clone() for n, t in released_tensors(dense) if n.startswith(first)})
    layers = load_model(folder).model.layers
    kinds = [isinstance(layers[i].block_sparse_moe.experts, PackedExperts) for i in (1, 2)]
    assert kinds == [False, True]


def test_packed_with_prefix_and_in_shards(saved_packed):
    """As K3's files are: a weight's codes and its scales may lie in different shards."""
    folder, tensors, model = saved_packed
    (folder / "model.safetensors").unlink()
    shards, weight_map = ({}, {}), {}
    for name, t in tensors.items():
        i = name.endswith("weight_scale")
        shards[i][f"language_model.{name}"] = t
        weight_map[f"language_model.{name}"] = f"model-{i:d}.safetensors"
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load_model(folder)(IDS).logits, model(IDS).logits)


def test_problems_of_packed_tensors_are_listed(saved_packed):
    folder, tensors, _ = saved_packed
    expert = "model.layers.1.block_sparse_moe.experts.0."
    del tensors[expert + "w1.weight_scale"]
    tensors[expert + "w2.weight_packed"] = torch.zeros(32, 32, dtype=torch.uint8)
    tensors[expert + "w3.weight_packed"] = tensors[expert + "w3.weight_packed"].float()
    tensors[expert + "w3.weight"] = torch.zeros(32, 32)
    tensors["model.layers.1.block_sparse_moe.shared_experts.up_proj.weight_packed"] = torch.zeros(64, 32).byte()
    tensors["model.layers.9.block_sparse_moe.experts.0.w1.weight_packed"] = torch.zeros(32, 16).byte()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].byte()
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError) as e:
        load_model(folder)
    for problem in (
        f"{expert}w1.weight_scale: missing",
        f"{expert}w2.weight_packed: shape (32, 32), wanted (32, 16)",
        f"{expert}w3.weight_packed: dtype F32, wanted torch.uint8",
        f"{expert}w3.weight: unknown",
        "shared_experts.up_proj.weight_packed: unknown",
        "model.layers.9.block_sparse_moe.experts.0.w1.weight_packed: unknown",
        "lm_head.weight: dtype U8, wanted torch.float32",
    ):
        assert problem in str(e.value)


def test_packed_files_for_widths_that_cannot_be_packed(saved):
    folder, tensors = saved
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    del tensors[name]
    rewrite(
        folder, tensors | {f"{name}_packed": torch.zeros(16, 12).byte(), f"{name}_scale": torch.zeros(16, 1).byte()}
    )
    with pytest.raises(CheckpointError, match=r"layers.1.block_sparse_moe.experts.w1: got an input width of 24"):
        load_model(folder)
