"""What is quoted, from whom and under which conditions: the ledger of figures, the spec sheet and the headline claims.

    data/claims.json           every figure in the prose of the notebooks and the README
    data/spec_sheet.json       the rows of K3's spec sheet (k3-architecture §5)
    data/headline_claims.json  claims about speed, memory and quality with all their conditions (k3-architecture §6)
    data/sources.json          what the keys in their field `source` stand for

data/README.md describes the fields. Every figure that is ours names an expression (`is`, see recompute.py), or the notebook cell that
prints it (`shown`); tests/test_claims.py holds the prose to the ledger and the ledger to both.
"""

from __future__ import annotations

import functools
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3lite.recompute import DATA, recomputed

LABELS = {
    "fact": "architectural fact",
    "vendor": "vendor-reported",
    "independent": "independently reproduced",
    "setting": "chosen for this course",  # a size that a text picks, or an example in it; says nothing about K3
}
CONDITIONS = ("context", "pass", "batch", "hardware", "precision", "baseline", "who")


class ClaimError(ValueError):
    """A row that cannot be used, or a figure that is not in the ledger; the message names file, row and fault."""


@dataclass(frozen=True)
class Claim:
    """One figure of the ledger. Empty text where a field does not apply."""

    id: str
    value: str  # the number as it is printed
    unit: str
    label: str  # a key of LABELS
    what: str  # of what
    conditions: str
    source: str  # keys of sources.json, joined by "; "
    recompute: str  # the expression that gives it again (field `is`)
    digits: int | None  # -2: rounded to hundreds; None: as many decimals as `value` has
    shown: str  # "07#pairs-32": notebook and code cell whose output holds it, or for a setting whose code does
    command: str  # that measures it
    where: tuple[str, ...]  # "07#established", "README#The needle": once for each time; none if only code reads it

    @property
    def text(self) -> str:
        """Number and unit, as prose has them: "6.3×", "75 %", "27.00 GiB"."""
        joined = self.unit in ("×", "B", "T", "k", "M")
        return f"{self.value}{'' if joined or not self.unit else ' '}{self.unit}"

    @property
    def number(self) -> float:
        return as_number(self.value)


def as_number(text: str) -> float:
    """ "2,779" or "−0.05" as a number."""
    return float(text.replace(",", "").replace("−", "-"))


_FIELDS = {"id", "value", "unit", "label", "what", "where"}
_OPTIONAL = {"conditions", "source", "is", "digits", "shown", "command"}


@functools.cache
def figure_ledger(path: Path = DATA / "claims.json") -> dict[str, Claim]:
    """{id: claim}. Raises ClaimError for the first row that is wrong."""
    ledger: dict[str, Claim] = {}
    for row in _rows(path):
        claim = _claim(row, path.name)
        if claim.id in ledger:
            raise ClaimError(f"{path.name}: {claim.id}: listed twice")
        ledger[claim.id] = claim
    return ledger


def quoted(name: str) -> Claim:
    """The claim with this id. Raises ClaimError for an unknown one."""
    ledger = figure_ledger()
    if name not in ledger:
        near = sorted(other for other in ledger if set(other.split("-")) & set(name.split("-")))
        raise ClaimError(f"claims.json: no {name!r}" + (f"; there are {', '.join(near[:8])}" if near else ""))
    return ledger[name]


def _claim(row: dict[str, Any], file: str) -> Claim:
    where = f"{file}: {row.get('id', row)}"
    missing, unknown = sorted(_FIELDS - set(row)), sorted(set(row) - _FIELDS - _OPTIONAL)
    if missing or unknown:
        faults = [f"{kind} {', '.join(names)}" for kind, names in (("without", missing), ("unknown", unknown)) if names]
        raise ClaimError(f"{where}: {'; '.join(faults)}")
    for name, value in row.items():
        wanted = {"where": list, "digits": int}.get(name, str)
        if not isinstance(value, wanted):
            raise ClaimError(f"{where}: {name}: got {value!r}, wanted {wanted.__name__}")
    _check_label(row["label"], where)
    try:
        as_number(row["value"])
    except ValueError:
        raise ClaimError(f"{where}: value: got {row['value']!r}, wanted a number in digits") from None
    if row["label"] != "setting" and not any(row.get(name) for name in ("source", "is", "shown", "command")):
        raise ClaimError(f"{where}: nothing behind it: wanted source, is (an expression), shown (a cell) or command")
    _check_sources(row.get("source", ""), where)
    text = {name: row.get(name, "") for name in ("conditions", "source", "shown", "command")}
    return Claim(
        id=row["id"], value=row["value"], unit=row["unit"], label=row["label"], what=row["what"],
        recompute=row.get("is", ""), digits=row.get("digits"), where=tuple(row["where"]), **text,
    )  # fmt: skip


# ---- the spec sheet


