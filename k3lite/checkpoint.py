"""Checkpoints: a folder with config.json and safetensors under the released tensor names. No pickle.

k3lite keeps the experts of a layer stacked (w1 [E,I,D]); files hold one tensor per expert
(`experts.{e}.w1.weight`), or two where the experts are packed in MXFP4 (`weight_packed`, `weight_scale`). Which it is
is decided by the tensors that are there, on both ways, whatever the config says of quantisation (k3-architecture §7.12). `A_log` is one number per head here; files store it flat, padded to 128 (K3) or as
[1,1,H,1] (Kimi Linear), so a loader flattens it and takes the first H. Source: k3-architecture §4, §7.4.

One file (`save_model`), or the released layout in shards with an index (`save_released`); `load_model` reads both.
`load_parts` and `save_parts` do it one layer at a time, for models that do not fit into memory. Nothing is read or
used before the headers of all files, and the index, have been found to be those of the model.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.moe import LatentMoE
from k3lite.packed import PackedExperts
from k3lite.released import CODES, NOT_TEXT, PREFIX, TensorSpec, is_k3, released_files, shard_of, text_parts
from k3lite.shards import INDEX, WEIGHTS, Shards, Stored, differences, make_index, read_shards, renamed_to, tensor_file

_STACKED = re.compile(r"(.*\.experts)\.(w[123])(|_packed|_scale)$")
_EXPERT = re.compile(r"(.*)\.experts\.\d+\.w[123]\.weight(_packed|_scale)?$")
# transformers 5.24 saves a dense layer's MLP under the experts' name; the released files say `mlp`.
_DENSE_MLP = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)$")
_DTYPES = {code: getattr(torch, name) for name, code in CODES.items()} | {"U8": torch.uint8}
SHOWN = 8  # problems that an error lists


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message lists everything that is wrong with it."""


