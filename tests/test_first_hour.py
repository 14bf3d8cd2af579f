"""The first hour: what `make` says when something is missing, and what a command leaves when the disk is full."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.absent import absent

if shutil.which("make") is None:
    absent("make is not installed")

ROOT = Path(__file__).resolve().parents[1]
FINE = 'if [ "$1" = --version ]; then echo Python 3.11.7; fi'
MAKES_VENV = 'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp pip "$3/bin/pip"; fi'


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder with the Makefile and what its rules look at, but nothing that could be installed."""
    (tmp_path / "tests" / "oracles").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tests/oracles/requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def make(clone: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(["make", *arguments], cwd=clone, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_no_python_at_all(clone):
    status, said = make(clone, "PYTHON=", "lab")
    assert status and "k3lite: no python3 found; install Python 3.11 or newer" in said


def test_an_old_python_is_named_with_the_way_out(clone):
    old = script(clone / "python", 'if [ "$1" = --version ]; then echo Python 3.9.18; else exit 1; fi')
    status, said = make(clone, f"PYTHON={old}", "lab")
    assert (
        status and "k3lite: Python 3.9.18 is too old; install Python 3.11 and run: make PYTHON=python3.11 lab" in said
    )
    assert not (clone / ".venv").exists()


def test_a_python_without_venv(clone):
    """Debian's python3 has no ensurepip; `python3 -m venv` then fails."""
    bare = script(clone / "python", FINE, 'if [ "$1" = -m ]; then exit 1; fi')
    status, said = make(clone, f"PYTHON={bare}", "lab")
    assert status and "python's venv module is missing (on Debian: apt-get install python3-venv)" in said
    assert not (clone / ".venv" / ".python").exists(), "the next try must make it again"


@pytest.mark.parametrize("target", ["lab", "book", "test"])
def test_an_installation_that_fails_says_so_and_is_tried_again(clone, target):
    script(clone / "pip", "echo 'ERROR: Could not install packages: [Errno 28] No space left on device' >&2; exit 1")
    python = script(clone / "python", FINE, MAKES_VENV)
    status, said = make(clone, f"PYTHON={python}", target)
    assert status and "No space left on device" in said and "k3lite: the installation stopped, see above" in said
    assert "some GB of disk" in said and not (clone / ".venv" / ".course").exists()


def test_lab_opens_the_first_notebook_under_the_address_that_it_prints_and_asks_nothing(clone):
    """Without a browser a reader types that address; JupyterLab's own question about news would be the first thing seen."""
    status, said = make(clone, "--dry-run", f"PYTHON={sys.executable}", "lab")
    assert status == 0
    path = said.split("--LabApp.default_url=/lab/tree/")[1].split()[0]
    assert (ROOT / path).exists()
    assert "labextension disable --level=sys_prefix @jupyterlab/apputils-extension:announcements" in said


def k3lite(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "k3lite.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


def test_a_training_that_cannot_write_leaves_nothing_half_written(tmp_path):
    small = ["--steps", "1", "--lengths", "64", "--depths", "50", "--trials", "1", "--threads", "1"]
    done = k3lite(
        *("needle", *small, "--out", str(tmp_path / "needle")),
        stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("k3lite: weights could not be written or read: ")
    assert "Traceback" not in done.stderr
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_output_that_cannot_be_written_is_one_line():
    if not Path("/dev/full").exists():
        absent("there is no /dev/full, which Linux has")
    with open("/dev/full", "w") as full:
        done = k3lite("params", "kimi-k3", stdout=full)
    assert done.returncode == 2 and done.stderr.startswith("k3lite: ") and done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr
