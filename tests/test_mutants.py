"""The mutation check: each chapter has a mutant that fits the source, and red, green and failed runs are told apart."""

import ast
from pathlib import Path

import nbformat
import pytest

from tests import mutants
from tests.mutants import MUTANTS, ROOT, Mutant

CHAPTERS = sorted(p.name.split("_")[0] for p in (ROOT / "notebooks").glob("[0-9]*.ipynb"))


def test_every_chapter_has_a_mutant():
    assert list(MUTANTS) == CHAPTERS


@pytest.mark.parametrize("chapter", MUTANTS)
def test_a_mutant_fits_the_source_and_is_python(chapter, tmp_path):
    mutant = MUTANTS[chapter]
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / mutant.file).read_text())
    mutants.break_file(mutant, tmp_path)
    ast.parse(copy.read_text())
    assert copy.read_text() != (ROOT / mutant.file).read_text()


def test_a_mutant_that_no_longer_fits_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old, times in (("x = 1", 2), ("y", 0)):
        with pytest.raises(ValueError, match=f"a.py holds '{old}' {times} times, wanted once"):
            mutants.break_file(Mutant("a.py", old, "z", ""), tmp_path)


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A course of one chapter over one function, in place of the real one."""
    for name in ("notebooks", "widgets", "k3lite"):
        (tmp_path / name).mkdir()
    (tmp_path / "k3lite" / "__init__.py").write_text("def double(x):\n    return 2 * x\n")
    cells = ["from k3lite import double", "print(double(2))", "import inspect\nprint(double(0))"]
    cells = [nbformat.v4.new_code_cell(c, execution_count=i + 1) for i, c in enumerate(cells)]
    cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="4\n")]
    cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text="0\n")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), tmp_path / "notebooks" / "99_x.ipynb"
    )
    monkeypatch.setattr(mutants, "lay_out", lambda folder, lay_out=mutants.lay_out: lay_out(folder, tmp_path))
    monkeypatch.setattr(mutants, "notebook_of", lambda chapter: tmp_path / "notebooks" / "99_x.ipynb")
    return tmp_path


def broken(new: str) -> dict[str, Mutant]:
    return {"99": Mutant("k3lite/__init__.py", "2 * x", new, "double does not")}


def test_a_notebook_that_sees_the_mutant_is_red(course, capsys):
    assert mutants.main([], broken("3 * x")) == 0
    assert capsys.readouterr().out == "99: red at Cell 1: double does not\n"
    assert "2 * x" in (course / "k3lite" / "__init__.py").read_text(), "the course itself is left alone"


def test_a_notebook_that_stays_green_is_reported(course, capsys):
    assert mutants.main([], broken("x + x")) == 1
    assert capsys.readouterr().out == "99: green (WRONG): double does not\n"


def test_control_wants_green(course, capsys):
    assert mutants.main(["--control"], broken("3 * x")) == 0
    assert "99: green: nothing changed" in capsys.readouterr().out


def test_a_run_that_fails_proves_nothing(course, monkeypatch, capsys):
    monkeypatch.setattr(mutants, "run", lambda notebook, root: (4, "usage: no such option"))
    assert mutants.main([], broken("3 * x")) == 1
    assert "99: FAILED: chapter 99: the run failed (pytest's status 4)" in capsys.readouterr().out


def test_source_on_show_is_not_compared(tmp_path):
    shown, table = (
        nbformat.v4.new_code_cell("f()", outputs=[nbformat.v4.new_output("execute_result", {"text/markdown": text})])
        for text in ("`ops.py`\n\n```python\nx = 1\n```", "| a table |")
    )
    plain = nbformat.v4.new_code_cell("f()", outputs=[nbformat.v4.new_output("execute_result", {"text/plain": "1"})])
    path = tmp_path / "a.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[shown, table, plain]), path)
    mutants.leave_out_source(path)
    assert [c.metadata.get("tags", []) for c in nbformat.read(path, 4).cells] == [["nbval-ignore-output"], [], []]
