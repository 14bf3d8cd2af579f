"""Documents of gist and verbatim: right answers, nothing leaked, and a model that always or never knows."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from k3lite.tasks.recall import (
    ASK,
    ASK_TOPIC,
    COPY,
    FACT,
    IGNORE,
    KEY,
    KEYS,
    RUMOUR,
    SLOT,
    STRING,
    STRING_MARK,
    SYMBOL,
    SYMBOLS,
    TOPIC,
    TOPIC_SHARE,
    TOPICS,
    VALUE,
    VALUES,
    VOCABULARY,
    WORD,
    WORDS,
    make_documents,
)
from k3lite.tasks.recall_exam import ASIDE, ASKED, CHANCE, DEPTHS, answers, exam_cells, measure


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def documents(batch=40, length=256, facts=16, **options):
    return make_documents(batch, length, facts, generator(), **options)


def lines_of(row, mark):
    """(slot, key, value) of each line that begins with `mark`."""
    at = [i for i, token in enumerate(row) if token == mark]
    assert all(i % SLOT == 0 for i in at)
    return [(i // SLOT, row[i + 1], row[i + 2]) for i in at]


def test_every_answer_is_what_the_document_says_last():
    exam = documents(rewritten=6, rumours=5)
    for b, row in enumerate(exam.ids.tolist()):
        text, tail = row[:256], row[256:]
        facts, rumours = lines_of(text, FACT), lines_of(text, RUMOUR)
        assert len(facts) == 16 + 6 and len(rumours) == 5
        assert len({slot for slot, *_ in facts + rumours}) == 16 + 6 + 5, "no line covers another"
        last = {key: (value, slot) for slot, key, value in facts}
        asked = [tail[2 + 2 * i] for i in range(16)]
        assert len(set(asked)) == 16
        assert [last[key][0] for key in asked] == exam.values[b].tolist()
        depth = [100 * last[key][1] / (256 // SLOT - 1) for key in asked]
        assert depth == pytest.approx(exam.depth[b].tolist(), abs=1e-3)
        first = {}
        for _, key, value in facts:
            first.setdefault(key, value)
        told = {key: value for _, key, value in rumours}
        assert [first[key] for key in asked[:6]] == exam.decoys[b, :6].tolist(), "the old value"
        assert [told[key] for key in asked[6:11]] == exam.decoys[b, 6:11].tolist(), "the rumour's value"
        assert (exam.decoys[b, 11:] == IGNORE).all()
    assert not (exam.decoys == exam.values).any()


def test_answers_are_due_one_place_after_their_question():
    exam = documents(facts=3, string=True)
    for row, labels, topic, values, string in zip(
        exam.ids, exam.labels, exam.topic, exam.values, exam.string, strict=True
    ):
        due = (labels != IGNORE).nonzero().flatten()
        assert due[0] == 257 and row[256] == ASK_TOPIC
        assert (row[due[1:4] - 1] >= KEY).all() and (row[due[1:4] - 2] == ASK).all()
        assert row[due[4] - 1] == COPY and torch.equal(row[due[5:] - 1], string[:-1])
        assert torch.equal(labels[due], torch.cat([topic[None], values, string]))
        marked = int((row[:256] == STRING_MARK).nonzero())
        assert torch.equal(row[marked + 1 : marked + 1 + STRING], string)
        assert len(set(string.tolist())) == STRING


def test_no_answer_but_the_strings_own_symbols_stands_behind_the_document():
    tail = documents(string=True).ids[:, 256:]
    assert not ((tail >= VALUE) & (tail < SYMBOL)).any()
    assert not ((tail >= TOPIC) & (tail < TOPIC + TOPICS)).any()


def test_controls_are_not_in_the_text():
    exam = documents(control=True)
    asked = exam.ids[:, 256 + 2 : 256 + 2 + 32 : 2]
    assert ((asked >= KEY) & (asked < KEY + KEYS)).all()
    assert not (exam.ids[:, :256, None] == asked[:, None]).any()
    assert exam.values.unique().numel() == VALUES and (exam.decoys == IGNORE).all()


def test_a_quarter_of_the_words_and_more_are_of_the_topic():
    exam = documents(batch=400, facts=1)
    text = exam.ids[:, :256]
    word = text < TOPICS * WORDS
    own = (text - WORD) // WORDS == (exam.topic - TOPIC)[:, None]
    share = (own & word).sum() / word.sum()
    assert share == pytest.approx(TOPIC_SHARE + (1 - TOPIC_SHARE) / TOPICS, abs=0.01)


def test_one_fact_can_be_put_anywhere():
    for percent, slot in ((0, 0), (50, 32), (100, 63)):
        exam = documents(facts=1, depth=percent)
        assert all(lines_of(row, FACT)[0][0] == slot for row in exam.ids[:, :256].tolist())
    exam = documents(facts=1, depth=50, string=True)
    assert (exam.ids[:, 32 * SLOT] == FACT).all() and (exam.ids == STRING_MARK).sum() == len(exam.ids)


def test_the_fullest_document_that_fits_can_be_made():
    full = documents(length=4 * (10 + 4 + 3 + 3), facts=10, rewritten=4, rumours=3, string=True)
    assert all(len(lines_of(row, FACT)) == 14 for row in full.ids[:, :80].tolist())
    assert int(full.ids.max()) < VOCABULARY


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 254}, "length: got 254, wanted a multiple of 4, 64 or more"),
        ({"length": 60}, "length: got 60"),
        ({"facts": 0}, "facts: got 0, wanted 1 to 256"),
        ({"length": 2048, "facts": 250, "questions": 10, "control": True}, "facts: got 250, wanted 1 to 246"),
        ({"questions": 17}, "questions: got 17, wanted 1 to 16"),
        ({"rumours": 9, "rewritten": 8}, "rumours, rewritten: got 9 and 8, wanted together at most 16"),
        ({"string": True, "symbols": 9}, "symbols: got 9, wanted 1 to 8"),
        ({"depth": 101.0}, "depth: got 101 and 0 rewritten keys"),
        ({"depth": 5.0, "rewritten": 1}, "depth: got 5 and 1 rewritten keys"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        documents(**options)


def test_a_string_can_be_shorter():
    exam = documents(facts=2, string=True, symbols=3)
    assert exam.string.shape == (40, 3) and (exam.labels[:, -3:] == exam.string).all()
    assert (exam.ids == COPY).nonzero()[:, 1].tolist() == [exam.ids.shape[1] - 4] * 40
    assert ((exam.ids[:, :256] >= SYMBOL) & (exam.ids[:, :256] < SYMBOL + SYMBOLS)).sum() == 3 * 40


# ---- the exam


class Reader:
    """Reads the text itself: the last value of a key, or with `first` the first one; the string; a fixed topic."""

    def __init__(self, first=False):
        self.first = first

    def __call__(self, ids, logits_to_keep):
        guess = torch.full_like(ids, TOPIC)
        for b, row in enumerate(ids.tolist()):
            known, symbol, begin = {}, {}, row.index(ASK_TOPIC)
            for slot in range(0, begin, SLOT):
                if row[slot] == FACT and not (self.first and row[slot + 1] in known):
                    known[row[slot + 1]] = row[slot + 2]
                if row[slot] == STRING_MARK:
                    text = [COPY, *row[slot + 1 : slot + 1 + STRING]]
                    symbol = dict(zip(text, text[1:], strict=False))
            for t in range(begin + 1, len(row)):
                guess[b, t] = known.get(row[t], symbol.get(row[t], 0))
        return SimpleNamespace(logits=F.one_hot(guess[:, -logits_to_keep:], VOCABULARY).float())


def test_who_reads_everything_gets_all_right():
    for kind in ("facts", "rumours", "rewritten", "string"):
        score = measure(Reader(), kind, 256, ASKED, 12)
        assert score.recall == 1 and score.recall_error == 0 and score.questions == 12 * ASKED
        assert set(score.by_depth) == {1.0}
        assert (score.string, score.symbols) == ((1, 1) if kind == "string" else (None, None))
        assert score.decoy == (0 if kind in ("rumours", "rewritten") else None)
    assert 0 <= score.topic < 1, "it always says the same topic"


def test_who_believes_the_first_value_is_found_out():
    score = measure(Reader(first=True), "rewritten", 256, ASKED, 12)
    assert score.recall == 0 and score.decoy == 1


def test_nobody_knows_what_was_not_written():
    score = measure(Reader(), "control", 256, ASKED, 12)
    assert score.recall == 0 and score.by_depth == ()


def test_a_string_counts_only_whole():
    exam = make_documents(2, 64, 4, generator(), string=True)

    def one_symbol_wrong(ids, logits_to_keep):
        logits = Reader()(ids, logits_to_keep).logits
        logits[0, -2] = 0  # the last symbol of the first document
        return SimpleNamespace(logits=logits)

    right = answers(one_symbol_wrong, exam).string == exam.string
    assert right.all(1).tolist() == [False, True] and right.sum() == 2 * STRING - 1


def test_depths_are_told_apart():
    """A reader that forgot the first half of the document."""

    def late(ids, logits_to_keep):
        return Reader()(torch.where(torch.arange(ids.shape[1]) < 128, WORD, ids), logits_to_keep)

    score = measure(late, "facts", 256, 16, 60)
    assert score.by_depth[0] == score.by_depth[1] == 0 and score.by_depth[3] == score.by_depth[4] == 1
    assert 0.3 < score.by_depth[2] < 0.7
    assert len(score.by_depth) == DEPTHS


def test_standard_errors_come_from_the_spread_between_documents():
    score = measure(lambda ids, logits_to_keep: Reader()(ids.roll(1, 0), logits_to_keep), "string", 64, 4, 50)
    topic = score.topic
    assert score.topic_error == pytest.approx((topic * (1 - topic) / 49) ** 0.5, abs=1e-3)


def test_cells_are_all_that_fit():
    all_cells = exam_cells((64, 256), (16, 64, 256))
    assert [c for c in all_cells if c[0] == "facts"] == [("facts", 64, 16), ("facts", 256, 16), ("facts", 256, 64)]
    assert {c[0] for c in all_cells if c[1] == 64} == {"facts", "control"}
    assert {c[0] for c in all_cells if c[1] == 256} == {"facts", *ASIDE}
    assert CHANCE == {"recall": 1 / 16, "topic": 1 / 8}
    for kind, length, n in all_cells:
        measure(Reader(), kind, length, n, 2)


def test_every_model_sits_the_same_exam(monkeypatch):
    from k3lite.tasks import recall_exam

    seen = []
    real = make_documents
    monkeypatch.setattr(recall_exam, "make_documents", lambda *a, **k: seen.append(real(*a, **k).ids) or real(*a, **k))
    for cell in (("facts", 64, 4, 3), ("facts", 64, 4, 3), ("control", 64, 4, 3)):
        measure(Reader(), *cell)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_bad_cells():
    with pytest.raises(ValueError, match="kind: got 'gossip', wanted one of facts, rumours"):
        measure(Reader(), "gossip", 64, 4, 3)
    with pytest.raises(ValueError, match="documents: got 1, wanted 2 or more"):
        measure(Reader(), "facts", 64, 4, 1)


def test_symbols_and_keys_do_not_overlap():
    exam = documents(string=True)
    words = exam.ids[:, :256][:, 3::SLOT]  # the place in a slot that no fact covers
    assert (((words >= WORD) & (words < KEY)) | ((words >= SYMBOL) & (words < SYMBOL + SYMBOLS))).all()
