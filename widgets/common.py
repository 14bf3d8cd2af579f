"""What every explorer shares: colours, the spelling of bytes, labelled controls, the message line, the box returned."""

from __future__ import annotations

import html
import math
import traceback
from collections.abc import Callable

import anywidget
import ipywidgets as w
import plotly.graph_objects as go

from k3lite.devices import read_devices
from k3lite.spell import format_bytes as format_bytes  # where explorers and chapters look for it

# Okabe and Ito's palette: its colours can be told apart with any of the common colour-vision deficiencies.
ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
# One ink for two themes: no grey has more than 4.35 : 1 against JupyterLab's white and its dark #111 at once,
# and this is the one that has it.
INK = "#797979"
GRID = "rgba(128,128,128,0.22)"

# Memory of one device in bytes; where it is from is said in k3lite/devices.json.
DEVICES = {name: int(device.memory) for name, device in read_devices().items()}


# ---- spelling


def device_label(device: str) -> str:
    """'H200, 141 GB': a key of DEVICES with its memory in the vendor's unit."""
    return f"{device}, {DEVICES[device] // 10**9} GB"


def byte_steps(top: float) -> list[int]:
    """Three to six tick values above 0 for a linear axis from 0 to `top` bytes, a power of two apart."""
    step = 2 ** max(0, math.ceil(math.log2(top / 6)))
    return list(range(0, int(top) + 1, step))


