"""All ways to balance beside each other: same layer, same tokens, several seeds. Writes balance.json.

A run takes ten seconds and is not cut in two; a job that was stopped goes on after the last finished run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from k3lite.checkpoint import CheckpointError, write_text
from k3lite.tasks.balance_task import (
    DATA,
    METHODS,
    STEPS,
    Clusters,
    Method,
    Run,
    balanced_from,
    dead,
    held_out,
    thinned,
    train_layer,
)
from k3lite.tasks.trained import from_lowest

TASK = "balance-1"
RESULT = "balance.json"
THIN = 5  # steps to a point of the stored curves


@dataclass(frozen=True)
class Job:
    """Options of `k3lite train balance`."""

    out: Path
    methods: tuple[Method, ...] = METHODS
    data: tuple[str, ...] = tuple(DATA)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = STEPS

    def check(self) -> None:
        """Raise ValueError before any work if a run cannot be made."""
        for name in ("methods", "data", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: got {', '.join(map(str, values)) or 'nothing'}, wanted some, each once")
        for name in self.data:
            if name not in DATA:
                raise ValueError(f"data: got {name!r}, wanted one of {', '.join(DATA)}")
        if min(self.seeds) < 0:
            raise ValueError(f"seeds: got {min(self.seeds)}, wanted 0 or more")
        if self.steps < THIN * 4:
            raise ValueError(f"steps: got {self.steps}, wanted {THIN * 4} or more")

    def runs(self) -> list[tuple[str, Method, int]]:
        return [(d, m, s) for s in self.seeds for d in self.data for m in self.methods]

    def restart(self) -> None:
        """Let `run` make every run anew."""
        (self.out / RESULT).unlink(missing_ok=True)


def run(job: Job, progress: bool = True) -> dict[str, Any]:
    """Make every run that job.out does not hold yet, and write balance.json after each; returns what it holds."""
    job.check()
    result = _begun(job)
    made = {(r["data"], r["method"], r["seed"]) for r in result["runs"]}
    wanted = job.runs()
    with tqdm(total=len(wanted), desc="runs", disable=not progress) as bar:
        for data, method, seed in wanted:
            bar.set_postfix_str(f"{data}, {method}, seed {seed}")
            if (data, str(method), seed) not in made:
                result["runs"].append(record(train_layer(data, method, seed, job.steps)))
                write_text(job.out / RESULT, json.dumps(result) + "\n")
            bar.update()
    return result


def _begun(job: Job) -> dict[str, Any]:
    path = job.out / RESULT
    fresh = {"task": TASK, "steps": job.steps, "thin": THIN, "torch": torch.__version__, "runs": []}
    if not path.exists():
        job.out.mkdir(parents=True, exist_ok=True)
        return fresh
    try:
        result = json.loads(path.read_text())
        same = (result["task"], result["steps"]) == (TASK, job.steps) and isinstance(result["runs"], list)
    except (ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path}: not a result of this job ({e}); choose another --out, or --restart") from e
    if not same:
        raise CheckpointError(f"{path}: made with another task or number of steps; choose another --out, or --restart")
    return result


def record(run: Run) -> dict[str, Any]:
    """What is kept of a run. The curves are means of THIN steps."""
    unseen_loss, unseen_loads = held_out(run.layer, Clusters(DATA[run.data], run.seed))
    return {
        "data": run.data,
        "method": str(run.method),
        "seed": run.seed,
        "loss": round(run.loss, 4),
        "dead": dead(run.loads),
        "loads": [round(x, 3) for x in run.loads],
        "held_out": {"loss": round(unseen_loss, 4), "busiest": round(max(unseen_loads), 3), "dead": dead(unseen_loads)},
        "losses": [round(x, 4) for x in thinned(run.losses, THIN)],
        "busiest": [round(x, 3) for x in thinned(run.busiest, THIN)],
    }


# ---- showing


def pick(result: dict[str, Any], data: str, method: str) -> list[dict[str, Any]]:
    """The runs of one method on one kind of data, by seed."""
    return sorted((r for r in result["runs"] if (r["data"], r["method"]) == (data, method)), key=lambda r: r["seed"])


def steps_to_balance(record: dict[str, Any]) -> int | None:
    """The first step from which the busiest expert, averaged over ten steps, stays within BALANCED; None: never."""
    at = balanced_from(record["busiest"], window=10 // THIN)
    return None if at is None else THIN * at


def text_table(result: dict[str, Any], data: str) -> str:
    """One row a method, lowest to highest seed: loads of the last steps, held-out tokens, steps to balance."""
    methods = list(dict.fromkeys(r["method"] for r in result["runs"] if r["data"] == data))
    seeds = {r["seed"] for r in result["runs"] if r["data"] == data}
    lines = [
        f"data {data!r}, {result['steps']} steps, {len(seeds)} seed(s), lowest to highest",
        f"{'method':14}{'busiest / mean':>16}{'held out':>14}{'dead of 64':>12}{'balanced from':>15}{'loss':>17}",
    ]
    for method in methods:
        runs = pick(result, data, method)
        cells = [
            from_lowest([max(r["loads"]) for r in runs], 2),
            from_lowest([r["held_out"]["busiest"] for r in runs], 2),
            from_lowest([r["dead"] for r in runs], 0),
            _steps([steps_to_balance(r) for r in runs]),
            from_lowest([r["loss"] for r in runs], 3),
        ]
        lines.append(f"{method:14}" + "".join(f"{c:>{w}}" for c, w in zip(cells, (16, 14, 12, 15, 17), strict=True)))
    return "\n".join(lines)


def _steps(values: list[int | None]) -> str:
    """'never' stands for the runs that did not get there."""
    there = [v for v in values if v is not None]
    if not there:
        return "never"
    return from_lowest(there, 0) + (f" ({len(values) - len(there)} never)" if len(there) < len(values) else "")
