"""`k3lite verify PATH`: is this folder a checkpoint of the released layout, and what of it is?"""

from __future__ import annotations

import argparse
from pathlib import Path

from k3lite.config import K3Config
from k3lite.released import A_LOG_MULTIPLE, Found, compare, listed, read_heads, tensor_list, totals


def add(commands: argparse._SubParsersAction) -> None:
    """Put `verify` among the commands."""
    verify = commands.add_parser("verify", help="compare a checkpoint's files with what its config asks for, by name")
    verify.add_argument("path", type=Path, help="folder with config.json and safetensors")
    verify.add_argument("--config", help="a preset or a config.json to compare with, in place of the folder's own")
    verify.set_defaults(run=_verify, threads=None)


def _verify(args: argparse.Namespace) -> int:
    if not args.path.is_dir():
        raise ValueError(f"{args.path}: no such folder")
    config = read_config(args.config) if args.config else K3Config.from_json(args.path)
    found = read_heads(args.path)
    problems = compare(found, tensor_list(config, vision=_vision(found), pad_a_log=_padded(found)))
    print(f"{len(found.shards)} file(s); tensors, stored numbers and bytes by part")
    sums = [0, 0, 0]
    for part, counts in totals(iter(found.tensors.values())).items():
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
        print(_row(part, counts))
    print(_row("all", sums))
    if problems:
        print(f"{len(problems):,} thing(s) do not match:\n{listed(problems)}")
        return 1
    print("every name, shape and dtype is what the config asks for")
    return 0


def read_config(name: str) -> K3Config:
    """A preset's name, or the path of a config.json or of its folder."""
    return K3Config.from_json(Path(name)) if Path(name).exists() else K3Config.preset(name)


def _row(part: str, counts) -> str:
    return f"  {part:32}{counts[0]:>10,}{counts[1]:>22,}{counts[2]:>22,}"


def _vision(found: Found) -> bool:
    return any(name.startswith(("vision_tower.", "mm_projector.")) for name in found.tensors)


def _padded(found: Found) -> bool:
    """K3's files pad A_log; those of a small model with the same layout need not."""
    return any(spec.shape[-1:] == (A_LOG_MULTIPLE,) for name, spec in found.tensors.items() if name.endswith(".A_log"))
