"""Needles in a haystack: facts hidden in real text, and a question at the end.

A needle is a line `abc=4071`; the question is `?abc=`; the answer is right if all four digits are. The filler
is real prose without digits, '=' and '?', so a needle stands nowhere by chance; keys of a document differ.

    length  = bytes read when the answer is due: filler, needles and the question
    depth   = how much of the filler comes before the asked needle, in percent
    chance  = 1 in 10,000; a control asks for a key that was never hidden

Traps that this avoids, each seen in public benchmarks: hazards.md T24.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3lite.tasks.text import encode

KEY_LETTERS, DIGITS = 3, 4
KEYS, VALUES = 26**KEY_LETTERS, 10**DIGITS
CHANCE = 1 / VALUES
NEEDLE_BYTES = len("\nabc=4071\n")
QUESTION_BYTES = len("?abc=")
IGNORE = -100


@dataclass(frozen=True)
class NeedleBatch:
    """ids: [B, length + answers].   labels: like ids, -100 but for the digits of answers.
    answers: [B, DIGITS], the digits of the last question, which end the row.
    """

    ids: Tensor
    labels: Tensor
    answers: Tensor


def shortest_length(needles: int, questions: int = 1) -> int:
    """Bytes that so many needles and questions need without any filler."""
    return needles * NEEDLE_BYTES + questions * QUESTION_BYTES + (questions - 1) * DIGITS


def make_batch(
    text: Tensor,
    batch: int,
    length: int,
    needles: int,
    generator: torch.Generator,
    *,
    questions: int = 1,
    depth: float | None = None,
    control: bool = False,
) -> NeedleBatch:
    """Documents of `length` bytes with `needles` facts, of which `questions` are asked at the end.

    text: [T] filler (see `tasks.text.haystack`).   depth: 0..100 for the needle asked last; None: anywhere.
    control: the last question asks for a key that is not there, and its answer is a number drawn at random.
    Raises ValueError when the length cannot hold what is asked.
    """
    if depth is not None and not 0 <= depth <= 100:
        raise ValueError(f"depth: got {depth:g}, wanted 0 to 100 percent")
    if questions - control > needles or questions < 1:
        raise ValueError(f"questions: got {questions} for {needles} needle(s)")
    least = shortest_length(needles, questions)
    filler = length - least
    if filler < 0:
        raise ValueError(
            f"length: {length} bytes cannot hold {needles} needle(s) and the question; wanted {least} or more"
        )
    if filler > len(text):
        raise ValueError(f"length: {length} bytes is more than the haystack has ({len(text)})")
    rows = [_document(text, filler, needles, questions, depth, control, generator) for _ in range(batch)]
    ids = torch.stack(rows)
    labels = torch.full_like(ids, IGNORE)
    step = QUESTION_BYTES + DIGITS
    for i in range(questions):
        end = ids.shape[1] - i * step
        labels[:, end - DIGITS : end] = ids[:, end - DIGITS : end]
    return NeedleBatch(ids, labels, ids[:, -DIGITS:])


def _document(text, filler, needles, questions, depth, control, generator) -> Tensor:
    def draw(high: int, n: int) -> Tensor:
        return torch.randint(high, (n,), generator=generator)

    names = torch.randperm(KEYS, generator=generator)[: needles + control]  # the control's key comes on top
    keys, values = _letters(names), _digits(draw(VALUES, needles + control))
    # A needle goes in after `cut` bytes of filler. Needle 0 is asked last.
    cuts = draw(filler + 1, needles)
    if depth is not None and needles and not control:
        cuts[0] = round(filler * depth / 100)
    start = int(draw(len(text) - filler + 1, 1))
    prose = text[start : start + filler]
    lines = _lines(keys, values)
    pieces, done = [], 0
    for i in cuts.argsort(stable=True).tolist():
        pieces += [prose[done : cuts[i]], lines[i]]
        done = int(cuts[i])
    pieces.append(prose[done:])
    asked = [*reversed(range(questions - control)), *[needles] * control]
    for i in asked:
        pieces += [_QUESTION, keys[i], _EQUALS, values[i]]
    return torch.cat(pieces)


_QUESTION, _EQUALS, _NEWLINE = encode("?"), encode("="), encode("\n")


def _letters(names: Tensor) -> Tensor:
    """[n] numbers below KEYS -> [n, 3] letter bytes."""
    return torch.stack([names // 26**i % 26 for i in reversed(range(KEY_LETTERS))], -1) + ord("a")


def _digits(numbers: Tensor) -> Tensor:
    """[n] numbers below VALUES -> [n, 4] digit bytes."""
    return torch.stack([numbers // 10**i % 10 for i in reversed(range(DIGITS))], -1) + ord("0")


def _lines(keys: Tensor, values: Tensor) -> Tensor:
    """[n, NEEDLE_BYTES]: newline, key, '=', value, newline."""
    n = len(keys)
    fixed = [x.expand(n, 1) for x in (_NEWLINE, _EQUALS, _NEWLINE)]
    return torch.cat([fixed[0], keys, fixed[1], values, fixed[2]], dim=1)
