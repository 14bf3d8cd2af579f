"""Takes the course's pictures: `python tests/browser/pictures.py [EXPLORER ...]`, or `make pictures`.

Every explorer as it opens, from a JupyterLab, goes to docs/explorers (README's gallery and the site show them); every
page of the site, in pieces as high as a screen can show, goes to out/pages, to be looked at and not stored.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a file, Python finds its neighbours and not the course

from browser_lab import CHROMIUM_FLAGS, LabPage, LabServer, errors_in, find_chromium
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from book.build import build
from book.explorers import PICTURES, ROOT, entries

WIDTH = 760  # pixels of a stored picture
MOST_BYTES = 80_000
PIECE = 4000  # pixels of a page in one file


def small(picture: bytes, width: int = WIDTH, most: int = MOST_BYTES) -> bytes:
    """A screenshot as a PNG with a palette: as many colours as fit into `most` bytes. Raises ValueError if 16 do not."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    for colours in (128, 64, 32, 16):
        out = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        if out.tell() < most:
            return out.getvalue()
    raise ValueError(f"the picture has {out.tell():,} bytes even in 16 colours, wanted fewer than {most:,}")


def explorer_pictures(browser: Browser, names: list[str], scratch: Path) -> None:
    """Open each explorer by itself, and store its picture once its figure is drawn."""
    with LabServer(scratch) as server:
        for name in names:
            server.write_notebook(f"{name}.ipynb", f"from widgets.{name} import explorer\n\nexplorer()")
            lab, context = LabPage.new(server, browser, scratch)
            lab.page.set_viewport_size({"width": 1366, "height": 1600})  # so that the whole explorer is on the screen
            if wrong := errors_in(lab.open(f"{name}.ipynb").run_all()):
                raise ValueError(f"{name}: {wrong[0]}")
            box = lab.page.locator(".jp-OutputArea-output .k3lite-explorer").first
            box.locator(".main-svg").first.wait_for()
            box.evaluate("box => { box.style.width = 'fit-content'; }")  # no empty space on the right
            box.evaluate(
                "box => box.querySelectorAll('.modebar').forEach(m => m.remove())"
            )  # where the mouse happens to be
            write(PICTURES / f"{name}.png", small(box.screenshot()))
            context.close()
            server.end_kernels()


def page_pictures(browser: Browser, site: Path, folder: Path) -> None:
    """Every page of the site in pieces: NAME-1.png, NAME-2.png and so on, from the top."""
    context = browser.new_context(viewport={"width": 1366, "height": PIECE})
    page = context.new_page()
    for path in build(site):
        page.goto(path.as_uri())
        page.evaluate("() => document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
        page.wait_for_function(
            "() => [...document.querySelectorAll('.figure')].every(f => f.querySelector('.main-svg'))"
        )
        pieces = -(-page.evaluate("() => document.documentElement.scrollHeight") // PIECE)
        for i in range(pieces):
            page.evaluate(f"() => window.scrollTo(0, {i * PIECE})")
            write(folder / f"{path.stem}-{i + 1}.png", page.screenshot())
    context.close()


def write(path: Path, data: bytes) -> None:
    """Write under another name, then rename: a stop in between leaves no half picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)
    print(f"{path}: {len(data):,} bytes", flush=True)


def main(argv: list[str] | None = None) -> int:
    known = [e.name for e in entries()]
    parser = argparse.ArgumentParser(prog="pictures", description="Take the pictures of explorers and pages.")
    parser.add_argument(
        "names", nargs="*", metavar="EXPLORER", help=f"only these, and no pages; of: {', '.join(known)}"
    )
    args = parser.parse_args(argv)
    if strange := sorted(set(args.names) - set(known)):
        print(f"k3lite: no explorer {strange[0]}; there are: {', '.join(known)}", file=sys.stderr)
        return 1
    chromium = find_chromium()
    if chromium is None:
        print("k3lite: no chromium on the PATH; install one (Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    with sync_playwright() as p, tempfile.TemporaryDirectory(prefix="k3lite-pictures-") as scratch:
        browser = p.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        try:
            explorer_pictures(browser, args.names or known, Path(scratch))
            if not args.names:
                page_pictures(browser, Path(scratch) / "site", ROOT / "out" / "pages")
        except ValueError as e:
            print(f"k3lite: {e}", file=sys.stderr)
            return 1
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
