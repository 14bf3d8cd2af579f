"""Checkpoints: a folder with config.json and safetensors under the released tensor names. No pickle.

k3lite keeps the experts of a layer stacked (w1 [E,I,D]); files hold one tensor per expert
(`experts.{e}.w1.weight`), or two where the experts are packed in MXFP4 (`weight_packed`, `weight_scale`). Which it is
is decided by the tensors that are there, on both ways, whatever the config says of quantisation (k3-architecture §7.12). `A_log` is one number per head here; files store it flat, padded to 128 (K3) or as
[1,1,H,1] (Kimi Linear), so a loader flattens it and takes the first H. Source: k3-architecture §4, §7.4.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.moe import LatentMoE
from k3lite.packed import PackedExperts
from k3lite.released import (
    INDEX,
    PREFIX,
    Found,
    TensorSpec,
    a_log_shape,
    compare,
    is_k3,
    listed,
    read_heads,
    tensor_list,
)

WEIGHTS = "model.safetensors"
_STACKED = re.compile(r"(.*\.experts)\.(w[123])(|_packed|_scale)$")
_PACKED = re.compile(r"(.*)\.experts\.\d+\.w[123]\.weight_(?:packed|scale)$")
# transformers 5.24 saves a dense layer's MLP under the experts' name; the released files say `mlp`.
_DENSE_MLP = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)$")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message lists everything that is wrong with it."""


