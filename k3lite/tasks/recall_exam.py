"""What a model recalls of held-out documents: its answers, and the score of one cell of the experiment.

A cell is a kind of document, a length and a number of facts. Its documents depend on these and a seed alone, so every
sibling sits the same exam.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3lite.model import K3ForCausalLM
from k3lite.tasks.recall import STRING, TOPICS, VALUES, Documents, least_length, make_documents
from k3lite.tasks.trained import cell_seed

CHANCE = {"recall": 1 / VALUES, "topic": 1 / TOPICS}
ASKED = 16  # questions a document, at most
DEPTHS = 5  # bins
EVAL_TOKENS = 16_384  # tokens in one forward pass: bounds memory

# Kinds of documents beside the plain ones: options of `make_documents`, each with ASKED facts.
ASIDE = {
    "rumours": {"rumours": ASKED},  # each asked key stands in a rumour as well
    "rewritten": {"rewritten": ASKED},  # each asked key has got another value
    "string": {"string": True},
    "control": {"control": True},
}
KINDS = ("facts", *ASIDE)


@dataclass(frozen=True)
class Answers:
    """The likeliest of all tokens after each question. topic: [B], values: [B,questions], string: [B,STRING] or None.

    The symbols of a string are asked one by one, each after the right one before it. All are right if and only if the
    model would also write the whole string by itself.
    """

    topic: Tensor
    values: Tensor
    string: Tensor | None


@torch.no_grad()
def answers(model: K3ForCausalLM, documents: Documents) -> Answers:
    """What the model answers, all questions in one pass."""
    questions, symbols = documents.values.shape[1], 0 if documents.string is None else STRING
    tail = 2 + 2 * questions + symbols
    rows = max(1, EVAL_TOKENS // documents.ids.shape[1])
    guess = torch.cat([model(ids, logits_to_keep=tail).logits.argmax(-1) for ids in documents.ids.split(rows)])
    after = 2 * questions + 1
    return Answers(guess[:, 0], guess[:, 2:after:2], guess[:, after : after + symbols] if symbols else None)


@dataclass(frozen=True)
class Score:
    """Shares of right answers in one cell, and their standard errors from the spread between documents.

    recall: of values.   topic: of topics.   by_depth: recall in fifths of the document, earliest first, by the place
    of the asked fact; None where nothing was asked, and for a control.   decoy: share of answers that give the other
    value of the key, old or rumoured; None where there is none.   string: share of whole strings, symbols: of symbols.
    """

    kind: str
    length: int
    facts: int
    documents: int
    questions: int
    recall: float
    recall_error: float
    by_depth: tuple[float | None, ...]
    decoy: float | None
    topic: float
    topic_error: float
    string: float | None
    string_error: float | None
    symbols: float | None


def measure(model: K3ForCausalLM, kind: str, length: int, facts: int, documents: int, seed: int = 0) -> Score:
    """One cell. Raises ValueError for an unknown kind, fewer than 2 documents, or as `make_documents`."""
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, wanted one of {', '.join(KINDS)}")
    if documents < 2:
        raise ValueError(f"documents: got {documents}, wanted 2 or more")
    generator = torch.Generator().manual_seed(cell_seed("recall, held out", seed, kind, length, facts))
    options = ASIDE.get(kind, {})
    exam = make_documents(documents, length, facts, generator, questions=min(facts, ASKED), **options)
    got = answers(model, exam)
    right = (got.values == exam.values).double()
    string = symbols = None
    if got.string is not None:
        symbols = (got.string == exam.string).double()
        string = symbols.prod(1)
    recall, recall_error = _share(right.mean(1))
    topic, topic_error = _share((got.topic == exam.topic).double())
    return Score(
        kind, length, facts, documents, right.numel(), recall, recall_error,
        () if kind == "control" else _by_depth(right, exam.depth),
        _share((got.values == exam.decoys).double().mean(1))[0] if bool((exam.decoys >= 0).any()) else None,
        topic, topic_error,
        *(_share(string) if string is not None else (None, None)),
        None if symbols is None else _share(symbols.mean(1))[0],
    )  # fmt: skip


def exam_cells(lengths: tuple[int, ...], facts: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """(kind, length, facts) of all that fits into documents of these lengths."""
    wanted = [("facts", length, n) for length in lengths for n in facts]
    wanted += [(kind, length, ASKED) for kind in ASIDE for length in lengths]
    return [(kind, length, n) for kind, length, n in wanted if least_length(n, **_lines(kind)) <= length]


def _lines(kind: str) -> dict[str, int | bool]:
    return {name: value for name, value in ASIDE.get(kind, {}).items() if name != "control"}


def _share(per_document: Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    return round(per_document.mean().item(), 4), round(per_document.std().item() / len(per_document) ** 0.5, 4)


def _by_depth(right: Tensor, depth: Tensor) -> tuple[float | None, ...]:
    fifth = (depth * DEPTHS / 100).long().clamp(max=DEPTHS - 1)
    groups = (right[fifth == i] for i in range(DEPTHS))
    return tuple(round(group.mean().item(), 4) if len(group) else None for group in groups)
