"""One notebook with every explorer in a cell of its own, and the hands of a reader: mouse, keyboard, typed text.

One kernel serves all cells, so torch and plotly are loaded once. A cell is run when its explorer is asked for, and
cleared before the next, so that a page holds one explorer at a time.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

from browser_lab import LabPage, errors_in
from playwright.sync_api import Locator, expect

# Where an explorer starts, if as it opens a control would be switched off, or offer one choice only.
STARTS = {
    "attention_map": "needles=2",
    "router": "rule='sign'",
    "state_capacity": "rule='kda'",
    "needle_lab": "length=256",
}
CONTROLS = ".widget-hslider, .widget-vslider, .widget-dropdown, .widget-text, .widget-textarea, .widget-checkbox, button.jupyter-button"
WAIT_MS = 30_000
MOVES = 40  # of the mouse in one drag
# What the page shows of an explorer, in the form of kernel_side.state(); null where figure and handle are not drawn.
PAGE_STATE = """box => {
    const plain = text => text.replace(/[\\u200b\\u00a0]/g, ' ').split(/\\s+/).filter(Boolean).join(' ');
    const number = v => typeof v === 'number' ? (Number.isFinite(v) ? Number(v.toPrecision(6)) : null) : v ?? null;
    const numbers = values => !values ? [] : Array.from(values).flatMap(
        v => Array.isArray(v) || ArrayBuffer.isView(v) ? numbers(v) : [number(v)]);
    const controls = {}, handles = {};
    for (const e of box.querySelectorAll('CONTROLS')) {
        if (e.offsetParent === null) continue;
        if (e.matches('button')) { controls[plain(e.textContent)] = plain(e.textContent); continue; }
        const label = plain(e.querySelector('.widget-label').textContent), select = e.querySelector('select');
        const handle = e.querySelector('.noUi-handle'), readout = e.querySelector('.widget-readout');
        if (handle) handles[label] = Number(handle.closest('.noUi-target').noUiSlider.get(true));
        controls[label] = select ? plain(select.options[select.selectedIndex]?.text ?? '')
            : handle ? (readout && getComputedStyle(readout).display !== 'none' ? plain(readout.textContent) : null)
            : e.querySelector('input[type=checkbox]')?.checked ?? e.querySelector('input, textarea').value;
    }
    const figure = box.querySelector('.js-plotly-plot'), said = [...box.querySelectorAll('[role=status]')];
    const message = [...box.querySelectorAll('[role=alert]')].map(e => plain(e.textContent));
    return {
        controls, handles, alerts: message, words: plain(said.at(-1)?.textContent ?? ''),
        title: plain(figure?.querySelector('.gtitle')?.textContent ?? ''),
        traces: (figure?.data ?? []).map(t => ({x: numbers(t.x), y: numbers(t.y), z: numbers(t.z)})),
    };
}""".replace("CONTROLS", CONTROLS)


def agree(page: dict, kernel: dict) -> list[str]:
    """In what the page and the kernel differ; empty when handle, read-out, words and picture are the kernel's."""
    wrong = [part for part in ("words", "title", "traces") if not alike(page[part], kernel[part])]
    if set(page["controls"]) != set(kernel["controls"]):
        return [*wrong, f"controls: {sorted(set(page['controls']) ^ set(kernel['controls']))}"]
    for label, value in kernel["controls"].items():
        if not shown_as(page["controls"][label], value):
            wrong.append(f"{label}: shows {page['controls'][label]!r}, is {value!r}")
    for label, value in kernel["handles"].items():
        if abs(page["handles"][label] - value) > 1e-6:
            wrong.append(f"handle of {label}: at {page['handles'][label]!r}, is {value!r}")
    return wrong


