"""What a needle job writes: needle.json, and a heat map that opens in any browser without a network."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from k3lite.checkpoint import write_text


def write_report(out: Path, result: dict[str, Any]) -> None:
    """needle.json and needle.html in `out`, each whole or not at all."""
    write_text(out / "needle.json", json.dumps(result, indent=2) + "\n")
    write_text(out / "needle.html", heat_map(result))


def text_table(result: dict[str, Any]) -> str:
    """Recall by length (rows) and depth (columns), one block for each number of needles, with cache bytes."""
    lines = []
    depths = _sorted(result, "depth")
    for n in _sorted(result, "needles"):
        trials = next(r["trials"] for r in result["records"] if r["needles"] == n)
        lines.append(f"\n{n} needle{'s' if n > 1 else ''}: recall in % of {trials} documents a cell (chance 0.01 %)")
        lines.append(
            f"{'length':>8}"
            + "".join(f"{f'depth {d:g}':>11}" for d in depths)
            + f"{'cache KiB':>12}{'all-MLA KiB':>13}"
        )
        for length in _sorted(result, "length"):
            cells = {r["depth"]: r["recall"] for r in result["records"] if (r["length"], r["needles"]) == (length, n)}
            if not cells:
                continue
            memory = next(c for c in result["cache"] if c["length"] == length)
            trained = "*" if length <= result["training_length"] else " "
            row = f"{length:>7}{trained}" + "".join(f"{100 * cells[d]:>11.0f}" for d in depths if d in cells)
            lines.append(row + f"{memory['hybrid_bytes'] / 1024:>12.1f}{memory['all_mla_bytes'] / 1024:>13.1f}")
    lines.append(f"  * within the training length of {result['training_length']} bytes")
    for c in result["controls"]:
        lines.append(
            f"control, a key that was never hidden, length {c['length']}: {100 * c['recall']:.0f} % of {c['trials']}"
        )
    return "\n".join(lines)


def heat_map(result: dict[str, Any]) -> str:
    """One self-contained HTML page: a coloured table for each number of needles, figures in the cells."""
    card = result["card"]
    blocks = [_table(result, n) for n in _sorted(result, "needles")]
    controls = "".join(
        f"<p>Control, asked for a key that was never hidden (length {c['length']}): "
        f"{100 * c['recall']:.0f} % of {c['trials']} documents.</p>"
        for c in result["controls"]
    )
    unfinished = "" if result["complete"] else "<p><b>Stopped before all cells were measured.</b></p>"
    took = f"{card['training_seconds']:.0f} s on " if card["training_seconds"] is not None else ""
    about = (
        f"{result['parameters']:,} parameters, {result['active_parameters']:,} active a token; trained for "
        f"{card['recipe']['steps']} steps on documents up to {result['training_length']} bytes, seed "
        f"{card['recipe']['seed']}, {took}{card['threads']} CPU thread(s), fp32."
    )
    return _PAGE.format(
        unfinished=unfinished,
        about=html.escape(about),
        blocks="".join(blocks),
        controls=controls,
    )


def _table(result: dict[str, Any], needles: int) -> str:
    records = [r for r in result["records"] if r["needles"] == needles]
    depths = _sorted(result, "depth")
    head = "".join(f"<th scope=col>{d:g} %</th>" for d in depths)
    rows = []
    for length in sorted({r["length"] for r in records}):
        cells = {r["depth"]: r for r in records if r["length"] == length}
        memory = next(c for c in result["cache"] if c["length"] == length)
        tds = "".join(_cell(cells.get(d)) for d in depths)
        mark = "" if length > result["training_length"] else " *"
        rows.append(
            f"<tr><th scope=row>{length:,}{mark}</th>{tds}<td class=n>{memory['hybrid_bytes'] / 1024:,.1f}</td>"
            f"<td class=n>{memory['all_mla_bytes'] / 1024:,.1f}</td></tr>"
        )
    what = "One needle" if needles == 1 else f"{needles} needles, one asked"
    return (
        f"<h2>{what}</h2><table><thead><tr><th rowspan=2>context<br>(bytes)</th><th colspan={len(depths)}>recall (%) by depth "
        f"of the asked needle</th><th colspan=2>cache of a sequence (KiB)</th></tr><tr>{head}<th>hybrid</th><th>all MLA</th></tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "<td>–</td>"
    r = record["recall"]
    # From dark blue (none) to yellow (all), the ends of cividis: distinct without colour vision, and in print.
    low, high = (0, 32, 81), (253, 234, 69)
    colour = ",".join(str(round(a + (b - a) * r)) for a, b in zip(low, high, strict=True))
    ink = "#000" if r > 0.45 else "#fff"
    return f'<td style="background:rgb({colour});color:{ink}" title="{record["trials"]} documents">{100 * r:.0f}</td>'


def _sorted(result: dict[str, Any], key: str) -> list:
    return sorted({r[key] for r in result["records"]})


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>k3lite: where a small K3 finds its needle</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: separate; border-spacing: 2px; margin: .5rem 0 1.5rem; }}
th, td {{ padding: .35rem .9rem; text-align: center; font-weight: normal; }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style></head><body>
<h1>Where a small K3 finds its needle</h1>
{unfinished}<p>{about}</p>
<p>A needle is a line such as <code>abc=4071</code>, hidden in real prose that the model was not trained on. It counts as
found if all four digits come out right; guessing finds 0.01 %. Depth is the share of the text before the needle.
An asterisk marks lengths within the training length.</p>
{blocks}{controls}
<p>Measured by <code>k3lite needle</code>; the figures with trial counts are in <code>needle.json</code> beside this page.</p>
</body></html>
"""
