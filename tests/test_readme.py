"""The README is true: its links lead somewhere, its map names what is there, its table is the measured one."""

import json
import re
from pathlib import Path

import pytest

from book.explorers import entries
from k3lite import budget
from k3lite.config import K3Config
from k3lite.tasks import recall_report
from k3lite.tasks.needle_job import read_card
from k3lite.tasks.needle_report import text_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
RECALL = ROOT / "data" / "models" / "recall"
NEEDLE = ROOT / "data" / "models" / "needle"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README))))
def test_links_lead_somewhere(target):
    assert target.startswith("https://") or (ROOT / target).exists()


def test_the_map_names_what_is_there():
    tree = README.split("## What is where")[1].split("```")[1]
    for name in re.findall(r"^(?:  )?((?:[\w./*-]+\.(?:py|toml|yml)|Makefile|[a-z0-9]+/) ?)", tree, re.MULTILINE):
        found = [p for base in (ROOT, ROOT / "k3lite") for p in base.glob(name.strip())]
        assert found, f"{name} is in the map and not in the tree"
    for module in (ROOT / "k3lite").glob("*.py"):
        assert module.name in tree or module.name == "__init__.py", f"{module.name} is not in the map"


def test_every_chapter_is_linked():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{notebook.name}" in README


@pytest.mark.parametrize("explorer", entries(), ids=lambda e: e.name)
def test_every_explorer_is_in_the_gallery(explorer):
    """`make pictures` takes the picture; it is small, and links to the first chapter that shows the explorer."""
    assert explorer.chapter, f"no chapter shows {explorer.name}"
    picture = f"docs/explorers/{explorer.name}.png"
    assert f"({picture})](notebooks/{explorer.chapter})" in README and explorer.about in README
    assert 1000 < (ROOT / picture).stat().st_size < 80_000


def test_the_recall_table_is_what_was_measured():
    result = json.loads((NEEDLE / "needle.json").read_text())
    assert result["complete"]
    assert text_table(result).strip("\n") in README
    assert read_card(NEEDLE) == result["card"], "by the model that is shipped"
    assert f"training took {result['card']['training_seconds']:.0f} s on two threads" in README
    assert result["card"]["threads"] == 2


def test_the_trained_model_learnt_its_task():
    result = json.loads((NEEDLE / "needle.json").read_text())
    trained = [r["recall"] for r in result["records"] if r["length"] == result["training_length"] and r["needles"] == 1]
    assert trained and min(trained) > 0.95
    assert all(c["recall"] <= 0.02 for c in result["controls"])


@pytest.mark.parametrize("needles", [1, 4, 8])
@pytest.mark.parametrize("length", [256, 4096])
def test_the_table_of_seeds_is_what_was_measured(needles, length):
    runs = [
        json.loads((NEEDLE / "needle.json").read_text()),
        *json.loads((NEEDLE / "other_seeds.json").read_text()).values(),
    ]
    assert [run["card"]["recipe"]["seed"] for run in runs] == [0, 1, 2]
    cells = []
    for run in runs:
        recall = [r["recall"] for r in run["records"] if (r["length"], r["needles"]) == (length, needles)]
        assert len(recall) == 5
        cells.append(f"{100 * sum(recall) / len(recall):.0f}")
    what = f"{needles} needle{'s' if needles > 1 else ''}, {length:,} bytes"
    assert f"| {what} | {' | '.join(cells)} |" in README


@pytest.mark.parametrize("variant", ["kda", "hybrid", "mla-conv", "mla"])
def test_the_table_of_siblings_is_what_was_measured(variant):
    result = json.loads((RECALL / "recall.json").read_text())
    cells = [("topic", "string", 16), ("recall", "facts", 1), ("recall", "facts", 256), ("string", "string", 16)]
    runs = [recall_report.spread(result, measured, variant, kind, 4096, facts) for measured, kind, facts in cells]
    assert all(len(run) == 3 for run in runs)
    shares = [
        f"{100 * low:.0f} to {100 * high:.0f}" if f"{low:.2f}" != f"{high:.2f}" else f"{100 * low:.0f}"
        for low, *_, high in runs
    ]
    (kept,) = (c["total"] for c in result["cache"] if (c["variant"], c["length"]) == (variant, 4096))
    assert f"| {' | '.join(shares)} | {kept / 1024:,.0f} KiB |" in README


