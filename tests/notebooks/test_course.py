"""notebooks/course.py: a wrong answer is told what is wrong with it, and nothing a reader writes stops the chapter."""

import importlib.util

import pytest
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
