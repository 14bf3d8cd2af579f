"""Which explorers there are: every module of widgets/ that defines a function `explorer`, with its title and chapter."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PICTURES = ROOT / "docs" / "explorers"


@dataclass(frozen=True)
class Entry:
    """One explorer. name: its module in widgets/. about: the first line of the module. chapter: the first
    notebook that shows it, by file name, or None if none does yet."""

    name: str
    about: str
    chapter: str | None

    @property
    def title(self) -> str:
        return title(self.name)

    @property
    def picture(self) -> Path:
        return PICTURES / f"{self.name}.png"


def title(module: str) -> str:
    """What an explorer is called in headings and galleries: `state_capacity` is "State capacity", `mx_explorer` "MX"."""
    name = module.removesuffix("_explorer").replace("_", " ")
    return name.upper() if len(name) == 2 else name.capitalize()


def chapters(folder: Path = NOTEBOOKS) -> list[Path]:
    """The notebooks in reading order: from the first one along their own links behind "Next:" (10a comes before 10),
    then those to which no such link leads, which is the glossary."""
    found = sorted(folder.glob("*.ipynb"))
    order = found[:1]
    while (after := next_of(order[-1]) if order else None) in found and after not in order:
        order.append(after)
    return order + [path for path in found if path not in order]


def next_of(notebook: Path) -> Path | None:
    """The notebook behind the first link after "Next:", which stands in the last cell of a chapter."""
    for cell in reversed(json.loads(notebook.read_text())["cells"]):
        if link := re.search(r"Next: \[[^]]*\]\(([^)]+\.ipynb)\)", "".join(cell["source"])):
            return notebook.with_name(link[1])
    return None


def entries(root: Path = ROOT) -> list[Entry]:
    """All explorers, in the order in which the chapters show them."""
    shown = {}
    for path in chapters(root / "notebooks"):
        for name in shown_in(path):
            shown.setdefault(name, path.name)
    found = [
        Entry(path.stem, about(path), shown.get(path.stem))
        for path in sorted((root / "widgets").glob("*.py"))
        if any(isinstance(n, ast.FunctionDef) and n.name == "explorer" for n in ast.parse(path.read_text()).body)
    ]
    return sorted(found, key=lambda e: list(shown).index(e.name) if e.chapter else len(shown))


def about(path: Path) -> str:
    """What an explorer shows, as the first line of its module says it."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    if not text:
        raise ValueError(f"{path.name}: an explorer's module opens with a line that says what it shows")
    return text.splitlines()[0]


def modules_named(source: str) -> list[str]:
    """Modules of widgets/ that a cell imports, in order; the text of a cell may not be Python (a magic)."""
    named = re.findall(r"from widgets\.(\w+) import", source)
    for line in re.findall(r"from widgets import ([^\n(]+)", source):
        named += [part.split(" as ")[0].strip() for part in line.split(",")]
    return named


def shown_in(notebook: Path) -> list[str]:
    """Modules whose explorer the cells of a notebook show, in order."""
    return list(dict.fromkeys(filter(None, by_cell(json.loads(notebook.read_text())["cells"]).values())))


def by_cell(cells: list[dict]) -> dict[int, str | None]:
    """{index of a cell that shows an explorer: its module, or None if no import of a notebook names one}."""
    found, imported = {}, []
    for i, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        imported += [m for m in modules_named(source) if m != "common"]
        # The stored output holds no widget state, so the call says which explorer it is.
        calls = re.findall(r"(?:(\w+)\.)?explorer\(", source)
        if calls:
            found[i] = calls[-1] if calls[-1] in imported else imported[-1] if imported else None
    return found
