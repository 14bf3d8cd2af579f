"""The site from stored outputs: nothing lost, links that lead somewhere, and refusals that name what is wrong."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from tests.absent import absent

if missing := [tool for tool in ("latex2mathml", "nbconvert", "plotly") if importlib.util.find_spec(tool) is None]:
    absent(f"{missing[0]} is not installed: pip install -e '.[site]'")
from book import build, render
from book.explorers import NOTEBOOKS, by_cell, chapters, entries


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "book"
    build.build(folder)
    return folder


def notebook(folder, *cells):
    path = folder / "some.ipynb"
    path.write_text(json.dumps({"cells": list(cells)}))
    return path


def text(source):
    return {"cell_type": "markdown", "source": source, "metadata": {}, "id": "a"}


def code(source, **data):
    outputs = [{"output_type": "display_data", "data": data}] if data else []
    return {"cell_type": "code", "source": source, "metadata": {}, "id": "b", "outputs": outputs}


@pytest.mark.parametrize("path", chapters(), ids=lambda p: p.stem)
def test_every_stored_output_is_on_the_page(site, path):
    page = (site / f"{path.stem}.html").read_text()
    words = render.plain(page)
    for cell in json.loads(path.read_text())["cells"]:
        for out in cell.get("outputs", []):
            if out["output_type"] == "stream":
                assert " ".join("".join(out["text"]).split()) in words
    count = lambda kind: sum(  # noqa: E731
        kind in o.get("data", {}) for c in json.loads(path.read_text())["cells"] for o in c.get("outputs", [])
    )
    assert page.count('class="figure"') == count(render.PLOTLY)
    assert page.count('figure class="explorer"') == count(render.WIDGET)


def test_every_link_leads_to_a_file_and_an_anchor_that_is_there(site):
    pages = {p.name: p.read_text() for p in site.glob("*.html")}
    for name, page in pages.items():
        for target in re.findall(r'(?:href|src)="([^"]*)"', page):
            if target.startswith(("https://", "data:")):
                continue
            file, _, anchor = target.partition("#")
            assert not file or (site / file).is_file(), f"{name}: {target}"
            if anchor and (file or name).endswith(".html"):
                assert f'id="{anchor}"' in pages[file or name], f"{name}: {target}"


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="([^"]*)"', page.read_text())
        assert [x for x in loaded if "//" in x] == []
    assert "//" not in re.sub(r"/\*.*?\*/", "", (site / "book.css").read_text())


def test_every_section_can_be_found(site):
    rows = json.loads((site / "search.js").read_text().removeprefix("window.BOOK_SECTIONS = ").rstrip(";\n"))
    assert {r["url"].partition("#")[0] for r in rows} == {p.stem + ".html" for p in chapters()}
    assert all("<" not in r["title"] and r["text"] for r in rows)
    assert any("glossary.html#" in r["url"] for r in rows)


def test_a_formula_becomes_mathml_and_keeps_its_tex():
    drawn = render.markdown(r"with $\beta_t \le 1$ and" + "\n\n$$S_t = S_{t-1}$$\n")
    assert r'alttext="\beta_t \le 1"' in drawn and 'display="block"' in drawn and "$" not in drawn


def test_dollars_in_code_stay(tmp_path):
    assert "$HOME and $x" in render.plain(render.page(notebook(tmp_path, text("`$HOME and $x`"))).body)


@pytest.mark.parametrize(
    "cell, message",
    [
        (text(r"$x \nosuch y$"), r"some.ipynb, cell a: formula .* cannot be drawn: nothing is known of .nosuch"),
        (text(r"$\left( x$"), r"some.ipynb, cell a: formula .* cannot be drawn"),
        (code("x", **{"image/tiff": "..."}), "some.ipynb, cell b: an output of image/tiff has no form here"),
        (code("explorer()", **{render.WIDGET: {}}), "cell b: shows an explorer, and no import"),
        (
            code("from widgets.nowhere import explorer\nexplorer()", **{render.WIDGET: {}}),
            "cell b: no picture of the explorer nowhere; `make pictures` takes one",
        ),
    ],
)
def test_what_cannot_be_shown_is_named(tmp_path, cell, message):
    with pytest.raises(ValueError, match=message):
        render.page(notebook(tmp_path, cell))


def test_script_end_in_a_figure_stays_in_it(tmp_path):
    figure = {"data": [{"name": "</script><b>"}], "layout": {"title": {"text": "<b>A & B</b>"}}}
    page = render.page(notebook(tmp_path, code("f", **{render.PLOTLY: figure})))
    assert page.body.count("</script>") == 1 and 'aria-label="A &amp; B"' in page.body
    stored = re.search(r'json">(.*?)</script>', page.body)[1]
    assert json.loads(stored) == {"data": figure["data"], "layout": figure["layout"]}


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    assert build.main(["--out", str(tmp_path)]) == 1
    assert "holds something that is not a site" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_build_that_fails_leaves_the_old_site(site, tmp_path, monkeypatch):
    folder = tmp_path / "book"
    build.build(folder)
    monkeypatch.setattr(build, "search_index", lambda pages: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build.build(folder)
    assert (folder / "index.html").exists() and [p.name for p in tmp_path.iterdir()] == ["book"]


def test_pages_are_in_the_order_of_the_notebooks_own_links(site):
    """As "Next:" at the end of each says: 10a is read before 10. The glossary, to which none leads, is the last."""
    order = [p.stem for p in chapters()]
    assert set(order) == {p.stem for p in NOTEBOOKS.glob("*.ipynb")}
    assert order[0] == "00_start_here" and order[-3:] == ["10_k3_assembled", "10b_what_a_claim_is_worth", "glossary"]
    assert order.index("10a_precision") + 1 == order.index("10_k3_assembled")
    for here, after in zip(order, order[1:], strict=False):
        assert f'rel="next" href="{after}.html"' in (site / f"{here}.html").read_text()


def test_chapters_end_where_links_lead_in_a_circle_or_nowhere(tmp_path):
    for name, after in (("00_a", "02_c"), ("01_b", "no_such"), ("02_c", "00_a")):
        (tmp_path / f"{name}.ipynb").write_text(json.dumps({"cells": [text(f"Next: [x]({after}.ipynb)")]}))
    assert [p.stem for p in chapters(tmp_path)] == ["00_a", "02_c", "01_b"]
    assert chapters(tmp_path / "none") == []


def test_the_first_page_asks_each_chapter_s_whole_question(site):
    words = render.plain((site / "index.html").read_text())
    for path in chapters()[:-1]:
        bold = "".join(json.loads(path.read_text())["cells"][0]["source"]).split("**")[1]
        assert " ".join(bold.split()) in words, path.name


def test_source_on_show_is_coloured_like_code():
    assert '<div class="code">' in render.markdown("```python\ndef f(): pass\n```")


def test_explorers_are_found_in_every_form_of_import():
    cells = [
        code("from widgets.decay import compute, explorer\nexplorer(layer=2)"),
        code("from widgets import common, roofline\nmachine = roofline.explorer()"),
        code("explorer()"),
        text("explorer()"),
    ]
    assert by_cell(cells) == {0: "decay", 1: "roofline", 2: "roofline"}
    assert by_cell([code("explorer()")]) == {0: None}


def test_every_explorer_of_the_package_is_known():
    modules = {p.stem for p in (NOTEBOOKS.parent / "widgets").glob("*.py") if "\ndef explorer(" in p.read_text()}
    assert {e.name for e in entries()} == modules
    assert [e.name for e in entries()][0] == "cache_explorer"
