"""A real JupyterLab on a copy of the course, and a page in it: what the browser tests drive.

The server has its own configuration, data, runtime and workspace folders and serves a copy, so that neither the
reader's Jupyter nor the checkout is touched.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, expect

REPO = Path(__file__).resolve().parents[2]
COPIED = ("notebooks", "widgets", "data", "k3lite")
SETTINGS = {
    # "full" windowing keeps cells that are off the screen out of the page, where no test could see them
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # an autosave or a "file changed" dialog in the middle of a test would be an accident
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}
CHROMIUM_FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
).split()
START_S, RUN_S = 90, 150  # a cold JupyterLab; a chapter (90 s by design) on a busy machine


def find_chromium() -> str | None:
    """Path of the browser: K3LITE_CHROMIUM, else the first usual name on the PATH; None if there is none."""
    named = os.environ.get("K3LITE_CHROMIUM")
    if named:
        return named
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class LabServer:
    """A running `jupyter lab` over a copy of the course. Use as a context manager."""

    def __init__(self, folder: Path):
        self.root = folder / "course"
        self.log = folder / "jupyter.log"
        self._folder = folder
        for name in COPIED:
            if (REPO / name).is_dir():
                ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
                shutil.copytree(REPO / name, self.root / name, ignore=ignore)
        (self.root / "notebooks").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> LabServer:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "IPYTHON"))}
        for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
            env[f"JUPYTER_{name}"] = str(self._folder / name.lower())
        env["JUPYTERLAB_WORKSPACES_DIR"] = str(self._folder / "workspaces")
        env["JUPYTERLAB_SETTINGS_DIR"] = str(self._folder / "settings")
        env["IPYTHONDIR"] = str(self._folder / "ipython")
        env["PYTHONPATH"] = str(self.root)  # the copy, before an editable install of the checkout
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        self.token = env["JUPYTER_TOKEN"] = secrets.token_hex(16)  # not on the command line, where others could read it
        for plugin, values in SETTINGS.items():
            path = self._folder / "settings" / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
            "--ServerApp.port_retries=0", f"--ServerApp.root_dir={self.root}",
            "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            "--LabApp.expose_app_in_browser=True",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=self.root)
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.api("GET", "status")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise RuntimeError(f"jupyter lab did not come up within {START_S} s:\n{self.log.read_text()[-3000:]}")

    def api(self, method: str, path: str):
        """One call of Jupyter's REST interface; returns the decoded JSON, or None for an empty answer."""
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def end_kernels(self) -> None:
        """End every kernel of this server: each holds some hundred MB once torch is imported."""
        for session in self.api("GET", "sessions"):
            self.api("DELETE", f"sessions/{session['id']}")

    def write_notebook(self, name: str, *cells: str) -> Path:
        """A new notebook in the copy, one code cell a string. Returns its path."""
        import nbformat

        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
        path = self.root / "notebooks" / name
        nbformat.write(nb, path)
        return path


