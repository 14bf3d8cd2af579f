"""A needle model that learns in seconds: fewer layers and short documents, the same formulas."""

import dataclasses

import torch
from torch import Tensor

from k3lite.config import K3Config
from k3lite.tasks.needle import make_batch
from k3lite.tasks.text import haystack
from k3lite.train import BatchAt, Recipe

_PRESET = K3Config.preset("needle")
SMALL = dataclasses.replace(
    _PRESET,
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=96,
    num_experts=4,
    moe_intermediate_size=32,
    attn_res_block_size=1,
    linear_attn_config=dataclasses.replace(_PRESET.linear_attn_config, kda_layers=(1,), full_attn_layers=(2,)),
)
SMALL_RECIPE = Recipe(steps=220, lr=8e-3, warmup=20, task="small needle")


def small_batches(tokens: int = 2048) -> BatchAt:
    """64 bytes, three needles, all asked."""
    text = haystack("train")

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(step)
        batch = make_batch(text, tokens // 64, 64, 3, g, questions=3)
        return batch.ids, batch.labels

    return batch_at
