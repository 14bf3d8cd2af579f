"""Every explorer under a reader's hands: mouse and keyboard on every control, fast drags, nonsense in every field."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest

from tests.absent import absent

if importlib.util.find_spec("playwright") is None:
    absent("playwright is not installed: pip install -e '.[test]'")
from browser_lab import LabPage
from explorer_page import ExplorerPage
from playwright.sync_api import expect

from book.explorers import entries

NAMES = [e.name for e in entries()]
SLIDERS, FIELDS = ".widget-hslider, .widget-vslider", ".widget-text, .widget-textarea"
NONSENSE = ("abc xyz", "", "1e999", "-1", "nan", "🦀🦀", "9" * 5000)
READOUT_NONSENSE = ("abc", "1e999", "")
# A button that has nothing to do before another one was pressed.
FIRST = {"Undo": "Write", "Empty all": "Write", "Start again": "One step on"}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def explorers(browser, lab_server, tmp_path_factory):
    """One page for all tests here (ExplorerPage), with one kernel."""
    lab, context = LabPage.new(lab_server, browser, tmp_path_factory.mktemp("shots"))
    yield ExplorerPage(lab, NAMES)
    context.close()
    lab_server.end_kernels()


@pytest.fixture
def show(explorers):
    """show(name) -> one explorer on the page; after the test nothing was refused, requested elsewhere, or logged."""
    lab = explorers.lab
    yield explorers.show
    wrong = lab.console_errors + lab.off_host
    lab.console_errors.clear(), lab.off_host.clear()
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_every_control_is_found(show, name):
    """What the tests below drive is all there is: a kind of control that they do not know would stand out here."""
    shown = show(name)
    kernel, page = shown.kernel(), shown.page()
    assert page["controls"].keys() == kernel["controls"].keys() and page["alerts"] == []
    assert page["words"] and page["title"]
    assert shown.box.locator("select:disabled, input:disabled, textarea:disabled, button:disabled").count() == 0


@pytest.mark.parametrize("name", NAMES)
def test_sliders_follow_a_fast_hand_and_the_keys(show, name):
    shown = show(name)
    sliders = shown.controls(SLIDERS)
    for label, slider in sliders[:: 8 if len(sliders) > 32 else 1]:  # MX has one for each of 32 numbers, all alike
        before = shown.page()["handles"][label]
        let_go = shown.drag(slider)
        page = shown.settle()
        assert page["handles"][label] != before, label
        assert page["alerts"] == [], label
        late = shown.at.ask("", f"since({let_go})")
        assert late.count(label) <= 2, f"{label}: {late.count(label)} old values were drawn after the hand let go"
        assert shown.again(label) == [], label
        at_end = page["handles"][label]
        handle = slider.locator(".noUi-handle")
        handle.focus()
        shown.changed_by(partial(handle.press, "ArrowLeft" if at_end > before else "ArrowRight"))
        assert shown.settle()["handles"][label] != at_end, label


@pytest.mark.parametrize("name", NAMES)
def test_choices_and_buttons_answer_mouse_and_keys(show, name):
    shown = show(name)
    keyboard = shown.at.lab.page.keyboard
    for label, menu in shown.controls(".widget-dropdown"):
        select = menu.locator("select")
        for by_mouse in (True, False):
            before = shown.page()["controls"][label]
            last = select.evaluate("s => s.selectedIndex === s.options.length - 1")
            select.click() if by_mouse else select.focus()
            keyboard.press("ArrowUp" if last else "ArrowDown")
            if by_mouse:
                keyboard.press("Enter")  # takes from the open list what the arrow marked; a closed one needs none
            page = shown.settle()
            assert page["controls"][label] != before and page["alerts"] == [], label
            assert shown.again(label) == [], label
    buttons = shown.box.locator("button.jupyter-button")
    for i in range(buttons.count()):
        button = buttons.nth(i)
        for press in (button.click, partial(button.press, "Space")):
            if first := FIRST.get(button.inner_text()):
                shown.changed_by(buttons.get_by_text(first, exact=True).click)
                shown.settle()
            shown.changed_by(press)
            assert shown.settle()["alerts"] == []
    if name == "training":
        expect(buttons).to_have_text("Start")  # the second press ended the run


@pytest.mark.parametrize("name", NAMES)
def test_nonsense_is_refused_or_put_back(show, name):
    shown = show(name)
    fields = [(label, c.locator("input, textarea"), NONSENSE) for label, c in shown.controls(FIELDS)]
    for label, slider in shown.controls(SLIDERS):
        readout = slider.locator(".widget-readout")
        if readout.count() and readout.is_visible():
            fields.append((label, readout, READOUT_NONSENSE))
    for label, field, texts in fields:
        good = shown.page()["controls"][label]
        for text in texts:
            shown.type_into(field, text)
            page = shown.settle()
            assert len(page["alerts"]) <= 1, (label, text, page["alerts"])
            for alert in page["alerts"]:
                assert 20 < len(alert) < 250 and "fault of this explorer" not in alert, (label, text, alert)
            if not page["alerts"]:
                assert shown.again(label) == [], (label, text)
        if good is not None:
            shown.type_into(field, good)
        page = shown.settle()
        assert page["alerts"] == [] and page["words"], label
    for label, slider in shown.controls(SLIDERS)[:1]:
        shown.drag(slider)
        assert shown.settle()["alerts"] == [] and shown.again(label) == []
