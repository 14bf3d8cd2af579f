"""Every notebook in a real JupyterLab and Chromium: it runs, draws its explorers, and asks nobody for anything."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil

import pytest

from tests.absent import absent

if importlib.util.find_spec("playwright") is None:
    absent("playwright is not installed: pip install -e '.[test]'")
from browser_lab import REPO, errors_in
from playwright.sync_api import expect

NOTEBOOKS = sorted(p.name for p in (REPO / "notebooks").glob("*.ipynb"))
RELOADED = ("00_start_here.ipynb", "05_the_delta_rule.ipynb")  # quick, three explorers
# anywidget says so of a model that took more than two seconds to begin, and begins it all the same. After a reload all
# figures of the kernel begin at once, and each loads plotly's 5 MB for itself.
ON_RELOAD = "uncaught: [anywidget] Failed to initialize model."
ALONE = ("from widgets.cache_explorer import explorer", "explorer()")

pytestmark = pytest.mark.timeout(300)  # a server start, a chapter of 90 s, and a busy machine


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebook_runs_clean(lab, notebook):
    ran_clean(lab, notebook, lab.open(notebook).run_all())
    lab.shot(notebook.removesuffix(".ipynb"))
    for box in explorers_of(lab):
        answers_the_keyboard(box)
    assert lab.off_host == []
    assert lab.console_errors == []


@pytest.mark.parametrize("notebook", RELOADED)
def test_a_reload_and_a_restart_leave_no_dead_explorer(lab, notebook):
    """Run, load the page again, run the explorer's cell again; then restart under the explorers and run all."""
    folder = lab.server.root / "notebooks"
    saved = shutil.copy(folder / notebook, folder / f"saved_{notebook}").name  # the other tests open it as shipped
    ran_clean(lab, notebook, lab.open(saved).run_all())
    lab.reload()
    cells = [i for i, c in enumerate(lab.all_cells()) if "Explorer(" in json.dumps(c.get("outputs", ""))]
    assert cells
    for i in cells:
        lab.run_cell(i)
        box = lab.page.locator(".jp-Cell").nth(i).locator(".k3lite-explorer")
        expect(box.locator(".main-svg").first).to_be_attached(timeout=30_000)
        answers_the_keyboard(box)
    ran_clean(lab, notebook, lab.restart_and_run_all())
    for box in explorers_of(lab):
        answers_the_keyboard(box)
    assert lab.off_host == []
    assert [e for e in lab.console_errors if e != ON_RELOAD] == []


def test_explorer_answers_the_keyboard(lab):
    """In the first notebook that shows the cache explorer: arrow keys move the read-out, the words and the curves."""
    holding = [n for n in NOTEBOOKS if "cache_explorer" in (REPO / "notebooks" / n).read_text()]
    if not holding:
        lab.server.write_notebook("explorer_alone.ipynb", *ALONE)
    lab.open(holding[0] if holding else "explorer_alone.ipynb").run_all()
    box = lab.explorer("Context length (tokens)")
    box.scroll_into_view_if_needed()
    slider = box.locator(".widget-hslider", has_text="Context length (tokens)")
    handle, readout = slider.locator(".noUi-handle"), slider.locator(".widget-readout")
    curves = box.locator(".scatterlayer path.js-line")
    expect(curves.first).to_be_attached()
    start, title = readout.inner_text(), box.locator(".gtitle").text_content()
    marks = dots(box)
    lab.shot("explorer_before", box)

    handle.focus()
    for _ in range(4):
        handle.press("ArrowLeft")
    expect(readout).not_to_have_text(start)
    lower = readout.inner_text()
    assert number(lower) * 4 == number(start)  # a press is half an octave
    expect(box.locator(".gtitle")).to_contain_text(lower)
    expect(box.locator("[role=status]").last).to_contain_text(f"At {lower}")
    assert box.locator(".gtitle").text_content() != title
    expect(box.locator(".scatterlayer path.point").first).not_to_have_attribute("transform", marks[0])

    lines = [c.get_attribute("d") for c in curves.all()]
    layers = box.locator(".widget-hslider", has_text="KDA layers").locator(".noUi-handle")
    layers.focus()
    for _ in range(5):
        layers.press("ArrowRight")
    hybrid = curves.nth(4)
    expect(hybrid).not_to_have_attribute("d", lines[4])
    assert [c.get_attribute("d") for c in curves.all()][:4] == lines[:4]  # the others have no KDA layers
    expect(box.locator("select").first).to_have_value(re.compile("custom"))
    lab.shot("explorer_after", box)
    assert lab.off_host == [] and lab.console_errors == []


def test_what_goes_wrong_in_a_notebook_is_seen(lab):
    """The checks above can fail: an error, text on stderr, a cell not reached, a request and a console error."""
    lab.server.write_notebook(
        "broken.ipynb",
        "import sys; print('careful', file=sys.stderr)",
        "from IPython.display import HTML; HTML('<img src=\"http://example.invalid/pixel.png\">')",
        "1 / 0",
        "print('never')",
    )
    cells = lab.open("broken.ipynb").run_all()
    wrong = errors_in(cells)
    assert "code cell 0 wrote to stderr: careful" in wrong[0]
    assert wrong[1] == "code cell 2 raised ZeroDivisionError: division by zero"
    assert wrong[2] == "code cell 3 was not run: print('never')"
    assert lab.off_host == ["http://example.invalid/pixel.png"]
    assert any("ERR_FAILED" in e for e in lab.console_errors)


def ran_clean(lab, notebook: str, cells: list[dict]) -> None:
    """Every code cell of the notebook was run, once and in order, and none of them complained."""
    stored = json.loads((REPO / "notebooks" / notebook).read_text())["cells"]
    assert len(cells) == sum(c["cell_type"] == "code" and bool("".join(c["source"]).strip()) for c in stored)
    assert errors_in(cells) == []
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))


def explorers_of(lab) -> list:
    return lab.page.locator(".jp-OutputArea-output .k3lite-explorer").all()


def answers_the_keyboard(box) -> None:
    """Keys on the first button, or slider where there is none, change what the explorer says; nothing is refused."""
    box.scroll_into_view_if_needed()
    button = box.locator("button.jupyter-button:not([disabled])")
    said = box if button.count() else box.locator("[role=status]").last
    before = said.inner_text()
    if button.count():
        button.first.press("Space")
    else:
        handle = box.locator(".widget-hslider:visible .noUi-handle").first
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):  # ends elsewhere, also at either end of the slider
            handle.press(key)
    expect(said).not_to_have_text(before, timeout=15_000, use_inner_text=True)
    expect(box.locator("[role=alert]")).to_have_count(0)


def dots(box) -> list[str]:
    return [p.get_attribute("transform") for p in box.locator(".scatterlayer path.point").all()]


def number(text: str) -> int:
    return int(re.sub(r"\D", "", text))
