"""The explorers alone, served by `make apps`, in Chromium: the first page shows all, and one answers the keyboard."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.absent import absent

if missing := [tool for tool in ("playwright", "voila") if importlib.util.find_spec(tool) is None]:
    absent(f"{missing[0]} is not installed: pip install -e '.[test,site]'")
from browser_lab import broken_images
from playwright.sync_api import expect

from book import apps
from book.explorers import ROOT, entries

START_S = 150  # a Python that imports torch and plotly, on a busy machine
pytestmark = pytest.mark.timeout(400)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def served(browser, tmp_path_factory):
    """Address of a running server. After `browser`, so that nothing starts where no browser is."""
    port, log = free_port(), tmp_path_factory.mktemp("apps") / "log"
    command = [sys.executable, "-m", "book.apps", "--port", str(port), "--no-browser"]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(address, timeout=START_S).close()
                break
            except (ConnectionError, urllib.error.URLError):
                assert process.poll() is None, log.read_text()
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def page(browser, served):
    """A page; after the test nothing may have been asked of anybody else, and no script may have failed.

    Voilà was built with an older JupyterLab than ours and warns of it in the console; that is not counted.
    """
    context = browser.new_context(viewport={"width": 1366, "height": 900})
    page, wrong = context.new_page(), []
    ours = (served, served.replace("http", "ws"), "data:", "blob:")
    page.on("request", lambda r: r.url.startswith(ours) or wrong.append(r.url))
    page.on("pageerror", lambda e: wrong.append(f"uncaught: {e}"))
    page.on("console", lambda m: m.type == "error" and wrong.append(m.text))
    yield page
    context.close()
    assert wrong == []


def test_the_first_page_shows_every_explorer(page, served):
    page.goto(served)
    links = page.locator("main a, ul a")
    assert [link.get_attribute("href") for link in links.all()] == [f"/voila/render/{e.name}.ipynb" for e in entries()]
    assert broken_images(page) == []


def test_an_explorer_answers_the_keyboard(page, served):
    page.goto(served)
    page.goto(f"{served}/voila/render/cache_explorer.ipynb", timeout=START_S * 1000)
    slider = page.locator(".widget-hslider", has_text="Context length (tokens)")
    expect(slider).to_be_visible(timeout=START_S * 1000)
    expect(page.locator(".k3lite-explorer .scatterlayer path.js-line").first).to_be_attached(timeout=60_000)
    readout, title = slider.locator(".widget-readout"), page.locator(".k3lite-explorer .gtitle").first
    start, said = readout.inner_text(), title.text_content()
    slider.locator(".noUi-handle").focus()
    for _ in range(4):
        slider.locator(".noUi-handle").press("ArrowLeft")
    expect(readout).not_to_have_text(start, timeout=30_000)
    expect(title).not_to_have_text(said, timeout=30_000)


def test_a_port_that_is_taken_is_named(capsys):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        assert apps.main(["--port", str(port), "--no-browser"]) == 1
    assert f"port {port} is taken; choose another one: make apps PORT=" in capsys.readouterr().err
    assert apps.main(["--port", "0"]) == 1 and "wanted a number from 1 to 65535" in capsys.readouterr().err


def test_what_is_served_shows_one_explorer_each(tmp_path: Path):
    apps.lay_out(tmp_path / "course", entries())
    names = sorted(p.stem for p in (tmp_path / "course" / "apps").glob("*.ipynb"))
    assert names == sorted(e.name for e in entries())
