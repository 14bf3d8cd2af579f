"""Measures how long a reader waits: `python tests/browser/latency.py [EXPLORER ...]`.

    first figure   from opening the first notebook, with a fresh kernel and all cells run at once, to its first figure
    slider         from the press of an arrow key to the frame that shows the new picture, in the browser

A press of a button stands in where an explorer computes nothing before one is pressed. For each explorer the control
with the slowest median is printed. The house asserts no times in tests, because they are the machine's too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a file, Python finds its neighbours and not the course

from browser_lab import CHROMIUM_FLAGS, LabPage, LabServer, find_chromium
from explorer_page import WAIT_MS, ExplorerPage, Shown
from playwright.sync_api import Browser, Locator, sync_playwright

from book.explorers import chapters, entries

LIVE = ("attention_map", "decay", "depth", "needle_lab", "training")  # run a model at each answer: no promise for them
PRESSED = {"state_stepper": "Decay, write, read", "needle_lab": "New document"}
# Resolves with the milliseconds from act() to the frame in which the figure has been drawn; null if it is not within 5 s.
TIMED = """async ([box, target, key]) => {
    const figure = box.querySelector('.js-plotly-plot');
    target.focus();
    const began = performance.now();
    return await new Promise(resolve => {
        const done = () => requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - began)));
        const late = setTimeout(() => { figure.removeListener('plotly_afterplot', drawn); resolve(null); }, 5000);
        const drawn = () => { clearTimeout(late); figure.removeListener('plotly_afterplot', drawn); done(); };
        figure.on('plotly_afterplot', drawn);
        if (key) target.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
        else target.click();
    });
}"""


def first_figure(browser: Browser, server: LabServer) -> tuple[str, float]:
    """The first notebook, and the seconds until it shows a figure that its own kernel has made."""
    name = chapters()[0].name
    lab, context = LabPage.new(server, browser, server.root)
    began = time.perf_counter()
    lab.open(name)
    lab.page.evaluate(
        """() => {
            const commands = window.jupyterapp.commands;
            return commands.execute('notebook:clear-all-cell-outputs').then(() => { commands.execute('notebook:run-all-cells'); });
        }"""
    )
    lab.page.locator(".jp-OutputArea-output .main-svg").first.wait_for(timeout=WAIT_MS * 4)
    seconds = time.perf_counter() - began
    context.close()
    server.end_kernels()
    return name, seconds


def answers(shown: Shown, target: Locator, moves: int, keys: tuple[str, ...]) -> list[float]:
    """Milliseconds of each move, to and fro. What draws nothing (a slider at its end) counts for nothing."""
    times = []
    for i in range(moves):
        key = keys[i % (2 * len(keys)) // len(keys)] if keys else None
        handles = [shown.box.element_handle(), target.element_handle()]
        times.append(shown.at.lab.page.evaluate(TIMED, [*handles, key]))
    return [t for t in times if t is not None]


def slowest(shown: Shown, name: str, moves: int) -> tuple[str, list[float]]:
    """The control of an explorer that takes longest in the median, and its times."""
    rows = []
    if name in PRESSED:
        button = shown.box.get_by_role("button", name=PRESSED[name], exact=True)
        rows.append((PRESSED[name], answers(shown, button, moves, ())))
    else:
        for label, slider in shown.controls(".widget-hslider") + shown.controls(".widget-vslider")[:1]:
            handle = slider.locator(".noUi-handle")
            value = shown.page()["handles"][label]
            handle.press("ArrowLeft")
            first = "ArrowRight" if shown.settle()["handles"][label] != value else None
            keys = ("ArrowLeft", "ArrowRight") if first else ("ArrowRight", "ArrowLeft")
            rows.append((label, answers(shown, handle, moves, keys)))
    rows = [(label, times) for label, times in rows if times]
    return max(rows, key=lambda row: statistics.median(row[1]), default=("nothing is drawn by a slider", []))


def main(argv: list[str] | None = None) -> int:
    known = [e.name for e in entries()]
    parser = argparse.ArgumentParser(prog="latency", description="Measure how long a reader waits.")
    parser.add_argument("names", nargs="*", metavar="EXPLORER", help=f"only these; of: {', '.join(known)}")
    parser.add_argument("--moves", type=int, default=20, help="of each slider")
    args = parser.parse_args(argv)
    if strange := sorted(set(args.names) - set(known)):
        print(f"k3lite: no explorer {strange[0]}; there are: {', '.join(known)}", file=sys.stderr)
        return 1
    if (chromium := find_chromium()) is None:
        print("k3lite: no chromium on the PATH; install one (Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    with sync_playwright() as p, tempfile.TemporaryDirectory(prefix="k3lite-latency-") as scratch:
        browser = p.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        with LabServer(Path(scratch)) as server:
            print(f"load of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
            if not args.names:
                print(
                    "first figure of {}: {:.1f} s after opening it".format(*first_figure(browser, server)), flush=True
                )
            lab, context = LabPage.new(server, browser, Path(scratch))
            page = ExplorerPage(lab, known)
            print(f"{'explorer':<16}{'slowest control':<34}{'moves':>6}{'median':>10}{'worst':>10}   (milliseconds)")
            for name in args.names or [n for n in known if n != "training"]:
                label, times = slowest(page.show(name), name, args.moves)
                figures = f"{statistics.median(times):>10.0f}{max(times):>10.0f}" if times else ""
                live = "   runs a model" if name in LIVE else ""
                print(f"{name:<16}{label:<34}{len(times):>6}{figures}{live}", flush=True)
            context.close()
            server.end_kernels()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
