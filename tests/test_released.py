"""The released layout: the list of tensors and its published totals, files written and read so, and every kind of damage."""

import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3lite import budget, checkpoint
from k3lite.checkpoint import CheckpointError, load_model, read_layer, released_tensors, save_parts, save_released
from k3lite.cli import main
from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.packed import pack_experts
from k3lite.released import INDEX, PREFIX, SHOWN, compare, listed, read_heads, tensor_list, totals
from tests.helpers import random_model, tiny

K3, LINEAR, TINY = (K3Config.preset(name) for name in ("kimi-k3", "kimi-linear-48b", "k3-tiny"))
TINY_PACKED = K3Config.from_dict(TINY.to_dict() | {"quantization_config": K3.quantization_config, "dtype": "bfloat16"})
IDS = torch.arange(1, 15).view(2, 7)
NORM = f"{PREFIX}model.norm.weight"


def sums(specs):
    return tuple(sum(column) for column in zip(*totals(specs).values(), strict=True))


def make_tiny_checkpoint(folder):
    """The tiny random checkpoint of k3-architecture §4.1 in the released layout: bf16, experts packed, a file a layer."""
    model = random_model(TINY_PACKED)
    pack_experts(model)
    save_released(model, folder)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("released") / "tiny"
    return make_tiny_checkpoint(folder), folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made[1], tmp_path / "copy")


# ---- the list


def test_totals_of_kimi_k3_are_the_published_ones():
    assert sums(tensor_list(K3, vision=True)) == (497_220, 1_503_647_073_024, 1_560_860_324_864)
    parts = totals(tensor_list(K3, vision=True))
    assert parts["vision tower"][1] == 401_214_464 and parts["projector"][1] == 46_144_512
    assert parts["routed experts"][2] == 1_446_456_066_048 and parts["AttnRes"][1] == 2_680_832
    assert sum(
        n for part, (_, n, _) in parts.items() if part not in ("vision tower", "projector", "routed experts")
    ) == (budget.active_parameters(K3, input_embedding=True) - 16 * 92 * budget.expert_parameters(K3) + 69 * 32)


def test_totals_of_kimi_linear_are_the_published_ones():
    assert sums(tensor_list(LINEAR))[:2] == (20_493, 49_122_681_728)
    spec = {s.name: s for s in tensor_list(LINEAR)}["model.layers.0.self_attn.A_log"]
    assert spec.shape == (1, 1, 32, 1) and spec.dtype == "F32"


@pytest.mark.parametrize("packed, count", [(True, 126), (False, 102)])
def test_the_tiny_layout(packed, count):
    config = TINY_PACKED if packed else K3Config.from_dict(TINY_PACKED.to_dict() | {"quantization_config": None})
    specs = list(tensor_list(config, pad_a_log=False))
    assert len(specs) == count
    assert (
        sum(s.numbers for s in specs if s.dtype != "U8")
        + sum(2 * s.numbers for s in specs if s.name.endswith("weight_packed"))
        == 125_988
        == sum(budget.parameters(TINY).values())
    )
    assert budget.active_parameters(TINY) == 107_556
    want = budget.checkpoint_bytes(config)
    assert sum(s.nbytes for s in specs) == want.total


