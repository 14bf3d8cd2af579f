"""notebooks/course.py: a wrong answer is told what is wrong with it, and nothing a reader writes stops the chapter."""

import importlib.util

import pytest
import torch
from notebook_guard import NOTEBOOKS

from k3lite import budget

spec = importlib.util.spec_from_file_location("course", NOTEBOOKS / "course.py")
course = importlib.util.module_from_spec(spec)
spec.loader.exec_module(course)


@pytest.fixture
def said(capsys):
    def run(function, *args, **kwargs):
        function(*args, **kwargs)
        return capsys.readouterr().out.strip()

    return run


@pytest.mark.parametrize(
    "guess, verdict",
    [(27, "close"), (29.7, "close"), (29.8, "too high"), (1, "too low"), (-5, "too low")],
)
def test_compare_sets_guess_beside_result(said, guess, verdict):
    assert said(course.compare, guess, 27.0, "GiB") == f"Result: 27.0 GiB. Your guess: {guess} GiB ({verdict})."


def test_compare_with_a_negative_result_and_without_a_guess(said):
    assert said(course.compare, 50, -321.5, "%") == "Result: -321.5 %. Your guess: 50 % (too high)."
    assert said(course.compare, -320, -321.5, "%").endswith("(close).")
    assert said(course.compare, None, 5461, "tokens", digits=0).startswith("Result: 5,461 tokens. No guess yet")


def test_check_passes_the_right_value_and_function(said):
    assert said(course.check, 5653, 5653) == "passed"
    assert said(course.check, lambda n: 3 * n, {1: 3, 4096: 12288}) == "passed"
    assert said(course.check, True, True) == "passed"
    assert said(course.check, 0.1 + 0.2, 0.3) == "passed"
    assert said(course.check, torch.tensor(1 / 3), 1 / 3) == "passed"  # fp32 is enough for what is not whole
    assert said(course.check, torch.tensor(5653), 5653) == "passed"
    assert said(course.check, 2_779_484_476_001, 2_779_484_476_000) != "passed"


def times_two(tokens):
    return 2 * tokens


@pytest.mark.parametrize(
    "answer, wanted, message",
    [
        (None, 5, "not yet: nothing there yet."),
        (..., 5, "not yet: nothing there yet."),
        (4, 5, "not yet: got 4, which is too small."),
        (6000, 5653, "not yet: got 6,000, which is too large."),
        ("five", 5, "not yet: got 'five', wanted a number."),
        (True, 1, "not yet: got True, wanted a number."),
        (False, True, "not yet: got False."),
        (times_two, {0: 0, 4096: 4096}, "not yet: times_two(4_096): got 8,192, which is too large."),
        (lambda: 1, {1: 1}, "not yet: <lambda>(1) raised TypeError:"),
        (lambda n: 1 / 0, {1: 1}, "not yet: <lambda>(1) raised ZeroDivisionError: division by zero"),
    ],
)
def test_check_says_what_is_wrong(said, answer, wanted, message):
    assert said(course.check, answer, wanted).startswith(message)


def test_hints_know_the_usual_mistakes(said):
    hints = {2: "MLA keeps one row, not keys and values."}
    assert said(course.check, times_two, {10: 10}, hints) == f"not yet: times_two(10): {hints[2]}"
    assert said(course.check, 30, 10, hints, otherwise="Count the layers.") == (
        "not yet: got 30, which is too large. Count the layers."
    )
    assert said(course.check, False, True, otherwise="still 27.4 GiB.") == "not yet: still 27.4 GiB."


def test_source_shows_the_package_and_names_its_file():
    shown = course.source(budget.expert_parameters).data
    assert shown.startswith("`k3lite/budget.py`\n\n```python\ndef expert_parameters(") and shown.endswith("\n```")


def test_a_known_mistake_is_named():
    known = {"the sign": [-1.0, -2.0], "the order": [2.0, 1.0]}
    assert course.named_mistake(None, [1, 2], known) is None
    assert course.named_mistake([1, 2 + 1e-9], [1, 2], known) == "right"
    assert course.named_mistake(torch.tensor([2.0, 1.0]), [1, 2], known) == "the order"
    assert course.named_mistake([1, 2.0005], [1, 2], known, within=1e-3) == "right"
    assert course.named_mistake([1, 2.0005], [1, 2], known) == "something else, 2 number(s): [1.0, 2.0005]"
    assert course.named_mistake([[1, 2, 3]], [1, 2], known).startswith("something else, 3 number(s)")
    assert course.named_mistake([[1], [2]], [1, 2], known) == "right"  # the shape is not asked for
    assert course.named_mistake([torch.tensor([1.0]), torch.tensor([2])], [1, 2], known) == "right"
    assert course.named_mistake([], [1, 2], known) == "something else, 0 number(s): []"


def test_bars_are_means_and_standard_deviations():
    drawn = course.bars([4, 8], [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])], name="sum")
    assert list(drawn.y) == [2, 2] and list(drawn.error_y.array) == [1.414, 0] and drawn.name == "sum"
    assert course.mean_sd(torch.tensor([1.0, 3.0])) == "2.00 ± 1.41"


def test_a_drawing_says_its_finding():
    figure = course.drawing([], 300, "It grows", {"xaxis": course.named("pairs", range=[0, 1])}, margin={"l": 10})
    assert figure.layout.title.text == "<b>It grows</b>" and figure.layout.height == 300
    assert figure.layout.xaxis.title.text == "pairs" and figure.layout.margin.l == 10