def released_tensors(module: nn.Module, before: str = "") -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything that a checkpoint of this model holds, experts one by one.

    before: what the names begin with, where `module` is a part of a model.
    """
    for name, p in module.state_dict().items():
        stacked = _STACKED.fullmatch(name := before + name)
        if not stacked:
            yield name, p
            continue
        for e, w in enumerate(p):
            yield f"{stacked[1]}.{e}.{stacked[2]}.weight{stacked[3]}", w


# ---- the whole model at once


def save_model(model: K3ForCausalLM, folder: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write config.json and model.safetensors into `folder`; each file appears whole or not at all.

    Raises CheckpointError where the folder holds a checkpoint in shards, which would be read in its place.
    """
    folder = Path(folder)
    if (folder / INDEX).exists():
        raise CheckpointError(f"{folder}: holds a checkpoint in shards already; wanted another folder")
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
    their inputs to MXFP8 if the config's `input_activations` asks for it, which K3's does not. A vision tower and its projector are passed over. Numbers may be stored in config.dtype or in any that loses nothing here.
    make: builds the model from its config, where it is not quite K3 (see `tasks/siblings.py`).
    """
    folder = Path(folder)
    config = K3Config.from_json(folder) if config is None else config
    with torch.device("meta"):
        plan = make(config)
    names = _checked(plan, read_shards(folder))
    model = make(config)
    _keep_packed(model, names)
    _fill(folder, names, released_tensors(model))
    return model.eval()


# ---- one part at a time


def parts(model: K3ForCausalLM) -> Iterator[tuple[str, nn.Module]]:
    """The pieces of `released.text_parts`, with the start of their names: embedding, each layer, norm and head.

    The last, named "", holds `model.norm`, `model.output_attn_res_*` and `lm_head`.
    """
    yield "model.embed_tokens.", model.model.embed_tokens
    for i, layer in enumerate(model.model.layers):
        yield f"model.layers.{i}.", layer
    ends = nn.Module()
    ends.model, ends.lm_head = nn.Module(), model.lm_head
    for name, child in model.model.named_children():
        if name not in ("embed_tokens", "layers"):
            ends.model.add_module(name, child)
    yield "", ends


def load_parts(folder: str | Path, config: K3Config | None = None) -> Iterator[tuple[str, nn.Module]]:
    """`parts` of a checkpoint, each read when it is asked for and held by nobody but the caller, in eval mode.

    All headers are checked before this returns. Errors as in `load_model`.
    """
    folder = Path(folder)
    with torch.device("meta"):
        plan = K3ForCausalLM(K3Config.from_json(folder) if config is None else config)
    names = _checked(plan, read_shards(folder))
    return ((before, _read_part(folder, names, before, part)) for before, part in parts(plan))


def _read_part(folder: Path, names: dict[str, tuple[str, str]], before: str, part: nn.Module) -> nn.Module:
    part = copy.deepcopy(part).to_empty(device="cpu")
    _fill(folder, names, released_tensors(part, before))
    return part.eval()


def save_released(model: K3ForCausalLM, folder: str | Path) -> None:
    """Write a model in the released layout: see `save_parts`."""
    save_parts(model.config, parts(model), folder)


@torch.no_grad()
def save_parts(config: K3Config, parts: Iterable[tuple[str, nn.Module]], folder: str | Path) -> None:
    """Write `parts` in the released layout of `config`: names, shapes, dtypes and files of `released`.

    Each part is let go before the next is asked for, and its tensors are written one at a time. The index comes last:
    without it there is no checkpoint, and after an error there are no files either. Raises CheckpointError for a folder
    that holds a checkpoint or files of one, and for parts that are not those of the config, or would lose digits.
    """
    folder, files = Path(folder), released_files(config)
    if any((folder / name).exists() for name in (INDEX, WEIGHTS, *files)):
        raise CheckpointError(f"{folder}: holds a checkpoint already; wanted another folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _write_parts(config, parts, folder, files)
        write_text(folder / "config.json", json.dumps(_wrapped(config), indent=2) + "\n")
        places = {spec.name: file for file, specs in files.items() for spec in specs}
        size = sum(spec.nbytes for specs in files.values() for spec in specs)
        write_text(folder / INDEX, make_index(places, size))
    except BaseException:
        for file in files:
            (folder / file).unlink(missing_ok=True)
        raise


def _write_parts(
    config: K3Config, parts: Iterable[tuple[str, nn.Module]], folder: Path, files: dict[str, list[TensorSpec]]
) -> None:
    wanted, names = dict(text_parts(config)), list(files)
    # The last file takes the first part and the last, so it stays open all the while.
    with tensor_file(folder / names[-1], files[names[-1]]) as last:
        for before, part in parts:
            if before not in wanted:
                raise CheckpointError(f"{folder}: part {before!r} is twice, or not of this config")
            specs, file = wanted.pop(before), names[shard_of(config, before) - 1]
            if file == names[-1]:
                _put_part(last, specs, before, part)
            else:
                with tensor_file(folder / file, specs) as layer:
                    _put_part(layer, specs, before, part)
            del part  # before the next one is made
        if wanted:
            raise CheckpointError(f"{folder}: missing parts: {', '.join(map(repr, wanted))}")


def _wrapped(config: K3Config) -> dict:
    """config.json as it lies beside the files: K3's text model is inside a wrapper (k3-architecture §1.1)."""
    return {"model_type": "kimi_k3", "text_config": config.to_dict()} if is_k3(config) else config.to_dict()


def _put_part(put: Callable[[str, Any], None], specs: list[TensorSpec], before: str, part: nn.Module) -> None:
    have, wanted = dict(released_tensors(part, before)), {s.name.removeprefix(PREFIX): s for s in specs}
    problems = [f"{name}: missing" for name in wanted if name not in have]
    problems += [f"{name}: unknown" for name in have if name not in wanted]
    if problems:
        raise CheckpointError(f"{before!r} is no part of this config (experts packed as it says?): {_listed(problems)}")
    for name, spec in wanted.items():
        put(spec.name, _as_stored(have[name], spec).cpu().flatten().view(torch.uint8).numpy())


def _as_stored(t: Tensor, spec: TensorSpec) -> Tensor:
    """A parameter in the shape and dtype of its file; A_log is padded with zeros."""
    if spec.name.endswith("A_log"):
        t = F.pad(t.flatten(), (0, spec.numel - t.numel())).view(spec.shape)
    stored = t.detach().to(_DTYPES[spec.dtype]).contiguous()
    if tuple(t.shape) != spec.shape or (stored.dtype != t.dtype and not torch.equal(stored.to(t.dtype), t)):
        raise CheckpointError(
            f"{spec.name}: got {t.dtype} {tuple(t.shape)}, wanted {spec.dtype} {spec.shape} without loss"
        )
    return stored


# ---- what is in the files


