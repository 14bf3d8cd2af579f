"""The released layout, loaded and saved: bit for bit, one layer at a time, and never used when anything is wrong."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import k3lite.checkpoint
from k3lite.checkpoint import CheckpointError, load_model, load_parts, parts, save_model, save_parts, save_released
from k3lite.config import K3Config
from k3lite.generate import generate
from k3lite.packed import PackedExperts
from k3lite.released import tensor_list, text_parts
from k3lite.shards import INDEX
from tests.helpers import random_model, tiny
from tests.tiny_released import DAMAGE, FILES, TINY, change_file, change_index, tensors_of, tiny_config, tiny_released

IDS = torch.arange(1, 9).unsqueeze(0)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    return folder, tiny_released(folder)


@pytest.fixture
def damaged(tmp_path):
    tiny_released(tmp_path)
    return tmp_path


def bytes_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# ---- what is written


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_packed, count", [(True, 126), (False, 102)], ids=["packed", "plain"])
def test_round_trip_bit_for_bit(tmp_path, is_packed, count, dtype):
    model = tiny_released(tmp_path / "a", is_packed, dtype)
    stored = {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(tmp_path / "a").items()}
    codes = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
    specs = tensor_list(tiny_config(is_packed, dtype))
    assert len(stored) == count and stored == {s.name: (s.shape, codes[s.dtype]) for s in specs}

    loaded = load_model(tmp_path / "a")
    assert loaded.config == model.config and not any(m.training for m in loaded.modules())
    for (name, p), (other, q) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other and p.dtype == q.dtype and torch.equal(p, q)
    assert torch.equal(generate(model, IDS, 6), generate(loaded, IDS, 6))
    save_released(loaded, tmp_path / "b")
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_the_files(packed):
    folder, model = packed
    assert sorted(p.name for p in folder.iterdir()) == sorted([*FILES, INDEX, "config.json"])
    index = json.loads((folder / INDEX).read_text())
    tensors = tensors_of(folder)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert all(name.startswith("language_model.") for name in tensors)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["model_type"] == "kimi_k3" and K3Config.from_json(folder) == model.config
    padded = tensors["language_model.model.layers.0.self_attn.A_log"]
    assert torch.equal(padded[:2], model.model.layers[0].self_attn.A_log) and not padded[2:].any()


def test_files_are_those_of_the_library(packed):
    """Ours are written piece by piece; safetensors itself writes the same bytes from all tensors of a file at once."""
    folder, _ = packed
    for file in FILES:
        assert save(load_file(folder / file)) == (folder / file).read_bytes()


def test_kimi_linear(tmp_path):
    """No prefix, [1,1,H,1]; what its files keep in bf16 is refused where bf16 would lose digits."""
    model = random_model(tiny("linear", dtype="bfloat16"))
    with pytest.raises(CheckpointError, match=r"q_conv1d.weight: got torch.float32 .*, wanted BF16 .* without loss"):
        save_released(model, tmp_path / "a")
    assert not list((tmp_path / "a").iterdir())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):
                p.copy_(p.bfloat16())
    save_released(model, tmp_path / "a")
    tensors = tensors_of(tmp_path / "a")
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 2, 1)
    assert tensors["model.layers.0.self_attn.q_conv1d.weight"].dtype == torch.bfloat16
    loaded = load_model(tmp_path / "a")
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    save_released(loaded, tmp_path / "b")
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_more_heads_than_the_padding(tmp_path):
    c = tiny("k3", layers=1, mla=())
    c = dataclasses.replace(c, linear_attn_config=dataclasses.replace(c.linear_attn_config, num_heads=130, head_dim=2))
    model = random_model(c)
    save_released(model, tmp_path)
    assert tensors_of(tmp_path)["language_model.model.layers.0.self_attn.A_log"].shape == (256,)
    assert torch.equal(load_model(tmp_path)(IDS).logits, model(IDS).logits)


def test_a_vision_tower_is_passed_over(damaged):
    want = load_model(damaged)(IDS).logits
    extra = {"vision_tower.patch_embed.proj.weight": torch.zeros(2, 3, 4, 4), "mm_projector.post_norm.weight": torch.zeros(2)}  # fmt: skip
    change_file(damaged, FILES[3], lambda t: t.update(extra))
    change_index(damaged, lambda i: (i["weight_map"].update(dict.fromkeys(extra, FILES[3])), i.pop("metadata")))
    assert torch.equal(load_model(damaged)(IDS).logits, want)


# ---- one part at a time


class HeldBytes(TorchDispatchMode):
    """The most bytes that live storages made while it is on ever had together; mapped files are the system's."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.device.type != "meta" and not t.untyped_storage().filename:
                storage = t.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def held_while(action):
    with HeldBytes() as held:
        action()
    return held


