"""Serves the explorers alone, each on a page of its own, through Voilà: `python -m book.apps` (or `make apps`).

Voilà's own templates ask a CDN for an icon font that no explorer uses; the templates here leave that out and add a
first page that shows all explorers. A page starts a Python of its own, which ends when the page is closed.
"""

from __future__ import annotations

import argparse
import html
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import nbformat

from book.explorers import ROOT, Entry, entries

PORT = 8866
# JupyterLab's other extensions only slow a page down
NEEDED = ("@jupyter-widgets/jupyterlab-manager", "anywidget", "@voila-dashboards/widgets-manager8")
TEMPLATES = Path(__file__).with_name("templates")


def notebook(entry: Entry) -> nbformat.NotebookNode:
    """A notebook that shows one explorer and nothing else."""
    title = nbformat.v4.new_markdown_cell(f"# {entry.title}\n\n{entry.about}\n\n[All explorers](/)")
    show = nbformat.v4.new_code_cell(f"from widgets.{entry.name} import explorer\n\nexplorer()")
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return nbformat.v4.new_notebook(cells=[title, show], metadata={"kernelspec": kernel})


def lay_out(folder: Path, shown: list[Entry]) -> None:
    """Write what Voilà serves: apps/ with notebooks and pictures, and its templates under voila/templates/k3lite."""
    apps, templates = folder / "apps", folder / "voila" / "templates" / "k3lite"
    apps.mkdir(parents=True)
    shutil.copytree(TEMPLATES, templates)
    for entry in shown:
        nbformat.write(notebook(entry), apps / f"{entry.name}.ipynb")
        if entry.picture.exists():
            shutil.copy(entry.picture, apps)
    page = (templates / "tree-lab.html").read_text().replace("<!-- explorers -->", "\n".join(map(tile, shown)))
    (templates / "tree-lab.html").write_text(page)


def tile(entry: Entry) -> str:
    """One explorer on the first page."""
    words = f"<b>{html.escape(entry.title)}</b><br>{html.escape(entry.about)}"
    image = f'<img src="/voila/files/{entry.name}.png" alt="" loading="lazy">' if entry.picture.exists() else ""
    return f'<li><a href="/voila/render/{entry.name}.ipynb">{image}{words}</a></li>'


def refuse_taken(port: int) -> None:
    """Raise ValueError if no server can listen on this port of this machine."""
    if not 1 <= port <= 65535:
        raise ValueError(f"port: got {port}, wanted a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the server will: one just ended is no hindrance
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            raise ValueError(f"port {port} is not open to you; choose one above 1023: make apps PORT={PORT}") from None
        except OSError:
            other = port + 1 if port < 65535 else PORT
            raise ValueError(f"port {port} is taken; choose another one: make apps PORT={other}") from None


def serve(folder: Path, port: int, browser: bool) -> None:
    """Run Voilà over a folder that lay_out() wrote, until it is interrupted."""
    # before voila is imported, since jupyter reads its paths then; the kernels inherit both
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("JUPYTER_PATH")]))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    from voila.app import Voila

    settings = [
        str(folder / "apps"), "--template=k3lite", "--Voila.ip=127.0.0.1", f"--port={port}", "--Voila.port_retries=0",
        r"--VoilaConfiguration.file_allowlist=[a-z0-9_]+\.png", *(f"--VoilaConfiguration.extension_allowlist={x}" for x in NEEDED), "--Voila.log_level=ERROR",
    ]  # fmt: skip
    Voila.launch_instance(argv=settings if browser else [*settings, "--no-browser"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m book.apps", description="Serve the explorers alone.")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    args = parser.parse_args(argv)
    try:
        refuse_taken(args.port)
    except ValueError as e:
        print(f"k3lite: {e}", file=sys.stderr)
        return 1
    shown = entries()
    print(f"k3lite: {len(shown)} explorers on http://127.0.0.1:{args.port} (Ctrl-C ends it)", flush=True)
    with tempfile.TemporaryDirectory(prefix="k3lite-apps-") as folder:
        lay_out(Path(folder), shown)
        serve(Path(folder), args.port, not args.no_browser)
    return 0


if __name__ == "__main__":
    sys.exit(main())