def test_speeds_are_those_of_the_stored_rows():
    decode, moe = (
        {(r["case"], r["peer"]): r for r in json.loads((ROOT / "data" / "bench" / f"{name}.json").read_text())}
        for name in ("decode", "moe")
    )
    one, four = (decode[f"hybrid 3:1, 262,144 tokens, batch {n}", "all-MLA"]["ratio"] for n in (1, 4))
    assert f"the hybrid decodes {one:.1f} times as fast as its all-MLA twin ({four:.1f} at batch 4)" in README
    few, many = (moe[f"layer forward, {n} experts", "limit"]["ours_s"] for n in (16, 896))
    assert f"takes {many / few:.1f} times as long with 896 experts as with 16" in README
    outputs, rows = (moe["experts forward, 896", f"loop, masked {what}"]["ratio"] for what in ("outputs", "rows"))
    assert f"its experts are {outputs:.0f} times as fast" in README and f"and {rows:.1f} times as fast" in README


@pytest.mark.parametrize(
    "figure",
    [
        f"{sum(budget.parameters(K3Config.preset('kimi-k3')).values()):,}",
        f"{budget.active_parameters(K3Config.preset('kimi-k3')):,}",
        f"{sum(budget.parameters(K3Config.preset('kimi-linear-48b')).values()):,}",
        f"{budget.break_even_tokens(K3Config.preset('kimi-k3')):,} tokens",
        f"{budget.cache_bytes(K3Config.preset('kimi-k3'), 2**20).latent / budget.GIB:.2f} GiB",
        f"{budget.cache_bytes(K3Config.preset('kimi-k3'), 2**20).state / budget.MIB:.0f} MiB",
        f"{budget.cache_bytes(K3Config.preset('kimi-k3').all_mla_twin(), 2**20).total / budget.GIB:.3f} GiB",
    ],
)
def test_figures_are_what_the_budget_says(figure):
    assert figure in README


# ---- CONTRIBUTING.md

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", GUIDE))))
def test_links_of_the_guide_lead_somewhere(target):
    assert (ROOT / target).exists()


@pytest.mark.parametrize(
    "path",
    sorted(set(re.findall(r"(?<![\w/.])((?:\.ci|book|data|docs|k3lite|notebooks|tests|widgets)/[\w./]*)", GUIDE))),
)
def test_files_that_the_guide_names_exist(path):
    """NAME and X stand for what the reader makes."""
    assert "NAME" in path or "/X." in path or (ROOT / path.rstrip(".")).exists()


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "CONTRIBUTING"])
def test_make_targets_exist(text):
    commands = "\n".join(re.findall(r"`[^`\n]+`|^make .*", text, re.MULTILINE))
    named = set(re.findall(r"\bmake (?:[A-Z]+=\S+ )?([a-z]+)", commands))
    assert len(named) > 3 and named <= TARGETS


def test_names_that_the_guide_gives_are_in_the_code():
    for name, file in {
        "ORDER": "tests/test_house.py",
        "write_atomically": "k3lite/checkpoint.py",
        "MUTANTS": "tests/mutants.py",
        "kda_recurrent": "k3lite/ops/kda.py",
        "Backend": "k3lite/ops/kda.py",
        "_check": "k3lite/ops/kda.py",
        "source": "notebooks/course.py",
    }.items():
        assert f"`{name}" in GUIDE and re.search(rf"^(?:def )?{name}\b", (ROOT / file).read_text(), re.MULTILINE)
