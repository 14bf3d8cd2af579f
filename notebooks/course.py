"""What every chapter uses: set a guess beside the result, check an exercise, show lines of k3lite, draw a figure.

`compare` and `check` print and never raise, so that a chapter runs to its end with no exercise solved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from IPython.display import Markdown

from widgets import common

ROOT = Path(__file__).resolve().parents[1]
CLOSE = 0.1  # a guess this near, relative to the result, counts as close
FP32 = 1e-5  # relative: an answer that was computed in fp32 is right. Whole numbers (bytes, tokens) must be exact


def compare(guess: float | None, result: float, unit: str = "", digits: int = 1) -> None:
    """Print a guess beside the result. None stands for a guess not made."""
    shown = f"{result:,.{digits}f} {unit}".rstrip()
    if guess is None:
        print(f"Result: {shown}. No guess yet (write a number in place of None, and run both cells again).")
        return
    off = guess - result
    verdict = "close" if abs(off) <= CLOSE * abs(result) else "too high" if off > 0 else "too low"
    print(f"Result: {shown}. Your guess: {guess:,} {unit}".rstrip() + f" ({verdict}).")


def check(answer: Any, wanted: Any, hints: Mapping[float, str] | None = None, otherwise: str = "") -> None:
    """Print `passed`, or `not yet:` with what is still wrong.

    answer: the reader's value, or function of one argument.
    wanted: the right value; for a function {argument: right value}.
    hints: {wrong / right: what that mistake means}, for numbers.
    otherwise: what to say of any other wrong answer.
    """
    cases = wanted.items() if callable(answer) else [(None, wanted)]
    for argument, right in cases:
        try:
            got = answer(argument) if callable(answer) else answer
        except Exception as e:
            print(f"not yet: {_call(answer, argument)} raised {type(e).__name__}: {e}")
            return
        fault = _fault(got, right, hints or {}, otherwise)
        if fault:
            where = f"{_call(answer, argument)}: " if callable(answer) else ""
            print(f"not yet: {where}{fault}")
            return
    print("passed")


def source(thing: Callable) -> Markdown:
    """The lines of a function or class as they stand in the package, with their file."""
    thing = inspect.unwrap(thing)  # a decorator like torch.no_grad() would be shown instead
    file = Path(inspect.getsourcefile(thing)).resolve()
    name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
    return Markdown(f"`{name}`\n\n```python\n{inspect.getsource(thing).rstrip()}\n```")


def as_tensor(answer: Any) -> torch.Tensor:
    """An answer in any form that holds its numbers, fp64: a tensor of any dtype, a number, or lists of either."""
    if isinstance(answer, Sequence):
        return torch.stack([as_tensor(part) for part in answer]) if answer else torch.zeros(0, dtype=torch.float64)
    return torch.as_tensor(answer, dtype=torch.float64)


def named_mistake(got: Any, right: Any, mistakes: Mapping[str, Any], within: float = 1e-5) -> str | None:
    """ "right", the name of the known mistake whose numbers `got` has, or what else it is; None for no answer.

    For `check`, with answers that are tensors: have the function return this, and want "right". An answer in fp32 may
    be right; within: the largest difference.
    """
    if got is None:
        return None
    got = as_tensor(got).flatten()
    for name, numbers in {"right": right, **mistakes}.items():
        wanted = as_tensor(numbers).flatten()
        if got.shape == wanted.shape and torch.allclose(got, wanted, rtol=0, atol=within):
            return name
    numbers = f": {[round(x, 4) for x in got.tolist()]}" if got.numel() <= 8 else ""
    return f"something else, {got.numel()} number(s){numbers}"


# ---- random numbers and figures


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for one measurement."""
    return torch.Generator().manual_seed(seed)


def mean_sd(x: torch.Tensor, digits: int = 2) -> str:
    """Mean and standard deviation over independent draws, as text."""
    return f"{float(x.mean()):.{digits}f} ± {float(x.std()):.{digits}f}"


def named(title: str, **settings: Any) -> dict:
    """Settings of an axis with a title."""
    return {"title": {"text": title, "font": {"size": 13}, "standoff": 12}, "showgrid": False} | settings


def drawing(traces: Sequence, height: int, finding: str, axes: Mapping[str, dict], **parts: Any) -> go.Figure:
    """A figure in the course's look under a title that says what it shows; the rest as in `common.layout`."""
    title = {"text": f"<b>{finding}</b>", "x": 0, "xref": "paper"}
    return go.Figure(traces, common.layout(height, axes, **{"title": title, "margin": {"t": 60, "l": 90}} | parts))


def bars(x: Sequence, runs: Sequence[torch.Tensor], mode: str = "markers", **look: Any) -> go.Scatter:
    """Dots with error bars: mean and standard deviation of each run over its draws, to three decimals."""
    y, sd = ([round(float(f(r)), 3) for r in runs] for f in (torch.mean, torch.std))
    return go.Scatter(x=x, y=y, error_y={"array": sd, "thickness": 1.5}, mode=mode, **look)


def _call(function: Callable, argument: Any) -> str:
    shown = f"{argument:_}" if isinstance(argument, int) else repr(argument)
    return f"{getattr(function, '__name__', 'your function')}({shown})"


def _fault(got: Any, right: Any, hints: Mapping[float, str], otherwise: str) -> str:
    """What is wrong with one answer, or an empty string."""
    if got is None or got is ...:
        return "nothing there yet. " + otherwise if otherwise else "nothing there yet."
    if isinstance(right, str) and isinstance(got, str):  # a mistake that the check has named
        return "" if got == right else f"{got}. {otherwise}".rstrip()
    if isinstance(right, bool) or not isinstance(right, (int, float)):
        return "" if got == right else otherwise or f"got {got!r}."
    if hasattr(got, "item") and getattr(got, "ndim", 1) == 0:
        got = got.item()  # a tensor or array with one number
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return f"got {got!r}, wanted a number."
    if abs(got - right) <= (1e-6 if isinstance(right, int) else FP32 * abs(right)):
        return ""
    for factor, hint in hints.items():
        if abs(got - right * factor) <= FP32 * abs(right * factor):
            return hint
    size = "too large" if got > right else "too small"
    return f"got {got:,}, which is {size}." + (f" {otherwise}" if otherwise else "")
