"""The glossary: in alphabetical order, every entry leads to a chapter, and every name of k3lite in it is there."""

import importlib
import re

import nbformat
import pytest
from notebook_guard import NOTEBOOKS

ENTRIES = {}
for cell in nbformat.read(NOTEBOOKS / "glossary.ipynb", as_version=4).cells:
    if cell.source.startswith("### "):
        head, _, text = cell.source.partition("\n")
        ENTRIES[head.removeprefix("### ")] = text


def test_entries_are_in_order():
    assert list(ENTRIES) == sorted(ENTRIES, key=lambda head: head.lower().replace("-", " "))


@pytest.mark.parametrize("head", ENTRIES)
def test_an_entry_leads_to_a_chapter_and_to_names_that_are_there(head):
    assert re.search(r"\[Chapter (\w+)\]\(\1_\w+\.ipynb\)", ENTRIES[head]), "leads to no chapter"
    for name, file in re.findall(r"\[([\w.]+)\]\(\.\./(k3lite/[\w/]+)\.py\)", ENTRIES[head]):
        module = file.replace("/", ".")
        thing = importlib.import_module(module)
        for part in f"k3lite.{name}".removeprefix(f"{module}.").split("."):
            thing = getattr(thing, part)


def test_every_entry_is_linked_from_a_chapter():
    text = "".join(path.read_text() for path in NOTEBOOKS.glob("[0-9]*.ipynb"))
    linked = set(re.findall(r"glossary\.ipynb#([^)\s\\\"]+)", text))
    assert {head.replace(" ", "-") for head in ENTRIES} == linked