def released_tensors(model: K3ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything that a checkpoint of this model holds, experts one by one."""
    for name, p in model.state_dict().items():
        stacked = _STACKED.fullmatch(name)
        if not stacked:
            yield name, p
            continue
        for e, w in enumerate(p):
            yield f"{stacked[1]}.{e}.{stacked[2]}.weight{stacked[3]}", w


def save_model(model: K3ForCausalLM, folder: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write config.json and model.safetensors into `folder`; each file appears whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().contiguous().clone() for name, p in released_tensors(model)}
    write_atomically(folder / WEIGHTS, lambda tmp: save_file(tensors, tmp, {"format": "pt", **(metadata or {})}))
    write_text(folder / "config.json", json.dumps(model.config.to_dict(), indent=2) + "\n")


def load_model(
    folder: str | Path,
    config: K3Config | None = None,
    make: Callable[[K3Config], K3ForCausalLM] = K3ForCausalLM,
) -> K3ForCausalLM:
    """Read a model in eval mode. Raises CheckpointError listing every wrong, missing or unknown tensor.

    Layers whose experts are packed in the files get `PackedExperts`; see `packed.unpack_experts` to train on. They round
    their inputs to MXFP8 if the config's `input_activations` asks for it, which K3's does not.
    make: builds the model from its config, where it is not quite K3 (see `tasks/siblings.py`).
    """
    folder = Path(folder)
    config = K3Config.from_json(folder) if config is None else config
    heads = read_heads(folder)
    if heads.problems and not heads.tensors:
        raise CheckpointError("; ".join(f"{folder}/{problem}" for problem in heads.problems))
    model = make(config)
    _keep_packed(model, heads, folder)
    wanted = dict(released_tensors(model))
    problems = [*heads.problems, *_misfits(heads, wanted)]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{folder}: not a checkpoint of this config: {shown}")
    with torch.no_grad():
        for raw, tensor in _stream(heads, list(heads.tensors)):
            target = wanted[_name(raw)]
            target.copy_(tensor.flatten()[: target.numel()].view_as(target))
    return model.eval()


def _misfits(heads: Found, wanted: dict[str, Tensor]) -> list[str]:
    """Every wrong, missing, doubled or unknown tensor, a line each. Plain numbers may be of any width, they are converted."""
    found: dict[str, str] = {}
    problems: list[str] = []
    for raw, spec in heads.tensors.items():
        name, file = _name(raw), heads.where[raw].name
        if name in found:
            problems.append(f"{name}: twice, in {found[name]} and {file}")
        found[name] = file
        if name not in wanted:
            problems.append(f"{name}: unknown")
        elif not _fits(name, spec.shape, wanted[name]):
            problems.append(f"{name}: shape {spec.shape}, wanted {tuple(wanted[name].shape)}")
        elif (spec.dtype == "U8") != (wanted[name].dtype == torch.uint8):
            problems.append(f"{name}: dtype {spec.dtype}, wanted {wanted[name].dtype}")
    return problems + [f"{name}: missing" for name in wanted if name not in found]


def _stream(heads: Found, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these names, one after another, so that no more than one is in memory on the way."""
    for shard in heads.shards:
        mine = [name for name in names if heads.where[name] == shard]
        if mine:
            with open_safetensors(shard) as f:
                yield from ((name, f.get_tensor(name)) for name in mine)


def read_layer(folder: str | Path, layer: int | None) -> dict[str, Tensor]:
    """The tensors of one decoder layer (from 0; None: those of no layer) by the names in the files, and nothing else of the folder.

    Raises CheckpointError if the files are damaged or hold no such layer.
    """
    heads = read_heads(Path(folder))
    if heads.problems:
        raise CheckpointError(f"{folder}:\n{listed(heads.problems)}")
    names = [name for name, spec in heads.tensors.items() if spec.layer == layer]
    if not names:
        raise CheckpointError(f"{folder}: holds no layer {layer}")
    return dict(_stream(heads, names))


def save_released(model: K3ForCausalLM, folder: str | Path) -> None:
    """Write `folder` as the released files are: a prefix, padded `A_log`, a file for each layer, an index. See `save_parts`."""
    parts: dict[int | None, dict[str, Tensor]] = {}
    for name, tensor in released_tensors(model):
        parts.setdefault(TensorSpec(name, (), "U8").layer, {})[name] = tensor
    save_parts(model.config, parts.values(), folder)


def save_parts(config: K3Config, parts: Iterable[dict[str, Tensor]], folder: str | Path) -> None:
    """The same from parts that come one after another, a file each: what belongs to no layer, and every layer.

    parts: tensors by name, with the prefix or without, as `read_layer` gives them. No more than one part is held, so a model that
    fits nowhere can be gone through. The folder appears whole or not at all; raises CheckpointError if it exists, or
    if the parts are not a checkpoint of this config.
    """
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as tmp:
        weight_map, size, n = {}, 0, 0
        for part in parts:
            n += 1  # enumerate would keep the part alive while the next one is made
            file = f"model-{n:05d}-of-{config.num_hidden_layers + 1:05d}.safetensors"
            held = {_released_name(name, config): _as_released(name, t, config) for name, t in part.items()}
            save_file(held, Path(tmp) / file, {"format": "pt"})
            weight_map |= dict.fromkeys(held, file)
            size += sum(t.nbytes for t in held.values())
            del part, held
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (Path(tmp) / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        (Path(tmp) / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        found = read_heads(Path(tmp))
        vision = any(spec.part in ("vision tower", "projector") for spec in found.tensors.values())
        packed = any(spec.dtype == "U8" for spec in found.tensors.values())
        if problems := compare(found, tensor_list(_as_packed(config, packed), vision)):
            raise CheckpointError(
                f"{folder}: not written, these parts are no checkpoint of the config:\n{listed(problems)}"
            )
        os.chmod(tmp, 0o755)
        os.rename(tmp, folder)
        Path(tmp).mkdir()  # for the context manager to remove


def _as_packed(config: K3Config, packed: bool) -> K3Config:
    """What is packed is decided by the tensors that are there, not by the config."""
    if packed == config.packs_mxfp4:
        return config
    return dataclasses.replace(config, quantization_config={"format": "mxfp4-pack-quantized"} if packed else None)


def _released_name(name: str, config: K3Config) -> str:
    beside = name.startswith(("vision_tower.", "mm_projector.", PREFIX))
    return name if beside or not is_k3(config) else PREFIX + name


def _as_released(name: str, tensor: Tensor, config: K3Config) -> Tensor:
    tensor = tensor.detach().contiguous().clone()
    if not name.endswith(".A_log"):
        return tensor
    shape = a_log_shape(config)
    flat = tensor.flatten()[: config.linear_attn_config.num_heads]
    return torch.nn.functional.pad(flat, (0, math.prod(shape) - flat.numel())).view(shape)


def _keep_packed(model: K3ForCausalLM, heads: Found, folder: Path) -> None:
    """Give the layers whose experts are packed in the files the modules for that."""
    layers = {match[1] for raw in heads.tensors if (match := _PACKED.fullmatch(_name(raw)))}
    for name, layer in model.named_modules():
        if name in layers and isinstance(layer, LatentMoE):
            try:
                layer.experts = PackedExperts(layer.experts)
                layer.experts.rounding = "floor" if model.config.rounds_expert_inputs else None
            except ValueError as e:
                raise CheckpointError(f"{folder}: packed, which this config forbids: {name}.experts.{e}") from e


def _name(raw: str) -> str:
    """A file's tensor name as k3lite's."""
    return _DENSE_MLP.sub(r".mlp.\1", raw.removeprefix(PREFIX))


def _fits(name: str, shape: tuple[int, ...], target: Tensor) -> bool:
    if name.endswith("A_log"):
        numbers = math.prod(shape)
        return numbers == target.numel() or (len(shape) == 1 and numbers > target.numel() and numbers % 128 == 0)
    return shape == tuple(target.shape)


def open_safetensors(path: str | Path):
    """safe_open, with a damaged or foreign file reported as CheckpointError."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path}: not a readable safetensors file ({e})") from e


def write_atomically(path: Path, write: Callable[[str], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: nobody ever sees half a file."""
    handle, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(tmp)
        os.chmod(tmp, 0o644)  # mkstemp makes files that only their owner may read
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_atomically` for a text file."""
    write_atomically(path, lambda tmp: Path(tmp).write_text(text))
