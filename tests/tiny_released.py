"""The tiny random checkpoint in the released layout (k3-architecture §4.1), made by code, and ways to damage it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3lite.checkpoint import save_released
from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.packed import pack_experts
from k3lite.shards import INDEX
from tests.helpers import random_model

TINY = K3Config.preset("k3-tiny")
LAYER = "language_model.model.layers.1."
FILES = [f"model-{i:05d}-of-000004.safetensors" for i in range(1, 5)]  # three layers; embedding, norm and head


def tiny_config(packed: bool = True, dtype: str = "float32") -> K3Config:
    return dataclasses.replace(TINY, dtype=dtype, quantization_config=TINY.quantization_config if packed else None)


def tiny_released(folder: Path, packed: bool = True, dtype: str = "float32", seed: int = 0) -> K3ForCausalLM:
    """Writes the checkpoint and returns its model: 126 tensors packed, 102 unpacked."""
    model = random_model(tiny_config(packed, dtype), seed)
    if packed:
        pack_experts(model)
    save_released(model, folder)
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors, as copies: load_file's are views of the file."""
    return {name: t.clone() for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def change_file(folder: Path, file: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = {name: t.clone() for name, t in load_file(folder / file).items()}
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def change_index(folder: Path, change: Callable[[dict], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def rewrite_header(path: Path, change: Callable[[dict], str | None]) -> None:
    """Change a file's header and leave its tensors; `change` may return a header as text."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    text = (json.dumps(header) if text is None else text).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


# ---- each kind of damage, and what the error must say


def _change(file: int, change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    return lambda folder: change_file(folder, FILES[file], change)


def _index(change: Callable[[dict], None]) -> Callable[[Path], None]:
    return lambda folder: change_index(folder, change)


def _truncate(keep: int) -> Callable[[Path], None]:
    return lambda folder: (folder / FILES[1]).write_bytes((folder / FILES[1]).read_bytes()[:keep])


def _rename(t: dict[str, Tensor]) -> None:
    t[f"{LAYER}mlp_res_norm.wieght"] = t.pop(f"{LAYER}mlp_res_norm.weight")


def _double_in_header(folder: Path) -> None:
    def twice(header):
        first, entry = next((n, e) for n, e in header.items() if n != "__metadata__")
        return json.dumps(header)[:-1] + f", {json.dumps(first)}: {json.dumps(entry)}" + "}"

    rewrite_header(folder / FILES[1], twice)


def _move_a_tensor(folder: Path) -> None:
    moved = {}
    change_file(folder, FILES[3], lambda t: moved.update({"lm_head": t.pop("language_model.lm_head.weight")}))
    change_file(folder, FILES[2], lambda t: t.update({"language_model.lm_head.weight": moved["lm_head"]}))


def _shift_offsets(header: dict) -> None:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [place + 4 for place in entry["data_offsets"]]


def _fractions(header: dict) -> None:
    """64.0 == 64 for Python, not for a reader of the format."""
    header[f"{LAYER}mlp_res_norm.weight"]["shape"] = [64.0]


def _into_moe(name: str, t: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{LAYER}block_sparse_moe.{name}": t})


GATE, PACKED, SCALE = "gate.weight", "experts.3.w2.weight_packed", "experts.0.w1.weight_scale"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "wrong name": (_change(1, _rename), r"mlp_res_norm.wieght: unknown"),
    "missing": (_change(1, lambda t: t.pop(f"{LAYER}self_attn.dt_bias")), r"layers.1.self_attn.dt_bias: .*not in model-00002"),
    "missing here and in the index": (
        lambda folder: [
            change_file(folder, FILES[1], lambda t: t.pop(f"{LAYER}self_attn.dt_bias")),
            change_index(folder, lambda i: i["weight_map"].pop(f"{LAYER}self_attn.dt_bias")),
        ],
        r"layers.1.self_attn.dt_bias: missing",
    ),
    "shape": (_change(1, _into_moe(GATE, torch.zeros(4, 63))), r"gate.weight: .*\(4, 63\), wanted .*\(4, 64\)"),
    "transposed": (_change(1, lambda t: t.update({f"{LAYER}self_attn.f_b_proj.weight": torch.zeros(16, 32)})), r"f_b_proj.weight: .*\(16, 32\), wanted .*\(32, 16\)"),
    "codes of another width": (_change(1, _into_moe(PACKED, torch.zeros(32, 32).byte())), r"w2.weight_packed: .*\(32, 32\), wanted .*\(32, 16\)"),
    "wider dtype": (_change(1, lambda t: t.update({f"{LAYER}self_attn.o_norm.weight": torch.zeros(16).double()})), r"o_norm.weight: .*F64.*, wanted"),
    "whole numbers": (_change(1, _into_moe(GATE, torch.zeros(4, 64).int())), r"gate.weight: .*I32.*, wanted"),
    "codes that are floats": (_change(1, _into_moe(SCALE, torch.zeros(32, 1))), r"w1.weight_scale: .*F32.*, wanted .*(uint8|U8)"),
    "too few decay rates": (_change(1, lambda t: t.update({f"{LAYER}self_attn.A_log": torch.zeros(1)})), r"A_log: .*\(1,\), wanted"),
    "doubled in another file": (_change(2, lambda t: t.update({"language_model.model.norm.weight": torch.zeros(64)})), r"model.norm.weight: twice, in model-00003.* and model-00004"),
    "doubled in one header": (_double_in_header, r"model-00002.*: not a readable safetensors file \(.*: twice\)"),
    "one byte short": (_truncate(-1), r"model-00002.*: not a readable safetensors file \(its tensors need \d+ bytes, it has \d+\)"),
    "cut within the header": (_truncate(100), r"model-00002.*: not a readable safetensors file \(100 bytes, too short"),
    "empty": (_truncate(0), r"model-00002.*: not a readable safetensors file \(0 bytes"),
    "bytes after the end": (lambda folder: (folder / FILES[1]).write_bytes((folder / FILES[1]).read_bytes() + b"x"), r"model-00002.*: not a readable"),
    "offsets that leave a gap": (lambda folder: rewrite_header(folder / FILES[1], _shift_offsets), r"model-00002.*begins at byte 4, wanted 0"),
    "a size that is no whole number": (lambda folder: rewrite_header(folder / FILES[1], _fractions), r"model-00002.*mlp_res_norm.weight: .*64.0.* describes no tensor"),
    "no file": (lambda folder: (folder / FILES[1]).unlink(), r"model-00002-of-000004.safetensors: no such file"),
    "index names a file that lacks the tensor": (_index(lambda i: i["weight_map"].update({f"{LAYER}{GATE}": FILES[0]})), r"gate.weight: in the index, not in model-00001"),
    "index says another file": (_move_a_tensor, r"lm_head.weight: in model-00003.*, the index says model-00004"),
    "file that the index lacks": (lambda folder: save_file({"x": torch.zeros(1)}, folder / "model-00005-of-000004.safetensors"), r"model-00005-of-000004.safetensors: not in the index"),
    "tensor that the index lacks": (_index(lambda i: i["weight_map"].pop("language_model.lm_head.weight")), r"lm_head.weight: in model-00004.*, not in the index"),
    "total_size": (_index(lambda i: i["metadata"].update(total_size=419_711)), r"total_size 419711, the tensors are 419712 bytes"),
    "index that is none": (lambda folder: (folder / INDEX).write_text("[]"), r"index.json: not a safetensors index"),
    "index that leaves the folder": (_index(lambda i: i["weight_map"].update(x="../x.safetensors")), r"'../x.safetensors' is no file name"),
}  # fmt: skip