SHAPES = {
    "k3-tiny": K3Config.from_dict(TINY.to_dict() | {"quantization_config": None}),
    "needle": K3Config.preset("needle"),
    "linear": tiny("linear"),
    "no latent norm": tiny("k3", latent_moe_use_norm=False),
    "no shared experts": tiny("k3", num_shared_experts=0),
    "plain residuals": tiny("k3", attn_res_block_size=None),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_the_list_is_what_a_model_holds(config):
    model = K3ForCausalLM(config)
    want = {name: p.numel() for name, p in released_tensors(model)}
    got = {s.name.removeprefix(PREFIX): s.numbers for s in tensor_list(config, pad_a_log=False)}
    assert got == want


def test_every_kind_of_tensor_of_k3_has_its_published_shape():
    specs = {s.name.removeprefix(PREFIX): s for s in tensor_list(K3, vision=True)}
    for name, shape, dtype in [
        ("lm_head.weight", (163840, 7168), "BF16"),
        ("model.layers.0.mlp.down_proj.weight", (7168, 33792), "BF16"),
        ("model.layers.0.self_attn.A_log", (128,), "F32"),
        ("model.layers.0.self_attn.k_conv1d.weight", (12288, 1, 4), "F32"),
        ("model.layers.0.self_attn.o_norm.weight", (128,), "F32"),
        ("model.layers.3.self_attn.kv_b_proj.weight", (24576, 512), "BF16"),
        ("model.layers.92.self_attn.q_b_proj.weight", (18432, 1536), "BF16"),
        ("model.layers.92.block_sparse_moe.gate.e_score_correction_bias", (896,), "F32"),
        ("model.layers.1.block_sparse_moe.experts.895.w1.weight_packed", (3072, 1792), "U8"),
        ("model.layers.1.block_sparse_moe.experts.0.w2.weight_scale", (3584, 96), "U8"),
        ("model.layers.5.mlp_res_proj.weight", (1, 7168), "BF16"),
        ("vision_tower.encoder.blocks.26.wqkv.weight", (4608, 1024), "BF16"),
    ]:
        assert (specs[name].shape, specs[name].dtype) == (shape, dtype), name
    assert specs["model.layers.92.mlp_res_proj.weight"].layer == 92 and specs["lm_head.weight"].layer is None


# ---- written and read


def test_files_are_as_released(made):
    model, folder = made
    heads = read_heads(folder)
    assert compare(heads, tensor_list(TINY_PACKED)) == [] and len(heads.tensors) == 126
    assert len(heads.shards) == TINY.num_hidden_layers + 1
    by_shard = {heads.where[n]: set() for n in heads.tensors}
    for name, spec in heads.tensors.items():
        by_shard[heads.where[name]].add(spec.layer)
    assert all(len(layers) == 1 for layers in by_shard.values()), "a layer a file"
    a_log = read_layer(folder, 0)[f"{PREFIX}model.layers.0.self_attn.A_log"]
    heads_ = TINY.linear_attn_config.num_heads
    assert (
        a_log.shape == (128,)
        and torch.equal(a_log[:heads_], model.model.layers[0].self_attn.A_log)
        and not a_log[heads_:].any()
    )


def test_round_trip_bit_for_bit(made, tmp_path):
    model, folder = made
    loaded = load_model(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) and loaded.state_dict()[name].dtype == tensor.dtype, name
    save_released(loaded, tmp_path / "again")
    files = sorted(p.name for p in folder.iterdir())
    assert files == sorted(p.name for p in (tmp_path / "again").iterdir())
    assert all((folder / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in files)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_kimi_linear_has_its_own_layout(tmp_path):
    model = random_model(tiny("linear"))
    save_released(model, tmp_path / "x")
    names = read_heads(tmp_path / "x").tensors
    assert not any(n.startswith(PREFIX) for n in names)
    assert names["model.layers.0.self_attn.A_log"].shape == (1, 1, 2, 1)
    assert torch.equal(load_model(tmp_path / "x")(IDS).logits, model(IDS).logits)


def test_one_layer_at_a_time(made, tmp_path, monkeypatch):
    """What is copied at once is a layer, and what is read for one layer is that layer."""
    model, folder = made
    copied = []
    real = checkpoint.save_file
    monkeypatch.setattr(
        checkpoint, "save_file", lambda t, *a: (copied.append(sum(x.nbytes for x in t.values())), real(t, *a))
    )
    save_released(model, tmp_path / "x")
    specs = list(read_heads(folder).tensors.values())
    sizes = sorted(sum(s.nbytes for s in specs if s.layer == i) for i in (None, *range(TINY.num_hidden_layers)))
    assert sorted(copied) == sizes and sum(sizes) > 2 * max(sizes)
    assert sum(t.nbytes for t in read_layer(folder, 2).values()) == sum(s.nbytes for s in specs if s.layer == 2)
    with pytest.raises(CheckpointError, match="holds no layer 7"):
        read_layer(folder, 7)


def test_a_checkpoint_is_gone_through_without_a_model(made, tmp_path):
    """Layer by layer from one folder into another: the same bytes, and one layer alive at a time."""
    folder, read = made[1], []

    def layer(i):
        assert not any(ref() is not None for ref in read), "an earlier layer is still held"
        part = read_layer(folder, i)
        read.append(weakref.ref(next(iter(part.values()))))
        return part

    save_parts(TINY_PACKED, map(layer, (None, *range(TINY.num_hidden_layers))), tmp_path / "x")
    assert len(read) == TINY.num_hidden_layers + 1
    assert all((tmp_path / "x" / p.name).read_bytes() == p.read_bytes() for p in folder.iterdir())


def test_parts_that_are_no_checkpoint_are_not_written(made, tmp_path):
    with pytest.raises(CheckpointError, match="not written, these parts are no checkpoint(.|\n)*layers.1.*: missing"):
        save_parts(TINY_PACKED, (read_layer(made[1], i) for i in (None, 0, 2)), tmp_path / "x")
    assert not any(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone_and_a_full_disk_leaves_nothing(made, folder, tmp_path, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(CheckpointError, match="copy: exists already; choose another folder"):
        save_released(made[0], folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_released(made[0], tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


# ---- damage: each kind is named, by loading and by `k3lite verify`, before any tensor is used


def shard_of(folder, name):
    return read_heads(folder).where[name]


def change(folder, name, tensors):
    """Replace one tensor of its file by these, and tell the index nothing."""
    shard = shard_of(folder, name)
    held = load_file(shard)
    del held[name]
    save_file(held | tensors, shard)


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def cut(folder):
    shard = shard_of(folder, NORM)
    shard.write_bytes(shard.read_bytes()[:-100])


def lie_about_length(folder):
    shard = shard_of(folder, NORM)
    raw = shard.read_bytes()
    shard.write_bytes((2**40).to_bytes(8, "little") + raw[8:])


def double(folder):
    other = shard_of(folder, f"{PREFIX}model.layers.1.input_layernorm.weight")
    save_file(load_file(other) | {NORM: torch.ones(64, dtype=torch.bfloat16)}, other)


def stranger(folder):
    save_file({"x": torch.ones(1)}, folder / "model-9.safetensors")


ONES = torch.ones(64, dtype=torch.bfloat16)
DAMAGE = {
    "name": (lambda f: change(f, NORM, {f"{PREFIX}model.form.weight": ONES}), "model.form.weight: unknown"),
    "missing": (lambda f: change(f, NORM, {}), "model.norm.weight: missing"),
    "shape": (lambda f: change(f, NORM, {NORM: ONES[:32]}), "model.norm.weight: shape"),
    "packed dtype": (lambda f: change(f, NORM, {NORM: ONES.byte()}), "model.norm.weight: dtype U8"),
    "doubled": (double, "model.norm.weight: twice, in"),
    "cut": (cut, "not a readable safetensors file"),
    "length": (lie_about_length, "not a readable safetensors file (a head of"),
    "no file": (lambda f: shard_of(f, NORM).unlink(), "no such file"),
    "stranger": (stranger, "model-9.safetensors: not in the index"),
    "index: size": (lambda f: edit_index(f, lambda i: i["metadata"].update(total_size=5)), "total_size 5, and the files hold"),
    "index: other file": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update({NORM: shard_of(f, f"{PREFIX}model.layers.0.self_attn.A_log").name})),
        "and the index says model-",
    ),
    "index: unheard of": (lambda f: edit_index(f, lambda i: i["weight_map"].pop(NORM)), "and the index says nothing"),
    "index: no JSON": (lambda f: (f / INDEX).write_text("{"), "not a safetensors index"),
}  # fmt: skip


@pytest.mark.parametrize("damage, told", DAMAGE.values(), ids=DAMAGE)
def test_damage(folder, damage, told, capsys, monkeypatch):
    damage(folder)
    monkeypatch.setattr(checkpoint, "_stream", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError) as e:
        load_model(folder)
    assert told in str(e.value)
    assert main(["verify", str(folder)]) == 1
    assert told in capsys.readouterr().out


def test_a_float_of_another_width_is_converted_by_loading_and_named_by_verify(folder, capsys):
    change(folder, NORM, {NORM: ONES.float()})
    edit_index(folder, lambda i: i["metadata"].pop("total_size"))
    assert load_model(folder).model.norm.weight.dtype == torch.bfloat16
    assert main(["verify", str(folder)]) == 1 and "model.norm.weight: dtype F32, wanted BF16" in capsys.readouterr().out


def test_all_is_listed_and_a_long_list_is_cut(folder):
    change(folder, NORM, {})
    stranger(folder)
    problems = compare(read_heads(folder), tensor_list(TINY_PACKED))
    assert len(problems) == 4, problems  # an unknown file, a name of the index, its total, and what is missing
    assert listed(["a"] * (SHOWN + 1500)).endswith("and 1,500 more")


# ---- the command


def test_verify_says_what_matches(folder, capsys):
    assert main(["verify", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "every name, shape and dtype is what the config asks for" in out
    line = next(line for line in out.splitlines() if "routed experts" in line).split()
    assert line[2:] == ["48", "13,056", "13,056"]  # 2 layers x 4 experts x 3 matrices x (512 + 32) bytes
    assert main(["verify", str(folder), "--config", "kimi-k3"]) == 1 and "more" in capsys.readouterr().out


def test_verify_refuses_what_is_no_folder(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "x")]) == 2 and "x: no such folder" in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 2 and "config.json" in capsys.readouterr().err
