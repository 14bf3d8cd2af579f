"""Builds the course as a static site, offline, from the outputs stored in the notebooks: `python -m book.build`.

The site asks for nothing outside itself, and works when its files are opened without a server: so the search index
is a script, not a file to fetch. Sphinx and Jupyter Book were weighed: both want MathJax and themes from a network or
a copy of them here, and neither shows a stored plotly figure without a plug-in.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import sys
from pathlib import Path

import plotly
from jinja2 import Environment, FileSystemLoader
from pygments.formatters import HtmlFormatter

from book import render
from book.explorers import ROOT, chapters, entries

STATIC = Path(__file__).with_name("static")
PLOTLY_JS = Path(plotly.__file__).with_name("package_data") / "plotly.min.js"


def build(folder: Path, root: Path = ROOT) -> list[Path]:
    """Write the site to `folder`, replacing one that is there, and return its pages.

    The old site stays until the new one is whole. Raises ValueError for a notebook that cannot be shown, and for a
    folder that holds something else.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "search.js").exists():
        raise ValueError(f"{folder} holds something that is not a site of this course; choose another folder")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        names = write(part, root)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return [folder / name for name in names]


def write(folder: Path, root: Path) -> list[str]:
    """All files of the site. Returns the names of its pages, the index first."""
    paths = chapters(root / "notebooks")
    pages = {path.stem + ".html": render.page(path, root / "docs" / "explorers") for path in paths}
    links = [(name, page.title) for name, page in pages.items()]
    env = Environment(loader=FileSystemLoader(STATIC), autoescape=True)
    template = env.get_template("page.html.j2")
    for i, (name, page) in enumerate(pages.items()):
        before = links[i - 1] if i else ("index.html", "Contents")
        after = links[i + 1] if i + 1 < len(links) else None
        text = template.render(page=page, chapters=links, here=name, before=before, after=after)
        (folder / name).write_text(text)
    index = render.Rendered("k3lite", contents(pages, entries(root)))
    (folder / "index.html").write_text(
        template.render(page=index, chapters=links, here="index.html", before=None, after=links[0])
    )
    copy(folder, root, {link for page in pages.values() for link in page.links})
    (folder / "search.js").write_text(search_index(pages))
    return ["index.html", *pages]


def contents(pages: dict[str, render.Rendered], explorers: list) -> str:
    """The first page: every chapter with its opening sentence, and the explorers."""
    rows = "".join(
        f'<li><a href="{name}">{html.escape(page.title)}</a><br>{html.escape(opening(page))}</li>'
        for name, page in pages.items()
    )
    tiles = "".join(
        f'<figure class="tile"><img src="explorers/{e.name}.png" alt="Picture of the {e.title} explorer" loading="lazy">'
        f"<figcaption>{html.escape(e.about)}</figcaption></figure>"
        for e in explorers
        if e.picture.exists()
    )
    return (
        "<h1>k3lite</h1><p>Build Kimi K3 small enough to hold, exact in every formula. These pages are the course's "
        "notebooks with their stored outputs; to run them, <code>make lab</code>.</p>"
        f'<ul class="contents">{rows}</ul><h2>Explorers</h2><p>They need Python: <code>make apps</code>.</p>'
        f'<div class="tiles">{tiles}</div>'
    )


def opening(page: render.Rendered) -> str:
    """The question under a chapter's title, which is in bold type; without one, the first sentence of the page."""
    first = re.match(r"\s*<section[^>]*>\s*<h1.*?</h1>\s*<p>(?:<strong>(.*?)</strong>)?", page.body, flags=re.DOTALL)
    if first and first[1]:
        return render.plain(first[1])
    text = page.sections[0][2]
    return re.split(r"(?<=[.?]) ", text, maxsplit=1)[0]


def copy(folder: Path, root: Path, linked: set[str]) -> None:
    """Style, scripts, plotly.js, pictures, and the files of the repository that pages link to."""
    for name in ("book.css", "book.js"):
        shutil.copy(STATIC / name, folder)
    light, dark = (HtmlFormatter(style=s).get_style_defs(".code") for s in ("default", "github-dark"))
    (folder / "code.css").write_text(f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n")
    shutil.copy(PLOTLY_JS, folder / "plotly.js")
    pictures = root / "docs" / "explorers"
    if pictures.is_dir():
        shutil.copytree(pictures, folder / "explorers")
    for name in sorted(linked):
        if not (root / name).is_file():
            raise ValueError(f"a notebook links to {name}, which is not a file of the repository")
        (folder / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / "files" / name)


def search_index(pages: dict[str, render.Rendered]) -> str:
    """One entry a section: where it is, what it is called, its words."""
    rows = [
        {"url": f"{name}#{anchor}" if anchor else name, "page": page.title, "title": heading, "text": text}
        for name, page in pages.items()
        for anchor, heading, text in page.sections
    ]
    return "window.BOOK_SECTIONS = " + json.dumps(rows, ensure_ascii=False) + ";\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m book.build", description="Build the course as a static site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "book", metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        pages = build(args.out)
    except (ValueError, OSError) as e:
        print(f"k3lite: {e}", file=sys.stderr)
        return 1
    print(f"k3lite: {len(pages)} pages; open {pages[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
