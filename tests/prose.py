"""Finds the figures in prose: the markdown cells of the notebooks, and the README.

The rule. A number written in digits is a figure if
  1. it has a decimal point, a comma between thousands or an exponent, or
  2. it is 100 or more, or
  3. a unit follows it (UNIT: per cent, times, bytes, seconds, tokens, trillion ...), or
  4. it stands in a list or a range whose last member is one ("12 to 15 %", "16, 32 or 64 tokens"), or
  5. it has a cell of a table to itself, other than in the first column, which names the row.
"64 × 64" is a shape, in which the rule looks at each number by itself.
No figures are what MASKS takes out first: code, formulas, HTML, addresses, dates and years, versions, list numbers, and references to
a chapter, section, exercise, seed, issue. Numbers in words ("three times") and small counts ("16 experts") are not looked for.

`python -m tests.prose` prints a row for each figure that data/claims.json lacks; complete the rows by hand and put them in.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from k3lite.claims import Claim, figure_ledger

ROOT = Path(__file__).resolve().parents[1]
MASKS = [
    r"(?:`\w+`|\btorch|\bPython) \d+\.\d+(?:\.\d+)?",  # a version, also behind a package in code style
    r"```.*?```",
    r"`[^`\n]*`",
    r"\$\$.*?\$\$",
    r"\$[^$\n]+\$",
    r"<!--.*?-->",
    r"</?[a-z][^<>]*>",
    r"\]\([^)\s]*\)",
    r"https?://\S+",
    r"\barXiv[: ]?\d{4}\.\d+(?:v\d)?",
    r"\b\d{4}-\d\d(?:-\d\d)?\b",
    r"(?<![\d,.])(?:19\d\d|20[0-3]\d)(?![\d,.]\d|\d| ?(?:%|×|times|bytes|tokens|steps|numbers))",  # a year
    r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])",  # versions and sections
    r"^ *\d+[.)] ",
    r"^#+ \d+[ab]? ",
    r"(?:\b(?:[Cc]hapters?|[Ss]ections?|[Ee]q\.|[Ee]quations?|[Ff]ig\.|[Ff]igures?|[Tt]ables?|[Ee]xercises?|[Ss]eeds?|[Ii]ssues?)|§|#)"
    r" ?\d+[\d.]*[ab]?(?:(?:, | and | to | or |–)\d+[\d.]*[ab]?\b(?! ?%))*",
]
NUMBER = re.compile(r"(?<![\w.,])(?<![A-Za-z]-)[−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[−-]?\d+)?")
UNIT = re.compile(
    r"[ -]?(?P<unit>%|×(?! ?\d)|per cent|times\b|[kKMGT]i?B\b|[kMBT]\b|bytes?\b|bits?\b|[mµn]?s\b|seconds?\b|minutes?\b|hours?\b|dB\b|nats?\b|points?\b"
    r"|tokens?\b|[MGTP]?FLOPs?\b|FLOP\b|trillion|billion|million)"
)
CHAIN = re.compile(r"(?: %)?(?:, | to | and | or |–| … | / )")
ALONE = re.compile(r"[−\d.,e%×*() -]+(?:(?:to|and|…|±|/)[−\d.,e%×*() -]+)*")


@dataclass(frozen=True)
class Figure:
    place: str  # "07#six-times": notebook and markdown cell; "README#The needle": the heading above it
    text: str  # the number as it is written
    unit: str  # what is written behind it: "%", "GiB", "times"; "" for nothing, or a word that is no unit
    start: int  # in the cell's text


def prose() -> dict[str, str]:
    """{place: text} of all prose in which figures are looked for."""
    cells = {}
    for part in re.split(r"^(?=## )", (ROOT / "README.md").read_text(), flags=re.MULTILINE):
        heading = re.match(r"## (.*)", part)
        cells[f"README#{heading[1] if heading else 'top'}"] = part
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                cells[f"{path.stem.split('_')[0]}#{cell['id']}"] = "".join(cell["source"])
    return cells


def mask(text: str) -> str:
    """Blanks in place of everything that holds no figures; every place keeps its number."""
    for pattern in MASKS:
        text = re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL | re.MULTILINE)
    return text


def figures(text: str, place: str = "") -> list[Figure]:
    """All figures of one text, in order."""
    text = mask(text)
    found, units = list(NUMBER.finditer(text)), {}
    for i, m in reversed(list(enumerate(found))):
        unit = UNIT.match(text, m.end())
        large = re.search(r"[.,e]", m[0]) or int(m[0].replace("−", "-")) >= 100
        joined = i + 1 in units and CHAIN.fullmatch(text[m.end() : found[i + 1].start()])
        if unit or large or joined or alone_in_cell(text, m):
            units[i] = unit["unit"] if unit else ""
    return [Figure(place, found[i][0], units[i], found[i].start()) for i in sorted(units)]


def alone_in_cell(text: str, m: re.Match) -> bool:
    """Whether a number has a cell of a table, not the first one, to itself or shares it with numbers only."""
    line_start, line_end = text.rfind("\n", 0, m.start()) + 1, (text + "\n").find("\n", m.end())
    line = text[line_start:line_end]
    if not line.startswith("|"):
        return False
    left = line.rfind("|", 0, m.start() - line_start)
    right = line.find("|", m.end() - line_start)
    return left > 0 and right > 0 and bool(ALONE.fullmatch(line[left + 1 : right].strip()))


def compared(found: list[Figure], ledger: dict[str, Claim]) -> tuple[list[Figure], list[tuple[str, str]]]:
    """(figures that no row lists, (id, place) of rows whose figure is not there), each printing counted once."""
    rows = [(claim, place) for claim in ledger.values() for place in claim.where]
    unlisted = []
    for figure in sorted(found, key=lambda f: not f.unit):  # with a unit first: it fits fewer rows
        fits = [
            r for r in rows if r[1] == figure.place and r[0].value == figure.text and figure.unit in ("", r[0].unit)
        ]
        if fits:
            rows.remove(fits[0])
        else:
            unlisted.append(figure)
    return unlisted, [(claim.id, place) for claim, place in rows]


def draft_row(figure: Figure, text: str) -> str:
    """The beginning of a row for a figure of this text."""
    around = text[max(0, figure.start - 40) : figure.start + len(figure.text) + 30]
    row = {"id": "?", "value": figure.text, "unit": figure.unit, "label": "?", "what": " ".join(around.split())}
    return json.dumps(row | {"where": [figure.place]}, ensure_ascii=False)


def main() -> int:
    cells = prose()
    unlisted, unused = compared([f for place, text in cells.items() for f in figures(text, place)], figure_ledger())
    for figure in unlisted:
        print(draft_row(figure, cells[figure.place]) + ",")
    for name, place in unused:
        print(f"{name}: not at {place}", file=sys.stderr)
    return 1 if unlisted or unused else 0


if __name__ == "__main__":
    sys.exit(main())
