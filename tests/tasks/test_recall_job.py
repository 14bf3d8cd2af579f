"""The experiment on gist and verbatim: it can be stopped, and what is shipped is what the shipped models do."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from k3lite.checkpoint import CheckpointError, load_model
from k3lite.tasks import recall_job
from k3lite.tasks.recall import ASK_TOPIC, FACT, IGNORE, RUMOUR, SLOT, STRING, STRING_MARK, SYMBOL, SYMBOLS, VOCABULARY
from k3lite.tasks.recall_exam import ASKED, CHANCE, exam_cells, measure
from k3lite.tasks.recall_job import (
    RECIPE,
    TOKENS_PER_STEP,
    TRAINED_LENGTH,
    WIDTH,
    Job,
    curriculum,
    load_sibling,
    run,
    train_sibling,
)
from k3lite.tasks.recall_report import spread, text_table
from k3lite.tasks.siblings import ConvMLA, sibling_cache_bytes, sibling_config
from k3lite.tasks.trained import read_card
from k3lite.train import STATE, Recipe

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "models" / "recall"


@pytest.fixture(scope="module")
def shipped():
    return json.loads((SHIPPED / "recall.json").read_text())


def kinds_of(recipe, **options):
    batch_at = curriculum(recipe, **options)
    return [batch_at(step) for step in range(recipe.steps)]


def first_question(ids):
    return int((ids[0] == ASK_TOPIC).nonzero())


def test_facts_alone_come_first_few_and_then_more():
    batches = kinds_of(Recipe(steps=200, lr=1e-3), tokens=600)[:40]
    facts = [int((ids[0] == FACT).sum()) for ids, _ in batches]
    assert facts[0] == 2 and max(facts[:4]) <= 4
    assert min(facts[24:]) >= TRAINED_LENGTH // SLOT // 4 and max(facts[24:]) > 50
    for (ids, labels), n in zip(batches, facts, strict=True):
        assert not ((ids == RUMOUR) | (ids == STRING_MARK)).any()
        assert first_question(ids) == SLOT * n and (labels[0] != IGNORE).sum() == 1 + n, "no filler, all asked"


def test_later_documents_are_of_all_kinds_and_no_longer_than_said():
    batches = kinds_of(Recipe(steps=250, lr=1e-3), tokens=300)[50:]
    marks = {mark: sum(bool((ids == mark).any()) for ids, _ in batches) for mark in (RUMOUR, STRING_MARK)}
    assert 35 < marks[STRING_MARK] < 75 and 3 < marks[RUMOUR] < 45
    facts = [int((ids[0] == FACT).sum()) for ids, _ in batches]
    assert min(facts) == 1 and max(facts) > 30
    assert max(first_question(ids) for ids, _ in batches) <= TRAINED_LENGTH
    symbols = []
    for ids, labels in batches:
        due = labels[0][labels[0] != IGNORE]
        symbols.append(int(((due >= SYMBOL) & (due < SYMBOL + SYMBOLS)).sum()))
        assert 2 <= len(due) - symbols[-1] <= 1 + (4 if symbols[-1] else 16), "topic and few values"
        assert (symbols[-1] > 0) == bool((ids == STRING_MARK).any())
    strings = [n for n in symbols if n]
    assert strings[0] == 2 and strings == sorted(strings) and set(strings[len(strings) // 2 + 5 :]) == {STRING}


def test_every_sibling_reads_the_same():
    recipe = Recipe(steps=10, lr=1e-3, seed=3)
    for step in (0, 9):
        assert torch.equal(curriculum(recipe)(step)[0], curriculum(recipe)(step)[0])
    other = curriculum(dataclasses.replace(recipe, seed=4))
    assert not torch.equal(curriculum(recipe)(9)[0][:1, :8], other(9)[0][:1, :8])


# ---- the job


@pytest.fixture
def tiny(tmp_path):
    recipe = dataclasses.replace(RECIPE, steps=30, task="tiny")
    return Job(
        out=tmp_path / "out", recipe=recipe, variants=("hybrid", "mla-conv"), widths=(4,), seeds=(0, 1),
        lengths=(64, 128), facts=(1, 16), questions=32, trained_length=64, step_tokens=100,
    )  # fmt: skip


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_job_writes_models_cards_and_records(tiny):
    result = run(tiny, progress=False)
    assert json.loads((tiny.out / "recall.json").read_text()) == json.loads(json.dumps(result))
    assert result["complete"] and result["chance"] == CHANCE
    assert [(m["variant"], m["seed"]) for m in result["models"]] == [
        ("hybrid", 0), ("mla-conv", 0), ("hybrid", 1), ("mla-conv", 1),
    ]  # fmt: skip
    assert len(result["records"]) == 4 * len(exam_cells(tiny.lengths, tiny.facts))
    assert [(c["variant"], c["length"]) for c in result["cache"]] == [
        (v, n) for v in ("hybrid", "mla-conv") for n in (64, 128)
    ]
    for entry, (variant, _, seed, folder) in zip(result["models"], tiny.models(), strict=True):
        assert entry["card"] == read_card(folder / "model", "recall")
        assert {m["length"] for m in entry["card"]["measured"]} == {64}, "within the training length"
        assert (entry["card"]["variant"], entry["card"]["recipe"]["seed"]) == (variant, seed)
        assert entry["folder"] == folder.name
        assert entry["parameters"] == sum(p.numel() for p in load_sibling(folder / "model").parameters())
    assert isinstance(load_sibling(tiny.out / "mla-conv-s0" / "model").model.layers[0].self_attn, ConvMLA)
    with pytest.raises(CheckpointError, match="conv1d.weight: unknown"):
        load_model(tiny.out / "mla-conv-s0" / "model")  # not a plain K3
    assert "verbatim: the whole string" in text_table(result)


def test_a_stopped_job_goes_on_to_the_same_models(tiny, monkeypatch):
    from k3lite import train as training

    whole = dataclasses.replace(tiny, out=tiny.out.parent / "whole")
    run(whole, progress=False)
    real, steps = training._step, []

    def killed(*args):
        if len(steps) == 30 + 28:
            raise KeyboardInterrupt
        steps.append(1)
        return real(*args)

    monkeypatch.setattr(training, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, progress=False)
    second = tiny.models()[1][-1]
    assert not json.loads((tiny.out / "recall.json").read_text())["complete"] and (second / STATE).exists()

    steps.clear()
    monkeypatch.setattr(training, "_step", lambda *args: (steps.append(1), real(*args))[1])
    assert run(tiny, progress=False)["complete"]
    assert len(steps) == 5 + 30 + 30
    for (*_, a), (*_, b) in zip(tiny.models(), whole.models(), strict=True):
        assert weights(a) == weights(b)


def test_the_same_weights_are_not_measured_twice(tiny, monkeypatch):
    one = dataclasses.replace(tiny, variants=("kda",), seeds=(0,))
    first = run(one, progress=False)
    asked, real = [], recall_job.measure
    monkeypatch.setattr(recall_job, "measure", lambda *cell: (asked.append(cell[1:]), real(*cell))[1])
    more = run(dataclasses.replace(one, facts=(1, 3, 16)), progress=False)
    assert {(kind, facts) for kind, _, facts, _ in asked} == {("facts", 3)}
    assert [r for r in more["records"] if r["facts"] != 3] == json.loads(json.dumps(first["records"]))
    asked.clear()
    other = dataclasses.replace(one, recipe=dataclasses.replace(one.recipe, lr=1e-3))
    other.restart()
    run(other, progress=False)
    assert len(asked) == len(first["records"]), "other weights"


def test_another_recipe_is_refused_and_restart_trains_anew(tiny):
    one = dataclasses.replace(tiny, variants=("kda",), seeds=(0,))
    run(one, progress=False)
    other = dataclasses.replace(one, recipe=dataclasses.replace(one.recipe, lr=1e-3))
    with pytest.raises(CheckpointError, match="another recipe or seed"):
        run(other, progress=False)
    other.restart()
    assert run(other, progress=False)["models"][0]["card"]["recipe"]["lr"] == 1e-3


def test_folders_are_named_for_what_they_hold():
    job = Job(out=Path("x"), variants=("1:1", "mla"), widths=(16, 32), seeds=(2,))
    assert [folder.name for *_, folder in job.models()] == ["1-1-s2", "mla-s2", "1-1-w32-s2"]
    deep = Job(out=Path("x"), variants=("7:1",), seeds=(0,), layers=8)
    deep.check()
    assert [folder.name for *_, folder in deep.models()] == ["7-1-l8-s0"]


def test_long_documents_are_fewer_and_strings_more():
    job = Job(out=Path("x"))
    assert job.documents("facts", 256, 16) == 30 and job.documents("facts", 4096, 16) == 30
    assert job.documents("facts", 256, 1) == 480 and job.documents("facts", 4096, 1) == 64
    assert job.documents("string", 256, 16) == 120
    assert Job(out=Path("x"), questions=1).documents("facts", 256, 16) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": ("kda", "rwkv")}, "variant: got 'rwkv', wanted one of"),
        ({"variants": ("7:1",)}, "layers: got 4, wanted a multiple of 8 for 7:1"),
        ({"variants": ()}, "variants: got , wanted one or more, each once"),
        ({"seeds": (1, 1)}, "seeds: got 1, 1, wanted one or more, each once"),
        ({"seeds": (-1,)}, "seeds: got -1, wanted 0 or more"),
        ({"lengths": (30,)}, "lengths: got 30, wanted a multiple of 4"),
        ({"facts": (300,)}, "facts: got 300, wanted 1 to 256"),
        ({"questions": 0}, "questions: got 0, wanted 1 or more"),
        ({"widths": (0,)}, "head_dim"),
    ],
)
def test_a_job_that_cannot_be_done_says_so_before_it_trains(tiny, change, message):
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(tiny, **change), progress=False)
    assert not tiny.out.exists()


def test_the_table_shows_lowest_and_highest_seed():
    def record(seed, recall):
        by_depth = [recall, None, 0, 0, 1]
        who = {"variant": "kda", "width": 16, "seed": seed, "kind": "facts", "length": 256, "facts": ASKED}
        return {**who, "recall": recall, "by_depth": by_depth}

    result = {
        "chance": CHANCE, "trained_length": 256, "records": [record(0, 0.5), record(1, 0.25), record(2, 0.3)],
        "models": [{"variant": "kda", "width": 16, "seed": seed} for seed in (0, 1, 2)],
        "cache": [{"variant": "kda", "width": 16, "length": 256, "total": 2048}],
    }  # fmt: skip
    assert spread(result, "recall", "kda", "facts", 256, ASKED) == [0.25, 0.3, 0.5]
    table = text_table(result)
    assert "3 seed(s)" in table and "25 - 50" in table and "2.0" in table
    assert table.split("earliest to latest fifth\n")[1].split("\n")[0].split() == ["kda", "35", "0", "0", "100"]


# ---- learning


SMALL = Recipe(steps=300, lr=1e-2, warmup=20, task="small recall")  # some 10 s of CPU time


@pytest.mark.timeout(240)
def test_a_small_sibling_made_again_does_what_its_card_says(tmp_path):
    job = Job(
        out=tmp_path, recipe=SMALL, variants=("kda",), widths=(48,), layers=1, seeds=(0,), lengths=(64,), facts=(4,),
        trained_length=64, step_tokens=1024,
    )  # fmt: skip
    run(job, progress=False)
    card = read_card(tmp_path / "kda-w48-l1-s0" / "model", "recall")
    (said,) = (m for m in card["measured"] if m["kind"] == "facts")
    (control,) = (m for m in card["measured"] if m["kind"] == "control")
    assert said["recall"] > 0.5, "chance is .06"
    assert control["recall"] < 0.0625 + 4 * (0.0625 * 0.9375 / control["questions"]) ** 0.5

    recipe = Recipe(**card["recipe"])
    longest, tokens = card["trained_length"], card["tokens_per_step"]
    folder = tmp_path / "again"
    model = train_sibling(
        folder,
        card["variant"],
        recipe,
        width=card["width"],
        layers=card["layers"],
        longest=longest,
        tokens=tokens,
        progress=False,
    )
    again = measure(model, "facts", 64, 4, 200, seed=1)  # other documents
    assert abs(said["recall"] - again.recall) < 4 * (said["recall_error"] ** 2 + again.recall_error**2) ** 0.5
    assert read_card(folder / "model", "recall")["sha256"] == card["sha256"], "on one machine, bit for bit"


# ---- what is shipped


def test_the_shipped_figures_are_complete(shipped):
    assert shipped["complete"] and shipped["trained_length"] == TRAINED_LENGTH
    wanted = {(v, WIDTH, s) for v in Job.variants for s in Job.seeds}
    assert {(m["variant"], m["width"], m["seed"]) for m in shipped["models"]} == wanted
    measured = [(r["variant"], r["width"], r["seed"], r["kind"], r["length"], r["facts"]) for r in shipped["records"]]
    assert sorted(measured) == sorted((*who, *cell) for who in wanted for cell in exam_cells(Job.lengths, Job.facts))


FILES = {  # what each tells of, and how many layers these have
    "recall": ([(v, WIDTH) for v in Job.variants], 4),
    "width-48": ([("kda", 48)], 4),
    "ratio-1-1": ([("1:1", WIDTH)], 4),
    "layers-8": ([("hybrid", WIDTH), ("7:1", WIDTH)], 8),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_shipped_was_made_by_the_recipe_of_the_command(name):
    siblings, layers = FILES[name]
    result = json.loads((SHIPPED / f"{name}.json").read_text())
    made = [(m["variant"], m["width"], m["seed"]) for m in result["models"]]
    assert made == [(*who, seed) for seed in Job.seeds for who in siblings]
    for entry in result["models"]:
        card = entry["card"]
        if name == "recall":  # reading checks the sha256 of the weights
            assert read_card(SHIPPED / entry["folder"], "recall") == card
        assert card["recipe"] == dataclasses.asdict(dataclasses.replace(RECIPE, seed=entry["seed"]))
        assert (card["variant"], card["width"], card["layers"]) == (entry["variant"], entry["width"], layers)
        assert (card["trained_length"], card["tokens_per_step"]) == (TRAINED_LENGTH, TOKENS_PER_STEP)
    sizes = [entry["parameters"] for entry in result["models"]]
    assert max(sizes) < 1.01 * min(sizes)


@pytest.mark.parametrize("name", FILES)
def test_controls_score_chance_and_errors_are_small(name):
    result = json.loads((SHIPPED / f"{name}.json").read_text())
    controls, p = [r for r in result["records"] if r["kind"] == "control"], CHANCE["recall"]
    asked = sum(r["questions"] for r in controls)
    assert sum(r["recall"] * r["questions"] for r in controls) / asked < p + 4 * (p * (1 - p) / asked) ** 0.5
    assert all(r["recall"] < p + 4.5 * (p * (1 - p) / r["questions"]) ** 0.5 for r in controls)
    assert all(r["recall_error"] < 0.065 for r in result["records"])


@pytest.mark.parametrize("variant", Job.variants)
def test_the_shipped_model_is_the_measured_one(shipped, variant):
    (entry,) = (m for m in shipped["models"] if (m["variant"], m["width"], m["seed"]) == (variant, WIDTH, 0))
    folder = SHIPPED / entry["folder"]
    assert read_card(folder, "recall") == entry["card"]
    model = load_sibling(folder)
    assert model.config == sibling_config(variant, VOCABULARY), "what the command would make today"
    assert sum(p.numel() for p in model.parameters()) == entry["parameters"]
    (record,) = (
        r for r in shipped["records"]
        if (r["variant"], r["width"], r["seed"], r["kind"], r["length"], r["facts"])
        == (variant, WIDTH, 0, "facts", 256, 16)
    )  # fmt: skip
    again = measure(model, "facts", 256, 16, 60, seed=1)  # other documents
    error = 4 * (again.recall_error**2 + record["recall_error"] ** 2) ** 0.5
    assert again.recall == pytest.approx(record["recall"], abs=max(error, 0.01))
    for kept in (c for c in shipped["cache"] if c["variant"] == variant):
        assert kept["total"] == sibling_cache_bytes(variant, model.config, kept["length"]).total


def test_the_shipped_folder_stays_small():
    assert sum(p.stat().st_size for p in SHIPPED.rglob("*") if p.is_file()) < 1e7
