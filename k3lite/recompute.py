"""Figures worked out again: the expressions that data/*.json name, from the released configs and from stored measurements.

An expression is a line of Python over the names below and nothing else ("active_parameters(k3) / 1e9"). They are part of this
repository like its code, and `recomputed` runs them as such: do not feed it a file from elsewhere.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

from k3lite import budget
from k3lite.config import K3Config
from k3lite.released import VisionConfig, tensor_list
from k3lite.tasks.text import DATA, haystack


@functools.cache
def stored_json(path: str) -> Any:
    """A JSON file below data/, e.g. "bench/decode.json". Raises ValueError where it cannot be read."""
    try:
        return json.loads((DATA / path).read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}: not a JSON file of data/ that can be read ({e})") from e


def rows_where(rows: Sequence[dict], **fields: Any) -> list[dict]:
    """The rows that have these values in these fields."""
    return [row for row in rows if all(row.get(name) == value for name, value in fields.items())]


def only_row(rows: Sequence[dict], **fields: Any) -> dict:
    """The only row that has these values in these fields. Raises ValueError if there is none, or another one."""
    found = rows_where(rows, **fields)
    if len(found) != 1:
        raise ValueError(f"{fields}: got {len(found)} rows, wanted one")
    return found[0]


def mean_of(numbers: Sequence[float]) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def small_config(path: str) -> K3Config:
    """The config of a trained model below data/, e.g. "models/needle"."""
    return K3Config.from_json(DATA / path)


def haystack_bytes(split: str) -> int:
    """Length of a cleaned haystack (tasks/text.py)."""
    return haystack(split).numel()


@functools.cache
def expression_names() -> dict[str, Any]:
    """Everything that an expression may use."""
    k3, linear = K3Config.preset("kimi-k3"), K3Config.preset("kimi-linear-48b")
    work = (
        "active_parameters break_even_tokens cache_bytes checkpoint_bytes expert_bytes expert_parameters experts_met forward_work"
        " fp32_numbers kda_layer_parameters mha_cache_bytes mla_attention_flops mla_layer_parameters paged_cache_bytes parameters"
        " row_bytes weight_bytes GIB MIB KIB"
    ).split()
    names = {name: getattr(budget, name) for name in work}
    names |= {f.__name__: f for f in (stored_json, rows_where, only_row, mean_of, small_config, haystack_bytes)}
    names |= {f.__name__: f for f in (sum, min, max, abs, len, list, round, range, sorted, set, tensor_list)}
    names |= {name: getattr(math, name) for name in ("log", "log2", "log10", "exp", "sqrt", "ceil", "prod", "e")}
    vision = VisionConfig.preset("kimi-k3")
    return names | {
        "vision": vision,
        "k3": k3,
        "twin": k3.all_mla_twin(),
        "linear": linear,
        "linear_twin": linear.all_mla_twin(),
    }


def recomputed(expression: str) -> float:
    """The value of an expression. Raises ValueError that quotes it."""
    try:
        value = eval(expression, {"__builtins__": {}, **expression_names()})
    except Exception as e:
        raise ValueError(f"{expression!r} cannot be computed: {type(e).__name__}: {e}") from e
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{expression!r} gives {value!r}, wanted a number")
    return value
