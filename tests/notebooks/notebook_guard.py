"""What a stored notebook must look like before nbval's word about it means anything.

nbval compares nothing in a cell that was never executed, obeys tags that switch it off, and knows nothing of
the package. So a notebook could be green and empty, or teach a second copy of a function that the package has
since changed. `faults` returns one line for each such thing; an empty list is a pass.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
PACKAGE = ROOT / "k3lite"
MAX_BYTES = 300_000
MAX_LINES = 15

# Every spelling by which nbval stops comparing a cell (its plugin.py: comment_markers, metadata_tags).
IGNORES = {"nbval-ignore-output", "pytest-validate-ignore-output"}
FORBIDDEN = {"nbval-skip", "nbval-raises-exception", "raises-exception"}

Listing = dict[str, dict[str, str]]  # {notebook: {cell id: reason}}


def listing(name: str) -> Listing:
    """One of the JSON files beside this one: the exceptions that were allowed, each with its reason."""
    return json.loads((Path(__file__).parent / name).read_text())


def faults(path: Path, ignored: Listing | None = None, long_cells: Listing | None = None) -> list[str]:
    """Everything wrong with one notebook, a line each.

    ignored, long_cells: the exceptions for all notebooks; default: the two JSON files beside this module.
    """
    ignored = listing("ignored_outputs.json") if ignored is None else ignored
    long_cells = listing("long_cells.json") if long_cells is None else long_cells
    nb = nbformat.read(path, as_version=4)
    code = [c for c in nb.cells if c.cell_type == "code"]
    return [
        *_file_faults(path, nb),
        *_execution_faults(code),
        *_listed(code, is_ignored, ignored.get(path.name, {}), "ignored_outputs.json", "has its output ignored"),
        *_listed(code, is_long, long_cells.get(path.name, {}), "long_cells.json", f"has more than {MAX_LINES} lines"),
        *_redefinitions(code),
        *_dead_links(path, nb),
    ]


def _file_faults(path: Path, nb: NotebookNode) -> list[str]:
    out = []
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as e:
        out.append(f"not a valid notebook: {e.message}")
    ids = [c.get("id") for c in json.loads(path.read_text())["cells"]]  # nbformat.read would repair them
    for name in sorted({i for i in ids if i and ids.count(i) > 1}):
        out.append(f"cell id {name!r} is used twice")
    if path.stat().st_size >= MAX_BYTES:
        out.append(f"{path.stat().st_size:,} bytes; the limit is {MAX_BYTES:,}")
    if nb.metadata.get("kernelspec", {}).get("name") != "python3":
        out.append(f"kernelspec {nb.metadata.get('kernelspec', {}).get('name')!r}, wanted 'python3'")
    if "widgets" in nb.metadata:
        out.append("metadata.widgets holds widget state; run tests/notebooks/execute.py")
    return out


def _execution_faults(code: list[NotebookNode]) -> list[str]:
    """Executed once, top to bottom, in one session, without an error and without a word on stderr."""
    out = []
    expected = 0
    for cell in code:
        blank = not cell.source.strip()
        expected += not blank
        wanted = None if blank else expected
        if cell.execution_count != wanted:
            out.append(f"cell {cell.id!r}: execution_count {cell.execution_count}, wanted {wanted}")
        if "execution" in cell.metadata:
            out.append(f"cell {cell.id!r}: holds execution time stamps")
        for output in cell.outputs:
            if output.output_type == "error":
                out.append(f"cell {cell.id!r}: stored error {output.ename}")
            if output.output_type == "stream" and output.name == "stderr":
                out.append(f"cell {cell.id!r}: stored stderr {output.text[:60]!r}")
        for mark in sorted(FORBIDDEN & marks(cell)):
            out.append(f"cell {cell.id!r}: {mark} is not allowed; a chapter runs top to bottom")
    return out


def marks(cell: NotebookNode) -> set[str]:
    """nbval's instructions in a cell, from its tags and its comments, in the spelling of the tags."""
    comments = [line.strip().lstrip("#").strip() for line in cell.source.splitlines() if line.strip().startswith("#")]
    return {m.lower().replace("_", "-") for m in (*cell.metadata.get("tags", []), *comments)}


def is_ignored(cell: NotebookNode) -> bool:
    return bool(IGNORES & marks(cell))


def is_long(cell: NotebookNode) -> bool:
    return len(cell.source.strip().splitlines()) > MAX_LINES


def _listed(code, test, reasons: dict[str, str], file: str, what: str) -> list[str]:
    """The cells that `test` finds are exactly those listed, and each reason is said."""
    found = {c.id for c in code if test(c)}
    return [
        *(f"cell {i!r} {what} and is not in {file}" for i in sorted(found - set(reasons))),
        *(f"{file} lists cell {i!r}, but no such cell {what}" for i in sorted(set(reasons) - found)),
        *(f"{file} gives no reason for cell {i!r}" for i in sorted(found & set(reasons)) if not reasons[i].strip()),
    ]


def package_names(package: Path = PACKAGE) -> dict[str, str]:
    """{public function or class: file} of every module in the package, read and not imported."""
    names: dict[str, str] = {}
    for file in sorted(package.rglob("*.py")):
        for name in _defined(ast.parse(file.read_text())):
            if not name.startswith("_"):
                names.setdefault(name, file.relative_to(package.parent).as_posix())
    return names


def _defined(tree: ast.AST) -> list[str]:
    """Names bound by def, class or a lambda at module level, also inside if, with, for and try."""
    names, todo = [], [tree]
    while todo:
        node = todo.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            names += [t.id for t in node.targets if isinstance(t, ast.Name)]
        else:
            todo += ast.iter_child_nodes(node)
    return names


def _redefinitions(code: list[NotebookNode]) -> list[str]:
    names, out = package_names(), []
    for cell in code:
        try:
            tree = ast.parse(TransformerManager().transform_cell(cell.source))
        except SyntaxError as e:
            out.append(f"cell {cell.id!r}: not Python ({e.msg})")
            continue
        for name in _defined(tree):
            if name in names:
                out.append(f"cell {cell.id!r} defines {name}, which {names[name]} already has: import it")
    return out


def _dead_links(path: Path, nb: NotebookNode) -> list[str]:
    """Links to a file of the repository, or to a heading of a notebook; addresses on the web are not followed."""
    out = []
    for cell in nb.cells:
        if cell.cell_type != "markdown":
            continue
        for target in re.findall(r"\]\(([^)\s]+)\)|href=\"([^\"]+)\"", cell.source):
            file, _, anchor = "".join(target).partition("#")
            if not file or re.match(r"[a-z]+:", file):
                continue
            if not (path.parent / file).exists():
                out.append(f"cell {cell.id!r}: dead link {file}")
            elif anchor and file.endswith(".ipynb") and anchor not in _anchors(path.parent / file):
                out.append(f"cell {cell.id!r}: {file} has no heading {anchor}")
    return out


def _anchors(path: Path) -> set[str]:
    """Headings of a notebook in the spelling in which JupyterLab links to them."""
    text = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown")
    return {h.strip().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}


def sanitize_patterns(config: Path = ROOT / "tests" / "sanitize.cfg") -> list[tuple[str, str]]:
    """(regex, replacement), read the way nbval reads them."""
    return re.findall(r"^regex: (.*)$\n^replace: (.*)$", config.read_text(), flags=re.MULTILINE)
