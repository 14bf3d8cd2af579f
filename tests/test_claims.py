"""Every figure in prose is in the ledger, and every figure of ours in the ledger can be had again."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from k3lite import claims
from k3lite.claims import ClaimError, as_number, figure_ledger, headline_claims, quoted, quoted_sources, spec_sheet
from k3lite.recompute import only_row, recomputed, stored_json
from tests.prose import Figure, compared, figures, prose

ROOT = Path(__file__).resolve().parents[1]
LEDGER = figure_ledger()
CELLS = prose()
PAGES = sorted({place.split("#")[0] for place in CELLS})
NUMBERS = re.compile(r"(?<![\w.])[−-]?\d+(?:[,_]\d{3})*(?:\.\d+)?(?:e[+−-]?\d+)?")


def page_rows(page):
    """The part of the ledger that is printed on one page: {id: claim}, with the places of that page only."""
    here = {}
    for name, claim in LEDGER.items():
        where = tuple(place for place in claim.where if place.split("#")[0] == page)
        if where:
            here[name] = dataclasses.replace(claim, where=where)
    return here


def unmet(pages, rows):
    """compared() for these texts {place: text}."""
    return compared([f for place, text in pages.items() for f in figures(text, place)], rows)


# ---- prose against ledger


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_is_in_the_ledger_and_no_row_is_left_over(page):
    cells = {place: text for place, text in CELLS.items() if place.split("#")[0] == page}
    unlisted, unused = unmet(cells, page_rows(page))
    shown = [f"{f.place}: {f.text} {f.unit}".rstrip() for f in unlisted]
    assert not unlisted and not unused, (
        f"in prose and not in data/claims.json: {shown}; in data/claims.json and not there: {unused}. "
        "`python -m tests.prose` drafts the rows; data/README.md says what belongs into them."
    )


def test_no_row_names_a_page_that_is_not_there():
    assert {place for claim in LEDGER.values() for place in claim.where} <= set(CELLS)
    code = "".join(path.read_text() for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert all(claim.where or f'quoted(\\"{name}\\")' in code for name, claim in LEDGER.items()), "a row nobody prints"


def test_a_changed_figure_is_seen():
    place = "README#What is measured and what is reported"
    rows = {name: dataclasses.replace(c, where=(place,) * c.where.count(place)) for name, c in LEDGER.items()}
    assert unmet({place: CELLS[place]}, rows) == ([], [])
    for old, new in (
        ("3.8 times", "3.9 times"),
        ("414 MiB", "414 GiB"),
        ("(3.9 at", "(3.7 at"),
        ("5,461 tokens", "many"),
    ):
        assert old in CELLS[place]
        unlisted, unused = unmet({place: CELLS[place].replace(old, new)}, rows)
        assert len(unused) == 1 and len(unlisted) == (new != "many")


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("It takes 3.7 times as long, 1.25 × as much or 6×.", ["3.7 times", "1.25 ×", "6 ×"]),
        ("12 to 15 % of 5,461 tokens in 1e-5 s", ["12", "15 %", "5,461 tokens", "1e-5 s"]),
        ("4, 16 or 64 tokens; 31 to 35 GFLOP/s; K3 has 896 experts, 16 of them at work", ["4", "16", "64 tokens", "31", "35 GFLOP", "896"]),
        ("27.00 GiB, 2.8 trillion, 48B, 2.78T, 512k, g = −0.05", ["27.00 GiB", "2.8 trillion", "48 B", "2.78 T", "512 k", "−0.05"]),
        ("A 64 × 64 state, 16 experts, three times, chapter 07, chapters 01 and 02, section 5.4.1, §3.2", []),
        ("`x = 5.0`, $y = 3.5$, [page](a_2.5.html), arXiv 2510.26692, 2026-11-30, July 2026, torch 2.13.0, AVX-512", []),
        ("```\n5.5 tokens\n```\n\n1. first\n## 5 · Title\n<img width=\"2.5\">", []),
        ("| name 1 | value |\n|---|---|\n| 8 needles | 36 |\n| 16 | 4 to 5 |\n", ["36", "4", "5"]),
        ("in 2009 and 2026; 2,048 tokens, 2048 tokens, 2048 rows, a rank of 1536", ["2,048 tokens", "2048 tokens", "2048", "1536"]),
    ],
)  # fmt: skip
def test_what_counts_as_a_figure(text, wanted):
    assert [f"{f.text} {f.unit}".rstrip() for f in figures(text)] == wanted


def test_a_figure_that_is_printed_twice_is_listed_twice():
    figure = Figure("07#a", "75", "%", 0)
    row = dataclasses.replace(quoted("klp-cache"), where=("07#a",))
    assert compared([figure], {"klp-cache": row}) == ([], [])
    assert compared([figure, figure], {"klp-cache": row}) == ([figure], [])
    assert compared([], {"klp-cache": row}) == ([], [("klp-cache", "07#a")])


# ---- ledger against what is behind it


def rounds_to(value, claim):
    """Whether `value` is the quoted figure, to the decimals that it has or to claim.digits."""
    text = claim.value.replace(",", "").replace("−", "-")
    mantissa, _, exponent = text.partition("e")
    digits = claim.digits if claim.digits is not None else len(mantissa.partition(".")[2]) - int(exponent or 0)
    return abs(value - as_number(claim.value)) <= 0.5 * 10**-digits * (1 + 1e-9)


@pytest.mark.parametrize("claim", [c for c in LEDGER.values() if c.recompute], ids=lambda c: c.id)
def test_derived_figures_are_what_their_expression_gives(claim):
    value = recomputed(claim.recompute)
    assert rounds_to(value, claim), f"{claim.text} in {', '.join(claim.where)}; computed {value}"


def output_text(cell):
    """What a code cell printed, and the titles of its figures."""
    parts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        parts.append("".join(output.get("text", "")))
        drawn = [value["layout"] for kind, value in data.items() if "plotly" in kind]
        parts += (
            []
            if drawn
            else ["".join(data.get("text/plain", "")), re.sub("<[^>]+>", " ", "".join(data.get("text/html", "")))]
        )
        parts += [str(layout.get("title", {}).get("text", "")) for layout in drawn]
        parts += [str(note.get("text", "")) for layout in drawn for note in layout.get("annotations", [])]
    return "\n".join(parts)


def code_cell(place):
    page, name = place.split("#")
    (path,) = (p for p in (ROOT / "notebooks").glob("*.ipynb") if p.stem.split("_")[0] == page)
    (cell,) = (c for c in json.loads(path.read_text())["cells"] if c["id"] == name)
    assert cell["cell_type"] == "code"
    return cell


def holds(text, claim):
    """Whether one of the numbers in a text is the quoted figure, itself or as a share of one."""
    shares = (1, 100) if claim.unit == "%" else (1,)
    numbers = [as_number(n.replace("_", "")) for n in NUMBERS.findall(text)]
    return any(rounds_to(share * number, claim) for number in numbers for share in shares)


@pytest.mark.parametrize("claim", [c for c in LEDGER.values() if c.shown], ids=lambda c: c.id)
def test_cells_hold_what_prose_tells_of_them(claim):
    cell = code_cell(claim.shown)
    text = "".join(cell["source"]) if claim.label == "setting" else output_text(cell)
    assert holds(text, claim), f"{claim.text} is not in {claim.shown}"


def test_a_changed_stored_value_is_seen(monkeypatch):
    claim = quoted("decode-ratio-1")
    row = only_row(stored_json("bench/decode.json"), case="hybrid 3:1, 262,144 tokens, batch 1", peer="all-MLA")
    assert rounds_to(recomputed(claim.recompute), claim)
    monkeypatch.setitem(row, "ratio", row["ratio"] + 0.1)
    assert not rounds_to(recomputed(claim.recompute), claim)
    assert not holds("42.4 times", quoted("k3-mla-times")) and holds("42.7 times", quoted("k3-mla-times"))


def test_what_cannot_be_recomputed_says_who_measured_it_and_how():
    for claim in LEDGER.values():
        if claim.label == "vendor":
            assert claim.source, claim.id
        if claim.label == "independent" and not (claim.recompute or claim.shown or claim.source):
            assert claim.command and claim.conditions, claim.id


# ---- spec sheet and headline claims


@pytest.mark.parametrize("row", spec_sheet(), ids=lambda r: r.name)
def test_the_spec_sheet_is_what_k3lite_computes(row):
    for figure, value in row.recomputed().items():
        decimals = len(figure.partition(".")[2])
        assert round(value, decimals) == as_number(figure), f"{row.name}: {figure}, computed {value}"


def test_the_spec_sheet_holds_the_published_totals():
    text = " ".join(row.value for row in spec_sheet())
    for figure in ("2,779,484,476,000", "104,189,612,640", "1,560,860,324,864", "497,220", "49,122,681,728"):
        assert figure in text


@pytest.mark.parametrize("claim", headline_claims(), ids=lambda c: c.id)
def test_headline_claims_name_what_is_missing(claim):
    assert tuple(claim.conditions) == claims.CONDITIONS
    assert claim.missing == [name for name, value in claim.conditions.items() if value is None]
    assert all(value is None or value.strip() for value in claim.conditions.values())
    if claim.ours is not None:
        value, decimals = recomputed(claim.ours["is"]), len(claim.ours["value"].partition(".")[2])
        assert round(value, decimals) == as_number(claim.ours["value"]), f"{claim.id}: computed {value}"


def test_a_headline_claim_prints_what_was_not_found_and_what_is_ours():
    claim = claims.headline("tpot-6.3-at-1m")
    assert claim.missing == ["batch", "hardware", "precision"]
    assert claim.text.count("NOT FOUND") == 3 and "here       3.9 times: decode of the hybrid" in claim.text
    assert claims.headline("scaling-2.5").text.endswith("here       not measured")
    assert max(map(len, claim.text.splitlines())) <= 110
    with pytest.raises(ClaimError, match="no 'faster'; there are kv-cache-75"):
        claims.headline("faster")


@pytest.mark.parametrize(
    "read, file, change, message",
    [
        (spec_sheet, "spec_sheet.json", {"is": {"94": "1"}}, "'94' does not stand in the value"),
        (spec_sheet, "spec_sheet.json", {"labels": ["true"]}, "label: got 'true'"),
        (spec_sheet, "spec_sheet.json", {"colour": ""}, "got fields colour, is"),
        (headline_claims, "headline_claims.json", {"source": "X"}, "'X' is not in sources.json"),
        (headline_claims, "headline_claims.json", {"conditions": {"batch": "1"}}, "conditions: got fields batch; wanted base"),
        (headline_claims, "headline_claims.json", {"ours": {"value": "1"}}, "ours: got fields value; wanted command"),
    ],
)  # fmt: skip
def test_a_bad_row_of_the_other_files(tmp_path, read, file, change, message):
    path = tmp_path / file
    path.write_text(json.dumps([json.loads((ROOT / "data" / file).read_text())[0] | change]))
    with pytest.raises(ClaimError, match=message):
        read(path)


# ---- bad files


def test_the_ledger_has_one_row_a_line_so_that_a_change_reads_well():
    text = (ROOT / "data" / "claims.json").read_text()
    lines = [json.dumps(row, ensure_ascii=False) for row in json.loads(text)]
    assert text == "[\n" + ",\n".join(lines) + "\n]\n"


GOOD = {"id": "a", "value": "1.5", "unit": "s", "label": "vendor", "what": "x", "source": "KLP", "where": ["07#title"]}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"label": "proved"}, r"bad.json: a: label: got 'proved', wanted one of fact"),
        ({"value": "a lot"}, r"bad.json: a: value: got 'a lot', wanted a number in digits"),
        ({"value": 1.5}, r"bad.json: a: value: got 1.5, wanted str"),
        ({"source": "RUMOUR §2"}, r"bad.json: a: source: 'RUMOUR §2' is not in sources.json"),
        ({"source": ""}, r"bad.json: a: nothing behind it: wanted source, is"),
        ({"colour": "red"}, r"bad.json: a: unknown colour"),
        ({"where": None}, r"bad.json: a: where: got None, wanted list"),
    ],
)
def test_a_bad_row_is_one_clear_error(tmp_path, change, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([GOOD | change]))
    with pytest.raises(ClaimError, match=message):
        figure_ledger(path)


def test_files_that_are_no_ledger(tmp_path):
    path = tmp_path / "bad.json"
    for text, message in (
        ("{", "cannot be read"),
        ("{}", "no list of objects"),
        (json.dumps([GOOD, GOOD]), "a: listed twice"),
    ):
        path.write_text(text)
        with pytest.raises(ClaimError, match=message):
            figure_ledger.__wrapped__(path)
    with pytest.raises(ClaimError, match=r"a: without value, what"):
        path.write_text(json.dumps([{k: v for k, v in GOOD.items() if k not in ("value", "what")}]))
        figure_ledger.__wrapped__(path)


def test_an_unknown_id_says_what_there_is():
    with pytest.raises(ClaimError, match=r"no 'klp-cash'; there are .*klp-"):
        quoted("klp-cash")


@pytest.mark.parametrize(
    "expression, message",
    [
        ("active_parameters(k4)", "'active_parameters\\(k4\\)' cannot be computed: NameError"),
        ("open('/etc/passwd')", "cannot be computed: NameError"),
        ("'a' * 3", "gives 'aaa', wanted a number"),
        ("stored_json('bench/none.json')", "not a JSON file of data/"),
        ("only_row(stored_json('bench/decode.json'), case='x')['ratio']", "got 0 rows, wanted one"),
    ],
)
def test_an_expression_that_fails_is_quoted(expression, message):
    with pytest.raises(ValueError, match=message):
        recomputed(expression)


def test_text_of_a_figure():
    assert quoted("klp-decode").text == "6×" and quoted("klp-cache").text == "75 %"
    assert quoted("k3-slots-gib").text in ("27.00 GiB", "27 GiB") and quoted("k3-slots-gib").number == 27
    assert quoted_sources()["KLP"].startswith("Kimi Linear")
