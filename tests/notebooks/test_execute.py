"""execute.py stores what a reader should see and nothing of the machine; nbval then holds the numbers to it."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from execute import main
from nbformat.v4 import new_code_cell, new_notebook
from notebook_guard import ROOT, faults

WIDGET = "import ipywidgets\nslider = ipywidgets.IntSlider(value=3)\nslider"


def notebook(path: Path, *sources: str) -> Path:
    cells = [new_code_cell(s, id=f"cell-{i}") for i, s in enumerate(sources, 1)]
    metadata = {"kernelspec": {"name": "mine", "display_name": "Mine"}, "widgets": {"state": {}}}
    cells[0].metadata["execution"] = {"iopub.status.busy": "2026-11-29T00:00:00Z"}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


def test_executed_notebook_passes_the_guard_and_nbval_and_a_changed_number_fails(tmp_path, capsys):
    (tmp_path / "near.txt").write_text("read from the notebook's own folder")
    source = "print(open('near.txt').read())\nround(27648 * 2**20 / 2**30, 2)"
    path = notebook(tmp_path / "x.ipynb", source, WIDGET)

    assert main([str(path)]) == 0
    assert capsys.readouterr().out.startswith("x.ipynb: ")
    assert faults(path, {}, {}) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["near.txt", "x.ipynb"]
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.outputs[0].text == "read from the notebook's own folder\n"
    assert first.outputs[1].data["text/plain"] == "27.0"

    assert nbval(path) == 0
    path.write_text(path.read_text().replace('"27.0"', '"27.1"'))
    assert nbval(path) == 1


@pytest.mark.parametrize(
    "source, reason",
    [
        ("x = 1\n1 / (x - 1)", "ZeroDivisionError: division by zero"),
        ("import time\ntime.sleep(60)", "took longer than 1 s"),
        ("import os\nos._exit(1)", "the kernel died (Kernel died)"),
    ],
    ids=["raises", "too-slow", "dies"],
)
def test_failure_is_one_line_and_leaves_the_file(tmp_path, capsys, source, reason):
    path = notebook(tmp_path / "x.ipynb", "print(1)", source)
    before = path.read_bytes()

    assert main([str(path), "--cell-timeout", "1"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"FAILED x.ipynb: cell 'cell-2': {reason}"
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["x.ipynb"]


def nbval(path: Path) -> int:
    """Exit status of the comparison that `make test` runs."""
    options = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=90", "-p", "no:cacheprovider"]
    sanitize = ["--nbval-sanitize-with", str(ROOT / "tests" / "sanitize.cfg")]
    command = [sys.executable, "-m", "pytest", "-q", str(path), "--rootdir", str(path.parent), *options, *sanitize]
    return subprocess.run(command, capture_output=True, timeout=200, cwd=path.parent).returncode
