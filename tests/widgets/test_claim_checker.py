"""The claim checker: every claim of the file with its conditions, its picture, and its control in the kernel."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from k3lite.claims import CONDITIONS, headline, headline_claims
from widgets.claim_checker import OPEN, STATED, UNNEEDED, compute, describe, details, explorer, figure

IDS = [c.id for c in headline_claims()]


@pytest.mark.parametrize("name", IDS)
def test_what_is_open_is_what_the_file_leaves_out(name):
    c = compute(claim=name)
    claim = headline(name)
    assert c.claim == claim and c.open_of[c.chosen] == len(claim.missing)
    for i, condition in enumerate(CONDITIONS):
        want = claim.conditions[condition]
        kind = OPEN if want is None else UNNEEDED if want.startswith(("does not apply", "any")) else STATED
        assert c.table[i][c.chosen] == kind
    assert all(m in describe(c) for m in claim.missing) and claim.claim in describe(c)
    assert ("measured here" if claim.ours is None else claim.ours["value"]) in describe(c).lower()


def test_kinds_by_hand():
    c = compute(claim="kv-cache-75")
    kinds = {name: row[c.chosen] for name, row in zip(CONDITIONS, c.table, strict=True)}
    assert kinds["hardware"] == kinds["batch"] == UNNEEDED and kinds["baseline"] == kinds["context"] == STATED
    assert "hardware" in compute(claim="k3-decode-6.3").claim.missing and "no condition is open" in describe(c)


def test_details_are_escaped_and_whole():
    text = details(compute(claim="attn-res-cost"))
    assert "not found in what was read" in text and "&quot;typical workloads&quot;" in text
    assert "Attention Residuals, arXiv" in text and text.count("<tr>") == 2 + len(CONDITIONS) + 2


def test_an_unknown_claim_is_named():
    with pytest.raises(ValueError, match="claim: got 'x', wanted one of kv-cache-75, "):
        compute(claim="x")
    with pytest.raises(ValueError, match="claim: got 'x'"):
        explorer("x")


@pytest.mark.parametrize("name", IDS)
def test_the_picture_shows_the_table_and_frames_the_claim(name):
    c = compute(claim=name)
    fig = figure(c)
    assert [t.type for t in fig.data] == ["heatmap"] and len(fig.layout.shapes) == 1
    assert tuple(map(tuple, fig.data[0].z)) == c.table and list(fig.layout.xaxis.ticktext) == IDS
    assert fig.layout.shapes[0].x0 == c.chosen - 0.5 and name in fig.layout.title.text


def test_the_slider_reaches_everything():
    box = explorer()
    assert isinstance(box.figure, go.FigureWidget) and repr(box) == "Explorer('claims')"
    before = box.text.value
    box.controls["claim"].value = "prefill-2.9"
    assert box.text.value != before and box.message.value == ""
    assert "prefill-2.9" in box.figure.layout.title.text and "No difference at 4k" in box.children[-2].value
