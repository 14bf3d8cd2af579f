"""Executes the course's notebooks in place and keeps their outputs: `python tests/notebooks/execute.py [FILE ...]`.

What is stored is what a reader sees and what nbval compares, so nothing of this machine may stay in the file:
no widget state (it would embed plotly.js, 5 MB a notebook), no time stamps, one kernel name. A notebook is
replaced only after its last cell has run; when a cell raises, the file stays as it was.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
VOLATILE = ("execution", "ExecuteTime", "collapsed", "scrolled")  # cell metadata that a session leaves behind


class NotebookFailed(Exception):
    """A notebook did not run to its end; the message is one line that names notebook, cell and error."""


def normalise(nb: NotebookNode) -> NotebookNode:
    """Drop what belongs to a session or a machine from the metadata, in place."""
    nb.metadata = nbformat.from_dict(METADATA)
    for cell in nb.cells:
        for key in VOLATILE:
            cell.metadata.pop(key, None)
    return nb


def execute(path: Path, cell_timeout: float = 90.0) -> float:
    """Run one notebook top to bottom from its own folder, rewrite it, and return the seconds it took."""
    nb = nbformat.read(path, as_version=4)
    client = NotebookClient(
        nb,
        timeout=cell_timeout,
        startup_timeout=60,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    running = {"cell": "none (kernel start)"}
    client.on_cell_start = lambda cell, cell_index: running.update(cell=cell.id)
    started = time.perf_counter()
    try:
        client.execute()
    except CellExecutionError as e:
        reason = f"{e.ename}: {e.evalue}"
    except CellTimeoutError:
        reason = f"took longer than {cell_timeout:g} s"
    except DeadKernelError as e:
        reason = f"the kernel died ({e})"
    else:
        reason = ""
    if reason:
        raise NotebookFailed(f"{path.name}: cell {running['cell']!r}: {' '.join(reason.split())}")
    seconds = time.perf_counter() - started
    write(normalise(nb), path)
    return seconds


def write(nb: NotebookNode, path: Path) -> None:
    """Replace `path` in one step, so that a stop in between leaves the old file and not half a new one."""
    part = path.with_suffix(".part")
    nbformat.validate(nb)
    nbformat.write(nb, part)
    os.replace(part, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute notebooks in place, keeping their outputs.")
    parser.add_argument("files", nargs="*", type=Path, help="default: notebooks/*.ipynb, in order")
    parser.add_argument("--cell-timeout", type=float, default=90.0, metavar="SECONDS")
    args = parser.parse_args(argv)
    failed = 0
    for path in args.files or sorted(NOTEBOOKS.glob("*.ipynb")):
        try:
            print(f"{path.name}: {execute(path.resolve(), args.cell_timeout):.1f} s", flush=True)
        except (NotebookFailed, OSError) as e:
            print(f"FAILED {e}", file=sys.stderr, flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
