"""Notebook cells as HTML from their stored outputs: nothing is executed, and nothing is fetched when a page is read.

Markdown goes through nbconvert's reader, as in JupyterLab; formulas become MathML, which browsers draw themselves;
a plotly figure stays its JSON, which book.js gives to the plotly.js of the site; an explorer is its picture.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from latex2mathml.converter import convert
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from book.explorers import PICTURES, by_cell, title

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass
class Rendered:
    """One page. body: HTML. sections: (anchor, heading, plain text) for the search. links: files outside the notebooks
    that it links to, as paths from the repository's root. figures: how many need plotly.js."""

    title: str
    body: str
    sections: list[tuple[str, str, str]] = field(default_factory=list)
    links: set[str] = field(default_factory=set)
    figures: int = 0


class Mathed(IPythonRenderer):
    """nbconvert's renderer, with formulas as MathML in place of TeX for a MathJax that is not there."""

    def block_code(self, code: str, info: str | None = None) -> str:
        # source on show looks like the code of a cell
        return super().block_code(code, info).replace('<div class="highlight">', '<div class="code">', 1)

    def inline_math(self, body: str) -> str:
        return mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return mathml(body, "block")


def mathml(tex: str, display: str) -> str:
    """A formula as MathML. The TeX stays as the text alternative. Raises ValueError for what cannot be read."""
    try:
        drawn = convert(tex.strip(), display=display)
    except Exception as e:
        raise ValueError(f"formula {tex.strip()!r} cannot be drawn: {type(e).__name__} {e}") from e
    if unknown := re.search(r"\\\w+", drawn):  # the converter passes on what it does not know
        raise ValueError(f"formula {tex.strip()!r} cannot be drawn: nothing is known of {unknown[0]}")
    return drawn.replace("<math ", f'<math alttext="{html.escape(tex.strip(), quote=True)}" ', 1)


def markdown(text: str) -> str:
    return MarkdownWithMath(renderer=Mathed(escape=False, anchor_link_text="¶")).render(text)


def code(source: str) -> str:
    return highlight(source, PythonLexer(), HtmlFormatter(cssclass="code"))


def page(notebook: Path, pictures: Path = PICTURES) -> Rendered:
    """Read one notebook. Raises ValueError that names it and the cell, if something in it cannot be shown."""
    cells = json.loads(notebook.read_text())["cells"]
    explorers = by_cell(cells)
    out = Rendered(notebook.stem, "")
    parts = []
    for i, cell in enumerate(cells):
        source = "".join(cell["source"])
        try:
            if cell["cell_type"] == "markdown":
                parts.append(f'<section class="text">{markdown(source)}</section>')
            elif cell["cell_type"] == "code" and source.strip():
                parts.append(code_cell(cell, source, explorers.get(i), out, pictures))
        except ValueError as e:
            raise ValueError(f"{notebook.name}, cell {cell.get('id', i)}: {e}") from e
    out.body = with_links(split_headings("\n".join(parts), out), out)
    return out


def code_cell(cell: dict, source: str, explorer: str | None, out: Rendered, pictures: Path) -> str:
    shown = code(source)
    if cell["metadata"].get("jupyter", {}).get("source_hidden"):
        shown = f"<details><summary>{html.escape(source.splitlines()[0].lstrip('# '))}</summary>{shown}</details>"
    outputs = "".join(output(o, explorer, out, pictures) for o in cell["outputs"])
    return f'<section class="cell">{shown}{outputs}</section>'


def output(stored: dict, explorer: str | None, out: Rendered, pictures: Path) -> str:
    """One stored output; the richest form that needs no kernel."""
    if stored["output_type"] == "stream":
        return f"<pre class=out>{html.escape(''.join(stored['text']))}</pre>"
    if stored["output_type"] == "error":
        return f"<pre class=out>{html.escape(stored['ename'] + ': ' + stored['evalue'])}</pre>"
    data = stored["data"]
    if WIDGET in data:
        return picture(explorer, pictures)
    if PLOTLY in data:
        out.figures += 1
        return figure(data[PLOTLY])
    if "text/markdown" in data:
        return f'<div class="out">{markdown("".join(data["text/markdown"]))}</div>'
    if "text/html" in data:
        return f'<div class="out">{"".join(data["text/html"])}</div>'
    if "text/plain" in data:
        return f"<pre class=out>{html.escape(''.join(data['text/plain']))}</pre>"
    raise ValueError(f"an output of {', '.join(data) or 'no type'} has no form here")


def figure(stored: dict) -> str:
    """A plotly figure as its JSON, in an element that says its title where it cannot be seen."""
    layout = stored.get("layout", {})
    said = re.sub(r"<br>", " ", str((layout.get("title") or {}).get("text", "figure")))
    said = html.escape(re.sub(r"<[^>]+>", "", said), quote=True)
    # "</" could end the script element early
    text = json.dumps({"data": stored["data"], "layout": layout}).replace("</", "<\\/")
    height = int(layout.get("height", 450))
    return (
        f'<div class="figure" role="img" aria-label="{said}" style="min-height:{height}px">'
        f'<script type="application/json">{text}</script></div>'
    )


def picture(module: str | None, pictures: Path) -> str:
    """An explorer's picture, and how to move it. Raises ValueError if its module is not known, or has no picture."""
    if module is None:
        raise ValueError("shows an explorer, and no import of the notebook names a module of widgets/")
    if not (pictures / f"{module}.png").exists():
        raise ValueError(f"no picture of the explorer {module}; `make pictures` takes one")
    name = title(module)
    return (
        f'<figure class="explorer"><img src="explorers/{module}.png" alt="Picture of the {name} explorer" loading="lazy">'
        f"<figcaption>A picture of the {name} explorer: its controls need Python. Move them with <code>make apps</code> "
        f"(the explorers alone) or <code>make lab</code> (this chapter).</figcaption></figure>"
    )


def split_headings(body: str, out: Rendered) -> str:
    """Note title and sections of the page for the search. The first heading is the title."""
    pieces = re.split(r'(<h[1-4] id="[^"]*">.*?</h[1-4]>)', body, flags=re.DOTALL)
    anchor, heading = "", out.title
    for piece in pieces:
        head = re.fullmatch(r'<h([1-4]) id="([^"]*)">(.*?)</h\1>', piece, flags=re.DOTALL)
        if head:
            anchor, heading = head[2], plain(head[3]).rstrip("¶ ")
            if head[1] == "1":
                out.title = heading
        elif text := plain(piece):
            out.sections.append((anchor, heading, text))
    return body


def plain(fragment: str) -> str:
    """The words of HTML, on one line. Figures' JSON is no words; a formula is its TeX."""
    fragment = re.sub(r"<script.*?</script>", " ", fragment, flags=re.DOTALL)
    fragment = re.sub(r'<math alttext="([^"]*)".*?</math>', r" \1 ", fragment, flags=re.DOTALL)
    # tags of colour sit inside words of code; all others are between words
    fragment = re.sub(r"</?(?:span|em|strong|code)[^>]*>", "", fragment)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", fragment)).split())


def with_links(body: str, out: Rendered) -> str:
    """Links between notebooks lead to pages; a link to another file of the repository leads to a copy in files/."""

    def moved(match: re.Match) -> str:
        target, anchor = match[1], match[2] or ""
        if target.startswith("../"):
            out.links.add(target.removeprefix("../"))
            return f'href="files/{target.removeprefix("../")}{anchor}"'
        return f'href="{re.sub(r"[.]ipynb$", ".html", target)}{anchor}"'

    return re.sub(r'href="(?!https?:|mailto:|#)([^"#]+)(#[^"]*)?"', moved, body)
