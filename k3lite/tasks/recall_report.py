"""The records of `k3lite train recall` as text: one table for each question, siblings in rows, lengths in columns."""

from __future__ import annotations

from typing import Any

from k3lite.tasks.recall_exam import ASKED, DEPTHS


def spread(result: dict[str, Any], measured: str, variant: str, kind: str, length: int, facts: int, width: int = 16):
    """One cell's `measured` (a field of `Score`), one number a seed, lowest first; empty where it was not measured."""
    wanted = {"variant": variant, "kind": kind, "length": length, "facts": facts, "width": width}
    return sorted(r[measured] for r in result["records"] if all(r[name] == value for name, value in wanted.items()))


def text_table(result: dict[str, Any]) -> str:
    """Lowest and highest seed of each cell in percent, then recall by depth, then cache bytes."""
    chance = result["chance"]
    seeds = {m["seed"] for m in result["models"]}
    lines = [f"in %, {len(seeds)} seed(s), lowest to highest; trained on documents of up to {result['trained_length']}"]
    for facts in sorted({r["facts"] for r in result["records"] if r["kind"] == "facts"}):
        title = f"values, {facts} fact{'s' * (facts > 1)} (chance {100 * chance['recall']:.1f})"
        lines += _table(result, title, "recall", "facts", facts)
    lines += _table(result, f"values, {ASKED} facts and as many rumours", "recall", "rumours", ASKED)
    lines += _table(result, f"values, {ASKED} facts, all rewritten", "recall", "rewritten", ASKED)
    lines += _table(result, "  answers that give the old value", "decoy", "rewritten", ASKED)
    lines += _table(result, "gist: the topic, in the documents with a string", "topic", "string", ASKED)
    lines += _table(result, "verbatim: the whole string", "string", "string", ASKED)
    lines += _table(result, "  its symbols", "symbols", "string", ASKED)
    lines += _table(result, "control: keys that were never written", "recall", "control", ASKED)
    return "\n".join(lines + _by_depth(result) + _cache(result))


def _siblings(result: dict[str, Any]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((m["variant"], m["width"]) for m in result["models"]))


def _name(variant: str, width: int) -> str:
    return variant if width == 16 else f"{variant}, {width} wide"


def _table(result: dict[str, Any], title: str, measured: str, kind: str, facts: int) -> list[str]:
    lengths = sorted({r["length"] for r in result["records"] if (r["kind"], r["facts"]) == (kind, facts)})
    if not lengths:
        return []
    lines = ["", title, _heading(lengths)]
    for variant, width in _siblings(result):
        cells = [spread(result, measured, variant, kind, length, facts, width) for length in lengths]
        shown = [f"{100 * c[0]:.0f} - {100 * c[-1]:.0f}" if c else "" for c in cells]
        lines.append(f"{_name(variant, width):>16}" + "".join(f"{text:>12}" for text in shown))
    return lines


def _by_depth(result: dict[str, Any]) -> list[str]:
    """Mean of the seeds at the longest length that has a cell of ASKED facts."""
    records = [r for r in result["records"] if (r["kind"], r["facts"]) == ("facts", ASKED)]
    if not records:
        return []
    length = max(r["length"] for r in records)
    lines = ["", f"values by depth, {ASKED} facts in {length}, mean of the seeds: earliest to latest fifth"]
    for variant, width in _siblings(result):
        mine = [r["by_depth"] for r in records if (r["variant"], r["width"], r["length"]) == (variant, width, length)]
        fifths = [[depths[i] for depths in mine if depths[i] is not None] for i in range(DEPTHS)]
        shown = [f"{100 * sum(f) / len(f):.0f}" if f else "" for f in fifths]
        lines.append(f"{_name(variant, width):>16}" + "".join(f"{text:>12}" for text in shown))
    return lines


def _cache(result: dict[str, Any]) -> list[str]:
    lengths = sorted({c["length"] for c in result["cache"]})
    lines = ["", "cache of one sequence in KiB (fp32)", _heading(lengths)]
    for variant, width in _siblings(result):
        kept = {c["length"]: c["total"] for c in result["cache"] if (c["variant"], c["width"]) == (variant, width)}
        lines.append(f"{_name(variant, width):>16}" + "".join(f"{kept[n] / 1024:>12.1f}" for n in lengths))
    return lines


def _heading(lengths: list[int]) -> str:
    return f"{'':>16}" + "".join(f"{n:>12}" for n in lengths)