def alike(a, b) -> bool:
    """Equal but for the last of six digits."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= 2e-5 * max(abs(a), abs(b))
    if isinstance(a, str) and isinstance(b, str):
        return a.replace(" ", "") == b.replace(" ", "")
    return a == b


def shown_as(text, value) -> bool:
    """Whether a control that shows `text` has this value. Numbers in a read-out are rounded; None: it has no read-out."""
    if text is None or text == value or isinstance(value, str) and alike(text, value):
        return True
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    digits = str(text).replace("\u2212", "-").replace(",", "")
    try:
        return abs(float(digits) - value) <= 0.51 * 10.0 ** -len(digits.partition(".")[2])
    except ValueError:
        return False


class ExplorerPage:
    """The notebook in JupyterLab. `show` gives one explorer of it."""

    def __init__(self, lab: LabPage, names: list[str]):
        self.lab, self.names = lab, names
        cells = [f"from widgets.{n} import explorer\n\nexplorer({STARTS.get(n, '')})" for n in names]
        lab.server.write_notebook("explorers.ipynb", *cells)
        lab.page.set_viewport_size({"width": 1366, "height": 1500})  # a whole explorer is on the screen
        lab.open("explorers.ipynb")
        self.ask(Path(__file__).with_name("kernel_side.py").read_text(), None)

    def ask(self, code: str, answer: str | None):
        """Run code in the kernel, next to the cells; returns the value of the expression `answer`, which is JSON."""
        reply = self.lab.page.evaluate(
            """async ([code, answer]) => {
                const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                const asked = answer ? {answer} : {};
                const run = kernel.requestExecute({code, silent: false, store_history: false, user_expressions: asked});
                return (await run.done).content;
            }""",
            [code, answer],
        )
        assert reply["status"] == "ok", reply
        if answer is None:
            return None
        value = reply["user_expressions"]["answer"]
        assert value["status"] == "ok", value
        return json.loads(ast.literal_eval(value["data"]["text/plain"]))

    def show(self, name: str) -> Shown:
        """Run the cell of this explorer, and no other is shown."""
        page = self.lab.page
        self.lab.clear_outputs()
        self.lab.run_cell(self.names.index(name))
        cell = self.lab.cells()[self.names.index(name)]
        assert errors_in([cell]) == []
        (output,) = cell["outputs"]
        box = page.locator(".jp-OutputArea-output .k3lite-explorer")
        expect(box).to_have_count(1)
        expect(box.locator(".main-svg").first).to_be_attached(timeout=WAIT_MS)
        shown = Shown(self, box, output["data"]["application/vnd.jupyter.widget-view+json"]["model_id"])
        self.ask(f"_watch({shown.model_id!r})", None)
        shown.settle()
        return shown


@dataclass
class Shown:
    """One explorer on the page."""

    at: ExplorerPage
    box: Locator
    model_id: str

    def kernel(self) -> dict:
        return self.at.ask("", f"state({self.model_id!r})")

    def page(self) -> dict:
        return self.box.evaluate(PAGE_STATE)

    def settle(self) -> dict:
        """Wait until the page shows what the kernel holds. Returns that; AssertionError says in what they differ."""
        for _ in range(60):
            kernel, page = self.kernel(), self.page()
            differing = agree(page, kernel)
            if not differing:
                return page
            self.at.lab.page.wait_for_timeout(50)
        raise AssertionError(f"page and kernel disagree: {differing}")

    def controls(self, kind: str) -> list[tuple[str, Locator]]:
        """Label and place of each visible control of a kind (classes of ipywidgets)."""
        found = [c for c in self.box.locator(kind).all() if c.is_visible()]
        return [(c.locator(".widget-label").first.inner_text().strip(), c) for c in found]

    def again(self, label: str) -> list[str]:
        """What would change if the control were moved to where it is; empty when words and picture are of its value."""
        return self.at.ask("", f"again({self.model_id!r}, {label!r})")

    def drag(self, slider: Locator) -> float:
        """Take the handle to the far end of its slider, fast: MOVES moves with no pause. When it was let go (ms)."""
        mouse, bar = self.at.lab.page.mouse, slider.locator(".noUi-base").bounding_box()
        handle = slider.locator(".noUi-handle").bounding_box()
        x, y = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
        if bar["width"] > bar["height"]:
            end = (bar["x"] + (bar["width"] + 30 if x < bar["x"] + bar["width"] / 2 else -30), y)
        else:
            end = (x, bar["y"] + (bar["height"] + 30 if y < bar["y"] + bar["height"] / 2 else -30))
        mouse.move(x, y)
        mouse.down()
        mouse.move(*end, steps=MOVES)
        mouse.up()
        return self.at.lab.page.evaluate("() => Date.now()")

    def type_into(self, field: Locator, text: str) -> None:
        """Replace what stands in a field, as far as it lets anybody, and leave it."""
        keyboard, place = self.at.lab.page.keyboard, field.bounding_box()
        self.at.lab.page.mouse.click(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        if field.evaluate("field => field === document.activeElement"):  # else the keys would select and delete cells
            keyboard.press("Control+A")
            keyboard.press("Delete")
        keyboard.insert_text(text)
        keyboard.press("Tab")

    def changed_by(self, act) -> None:
        """Do something, and wait until the explorer says or draws something new."""
        self.box.evaluate(
            """box => {
                box.mutations = 0;
                new MutationObserver((_, me) => { box.mutations += 1; me.disconnect(); })
                    .observe(box, {childList: true, characterData: true, subtree: true});
            }"""
        )
        act()
        self.at.lab.page.wait_for_function("box => box.mutations > 0", arg=self.box.element_handle(), timeout=WAIT_MS)
