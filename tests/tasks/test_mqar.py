"""Associative recall: what stands in a row, what is asked, and nothing that answers by accident (hazards.md T24)."""

import math
from types import SimpleNamespace

import pytest
import torch

from k3lite.config import ConfigError
from k3lite.model import K3ForCausalLM
from k3lite.tasks.mqar import (
    CHANCE,
    END,
    HIDDEN,
    IGNORE,
    KEYS,
    VALUES,
    VOCABULARY,
    make_batch,
    measure,
    mqar_config,
    right_answers,
)

from ..helpers import dims


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def facts(row: torch.Tensor, pairs: int) -> dict[int, int]:
    return dict(row[: 2 * pairs].unflatten(0, (-1, 2)).tolist())


class FirstPairOnly:
    """Stands for a model: it knows every row's first pair, and answers `otherwise` to any other key."""

    def __init__(self, otherwise: int = KEYS):
        self.otherwise = otherwise

    def __call__(self, ids, logits_to_keep):
        known = ids[:, -logits_to_keep:] == ids[:, :1]
        guess = torch.where(known, ids[:, 1:2], self.otherwise)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(guess, VOCABULARY).float())


@dims("pairs questions", (1, 1), (4, 4), (16, 3), (128, 16), (256, 256))
def test_a_row_holds_its_pairs_and_asks_for_them(pairs, questions):
    batch = make_batch(5, pairs, rng(), questions=questions)
    assert batch.ids.shape == batch.labels.shape == (5, 2 * pairs + questions + 1)
    assert batch.answers.shape == batch.ages.shape == (5, questions)
    for row, labels, answers, ages in zip(batch.ids, batch.labels, batch.answers, batch.ages, strict=True):
        known, asked = facts(row, pairs), row[2 * pairs : -1].tolist()
        assert len(known) == pairs, "keys differ"
        assert all(0 <= key < KEYS <= value < KEYS + VALUES for key, value in known.items())
        assert len(set(asked)) == questions, "each key is asked once"
        assert [known[key] for key in asked] == answers.tolist()
        assert row[-1] == END and (row == END).sum() == 1
        newest_first = list(reversed(known))
        assert [newest_first[age] for age in ages.tolist()] == asked
        # The model predicts labels[t] from the tokens before t, so the answer is due one place after its question.
        assert labels[2 * pairs + 1 :].tolist() == answers.tolist()
        assert (labels[: 2 * pairs + 1] == IGNORE).all(), "the loss is on answers only"


def test_no_answer_stands_among_the_questions():
    batch = make_batch(50, 8, rng())
    assert (batch.ids[:, 16:-1] < KEYS).all()


def test_control_asks_for_keys_that_were_never_written():
    batch = make_batch(30, 128, rng(), questions=128, control=True)
    for row in batch.ids:
        assert not set(row[0:256:2].tolist()) & set(row[256:-1].tolist())
    near = 4 * math.sqrt(1 / VALUES / batch.answers.numel())
    for value in (KEYS, KEYS + VALUES - 1):
        assert abs((batch.answers == value).double().mean() - CHANCE) < near, "answers are drawn from all values"


def test_all_pairs_are_asked_alike():
    ages = make_batch(4000, 8, rng(), questions=2).ages
    share = torch.bincount(ages.flatten(), minlength=8) / ages.numel()
    assert (share - 1 / 8).abs().max() < 4 * math.sqrt(1 / 8 / 8000)


def test_same_seed_same_rows():
    a, b, c = (make_batch(4, 8, rng(seed)).ids for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 0}, "pairs: got 0, wanted 1 to 256, since keys differ"),
        ({"pairs": 257}, "pairs: got 257, wanted 1 to 256"),
        ({"pairs": 250, "questions": 10, "control": True}, "pairs: got 250, wanted 1 to 246"),
        ({"pairs": 4, "questions": 5}, r"questions: got 5 for 4 pair\(s\), wanted 1 to 4"),
        ({"pairs": 4, "questions": 0}, "questions: got 0"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_batch(1, generator=rng(), **options)


# ---- the model


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_models_differ_in_their_states_alone(width):
    config = mqar_config(width)
    cache = K3ForCausalLM(config).new_cache()
    assert [layer.S.shape for layer in cache.layers] == [(1, 1, width, width)] * 2
    assert config.layer_kinds == ("kda", "kda") and config.num_experts == 0 and config.attn_res_block_size is None
    assert config.linear_attn_config.gate_lower_bound == -5 and config.hidden_size == HIDDEN


@pytest.mark.parametrize("width", [0, -8, 2.5, True, "16"])
def test_a_width_that_is_none_is_refused(width):
    with pytest.raises(ConfigError, match=f"width: got {width!r}, wanted a whole number, 1 or more"):
        mqar_config(width)


# ---- measuring


def test_measuring_counts_the_right_answers_by_age():
    recall = measure(FirstPairOnly(otherwise=END), 8, 500)
    assert recall.questions == 4000 and recall.chance == CHANCE
    assert recall.accuracy == 1 / 8
    assert recall.by_age == (0, 0, 0, 0.5), "of the oldest two pairs it knows one"
    assert recall.standard_error == 0, "every row gave the same share"


def test_the_standard_error_counts_rows_and_not_questions():
    recall = measure(FirstPairOnly(otherwise=KEYS), 16, 900)  # one key, and chance for the others
    p = 1 / 16 + 15 / 16 * CHANCE
    assert recall.accuracy == pytest.approx(p, abs=4 * recall.standard_error)
    assert recall.standard_error == pytest.approx(math.sqrt(15 * CHANCE * (1 - CHANCE)) / 16 / 30, rel=0.1)


@dims("pairs groups", (1, 1), (2, 2), (3, 3), (5, 4), (64, 4))
def test_groups_of_age(pairs, groups):
    by_age = measure(FirstPairOnly(otherwise=END), pairs, 60).by_age
    assert len(by_age) == groups
    assert by_age[-1] > 0 and not any(by_age[:-1])


def test_measuring_in_pieces_changes_nothing(monkeypatch):
    from k3lite.tasks import mqar

    model, batch = K3ForCausalLM(mqar_config(8)).eval(), make_batch(7, 5, rng())
    whole = right_answers(model, batch)
    monkeypatch.setattr(mqar, "EVAL_TOKENS", 40)
    assert torch.equal(right_answers(model, batch), whole)


def test_an_untrained_model_and_a_control_score_chance_or_less():
    model = K3ForCausalLM(mqar_config(8)).eval()
    knows_all_but = measure(FirstPairOnly(otherwise=KEYS + 3), 16, 500, control=True)
    assert abs(knows_all_but.accuracy - CHANCE) < 4 * math.sqrt(CHANCE / knows_all_but.questions)
    assert knows_all_but.by_age == ()
    assert measure(model, 8, 200).accuracy < 2 * CHANCE


def test_the_exam_is_the_same_for_every_model_and_another_for_another_seed():
    seen = []

    def note(ids, logits_to_keep):
        seen.append(ids)
        return FirstPairOnly()(ids, logits_to_keep)

    for seed in (0, 0, 1):
        measure(note, 8, 20, seed)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="rows: got 1, wanted 2 or more"):
        measure(FirstPairOnly(), 4, 1)