def _checked(model: K3ForCausalLM, shards: Shards) -> dict[str, tuple[str, str]]:
    """k3lite's name of each tensor of the model -> its name in the files, and its file.

    Gives layers of `model` packed experts where the files have them. Raises CheckpointError listing all that is wrong.
    """
    found: dict[str, Stored] = {}
    names: dict[str, tuple[str, str]] = {}
    problems = list(shards.problems)
    for raw, stored in shards.tensors.items():
        if raw.startswith(NOT_TEXT):
            continue
        name = _name(raw)
        if name in found:
            problems.append(f"{name}: twice, in {found[name].file} and {stored.file}")
        found[name], names[name] = stored, (raw, stored.file)
    shards.explained = {_name(raw) for raw in shards.explained}
    problems += _keep_packed(model, [*names, *shards.explained])  # what the index says of unreadable files, too
    own = getattr(torch, model.config.dtype)
    wanted = dict(released_tensors(model))
    problems += differences(shards, found, wanted, lambda name, stored, target: _unfit(name, stored, target, own))
    problems = problems or _padding(shards.folder, names, found, wanted)
    if problems:
        raise CheckpointError(f"{shards.folder}: not a checkpoint of this config: {_listed(problems)}")
    return names


def _padding(
    folder: Path, names: dict[str, tuple[str, str]], found: dict[str, Stored], wanted: dict[str, Tensor]
) -> list[str]:
    """What is not zero behind the heads of a padded A_log: it would belong to heads that the config does not have."""
    problems = []
    for name, target in wanted.items():
        if name.endswith("A_log") and math.prod(found[name].shape) > (heads := target.numel()):
            raw, file = names[name]
            with open_safetensors(folder / file) as f:
                if count := int(f.get_tensor(raw).flatten()[heads:].count_nonzero()):
                    problems.append(f"{name}: {count} numbers behind its {heads} are not 0, wanted a padding of zeros")
    return problems


def _listed(problems: list[str]) -> str:
    more = len(problems) - SHOWN
    return "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


@torch.no_grad()
def _fill(folder: Path, names: dict[str, tuple[str, str]], targets: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the files' tensors into `targets`, one at a time; each file is opened once."""
    by_file: dict[str, list[tuple[str, Tensor]]] = {}
    for name, target in targets:
        raw, file = names[name]
        by_file.setdefault(file, []).append((raw, target))
    for file, wanted in by_file.items():
        with open_safetensors(folder / file) as f:
            for raw, target in wanted:
                target.copy_(f.get_tensor(raw).flatten()[: target.numel()].view_as(target))


def _keep_packed(model: K3ForCausalLM, names: Iterable[str]) -> list[str]:
    """Give the layers whose experts are packed in the files the modules for that; what forbids it, one line each.

    Where the files have no expert of a layer, the config says which ones are missing.
    """
    packed: dict[str, bool] = {}
    for match in filter(None, map(_EXPERT.fullmatch, names)):
        packed[match[1]] = packed.get(match[1], False) or match[2] is not None
    problems = []
    for name, layer in model.named_modules():
        if isinstance(layer, LatentMoE) and packed.get(name, model.config.packs_mxfp4):
            try:
                layer.experts = PackedExperts(layer.experts)
                layer.experts.rounding = "floor" if model.config.rounds_expert_inputs else None
            except ValueError as e:
                problems.append(f"packed, which this config forbids: {name}.experts.{e}")
    return problems


def _name(raw: str) -> str:
    """A file's tensor name as k3lite's."""
    return _DENSE_MLP.sub(r".mlp.\1", raw.removeprefix(PREFIX))


def _unfit(name: str, stored: Stored, target: Tensor, own: torch.dtype) -> str | None:
    if not _fits(name, stored.shape, target):
        return f"shape {stored.shape}, wanted {tuple(target.shape)}"
    if not _keeps(_DTYPES.get(stored.dtype), target.dtype, own):
        return f"dtype {stored.dtype}, wanted {target.dtype}"
    return None


def _keeps(stored: torch.dtype | None, target: torch.dtype, own: torch.dtype) -> bool:
    """Whether a tensor of the file may be read as `target`: no digit is lost, but for fp32 parts of an fp64 model."""
    if stored is None or torch.uint8 in (stored, target):
        return stored == target
    return stored == own or torch.promote_types(stored, target) == target


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
    with renamed_to(path) as tmp:
        write(tmp)


def write_text(path: Path, text: str) -> None:
    """`write_atomically` for a text file."""
    write_atomically(path, lambda tmp: Path(tmp).write_text(text))