@dataclass(frozen=True)
class SpecRow:
    """One line of K3's spec sheet."""

    name: str
    value: str  # as text; may hold several figures
    unit: str
    labels: tuple[str, ...]
    source: str
    recompute: dict[str, str]  # {figure as it stands in `value`: expression}; empty where the config does not say
    note: str

    def recomputed(self) -> dict[str, float]:
        """{figure as it stands in `value`: what k3lite makes of the released config}."""
        return {figure: recomputed(expression) for figure, expression in self.recompute.items()}


def spec_sheet(path: Path = DATA / "spec_sheet.json") -> list[SpecRow]:
    """All rows, in order. Raises ClaimError for the first one that is wrong."""
    out = []
    for row in _rows(path):
        where = f"{path.name}: {row.get('name', row)}"
        _check_keys(row, {"name", "value", "unit", "labels", "source", "is", "note"}, where)
        for label in row["labels"]:
            _check_label(label, where)
        _check_sources(row["source"], where)
        absent = [figure for figure in row["is"] if figure not in row["value"]]
        if absent:
            raise ClaimError(f"{where}: is: {absent[0]!r} does not stand in the value {row['value']!r}")
        out.append(
            SpecRow(row["name"], row["value"], row["unit"], tuple(row["labels"]), row["source"], row["is"], row["note"])
        )
    return out


# ---- headline claims


@dataclass(frozen=True)
class Headline:
    """One published claim, the conditions under which it was measured, and what we measured beside it."""

    id: str
    claim: str
    conditions: dict[str, str | None]  # by CONDITIONS; None: not found in what was read
    caution: str
    label: str
    source: str
    ours: dict[str, str] | None  # what, value, unit, is, conditions, command; None: nothing was measured here

    @property
    def missing(self) -> list[str]:
        """Conditions that a reader needs and that were not found in what was read."""
        return [name for name, value in self.conditions.items() if value is None]

    @property
    def text(self) -> str:
        """The whole of it, for print: claim, conditions, what is missing, caution, and what we have beside it."""
        lines = [f"{self.claim} ({LABELS[self.label]}; {self.source})"]
        lines += [f"  {name:10} {'NOT FOUND' if value is None else value}" for name, value in self.conditions.items()]
        lines += [_folded(f"  caution    {self.caution}")]
        if self.ours is None:
            return "\n".join([*lines, "  here       not measured"])
        result = (
            f"{self.ours['value']}{'' if self.ours['unit'] == '×' else ' '}{self.ours['unit']}: {self.ours['what']}"
        )
        return "\n".join([*lines, _folded(f"  here       {result}"), _folded(f"  {'':10} {self.ours['conditions']}")])


def headline_claims(path: Path = DATA / "headline_claims.json") -> list[Headline]:
    """All claims, in order. Raises ClaimError for the first one that is wrong."""
    out = []
    for row in _rows(path):
        where = f"{path.name}: {row.get('id', row)}"
        _check_keys(row, {"id", "claim", "conditions", "caution", "label", "source", "ours"}, where)
        _check_keys(row["conditions"], set(CONDITIONS), f"{where}: conditions")
        if row["ours"] is not None:
            _check_keys(row["ours"], {"what", "value", "unit", "is", "conditions", "command"}, f"{where}: ours")
        _check_label(row["label"], where)
        _check_sources(row["source"], where)
        out.append(Headline(**row))
    return out


def headline(name: str) -> Headline:
    """The headline claim with this id. Raises ClaimError for an unknown one."""
    found = {claim.id: claim for claim in headline_claims()}
    if name not in found:
        raise ClaimError(f"headline_claims.json: no {name!r}; there are {', '.join(found)}")
    return found[name]


def _folded(line: str) -> str:
    return textwrap.fill(line, width=110, subsequent_indent=" " * 13)


# ---- shared


@functools.cache
def quoted_sources() -> dict[str, str]:
    """{key: what it is and where it was read}."""
    return json.loads((DATA / "sources.json").read_text())


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ClaimError(f"{path.name}: cannot be read ({e})") from e
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ClaimError(f"{path.name}: got no list of objects")
    return rows


def _check_keys(row: dict[str, Any], wanted: set[str], where: str) -> None:
    if set(row) != wanted:
        raise ClaimError(f"{where}: got fields {', '.join(sorted(row))}; wanted {', '.join(sorted(wanted))}")


def _check_label(label: str, where: str) -> None:
    if label not in LABELS:
        raise ClaimError(f"{where}: label: got {label!r}, wanted one of {', '.join(LABELS)}")


def _check_sources(source: str, where: str) -> None:
    unknown = [key for key in source.split("; ") if key and key.split(" ")[0] not in quoted_sources()]
    if unknown:
        raise ClaimError(f"{where}: source: {unknown[0]!r} is not in sources.json")
