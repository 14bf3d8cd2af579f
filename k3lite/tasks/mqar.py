"""Multi-query associative recall (MQAR): pairs of a key and a value, then keys alone, whose values are wanted.

    k1 v1 k2 v2 ... kN vN   q1 q2 ... qM   end

A key is one token of KEYS, a value one of VALUES, and the keys of a row differ. There is no filler, and no answer
stands in the row, so a question writes nothing that could help or crowd out the next one. Nothing but a memory of
the N pairs can answer: rows are drawn at random, so they are never seen twice.

    chance  = 1 in VALUES; a control asks for keys that were never written
    age     = pairs written after the asked one, 0 for the newest

Traps that this avoids: hazards.md T24.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3lite.config import ConfigError, K3Config, LinearAttnConfig
from k3lite.model import K3ForCausalLM
from k3lite.tasks.trained import cell_seed

KEYS, VALUES = 256, 32
CHANCE = 1 / VALUES
END = KEYS + VALUES  # the token after the last question: an answer is what the model expects *next*
VOCABULARY = KEYS + VALUES + 1
HIDDEN, MLP = 64, 8
IGNORE = -100
ASKED = 16  # questions a row when measuring, at most: more of one row say little more
AGE_GROUPS = 4
EVAL_TOKENS = 16_384  # tokens in one forward pass when measuring: bounds memory


# ---- the rows


@dataclass(frozen=True)
class MqarBatch:
    """ids: [B, 2 pairs + questions + 1].   labels: like ids, -100 but one place after each question.
    answers: [B, questions], token ids of the values.   ages: [B, questions], 0 for the pair written last.
    """

    ids: Tensor
    labels: Tensor
    answers: Tensor
    ages: Tensor


def make_batch(
    batch: int, pairs: int, generator: torch.Generator, *, questions: int | None = None, control: bool = False
) -> MqarBatch:
    """Rows of `pairs` pairs, of which `questions` different ones (default: all, in random order) are asked.

    control: the questions are keys that the row does not hold, their answers drawn at random, their ages 0.
    Raises ValueError when there are not so many different keys.
    """
    questions = pairs if questions is None else questions
    most = KEYS - questions if control else KEYS
    if not 1 <= pairs <= most:
        raise ValueError(f"pairs: got {pairs}, wanted 1 to {most}, since keys differ")
    if questions < 1 or (questions > pairs and not control):
        raise ValueError(f"questions: got {questions} for {pairs} pair(s), wanted 1 to {pairs}")
    names = _shuffled(batch, KEYS, generator)
    values = torch.randint(KEYS, KEYS + VALUES, (batch, KEYS), generator=generator)  # of every key, written or not
    asked = _shuffled(batch, pairs, generator)[:, :questions]
    if control:
        asked = torch.arange(pairs, pairs + questions).expand(batch, -1)
    ages = torch.zeros_like(asked) if control else pairs - 1 - asked
    answers = values.gather(1, asked)
    written = torch.stack([names[:, :pairs], values[:, :pairs]], -1).flatten(1)
    ids = torch.cat([written, names.gather(1, asked), torch.full((batch, 1), END)], 1)
    labels = torch.full_like(ids, IGNORE)
    labels[:, -questions:] = answers
    return MqarBatch(ids, labels, answers, ages)


def _shuffled(batch: int, n: int, generator: torch.Generator) -> Tensor:
    """[batch, n]: in each row the numbers below n in random order."""
    return torch.rand(batch, n, generator=generator).argsort(-1)


# ---- the model


def mqar_config(width: int) -> K3Config:
    """Two KDA layers with one head each, whose state is width x width; no MLA layer, no experts, plain residual sum.

    What the formulas of K3 do not need is left out or small: every layer must have an MLP, so it is MLP wide. The
    fields of MLA are required and unused. Raises ConfigError for a width that is none.
    """
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise ConfigError(f"width: got {width!r}, wanted a whole number, 1 or more")
    return K3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=MLP,
        kv_lora_rank=1,
        qk_nope_head_dim=1,
        qk_rope_head_dim=0,
        v_head_dim=1,
        hidden_act="situ",
        initializer_range=HIDDEN**-0.5,
        linear_attn_config=LinearAttnConfig(
            kda_layers=(1, 2),
            full_attn_layers=(),
            num_heads=1,
            head_dim=width,
            use_full_rank_gate=True,
            gate_lower_bound=-5.0,
        ),
    )


# ---- measuring


@dataclass(frozen=True)
class Recall:
    """Share of right answers to `questions` questions in held-out rows of `pairs` pairs.

    standard_error: of accuracy, from the spread between rows.   by_age: accuracy of the newest quarter of the pairs,
    the next older, ..., the oldest (fewer groups if there are fewer pairs; empty for a control).
    """

    pairs: int
    accuracy: float
    standard_error: float
    questions: int
    by_age: tuple[float, ...]
    chance: float = CHANCE


@torch.no_grad()
def right_answers(model: K3ForCausalLM, batch: MqarBatch) -> Tensor:
    """[B, questions] bool: is the likeliest of all tokens the answer?"""
    rows, questions = max(1, EVAL_TOKENS // batch.ids.shape[1]), batch.answers.shape[1]
    logits = (model(ids, logits_to_keep=questions + 1).logits for ids in batch.ids.split(rows))
    return torch.cat([x[:, :-1].argmax(-1) for x in logits]) == batch.answers


def measure(model: K3ForCausalLM, pairs: int, rows: int, seed: int = 0, *, control: bool = False) -> Recall:
    """Recall in `rows` held-out rows, which depend on `seed` and `pairs` alone: every model sits the same exam.

    control: ask for keys that were never written, which scores chance unless the test leaks.
    Raises ValueError for fewer than 2 rows, or as `make_batch`.
    """
    if rows < 2:
        raise ValueError(f"rows: got {rows}, wanted 2 or more")
    generator = torch.Generator().manual_seed(cell_seed("mqar, held out", seed, pairs, control))
    batch = make_batch(rows, pairs, generator, questions=min(pairs, ASKED), control=control)
    right = right_answers(model, batch).double()
    groups = batch.ages * min(AGE_GROUPS, pairs) // pairs
    return Recall(
        pairs,
        accuracy=round(right.mean().item(), 4),
        standard_error=round(right.mean(1).std().item() / rows**0.5, 4),
        questions=right.numel(),
        by_age=() if control else tuple(round(right[groups == i].mean().item(), 4) for i in groups.unique().tolist()),
    )
