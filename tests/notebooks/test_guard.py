"""The stored notebooks are fit to be compared by nbval, and the guard that says so catches each fault."""

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_guard import NOTEBOOKS, faults, listing, package_names, sanitize_patterns

STORED = sorted(NOTEBOOKS.glob("*.ipynb"))


# ---- the notebooks of the course


def test_there_are_notebooks():
    assert STORED, f"no notebook in {NOTEBOOKS}"


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.stem)
def test_notebook_is_fit_to_compare(path):
    assert faults(path) == []


@pytest.mark.parametrize("name", ["ignored_outputs.json", "long_cells.json"])
def test_exceptions_are_for_notebooks_that_exist(name):
    assert set(listing(name)) <= {p.name for p in STORED}


def test_sanitizing_changes_only_widget_reprs():
    """What a cell printed is compared as it stands; only the text form of a widget may be touched."""
    touched = []
    for path in STORED:
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", []):
                is_widget = "application/vnd.jupyter.widget-view+json" in output.get("data", {})
                texts = [output.get("text", ""), *(v for v in output.get("data", {}).values() if isinstance(v, str))]
                if any(sanitized(t) != t for t in texts) and not is_widget:
                    touched.append(f"{path.name}: cell {cell.id!r}")
    assert touched == []


# ---- the guard itself


def cell(source="print(1)", count=1, outputs=None, cell_id="one", tags=()):
    outputs = [new_output("stream", name="stdout", text="1\n")] if outputs is None else outputs
    metadata = {"tags": list(tags)} if tags else {}
    return new_code_cell(source, id=cell_id, execution_count=count, outputs=outputs, metadata=metadata)


KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}


@pytest.fixture
def check(tmp_path):
    """Write a notebook made of the given cells and return the guard's faults."""

    def run(*cells, metadata=None, ignored=None, long_cells=None):
        path = tmp_path / "x.ipynb"
        nbformat.write(new_notebook(cells=list(cells), metadata=KERNEL if metadata is None else metadata), path)
        by_name = [{path.name: reasons or {}} for reasons in (ignored, long_cells)]
        return faults(path, *by_name)

    return run


def test_sound_notebook_has_no_fault(check):
    blank = cell("", None, [], "blank")
    assert check(new_markdown_cell("# Title"), cell(), blank, cell("x = 2", 2, [], "two")) == []


def test_cell_never_executed(check):
    assert check(cell(count=None)) == ["cell 'one': execution_count None, wanted 1"]


def test_cells_executed_out_of_order(check):
    found = check(cell(count=2), cell(count=1, cell_id="two"))
    assert found == ["cell 'one': execution_count 2, wanted 1", "cell 'two': execution_count 1, wanted 2"]


def test_blank_cell_executed(check):
    assert check(cell("  ", 1, [])) == ["cell 'one': execution_count 1, wanted None"]


def test_stored_error(check):
    error = new_output("error", ename="ValueError", evalue="bad", traceback=[])
    assert check(cell("1", outputs=[error])) == ["cell 'one': stored error ValueError"]


def test_stored_stderr(check):
    warning = new_output("stream", name="stderr", text="UserWarning: old\n")
    assert check(cell(outputs=[warning])) == ["cell 'one': stored stderr 'UserWarning: old\\n'"]


def test_time_stamps(check):
    stamped = cell()
    stamped.metadata["execution"] = {"iopub.execute_input": "2026-11-29T00:00:00Z"}
    assert check(stamped) == ["cell 'one': holds execution time stamps"]


def test_widget_state(check):
    assert "metadata.widgets" in check(cell(), metadata={**KERNEL, "widgets": {"state": {}}})[0]


def test_too_large(check):
    found = check(cell(outputs=[new_output("stream", name="stdout", text="1" * 300_000)]))
    assert len(found) == 1 and found[0].endswith("the limit is 300,000")


@pytest.mark.parametrize("metadata", [{"kernelspec": {"name": "my-env", "display_name": "Mine"}}, {}])
def test_foreign_kernel(check, metadata):
    name = metadata.get("kernelspec", {}).get("name")
    assert check(cell(), metadata=metadata) == [f"kernelspec {name!r}, wanted 'python3'"]


@pytest.mark.parametrize(
    "marked",
    [
        cell(tags=["nbval-ignore-output"]),
        cell("# NBVAL_IGNORE_OUTPUT\nprint(1)"),
        cell("    #PYTEST_VALIDATE_IGNORE_OUTPUT\nprint(1)".strip()),
    ],
    ids=["tag", "comment", "old-comment"],
)
def test_ignored_output_must_be_listed_with_a_reason(check, marked):
    unlisted = ["cell 'one' has its output ignored and is not in ignored_outputs.json"]
    assert check(marked) == unlisted
    assert check(marked, ignored={"one": " "}) == ["ignored_outputs.json gives no reason for cell 'one'"]
    assert check(marked, ignored={"one": "holds seconds"}) == []


