"""Runs in the kernel of a page under test (explorer_page.py sends this text there): what an explorer holds, as JSON.

An explorer is found by the id that the page shows it under; its controls go by their labels, as on the page.
"""

import json
import re
import time

import ipywidgets

changes: list[tuple[str, float]] = []  # label of a control that changed, and when, in ms since 1970


def _explorer(model_id: str):
    return ipywidgets.widgets.widget._instances[model_id]


def _named(box) -> dict:
    """Controls by label."""
    return {control.description: control for control in box.controls.values()}


def _watch(model_id: str) -> None:
    """Note from now on every change of a control's value."""
    for label, control in _named(_explorer(model_id)).items():
        if "value" in control.traits():
            control.observe(lambda _, label=label: changes.append((label, 1000 * time.time())), "value")


def _value(control):
    """What the page shows of a control: of a choice its text, of a button its words."""
    if isinstance(control, ipywidgets.Button):
        return control.description
    return control._options_labels[control.index] if "index" in control.traits() else control.value


def _numbers(values) -> list:
    """A trace's coordinates as the page gets them: a flat list of numbers to six digits, texts, and nulls."""
    if values is None:
        return []
    flat = []
    for v in values:
        if isinstance(v, (list, tuple)) or hasattr(v, "tolist") and getattr(v, "ndim", 0):
            flat += _numbers(v)
        else:
            v = v.item() if hasattr(v, "item") else v
            flat.append(float(f"{v:.6g}") if isinstance(v, (int, float)) and v == v else None if v != v else v)
    return flat


def _plain(text: str) -> str:
    """HTML as the words that a reader sees of it."""
    text = re.sub(r"<[^>]+>", "", text)
    for name, sign in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#x27;", "'"), ("&amp;", "&")):
        text = text.replace(name, sign)
    return " ".join(text.split())


def _state(model_id: str) -> dict:
    box = _explorer(model_id)
    return {
        "controls": {label: _value(control) for label, control in _named(box).items()},
        "handles": {
            label: control.index if "index" in control.traits() else control.value
            for label, control in _named(box).items()
            if "Slider" in type(control).__name__
        },
        "words": _plain(box.text.value),
        "message": _plain(box.message.value),
        "title": _plain(box.figure.layout.title.text or ""),
        "traces": [
            {axis: _numbers(trace[axis] if axis in trace else None) for axis in "xyz"} for trace in box.figure.data
        ],
    }


def state(model_id: str) -> str:
    return json.dumps(_state(model_id))


def again(model_id: str, label: str) -> str:
    """Call once more what a change of this control calls. Returns what that changed of the words and the picture."""
    before = _state(model_id)
    control = _named(_explorer(model_id))[label]
    control.notify_change(
        {"name": "value", "old": control.value, "new": control.value, "owner": control, "type": "change"}
    )
    after = _state(model_id)
    return json.dumps([part for part in ("words", "title", "traces") if before[part] != after[part]])


def since(when: float) -> str:
    """Changes of controls after a time (ms since 1970)."""
    return json.dumps([label for label, at in changes if at > when])
