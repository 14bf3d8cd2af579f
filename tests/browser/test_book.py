"""The static site in Chromium, opened as files: figures alive, search, formulas, and nothing asked of anybody."""

from __future__ import annotations

import importlib.util

import pytest

from tests.absent import absent

if missing := [tool for tool in ("playwright", "latex2mathml") if importlib.util.find_spec(tool) is None]:
    absent(f"{missing[0]} is not installed: pip install -e '.[test,site]'")
from browser_lab import broken_images
from playwright.sync_api import expect

from book.build import build
from book.explorers import chapters

PAGES = ["index.html", *(p.stem + ".html" for p in chapters())]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "book"
    build(folder)
    return folder


@pytest.fixture
def opened(browser, site):
    """open(name) -> a page of the site; after the test nothing may have been asked for outside of it, or gone wrong."""
    context = browser.new_context(viewport={"width": 1366, "height": 900})
    page, wrong = context.new_page(), []
    page.on("request", lambda r: r.url.startswith((f"file://{site}/", "data:", "blob:")) or wrong.append(r.url))
    page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(m.text))
    page.on("pageerror", lambda e: wrong.append(f"uncaught: {e}"))

    def open_page(name: str):
        page.goto(f"file://{site}/{name}")
        return page

    yield open_page
    context.close()
    assert wrong == []


@pytest.mark.parametrize("name", PAGES)
def test_every_page_draws_its_figures(opened, site, name):
    page = opened(name)
    expect(page.locator("main h1").first).to_be_visible()
    figures = page.locator(".figure")
    assert figures.count() == (site / name).read_text().count('class="figure"')
    for i in range(figures.count()):
        expect(figures.nth(i).locator(".main-svg").first).to_be_attached()
        assert figures.nth(i).get_attribute("aria-label") != "figure"
    assert broken_images(page) == []


def test_a_figure_answers_the_mouse(opened):
    page = opened("05_the_delta_rule.html")
    figure = page.locator(".figure").first
    figure.scroll_into_view_if_needed()
    box = figure.locator(".xy .drag, .nsewdrag").first.bounding_box()
    before = page.evaluate("() => document.querySelector('.figure').layout.xaxis.range.slice()")
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.7, steps=5)
    page.mouse.up()
    page.wait_for_function(
        "before => String(document.querySelector('.figure').layout.xaxis.range) !== String(before)", arg=before
    )


def test_search_leads_to_the_section(opened):
    page = opened("index.html")
    page.get_by_label("Search").fill("half-life channel")
    hit = page.locator("#found a").first
    expect(hit).to_contain_text("KDA")
    hit.press("Enter")
    page.wait_for_url("**/06*_kda*.html*")
    page.get_by_label("Search").fill("xyzzyplugh")
    expect(page.locator("#found")).to_have_text("Nothing found.")


def test_previous_and_next_walk_through_all_pages(opened):
    page = opened(PAGES[0])
    for name in PAGES[1:]:
        page.locator("a[rel=next]").click()
        assert page.url.endswith("/" + name)
    assert page.locator("a[rel=next]").count() == 0
    for name in PAGES[-2::-1]:
        page.locator("a[rel=prev]").click()
        assert page.url.endswith("/" + name)


def test_formulas_are_drawn_by_the_browser(opened):
    page = opened("06_kda.html")
    formula = page.locator("main math[display=block]").first
    assert formula.bounding_box()["height"] > 10
    assert "$$" not in page.locator("main").inner_text()
