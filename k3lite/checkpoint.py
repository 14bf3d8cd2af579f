"""Checkpoints: a folder with config.json and safetensors under the released tensor names. No pickle.

k3lite keeps the experts of a layer stacked (w1 [E,I,D]); files hold one tensor per expert
(`experts.{e}.w1.weight`), or two where the experts are packed in MXFP4 (`weight_packed`, `weight_scale`). Which it is
is decided by the tensors that are there, on both ways, whatever the config says of quantisation (k3-architecture §7.12). `A_log` is one number per head here; files store it flat, padded to 128 (K3) or as
[1,1,H,1] (Kimi Linear), so a loader flattens it and takes the first H. Source: k3-architecture §4, §7.4.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.moe import LatentMoE
from k3lite.packed import PackedExperts

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "language_model."  # of the text model in K3's files
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
    their inputs to MXFP8 (floor rule) if quantization_config's input_activations asks for it; K3's is null: no rounding.
    make: builds the model from its config, where it is not quite K3 (see `tasks/siblings.py`).
    """
    folder = Path(folder)
    config = K3Config.from_json(folder) if config is None else config
    files = _files(folder)
    model = make(config)
    _keep_packed(model, files)
    wanted = dict(released_tensors(model))
    found: dict[str, Path] = {}
    problems: list[str] = []
    for path in files:
        with open_safetensors(path) as f:
            for raw in f.keys():
                name = _name(raw)
                if name in found:
                    problems.append(f"{name}: twice, in {found[name].name} and {path.name}")
                found[name] = path
                if name not in wanted:
                    problems.append(f"{name}: unknown")
                elif not _fits(name, shape := tuple(f.get_slice(raw).get_shape()), wanted[name]):
                    problems.append(f"{name}: shape {shape}, wanted {tuple(wanted[name].shape)}")
                elif (f.get_slice(raw).get_dtype() == "U8") != (wanted[name].dtype == torch.uint8):
                    problems.append(f"{name}: dtype {f.get_slice(raw).get_dtype()}, wanted {wanted[name].dtype}")
    problems += [f"{name}: missing" for name in wanted if name not in found]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{folder}: not a checkpoint of this config: {shown}")
    with torch.no_grad():
        for path in files:
            with open_safetensors(path) as f:
                for raw in f.keys():
                    target = wanted[_name(raw)]
                    target.copy_(f.get_tensor(raw).flatten()[: target.numel()].view_as(target))
    return model.eval()


def _keep_packed(model: K3ForCausalLM, files: list[Path]) -> None:
    """Give the layers whose experts are packed in `files` the modules for that."""
    layers = set()
    for path in files:
        with open_safetensors(path) as f:
            layers |= {match[1] for raw in f.keys() if (match := _PACKED.fullmatch(_name(raw)))}
    for name, layer in model.named_modules():
        if name in layers and isinstance(layer, LatentMoE):
            try:
                layer.experts = PackedExperts(layer.experts)
                layer.experts.input_rounding = "floor" if model.config.rounds_expert_inputs else None
            except ValueError as e:
                raise CheckpointError(
                    f"{files[0].parent}: packed, which this config forbids: {name}.experts.{e}"
                ) from e


def _name(raw: str) -> str:
    """A file's tensor name as k3lite's."""
    return _DENSE_MLP.sub(r".mlp.\1", raw.removeprefix(PREFIX))


def _fits(name: str, shape: tuple[int, ...], target: Tensor) -> bool:
    if name.endswith("A_log"):
        numbers = math.prod(shape)
        return numbers == target.numel() or (len(shape) == 1 and numbers > target.numel() and numbers % 128 == 0)
    return shape == tuple(target.shape)


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder."""
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(f"{index}: not a safetensors index ({e})") from e
    else:
        names = [WEIGHTS]
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: no such file")
    return [folder / name for name in names]


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
