"""`k3lite verify`: what matches is counted, each kind of damage is named, and the exit status says which it was."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3lite.checkpoint import save_model
from k3lite.cli import main
from k3lite.config import K3Config
from k3lite.released import VisionConfig, tensor_list
from k3lite.shards import INDEX, WEIGHTS
from k3lite.verify import conformance
from tests.tiny_released import DAMAGE, FILES, TINY, change_file, change_index, tiny_config, tiny_released


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, tiny_released(folder)


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "copy")


def test_a_whole_checkpoint(whole):
    result = conformance(whole[0], TINY)
    assert not result.problems
    assert (result.total.matching, result.total.wanted, result.tensors) == (126, 126, 126)
    assert result.total.nbytes == result.nbytes == 419_712
    kda, codes = result.kinds["kda"], result.kinds["routed_experts"]
    assert (kda.matching, kda.dtypes, kda.files) == (28, {"F32"}, set(FILES[:2]))
    assert (codes.matching, codes.dtypes, codes.nbytes) == (24, {"U8"}, 24 * 32 * 16)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(copied, kind):
    damage, message = DAMAGE[kind]
    damage(copied)
    problems = conformance(copied, TINY).problems
    assert any(re.search(message, problem) for problem in problems), problems
    assert len(problems) <= 3, "a wrong name is two in the index and one unknown; no fault is told more often"


def test_what_load_model_forgives_is_no_conformance(copied):
    """bf16 where K3 keeps fp32, and a checkpoint of `save_model`: no prefix, unpadded."""
    name = "language_model.model.layers.1.self_attn.o_norm.weight"
    change_file(copied, FILES[1], lambda t: t.update({name: t[name].bfloat16()}))
    change_index(copied, lambda i: i.pop("metadata"))
    assert conformance(copied, TINY).problems == [f"{name}: BF16 (16,), wanted F32 (16,)"]


def test_a_checkpoint_of_save_model(whole, tmp_path):
    save_model(whole[1], tmp_path)
    result = conformance(tmp_path, TINY)
    assert result.problems[0] == "no name begins with 'language_model.'; compared as if all did"
    assert [p.split(": ")[1] for p in result.problems[1:]] == ["F32 (2,), wanted F32 (128,)"] * 2
    assert result.total.matching == 124


def test_vision_is_compared_too(copied):
    tower = {
        "vt_hidden_size": 4, "vt_intermediate_size": 6, "vt_num_hidden_layers": 2, "qkv_hidden_size": 6,
        "patch_size": 2, "init_pos_emb_height": 3, "init_pos_emb_width": 5, "merge_kernel_size": [2, 2],
        "text_hidden_size": 64,
    }  # fmt: skip
    vision = VisionConfig.from_dict(tower)
    specs = [s for s in tensor_list(TINY, vision) if not s.name.startswith("language_model.")]
    assert len(specs) == 2 * 6 + 3 + 3
    assert sum("missing" in p for p in conformance(copied, TINY, vision).problems) == 18
    file = "model-vision.safetensors"
    save_file({s.name: torch.zeros(s.shape) for s in specs}, copied / file)
    change_index(copied, lambda i: (i["weight_map"].update({s.name: file for s in specs}), i.pop("metadata")))
    assert not conformance(copied, TINY, vision).problems
    assert len(conformance(copied, TINY).problems) == 18
    raw = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(raw | {"vision_config": tower}))
    assert main(["verify", str(copied)]) == 0


def test_one_file_without_an_index(whole, tmp_path):
    tensors = {}
    for file in FILES:
        tensors |= load_file(whole[0] / file)
    save_file(tensors, tmp_path / WEIGHTS)
    assert not conformance(tmp_path, TINY).problems
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-1])
    (problem,) = conformance(tmp_path, TINY).problems
    assert "model.safetensors: not a readable safetensors file" in problem


def test_a_layer_that_is_nowhere(copied):
    """Neither its file nor its names in the index: only then is each of its tensors called missing."""
    (copied / FILES[1]).unlink()
    assert conformance(copied, TINY).problems == [f"{FILES[1]}: no such file"]
    change_index(copied, lambda i: i.update(weight_map={n: f for n, f in i["weight_map"].items() if f != FILES[1]}))
    problems = conformance(copied, TINY).problems
    assert (
        len(problems) == 1 + 52 and "total_size" in problems[0] and all(p.endswith(": missing") for p in problems[1:])
    )


def test_plain_and_packed_are_different_layouts(whole):
    result = conformance(whole[0], tiny_config(packed=False))
    assert len(result.problems) == 48 + 24 and result.total.wanted == 102


# ---- the command


def test_the_command(copied, capsys):
    assert main(["verify", str(copied)]) == 0
    out = capsys.readouterr().out
    assert "total                 126      126             419,712  F32 U8           4" in out
    assert out.endswith("as released: every name, shape, dtype and file\n")

    (copied / FILES[1]).unlink()
    assert main(["verify", str(copied)]) == 1
    out = capsys.readouterr().out
    assert "not as released, 1 problem(s)" in out and f"  {FILES[1]}: no such file" in out


def test_the_command_against_a_preset(copied, capsys):
    assert main(["verify", str(copied), "--config", "k3-tiny"]) == 0
    assert main(["verify", str(copied), "--config", "needle"]) == 1
    out = capsys.readouterr().out
    assert "against needle" in out and "problem(s); 126 tensors of 419,712 bytes are there" in out
    assert out.count("\n  ") == 21 and "  and " in out.splitlines()[-1]


@pytest.mark.parametrize("what, message", [("nowhere", "no such folder"), ("", "config.json: cannot be read")])
def test_nothing_to_compare(tmp_path, capsys, what, message):
    assert main(["verify", str(tmp_path / what)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_weights_are_not_read(copied):
    """Every byte behind the headers may be anything."""
    for file in FILES:
        raw = (copied / file).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        (copied / file).write_bytes(raw[:start] + b"\xff" * (len(raw) - start))
    assert main(["verify", str(copied)]) == 0
    assert (copied / INDEX).exists() and K3Config.from_json(copied) == TINY
