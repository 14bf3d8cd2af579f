"""Fixtures of the browser tests: one JupyterLab and one Chromium for the session, one page for a test.

Settings by environment: K3LITE_CHROMIUM (path of the browser), K3LITE_SCREENSHOTS (folder that keeps the pictures),
CI or K3LITE_STRICT (a missing browser fails instead of skipping).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.absent import absent


@pytest.fixture(scope="session")
def browser():
    """Chromium through Playwright. Skips with the reason where there is none, unless CI or K3LITE_STRICT is set."""
    from browser_lab import CHROMIUM_FLAGS, find_chromium
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if path is None:
        absent("no chromium on the PATH; install one (Debian: apt-get install chromium) or set K3LITE_CHROMIUM")
    with sync_playwright() as p:
        running = p.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def lab_server(browser, tmp_path_factory):
    """A JupyterLab on a copy of the course. After `browser`, so that nothing starts where no browser is."""
    from browser_lab import LabServer

    with LabServer(tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture
def lab(browser, lab_server, tmp_path):
    """An empty page (browser_lab.LabPage); its kernels end with the test."""
    from browser_lab import LabPage

    shots = Path(os.environ.get("K3LITE_SCREENSHOTS") or tmp_path / "screenshots")
    page, context = LabPage.new(lab_server, browser, shots)
    yield page
    context.close()
    lab_server.end_kernels()