def largest_part(config):
    return max(sum(s.nbytes for s in specs) for _, specs in text_parts(config))


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
def test_no_more_than_a_layer_is_held(tmp_path, is_packed):
    """From files to files: the peak of all tensors is the largest part, and the largest single tensor at most beside it."""
    config = dataclasses.replace(tiny_config(is_packed), num_experts=16, vocab_size=48)
    model = random_model(config)
    if is_packed:
        k3lite.packed.pack_experts(model)
    save_released(model, tmp_path / "a")
    del model

    held = held_while(lambda: save_parts(config, load_parts(tmp_path / "a"), tmp_path / "b"))
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    whole = sum(s.nbytes for s in tensor_list(config))
    biggest = max(s.nbytes for s in tensor_list(config))
    assert largest_part(config) <= held.peak + 504  # A_log is padded in the file only
    assert held.peak <= largest_part(config) + biggest < whole / 2

    kept = held_while(lambda: list(load_parts(tmp_path / "a")))
    assert kept.peak > 0.9 * whole, "the hook sees what is held"


def test_parts_are_those_of_the_model(packed):
    folder, model = packed
    for (before, got), (other, want) in zip(load_parts(folder), parts(model), strict=True):
        assert before == other and not any(m.training for m in got.modules())
        tensors = want.state_dict()
        assert got.state_dict().keys() == tensors.keys()
        assert all(torch.equal(t, tensors[name]) for name, t in got.state_dict().items())
    assert isinstance(dict(load_parts(folder))["model.layers.1."].block_sparse_moe.experts, PackedExperts)


def test_a_layer_that_was_read_alone_computes(packed):
    folder, model = packed
    from k3lite.attn_res import DepthStream

    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    outputs = []
    for layer in (dict(load_parts(folder))["model.layers.0."], model.model.layers[0]):
        stream = DepthStream(x, TINY.attn_res_block_size, TINY.rms_norm_eps)
        with torch.no_grad():
            layer(stream, None, None, None, None)
        outputs.append(stream.read(model.model, "output_attn_res"))
    assert torch.equal(*outputs)