@pytest.mark.parametrize("name", ["one", "gone"])
def test_nothing_is_listed_that_is_not_there(check, name):
    wanted = [f"ignored_outputs.json lists cell {name!r}, but no such cell has its output ignored"]
    assert check(cell(), ignored={name: "holds seconds"}) == wanted


@pytest.mark.parametrize("mark", ["nbval-skip", "raises-exception", "nbval-raises-exception"])
def test_a_cell_may_not_be_skipped_or_raise(check, mark):
    wanted = f"cell 'one': {mark} is not allowed; a chapter runs top to bottom"
    assert check(cell(tags=[mark])) == [wanted]
    assert check(cell(f"# {mark.upper().replace('-', '_')}\nprint(1)")) == [wanted]


@pytest.mark.parametrize(
    "source",
    [
        "def cache_bytes(c, tokens):\n    return 0",
        "class K3Config:\n    pass",
        "if True:\n    def cache_bytes():\n        pass",
        "cache_bytes = lambda c: 0",
    ],
    ids=["def", "class", "nested", "lambda"],
)
def test_package_function_defined_again(check, source):
    found = check(cell(source, outputs=[]))
    assert len(found) == 1 and re.search(r"defines \w+, which k3lite/(budget|config)\.py already has", found[0])


def test_methods_and_own_names_are_free(check):
    own = "class Mine:\n    def cache_bytes(self):\n        return 0\ndef my_cache_bytes():\n    pass"
    assert check(cell(own, outputs=[]), cell("%pwd", 2, [], "magic")) == []


def test_package_names_are_read_from_the_source():
    names = package_names()
    assert names["cache_bytes"] == "k3lite/budget.py" and names["K3Config"] == "k3lite/config.py"
    assert "preset" not in names and not [n for n in names if n.startswith("_")]


def test_long_cell_must_be_listed(check):
    long, limit = ("\n".join(f"x{i} = {i}" for i in range(n)) for n in (16, 15))
    assert check(cell(limit, outputs=[])) == []
    assert check(cell(long, outputs=[])) == ["cell 'one' has more than 15 lines and is not in long_cells.json"]
    assert check(cell(long, outputs=[]), long_cells={"one": "one table"}) == []
    assert check(cell(), long_cells={"one": "one table"}) == [
        "long_cells.json lists cell 'one', but no such cell has more than 15 lines"
    ]


def test_not_python(check):
    assert check(cell("x = = 1", outputs=[])) == ["cell 'one': not Python (invalid syntax)"]


def test_cell_id_used_twice(check, tmp_path):
    assert check(cell(), cell(count=2, cell_id="two")) == []
    path = tmp_path / "x.ipynb"
    path.write_text(path.read_text().replace('"two"', '"one"'))
    with pytest.warns(nbformat.warnings.DuplicateCellId):
        assert faults(path, {}, {}) == ["cell id 'one' is used twice"]


def test_dead_link(check, tmp_path):
    (tmp_path / "there.md").touch()
    nbformat.write(new_notebook(cells=[new_markdown_cell("# A b\n## C")]), tmp_path / "words.ipynb")
    sound = "[a](there.md#part) [b](https://arxiv.org/abs/1) [c](#here) [d](words.ipynb#A-b) [e](words.ipynb#C)"
    assert check(new_markdown_cell(sound), cell()) == []
    links = new_markdown_cell("[a](gone.ipynb) [b](words.ipynb#B)", id="links")
    assert check(links, cell()) == ["cell 'links': dead link gone.ipynb", "cell 'links': words.ipynb has no heading B"]


# ---- the sanitizer


def sanitized(text: str) -> str:
    for regex, replacement in sanitize_patterns():
        text = re.sub(regex, replacement, text)
    return text


def test_sanitizer_covers_what_differs_between_two_runs():
    trace = "FigureWidget({'data': [{'uid': '%s', 'y': [1.5, 2]}]})"
    one, two = trace % "5cf78157-034e-4adc-bb24-d1bb6d36c78c", trace % "0acd9d1e-95b3-4be6-9f31-4ab2a64e9d0c"
    assert sanitized(one) == sanitized(two) and "[1.5, 2]" in sanitized(one)
    assert sanitized("VBox(children=(IntSlider(3), 'uid': '5cf7…") == "VBox(children=(IntSlider(3), 'uid': '-'"
    assert sanitized("/tmp/ipykernel_81/332.py:3: x") == "ipykernel.py:3: x"


@pytest.mark.parametrize(
    "text", ["27.00 GiB", "5,461 tokens", "VBox(children=(IntSlider(value=3),))", "'uid': 3", "{'y': [0.25]}"]
)
def test_sanitizer_leaves_numbers_alone(text):
    assert sanitized(text) == text