def whole(name: str, value: object, low: int, high: int) -> None:
    """Raise ValueError unless value is a whole number from low to high; the text is meant for the reader."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, wanted a whole number from {low:,} to {high:,}.")


# ---- figures


WIDTH = 900  # pixels; fits a notebook on a 1366-pixel screen with the file browser open


def layout(height: int, axes: dict[str, dict], **parts) -> dict:
    """A plotly layout in the course's look: no background of its own, so that it sits in a light and a dark notebook.

    The width is fixed: a FigureWidget that is left to find its own draws 700 pixels and misses later changes.
    height: pixels. axes: settings by name ("xaxis", "yaxis2"). parts: everything else of a layout. One plain dict,
    because plotly checks a figure that is built at once four times faster than one that is changed step by step.
    """
    lines = {"gridcolor": GRID, "linecolor": INK, "zeroline": False, "ticks": "outside", "tickcolor": GRID}
    clear = {"template": "none", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    base = {"height": height, "width": WIDTH, "font": {"color": INK, "size": 13}}
    return clear | base | {name: lines | axis for name, axis in axes.items()} | parts


def axis(title: str, values, texts, **settings) -> dict:
    """An axis with hand-set ticks: bytes tick at powers of two, which plotly does not choose by itself."""
    labels = {"tickvals": list(values), "ticktext": list(texts)}
    return {"title": {"text": title, "font": {"size": 13}}} | labels | settings


def redraw(target: go.FigureWidget, source: go.Figure) -> None:
    """Move what `source` shows into the living `target`, as one message to the browser.

    Both come from the same figure(), so traces pair up by position and have the same properties. The number of
    annotations is constant too (hide what does not apply): the browser pairs them up, and fonts have leaked across.
    Only what differs is set, since setting is what costs plotly its time.
    """
    parts = [*zip(target.data, source.data, strict=True), (target.layout, source.layout)]
    with target.batch_update():
        for old, new in parts:
            before, after = old.to_plotly_json(), new.to_plotly_json()
            for name, value in after.items():
                if before.get(name) != value:
                    old[name] = value  # as a whole; update() would walk into every annotation


# ---- controls

# ipywidgets cuts a slider's read-out at 72 px, which "1,048,576 tokens" does not fit. And it lets the reader type into
# the read-out of a slider over choices, where nothing reads what was typed and nothing puts the choice back.
STYLE = (
    "<style>.k3lite-explorer .widget-readout {min-width: 125px; text-align: left}"
    ".k3lite-choice .widget-readout {-webkit-user-modify: read-only; pointer-events: none}</style>"
)


def labelled(kind: type[w.Widget], label: str, **options) -> w.Widget:
    """A control with its whole label in view. `label` ends in the unit."""
    # ipywidgets' own 80 px cut most labels off.
    control = kind(description=label, style={"description_width": "200px"}, layout={"width": "99%"}, **options)
    if kind is w.SelectionSlider:
        control.add_class("k3lite-choice")
    return control


def side_by_side(columns: list[list[w.Widget]]) -> w.Box:
    """Columns of controls that wrap under each other where the page is narrow."""
    stacks = [w.VBox(column, layout={"flex": "1 1 400px"}) for column in columns]
    return w.Box(stacks, layout={"flex_flow": "row wrap", "width": "100%", "max_width": f"{WIDTH}px"})


def spoken(text: str) -> str:
    """HTML of the sentences under a picture; a screen reader reads them out when they change."""
    style = f"font-size:14px;line-height:1.5;margin:4px 10px;max-width:{WIDTH - 20}px"
    return f'<p role="status" aria-live="polite" style="{style}">{html.escape(text)}</p>'


LONGEST = 180  # characters of a refusal


class Message(w.HTML):
    """The line of an explorer that says what was wrong. Empty while all is well, never silent when it is not."""

    def show(self, text: str, error: bool = False) -> None:
        """Show plain text, or nothing if it is empty. An error is read out at once by screen readers."""
        if not text:
            self.value = ""
            return
        colour, role, word = (VERMILION, "alert", "Not drawn. ") if error else (ORANGE, "status", "")
        self.value = (
            f'<div role="{role}" style="border-left:4px solid {colour};padding:2px 10px;line-height:1.5;'
            f'white-space:pre-wrap"><b>{word}</b>{html.escape(text)}</div>'
        )

    def guard(self, action: Callable[[], None]) -> None:
        """Run the body of a callback. A ValueError is for the reader to mend, so its text is shown; any other
        exception is ours, and its traceback is shown too. Jupyter would drop both without a trace.
        """
        try:
            action()
        except ValueError as e:
            text = str(e)  # may quote all that was typed
            text = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
            self.show(f"{text} The picture keeps the last values that worked.", error=True)
        except Exception:
            self.show("A fault of this explorer, please report it.\n" + traceback.format_exc(), error=True)

    def watch(self, controls: dict[str, w.Widget], react: Callable[[str], None]) -> None:
        """Call react(name), guarded, when the reader changes the value of a control. What `react` itself moves calls
        nothing, so that only the end of a change is drawn.
        """
        names, busy = {control: name for name, control in controls.items()}, False

        def changed(change) -> None:
            nonlocal busy
            if not busy:
                busy = True
                try:
                    self.guard(lambda: react(names[change.owner]))
                finally:  # also when the reader interrupts the kernel, which no guard catches
                    busy = False

        for control in controls.values():
            control.observe(changed, "value")


class OwnKeys(anywidget.AnyWidget):
    """Nothing to be seen. Keys pressed in the explorer that holds it are the explorer's: JupyterLab takes arrows,
    letters and Enter for its cells otherwise, so that a menu would not answer, and "x" on it would cut the cell.
    What was typed into a slider's read-out counts, or is put back, when the reader leaves it: ipywidgets means to do
    so, but waits for a "blur" that does not bubble.
    """

    _esm = """
    const own = box => {
      // on what has the focus, since JupyterLab looks there first
      box.addEventListener("focusin", e => e.target.setAttribute("data-lm-suppress-shortcuts", "true"));
      box.addEventListener("focusout", e => {
        if (e.target.matches(".widget-readout")) e.target.dispatchEvent(new FocusEvent("blur", {bubbles: true}));
      });
    };
    export default {
      render({ el }) {
        const find = frames => {
          const box = el.closest(".k3lite-explorer");
          if (box) own(box);
          else if (frames) requestAnimationFrame(() => find(frames - 1));  // not on the page yet
        };
        find(600);
      },
    };
    """


class Explorer(w.VBox):
    """What an explorer() returns: the box to display, and its parts by name so that cells and tests can drive it."""

    def __init__(
        self,
        title: str,
        controls: dict[str, w.Widget],
        figure: go.FigureWidget,
        text: w.HTML,
        message: Message,
        children: list[w.Widget],
    ):
        self.title, self.controls, self.figure, self.text, self.message = title, controls, figure, text, message
        super().__init__(
            children=[w.HTML(STYLE), OwnKeys(layout={"display": "none"}), *children],
            layout={"width": "100%", "overflow": "auto hidden"},
        )
        self.add_class("k3lite-explorer")

    def __repr__(self) -> str:
        # A notebook stores this as text/plain: without ids in it, the stored output is the same on every run.
        return f"Explorer({self.title!r})"
