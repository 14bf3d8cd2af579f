"""Every exercise of every chapter: unsolved, its check says what is missing; with the folded solution, it passes.

A chapter names its cells exercise-1 (the reader's code), check-1 (prints "passed" or "not yet: ...") and
solution-1 (text with a folded ```python block that goes into exercise-1).
"""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from notebook_guard import NOTEBOOKS

CHAPTERS = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))


def by_id(nb, kind: str) -> dict[str, nbformat.NotebookNode]:
    """{number: cell} of the cells named kind-number."""
    return {c.id.removeprefix(f"{kind}-"): c for c in nb.cells if re.fullmatch(rf"{kind}-\d+", c.id)}


def solution(cell) -> str:
    """The code of a folded solution."""
    block = re.fullmatch(r"<details>.*?```python\n(.*?)```.*</details>", cell.source.strip(), flags=re.DOTALL)
    assert block, f"{cell.id}: wanted <details> ... one ```python block ... </details>"
    return block[1].strip()


def printed(cell) -> str:
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_three_to_five_exercises_each_with_check_and_solution(path: Path):
    nb = nbformat.read(path, as_version=4)
    exercises, checks, solutions = (by_id(nb, kind) for kind in ("exercise", "check", "solution"))
    assert list(exercises) == list(checks) == list(solutions) == [str(n + 1) for n in range(len(exercises))]
    assert 3 <= len(exercises) <= 5


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_stored_checks_say_what_is_missing(path: Path):
    checks = by_id(nbformat.read(path, as_version=4), "check")
    silent = [c.id for c in checks.values() if not re.fullmatch(r"not yet: .{10,}\n", printed(c))]
    assert silent == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_solutions_pass_their_checks(path: Path):
    nb = nbformat.read(path, as_version=4)
    for number, cell in by_id(nb, "exercise").items():
        cell.source = solution(by_id(nb, "solution")[number])
    resources = {"metadata": {"path": str(path.parent)}}
    quiet = ["--log-level=ERROR"]
    client = NotebookClient(nb, timeout=90, kernel_name="python3", resources=resources, extra_arguments=quiet)
    client.execute()
    assert {c.id: printed(c) for c in by_id(nb, "check").values() if printed(c) != "passed\n"} == {}
