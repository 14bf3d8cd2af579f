"""Gist and verbatim in one document: what a sibling keeps of a text, and what it can give back word for word.

A document is `length` tokens of words from one topic (a quarter of them; the rest from all topics), in which are hidden

    FACT key value       a fact; a key may be given a new value later, and the last one counts
    RUMOUR key value     a distractor: looks like a fact, has the key of one, and must not be believed
    STRING s1 ... s8     eight different random symbols

and at its end stand the questions:  TOPIC? · ASK key · ASK key ... · COPY s1 ... s7. A model answers with the next token it
expects: the topic after TOPIC?, the value after each key, the next symbol after COPY and after each symbol. No answer but
the string's own symbols stands in the row.

    chance  topic 1 in 8, value 1 in 16, the whole string nearly 0

Traps that this avoids: hazards.md T24.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOPICS, WORDS = 8, 16  # words of each topic
KEYS, VALUES, SYMBOLS, STRING = 256, 16, 16, 8
SLOT = 4  # facts stand at multiples of it
_sizes = {"words": TOPICS * WORDS, "keys": KEYS, "values": VALUES, "symbols": SYMBOLS, "topics": TOPICS}
_starts = torch.tensor([0, *_sizes.values()]).cumsum(0).tolist()
WORD, KEY, VALUE, SYMBOL, TOPIC = _starts[:-1]  # first token id of each kind
FACT, RUMOUR, STRING_MARK, ASK_TOPIC, ASK, COPY, END = range(_starts[-1], _starts[-1] + 7)
VOCABULARY = _starts[-1] + 7
IGNORE = -100
TOPIC_SHARE = 0.25
STRING_SLOTS = 3  # of SLOT tokens, for the mark and eight symbols


@dataclass(frozen=True)
class Documents:
    """ids: [B,T], the document and its questions.   labels: like ids, -100 but where an answer is due.
    topic: [B], values: [B,questions], string: [B,symbols] or None: the answers, token ids.
    depth: [B,questions], percent of the document at which the asked fact stands (the newer one of a rewritten key).
    decoys: [B,questions], the other value that stands beside the key, old or rumoured; -100 where there is none.
    """

    ids: Tensor
    labels: Tensor
    topic: Tensor
    values: Tensor
    string: Tensor | None
    depth: Tensor
    decoys: Tensor


def make_documents(
    batch: int,
    length: int,
    facts: int,
    generator: torch.Generator,
    *,
    questions: int | None = None,
    rumours: int = 0,
    rewritten: int = 0,
    string: bool = False,
    symbols: int = STRING,
    depth: float | None = None,
    control: bool = False,
) -> Documents:
    """Random documents of `length` tokens, a multiple of SLOT, with their questions behind.

    facts: different keys that are written.   questions: how many of them are asked, default all.
    rewritten: of the first asked keys so many get another value later on, which then is the answer.
    rumours: of the keys after these so many also stand in a RUMOUR line with another value.
    string: hide a string of `symbols` symbols as well, and ask for it.
    depth: percent of the document at which the first fact stands; by default all places are random.
    control: ask for keys that are not written; their answers are drawn at random.
    Raises ValueError for what does not fit.
    """
    questions = facts if questions is None else questions
    _check(length, facts, questions, rumours, rewritten, string, depth, control)
    if not 1 <= symbols <= STRING:
        raise ValueError(f"symbols: got {symbols}, wanted 1 to {STRING}")

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (batch, *shape), generator=generator)

    topic = draw(0, TOPICS, 1)
    own = topic * WORDS + draw(0, WORDS, length)
    is_own = torch.rand(batch, length, generator=generator) < TOPIC_SHARE
    ids = WORD + torch.where(is_own, own, draw(0, TOPICS * WORDS, length))

    where, string_at = _places(batch, length // SLOT, facts + rewritten + rumours, string, depth, generator)
    first, again, told = where.split([facts, rewritten, rumours], 1)
    if rewritten:
        early, late = torch.stack([first[:, :rewritten], again]).sort(0).values
        first, again = torch.cat([early, first[:, rewritten:]], 1), late
    keys = KEY + torch.rand(batch, KEYS, generator=generator).argsort(-1)
    value = VALUE + draw(0, VALUES, facts)
    other = VALUE + (value - VALUE + draw(1, VALUES, facts)) % VALUES
    doubted = slice(rewritten, rewritten + rumours)
    _write(ids, first, FACT, keys[:, :facts], value)
    _write(ids, again, FACT, keys[:, :rewritten], other[:, :rewritten])
    _write(ids, told, RUMOUR, keys[:, doubted], other[:, doubted])
    text = None
    if string:
        text = SYMBOL + torch.rand(batch, SYMBOLS, generator=generator).argsort(-1)[:, :symbols]
        line = torch.cat([torch.full((batch, 1), STRING_MARK), text], 1)
        ids.scatter_(1, SLOT * string_at + torch.arange(symbols + 1), line)

    asked, answers = keys[:, :questions], torch.cat([other[:, :rewritten], value[:, rewritten:]], 1)[:, :questions]
    decoys = torch.full_like(value, IGNORE)
    decoys[:, :rewritten], decoys[:, doubted] = value[:, :rewritten], other[:, doubted]
    if control:
        asked, answers = keys[:, facts : facts + questions], VALUE + draw(0, VALUES, questions)
        decoys = torch.full_like(answers, IGNORE)
    at = torch.cat([again, first[:, rewritten:]], 1)[:, :questions]
    tail, labels = _questions(TOPIC + topic, asked, answers, text)
    labels = torch.cat([torch.full_like(ids, IGNORE), labels], 1)
    depths = 100 * at / max(1, length // SLOT - 1)
    return Documents(
        torch.cat([ids, tail], 1), labels, (TOPIC + topic).squeeze(1), answers, text, depths, decoys[:, :questions]
    )


def least_length(facts: int, *, rumours: int = 0, rewritten: int = 0, string: bool = False) -> int:
    """Tokens of the shortest document that holds so much."""
    return SLOT * (facts + rewritten + rumours + STRING_SLOTS * string)


def _check(length, facts, questions, rumours, rewritten, string, depth, control) -> None:
    least = least_length(facts, rumours=rumours, rewritten=rewritten, string=string)
    if length % SLOT or length < least:
        raise ValueError(f"length: got {length}, wanted a multiple of {SLOT}, {least} or more for what it is to hold")
    most = KEYS - questions if control else KEYS
    if not 1 <= facts <= most:
        raise ValueError(f"facts: got {facts}, wanted 1 to {most}, since keys differ")
    if questions < 1 or (questions > facts and not control):
        raise ValueError(f"questions: got {questions}, wanted 1 to {facts}")
    if min(rumours, rewritten) < 0 or rumours + rewritten > facts:
        raise ValueError(f"rumours, rewritten: got {rumours} and {rewritten}, wanted together at most {facts}")
    if depth is not None and (rewritten or not 0 <= depth <= 100):
        raise ValueError(f"depth: got {depth:g} and {rewritten} rewritten keys, wanted 0 to 100 percent, and none")


def _places(batch, slots, lines, string, depth, generator) -> tuple[Tensor, Tensor]:
    """[batch, lines] different slots in random order, and [batch, 1], the first of the slots of the string."""
    order = torch.rand(batch, slots, generator=generator)
    fixed = None if depth is None else round(depth / 100 * (slots - 1))
    string_at = torch.zeros(batch, 1, dtype=torch.long)
    if string:
        free = [s for s in range(slots - STRING_SLOTS + 1) if fixed is None or not s <= fixed < s + STRING_SLOTS]
        string_at = torch.tensor(free)[torch.randint(len(free), (batch, 1), generator=generator)]
        order.scatter_(1, string_at + torch.arange(STRING_SLOTS), 2.0)  # behind all that are free
    if fixed is not None:
        order[:, fixed] = -1.0
    return order.argsort(-1)[:, :lines], string_at


def _write(ids: Tensor, slots: Tensor, mark: int, keys: Tensor, values: Tensor) -> None:
    """Put lines `mark key value` into ids; slots, keys, values: [B, lines]."""
    for offset, token in enumerate((torch.full_like(keys, mark), keys, values)):
        ids.scatter_(1, SLOT * slots + offset, token)


def _questions(topic: Tensor, asked: Tensor, answers: Tensor, text: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens and labels behind the document; an answer is due one place after its question."""
    batch = len(topic)
    column = lambda token: torch.full((batch, 1), token)  # noqa: E731
    pairs = torch.stack([torch.full_like(asked, ASK), asked], -1).flatten(1)
    due = torch.stack([answers, torch.full_like(answers, IGNORE)], -1).flatten(1)
    ids, labels = [column(ASK_TOPIC), pairs], [column(IGNORE), topic, column(IGNORE), due[:, :-1]]
    if text is not None:  # COPY stands where the last value is due
        ids += [column(COPY), text[:, :-1]]
        labels += [text]
    ids.append(column(END))
    return torch.cat(ids, 1), torch.cat(labels, 1)
