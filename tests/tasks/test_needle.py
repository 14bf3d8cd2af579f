"""The needle task: what stands where, what is asked, and nothing that answers by accident (hazards.md T24)."""

import re

import pytest
import torch

from k3lite.tasks.needle import DIGITS, IGNORE, NEEDLE_BYTES, QUESTION_BYTES, make_batch, shortest_length
from k3lite.tasks.text import RESERVED, clean, decode, encode, haystack

FACT = re.compile(r"\n([a-z]{3})=([0-9]{4})\n")
QUESTION = re.compile(r"\?([a-z]{3})=([0-9]{4})")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def text():
    return haystack("heldout")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_filler_holds_nothing_that_a_needle_is_made_of(split):
    filler = bytes(haystack(split).tolist())
    assert len(filler) > 400_000
    assert not set(filler) & set(RESERVED)
    assert max(filler) < 128


def test_training_and_heldout_text_are_different_books():
    train, heldout = (bytes(haystack(s).tolist()) for s in ("train", "heldout"))
    pieces = [heldout[i : i + 60] for i in range(0, len(heldout) - 60, 5000)]
    assert sum(piece in train for piece in pieces) == 0


@pytest.mark.parametrize(
    ("length", "needles", "questions"), [(15, 1, 1), (64, 2, 1), (256, 8, 1), (96, 5, 5), (300, 20, 8)]
)
def test_a_document_holds_its_needles_and_asks_for_them(text, length, needles, questions):
    length = max(length, shortest_length(needles, questions))
    batch = make_batch(text, 5, length, needles, rng(), questions=questions)
    assert batch.ids.shape == (5, length + DIGITS)
    for ids, labels, answer in zip(batch.ids, batch.labels, batch.answers, strict=True):
        document = decode(ids)
        body, asked = document[: document.index("?")], QUESTION.findall(document)
        facts = dict(FACT.findall(body.replace("\n", "\n\n")))  # neighbouring needles each own their newlines
        assert len(facts) == needles, "keys differ"
        assert len(asked) == questions == len(dict(asked)), "each key is asked once"
        assert all(facts[key] == value for key, value in asked)
        assert decode(answer) == asked[-1][1] == document[-DIGITS:]
        assert decode(ids[labels != IGNORE]) == "".join(value for _, value in asked), (
            "the loss is on answer digits only"
        )


@pytest.mark.parametrize("depth", [0, 25, 50, 100])
def test_depth_is_the_share_of_filler_before_the_needle(text, depth):
    length = 500
    batch = make_batch(text, 3, length, 1, rng(), depth=depth)
    filler = length - NEEDLE_BYTES - QUESTION_BYTES
    for ids in batch.ids:
        assert FACT.search(decode(ids)).start() == round(filler * depth / 100)


def test_depth_holds_for_the_asked_one_of_several(text):
    for ids in make_batch(text, 10, 2000, 6, rng(), depth=50).ids:
        document = decode(ids)
        key = QUESTION.search(document)[1]
        before = document[: document.index(f"\n{key}=")]
        filler_before = len(before) - NEEDLE_BYTES * len(re.findall(r"[a-z]{3}=[0-9]{4}", before))
        assert filler_before == round((2000 - 6 * NEEDLE_BYTES - QUESTION_BYTES) * 0.5)


def test_control_asks_for_a_key_that_is_not_there(text):
    batch = make_batch(text, 20, 200, 3, rng(), control=True)
    for ids in batch.ids:
        document = decode(ids)
        (key, _), *rest = QUESTION.findall(document)
        assert not rest
        assert document.count(f"{key}=") == 1, "only the question names it"


def test_same_seed_same_documents(text):
    a, b, c = (make_batch(text, 4, 128, 2, rng(seed)).ids for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 14, "needles": 1}, r"length: 14 bytes cannot hold 1 needle.*wanted 15 or more"),
        ({"length": 100, "needles": 1, "depth": 120}, r"depth: got 120, wanted 0 to 100 percent"),
        ({"length": 100, "needles": 1, "questions": 2}, r"questions: got 2 for 1 needle"),
        ({"length": 10**7, "needles": 1}, r"length: 10000000 bytes is more than the haystack has"),
    ],
)
def test_what_cannot_be_is_refused(text, options, message):
    with pytest.raises(ValueError, match=message):
        make_batch(text, 1, generator=rng(), **options)


def test_text_round_trip_and_cleaning():
    assert decode(encode("Gehe hin, ä")) == "Gehe hin, ä"
    assert clean("a1b=c?\r\né".encode()) == b"abc\n "
    assert encode("").shape == (0,)
