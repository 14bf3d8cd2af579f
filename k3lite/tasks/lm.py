"""The whole of K3 as a small language model: prose byte by byte, then facts hidden in prose.

Everything is on: KDA and gated MLA 3 : 1, LatentMoE with Quantile Balancing, Block AttnRes, Muon. Two stages:

    text     the next byte of real prose, in rows that grow longer, and documents full of facts (`tasks.needle`) beside it:
             many at first, few later. A model that had read prose alone did not learn to look facts up in 250 steps
             of the second stage, whereas a fresh one began to within 60 (docs/log.md)
    recall   documents with few facts or many, prose beside them so that it is not forgotten, and routed experts rounded
             in the forward pass to what they will be stored in (`qat`)

K3 too grows its context in stages and rounds from fine-tuning on (vendor-reported, report §3, §4.1.4); its lengths,
data and fine-tuning tasks are other ones. Each ablation changes one thing of the model and nothing of the recipe.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3lite.config import K3Config
from k3lite.kda import KimiDeltaAttention
from k3lite.model import K3ForCausalLM
from k3lite.tasks.needle import DIGITS, NEEDLE_BYTES, QUESTION_BYTES, make_batch
from k3lite.tasks.needle_job import QUESTIONS, curriculum
from k3lite.tasks.text import haystack
from k3lite.tasks.trained import fresh_model
from k3lite.train import BatchAt, MuonRecipe

VOCAB = 128  # the haystacks and the needles are ASCII
TEXT_LENGTHS = (64, 128, 256)  # bytes in a row, in thirds of the stage
FACT_SHARES = (0.75, 0.25, 0.25)  # of the rows in each third, those that are documents full of facts
TOKENS_PER_STEP = 4096
PROSE_ROWS = 8  # in the recall stage one row in so many is plain prose
STAGES = ("text", "recall")


@dataclass(frozen=True)
class Preset:
    """Steps of both stages."""

    text: int
    recall: int


PRESETS = {"short": Preset(text=450, recall=200), "long": Preset(text=3000, recall=1500)}
LR = {"text": 2e-2, "recall": 8e-3}
WARMUP, WEIGHT_DECAY = 20, 0.1


def lm_config() -> K3Config:
    """The needle preset's shape over ASCII. Experts are stored in MXFP4 and read inputs in MXFP8, as they were trained
    (the released config says nothing of inputs: `input_activations` is null there).
    """
    released = K3Config.preset("kimi-k3").quantization_config
    quantization = copy.deepcopy(released)
    quantization["config_groups"]["group_0"]["input_activations"] = {"type": "float", "num_bits": 8, "group_size": 32}
    return dataclasses.replace(K3Config.preset("needle"), vocab_size=VOCAB, quantization_config=quantization)


def stage_recipe(stage: str, preset: Preset, seed: int, ablation: str | None = None) -> MuonRecipe:
    task = f"lm-{stage}-1" if ablation is None else f"lm-{stage}-1 {ablation}"
    steps = getattr(preset, stage)
    return MuonRecipe(steps=steps, lr=LR[stage], seed=seed, warmup=WARMUP, weight_decay=WEIGHT_DECAY, task=task)


def batches(stage: str, recipe: MuonRecipe) -> BatchAt:
    """The batches of a stage: ids and labels [B,T]."""
    return text_and_facts(recipe) if stage == "text" else recall_and_prose(recipe)


def text_and_facts(recipe: MuonRecipe) -> BatchAt:
    """Rows of the training text from anywhere, every next byte asked; beside them documents full of facts."""
    text = haystack("train")

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        third = text_third(step, recipe.steps)
        length, g = TEXT_LENGTHS[third], _generator(recipe.seed, step)
        rows = TOKENS_PER_STEP // length
        facts = int(FACT_SHARES[third] * rows)
        needles = (length - DIGITS - QUESTION_BYTES) // (NEEDLE_BYTES + DIGITS + QUESTION_BYTES)
        documents = make_batch(text, facts, length - DIGITS, needles, g, questions=min(needles, QUESTIONS))
        prose = prose_rows(text, rows - facts, length, g)
        return torch.cat([prose, documents.ids]), torch.cat([prose, documents.labels])

    return batch_at


def text_third(step: int, steps: int) -> int:
    """Which third of the text stage a step is in, from 0."""
    return min(len(TEXT_LENGTHS) * step // steps, len(TEXT_LENGTHS) - 1)


def recall_and_prose(recipe: MuonRecipe) -> BatchAt:
    """`needle_job.curriculum`, in which some documents are replaced by prose of their length, all of it asked."""
    text = haystack("train")
    documents = curriculum(text, recipe, TOKENS_PER_STEP)

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        ids, labels = documents(step)
        n = max(1, len(ids) // PROSE_ROWS)
        ids[:n] = labels[:n] = prose_rows(text, n, ids.shape[1], _generator(recipe.seed, -1 - step))
        return ids, labels

    return batch_at


def prose_rows(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """[rows, length] bytes from anywhere in the text."""
    starts = torch.randint(0, len(text) - length, (rows, 1), generator=generator)
    return text[starts + torch.arange(length)]


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step + 10**9)


# ---- ablations


def _kda(**changes) -> Callable[[K3Config], K3Config]:
    def change(config: K3Config) -> K3Config:
        return dataclasses.replace(config, linear_attn_config=dataclasses.replace(config.linear_attn_config, **changes))

    return change


def _mla_layers(*mla: int) -> Callable[[K3Config], K3Config]:
    def change(config: K3Config) -> K3Config:
        kda = tuple(i for i in range(1, config.num_hidden_layers + 1) if i not in mla)
        return _kda(kda_layers=kda, full_attn_layers=mla)(config)

    return change


def _field(**changes) -> Callable[[K3Config], K3Config]:
    return lambda config: dataclasses.replace(config, **changes)


# no-conv leaves the SiLU behind the convolution, and a factor for each channel.
ABLATIONS: dict[str, Callable[[K3Config], K3Config]] = {
    "no-conv": _kda(short_conv_kernel_size=1),
    "no-output-gate": _field(mla_use_output_gate=False),  # and KDA's, in `lm_model`
    "ratio-1-1": _mla_layers(2, 4),
    "ratio-all-kda": _mla_layers(),
    "no-attn-res": _field(attn_res_block_size=None),
    "no-latent-norm": _field(latent_moe_use_norm=False),
    "softplus-gate": _kda(gate_lower_bound=None),
}


def ablated_config(ablation: str | None) -> K3Config:
    """The model's config with one thing changed. Raises ValueError for an unknown ablation."""
    if ablation is not None and ablation not in ABLATIONS:
        raise ValueError(f"ablation: got {ablation!r}, wanted one of {', '.join(ABLATIONS)}")
    return lm_config() if ablation is None else ABLATIONS[ablation](lm_config())


def lm_model(seed: int, ablation: str | None = None, config: K3Config | None = None) -> K3ForCausalLM:
    """A fresh model, of another config than `ablated_config` if one is given."""
    model = fresh_model(ablated_config(ablation) if config is None else config, seed)
    if ablation == "no-output-gate":
        for kda in (m for m in model.modules() if isinstance(m, KimiDeltaAttention)):
            _open_gate(kda)
    return model


@torch.no_grad()
def _open_gate(kda: KimiDeltaAttention) -> None:
    """No field switches KDA's output gate off: hold it at sigmoid(0) = 1/2, which o_norm makes up for."""
    kda.g_proj.weight.zero_().requires_grad_(False)
    kda.o_norm.weight.mul_(2)