# ---- what is wrong


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_before_anything_is_read(damaged, monkeypatch, kind):
    damage, message = DAMAGE[kind]
    damage(damaged)

    def never(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(k3lite.checkpoint, "open_safetensors", never)
    for load in (load_model, load_parts):
        with pytest.raises(CheckpointError, match=message) as e:
            load(damaged)
        assert str(damaged) in str(e.value)


def test_a_file_that_cannot_be_read_does_not_hide_the_rest(damaged):
    """Its tensors are not called missing: the index says where they would be. What else is wrong is listed."""
    (damaged / FILES[1]).write_bytes(b"")
    change_file(damaged, FILES[3], lambda t: t.update({"language_model.model.norm.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError) as e:
        load_model(damaged)
    assert "model-00002" in str(e.value) and "model.norm.weight: shape (3,), wanted (64,)" in str(e.value)
    assert "missing" not in str(e.value) and str(e.value).count(";") == 1


def test_a_layer_that_is_nowhere_is_missing_as_the_config_packs_it(damaged, monkeypatch):
    monkeypatch.setattr(k3lite.checkpoint, "SHOWN", 200)
    for is_packed in (True, False):
        change_index(
            damaged, lambda i: i.update(weight_map={n: f for n, f in i["weight_map"].items() if f != FILES[1]})
        )
        (damaged / FILES[1]).unlink(missing_ok=True)
        with pytest.raises(CheckpointError) as e:
            load_model(damaged, tiny_config(is_packed))
        assert ("experts.0.w1.weight_packed: missing" in str(e.value)) == is_packed
        assert ("experts.0.w1.weight: missing" in str(e.value)) != is_packed


@pytest.mark.parametrize("number", [9.0, float("nan")])
def test_a_padding_that_is_none(damaged, number):
    """Of the 126 numbers behind the two heads, two that are not zero, in one layer; said before a model is made."""
    name = "language_model.model.layers.1.self_attn.A_log"
    change_file(damaged, FILES[1], lambda t: t[name][-2:].fill_(number))
    for load in (load_model, load_parts):
        with pytest.raises(CheckpointError, match=r"config: model.layers.1.self_attn.A_log: 2 numbers behind its 2 are not 0, wanted a padding of zeros$"):  # fmt: skip
            load(damaged)


def test_numbers_are_widened_but_never_cut(damaged):
    """bf16 files for an fp32 config are read; fp32 files for a bf16 config are refused."""
    wider, narrower = (dataclasses.replace(TINY, dtype=dtype) for dtype in ("float64", "bfloat16"))
    assert load_model(damaged, wider).lm_head.weight.dtype == torch.float64
    with pytest.raises(CheckpointError, match="input_layernorm.weight: dtype F32, wanted torch.bfloat16"):
        load_model(damaged, narrower)


@pytest.mark.parametrize("failing", ["third part", "index"])
def test_a_failed_save_leaves_nothing(packed, tmp_path, monkeypatch, failing):
    folder, model = packed

    def some():
        yield from list(parts(model))[:2]
        raise OSError("disk full")

    if failing == "index":
        monkeypatch.setattr(
            k3lite.checkpoint, "write_text", lambda path, text: (_ for _ in ()).throw(OSError("disk full"))
        )
    with pytest.raises(OSError, match="disk full"):
        save_parts(model.config, some() if failing == "third part" else parts(model), tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_checkpoint_a_folder(packed, tmp_path):
    folder, model = packed
    with pytest.raises(CheckpointError, match="holds a checkpoint already; wanted another folder"):
        save_released(model, folder)
    with pytest.raises(CheckpointError, match="holds a checkpoint in shards already"):
        save_model(model, folder)
    save_model(model, tmp_path)
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        save_released(model, tmp_path)
    half = tmp_path / "half"  # a download that has no index yet: neither written over nor cleaned away
    half.mkdir()
    (half / FILES[2]).write_bytes(b"17 GB")
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        save_released(model, half)
    assert bytes_of(half) == {FILES[2]: b"17 GB"}


def test_parts_of_another_config(packed, tmp_path):
    _, model = packed
    some = list(parts(model))
    with pytest.raises(CheckpointError, match=r"missing parts: ''$"):
        save_parts(model.config, some[:-1], tmp_path)
    with pytest.raises(CheckpointError, match="part 'model.layers.0.' is twice, or not of this config"):
        save_parts(model.config, [*some[:2], some[1]], tmp_path)
    with pytest.raises(CheckpointError, match=r"experts packed as it says\?\): .*experts.0.w1.weight_packed: missing"):
        save_released(random_model(TINY), tmp_path)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: got .*\(96, 64\), wanted F32 \(95, 64\)"):
        save_parts(dataclasses.replace(model.config, vocab_size=95), some, tmp_path)
    assert not list(tmp_path.iterdir())
