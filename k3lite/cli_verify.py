"""`k3lite verify PATH`: is this folder a checkpoint in the released layout?"""

from __future__ import annotations

import argparse
from pathlib import Path

from k3lite.config import K3Config, presets
from k3lite.released import VisionConfig
from k3lite.verify import Conformance, conformance

SHOWN = 20  # problems that are printed


def add(commands: argparse._SubParsersAction) -> None:
    """Put `verify` among the commands."""
    verify = commands.add_parser(
        "verify", help="compare a checkpoint's headers with the released names, shapes, dtypes"
    )
    verify.add_argument("path", type=Path, help="folder with config.json and safetensors files; weights are not read")
    verify.add_argument(
        "--config", choices=presets(), help="compare with this preset (default: the folder's config.json)"
    )
    verify.set_defaults(run=_verify, threads=None)


def _verify(args: argparse.Namespace) -> int:
    if not args.path.is_dir():
        raise ValueError(f"{args.path}: no such folder")
    if args.config:
        config, vision = K3Config.preset(args.config), VisionConfig.preset(args.config)
    else:
        config, vision = K3Config.from_json(args.path), VisionConfig.from_json(args.path)
    result = conformance(args.path, config, vision)
    print(f"{args.path}, against {args.config or 'its own config.json'}")
    print("\n".join([*table(result), *outcome(result)]))
    return 1 if result.problems else 0


def table(result: Conformance) -> list[str]:
    """A line a kind: tensors that match of those wanted, their bytes, dtypes and number of files."""
    rows = [("kind", "tensors", "of", "bytes", "dtypes", "files")]
    for name, k in [*result.kinds.items(), ("total", result.total)]:
        rows.append(
            (name, f"{k.matching:,}", f"{k.wanted:,}", f"{k.nbytes:,}", " ".join(sorted(k.dtypes)), len(k.files))
        )
    return [f"{a:<16}{b:>9}{c:>9}{d:>20}  {e:<12}{f:>6}" for a, b, c, d, e, f in rows]


def outcome(result: Conformance) -> list[str]:
    """What does not match, or that nothing is wrong."""
    if not result.problems:
        return ["as released: every name, shape, dtype and file"]
    here = f"{result.tensors:,} tensors of {result.nbytes:,} bytes are there"
    shown = [f"  {problem}" for problem in result.problems[:SHOWN]]
    more = len(result.problems) - SHOWN
    return [
        f"not as released, {len(result.problems):,} problem(s); {here}",
        *shown,
        *[f"  and {more:,} more"] * (more > 0),
    ]
