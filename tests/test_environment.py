"""One environment, written twice: environment.yml for conda, pyproject.toml's `course` extra for pip."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.absent import absent

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
COURSE = [Requirement(line) for line in PROJECT["optional-dependencies"]["course"]]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]


def conda_pip_lines() -> list[str]:
    """The lines of the pip section."""
    return next(d["pip"] for d in CONDA["dependencies"] if isinstance(d, dict))


def by_name(requirements: list[Requirement]) -> dict[str, tuple[str, str]]:
    return {r.name: (str(r.specifier), str(r.marker or "")) for r in requirements}


def test_pip_section_is_the_course_extra_and_the_package_itself():
    lines = conda_pip_lines()
    assert lines[-1] == "-e ."
    assert by_name([Requirement(line) for line in lines[:-1]]) == by_name(COURSE)


def test_conda_section_is_python_and_pip():
    """All else comes through pip, so that there is one list to keep."""
    assert CONDA["name"] == "k3lite" and CONDA["channels"] == ["conda-forge"]
    assert [d for d in CONDA["dependencies"] if isinstance(d, str)] == ["python=3.11", "pip"]


@pytest.mark.parametrize("requirement", COURSE, ids=lambda r: r.name)
def test_course_pins_one_version(requirement):
    assert [s.operator for s in requirement.specifier] == ["=="]


@pytest.mark.parametrize("requirement", BASE, ids=lambda r: r.name)
def test_course_covers_the_base_with_a_version_that_the_base_allows(requirement):
    pinned = {r.name: next(iter(r.specifier)).version for r in COURSE}
    assert requirement.specifier.contains(pinned[requirement.name])


def test_what_a_reader_needs_and_plotly_and_torch_do_not_bring():
    """anywidget: FigureWidget fails without it. triton: no wheel exists for macOS and Windows."""
    course = by_name(COURSE)
    assert {"anywidget", "numpy", "ipykernel"} <= set(course)
    assert course["triton"][1] == 'sys_platform == "linux"'


@pytest.mark.parametrize("requirement", COURSE, ids=lambda r: r.name)
def test_stored_outputs_are_made_with_the_pinned_versions(requirement):
    try:
        installed = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        absent(f"{requirement.name} is not installed here")
    assert requirement.specifier.contains(installed.split("+")[0])