@dataclass
class LabPage:
    """One notebook open in JupyterLab. `off_host` and `console_errors` collect from the first request on."""

    server: LabServer
    page: Page
    shots: Path
    off_host: list[str] = field(default_factory=list)
    console_errors: list[str] = field(default_factory=list)

    @classmethod
    def new(cls, server: LabServer, browser: Browser, shots: Path, **context_options) -> tuple[LabPage, BrowserContext]:
        """A page in a browser context of its own (close the context in the end)."""
        context = browser.new_context(viewport={"width": 1366, "height": 900}, **context_options)
        lab = cls(server, context.new_page(), shots)
        # What is not the server's is noted and cut off, so a notebook is tried as if there were no network.
        context.route(lambda url: not lab._ours(url), lab._cut_off)
        lab.page.on("websocket", lambda ws: lab._ours(ws.url) or lab.off_host.append(ws.url))
        lab.page.on("console", lambda m: m.type == "error" and lab.console_errors.append(m.text))
        lab.page.on("pageerror", lambda e: lab.console_errors.append(f"uncaught: {e}"))
        return lab, context

    def _cut_off(self, route: Route) -> None:
        if route.request.url not in self.off_host:  # the page may ask again for what it did not get
            self.off_host.append(route.request.url)
        route.abort()

    def _ours(self, url: str) -> bool:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("data", "blob", "about") or parts.netloc == self.server.url.removeprefix("http://")

    def open(self, notebook: str) -> LabPage:
        """Open notebooks/<notebook> with a fresh kernel and wait until the kernel has answered."""
        self.page.goto(
            f"{self.server.url}/lab/tree/notebooks/{urllib.parse.quote(notebook)}?reset&token={self.server.token}"
        )
        return self._wait_ready()

    def reload(self) -> LabPage:
        """Save the notebook, load the page again, and wait until the kernel, which lives on, has answered."""
        self.settle()
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        before = len(self.console_errors)
        self.page.reload(wait_until="commit")
        del self.console_errors[before:]  # what a page says while it is torn down, nobody can see
        return self._wait_ready()

    def settle(self) -> None:
        """Wait until the kernel has nothing to do and the page has taken in all that it sent.

        A figure's update that comes after its output was cleared is an error in the console (plotly's view stays
        subscribed), and no reader clears a cell within a tenth of a second of moving a slider. Several rounds: ipywidgets
        holds a control's next value back until the kernel is done with the one before.
        """
        self.page.evaluate(
            """async () => {
                const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                for (let i = 0; i < 3; i++) await kernel.requestExecute({code: '', silent: true}).done;
            }"""
        )

    def _wait_ready(self) -> LabPage:
        expect(self.page.locator(".jp-NotebookPanel .jp-Cell").first).to_be_visible(timeout=START_S * 1000)
        # "Idle" in the status bar can show before the kernel's channels are open, and a run then goes nowhere.
        self.page.evaluate(
            """async () => {
                const panel = window.jupyterapp.shell.currentWidget;
                await panel.context.ready;
                await panel.sessionContext.ready;
                await panel.sessionContext.session.kernel.info;
            }"""
        )
        self._wait_idle(START_S)
        return self

    def _wait_idle(self, seconds: float) -> None:
        status = self.page.locator("#jp-main-statusbar").get_by_text(re.compile(r"\| Idle"))
        expect(status).to_be_visible(timeout=seconds * 1000)

    def run_all(self) -> list[dict]:
        """Run > Run All Cells, and wait until it is over: every cell has its number, or one has failed.

        Returns the code cells as cells() does; errors_in() says what went wrong in them.
        """
        self._choose_run("Run All Cells")
        return self._wait_run()

    def restart_and_run_all(self) -> list[dict]:
        """Run > Restart Kernel and Run All Cells, say yes, and wait as run_all() does."""
        self._choose_run("Restart Kernel and Run All Cells…")
        self.page.locator(".jp-Dialog").get_by_role("button", name="Confirm Kernel Restart").click()
        return self._wait_run()

    def _choose_run(self, item: str) -> None:
        # A stored notebook comes with numbers and outputs; without them none can be taken for this run's.
        self.clear_outputs()
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name=item, exact=True).click()

    def clear_outputs(self) -> None:
        self.settle()
        self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")

    def _wait_run(self) -> list[dict]:
        self.page.wait_for_function(
            """() => {
                const panel = window.jupyterapp.shell.currentWidget;
                const prompts = [...panel.node.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
                if (prompts.some(p => p.textContent.includes('*'))) return false;
                const code = panel.context.model.toJSON().cells.filter(
                    c => c.cell_type === 'code' && [c.source].flat().join('').trim());
                return code.every(c => c.execution_count !== null)
                    || code.some(c => c.outputs.some(o => o.output_type === 'error'));
            }""",
            timeout=RUN_S * 1000,
        )
        self._wait_idle(RUN_S)
        return self.cells()

    def cells(self) -> list[dict]:
        """Code cells with source as JupyterLab holds them now: execution_count, outputs, source."""
        return [c for c in self.all_cells() if c["cell_type"] == "code" and "".join(c["source"]).strip()]

    def all_cells(self) -> list[dict]:
        """All cells, texts too."""
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.model.toJSON().cells")

    def run_cell(self, index: int) -> None:
        """Run one cell, counted among all from 0, and wait until it is over."""
        self.page.evaluate(
            """async index => {
                const app = window.jupyterapp;
                app.shell.currentWidget.content.activeCellIndex = index;
                await app.commands.execute('notebook:run-cell');
            }""",
            index,
        )

    def explorer(self, label: str) -> Locator:
        """The explorer that holds a control with this label."""
        return self.page.locator(".jp-OutputArea-output .k3lite-explorer").filter(has_text=label).first

    def shot(self, name: str, what: Locator | None = None) -> Path:
        """A picture of the page, or of one part of it, in the folder for screenshots."""
        self.shots.mkdir(parents=True, exist_ok=True)
        path = self.shots / f"{name}.png"
        (what or self.page).screenshot(path=str(path))
        return path


def errors_in(cells: list[dict]) -> list[str]:
    """What went wrong in a run: raised errors, text on stderr, and cells that were never reached."""
    wrong = []
    for i, cell in enumerate(cells):
        head = "".join(cell["source"]).strip().splitlines()[0]
        if cell["execution_count"] is None:
            wrong.append(f"code cell {i} was not run: {head}")
        for out in cell["outputs"]:
            if out["output_type"] == "error":
                wrong.append(f"code cell {i} raised {out['ename']}: {out['evalue']}")
            elif out.get("name") == "stderr":
                wrong.append(f"code cell {i} wrote to stderr: {''.join(out['text'])[:200]}")
    return wrong


def broken_images(page: Page) -> list[str]:
    """Addresses of the page's pictures that cannot be shown, those further down included."""
    return page.evaluate(
        """async () => {
            const images = [...document.images];
            images.forEach(i => i.loading = 'eager');
            await Promise.all(images.map(i => i.decode().catch(() => null)));
            return images.filter(i => !i.naturalWidth).map(i => i.src);
        }"""
    )
