"""Small deep language models under the microscope: which depths each sub-layer reads, and how large they are.

Eight layers of width 32 read prose byte by byte. Depth is the point here, not skill: 16 sub-layers, and models that
differ in `attn_res_block_size` alone. None: plain pre-norm. 0.5: Full AttnRes. 1, 4: blocks of so many layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from k3lite.attn_res import DepthStream, depth_query, depth_scores
from k3lite.config import K3Config, LinearAttnConfig
from k3lite.model import K3ForCausalLM
from k3lite.tasks.text import haystack
from k3lite.tasks.trained import fresh_model
from k3lite.train import BatchAt, Recipe

LAYERS, WIDTH, VOCAB = 8, 32, 128  # bytes of English prose are ASCII
LENGTH, ROWS = 64, 12  # bytes in a row, rows in a training step
SIZES: tuple[float | None, ...] = (None, 0.5, 1, 4)
EXAM_START = 100_000  # where in the held-out text the exam begins


def depth_config(block_size: float | None, layers: int = LAYERS) -> K3Config:
    """K3 in small: KDA, KDA, KDA, MLA, and so on; dense MLPs, so that nothing but depth differs between models."""
    mla = tuple(range(4, layers + 1, 4))
    return K3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=16,
        mla_use_output_gate=True,
        hidden_act="situ",
        attn_res_block_size=block_size,
        linear_attn_config=LinearAttnConfig(
            kda_layers=tuple(i for i in range(1, layers + 1) if i not in mla),
            full_attn_layers=mla,
            num_heads=2,
            head_dim=16,
            use_full_rank_gate=True,
            gate_lower_bound=-5.0,
        ),
    )


def depth_model(config: K3Config, seed: int) -> K3ForCausalLM:
    """A fresh model. All block sizes, and the plain one, start from the same weights: only the queries are added."""
    full = fresh_model(dataclasses.replace(config, attn_res_block_size=0.5), seed)
    model = fresh_model(config, seed)
    model.load_state_dict(full.state_dict(), strict=config.attn_res_block_size is not None)
    return model


def prose(recipe: Recipe) -> BatchAt:
    """Rows of the training text from anywhere; every next byte is asked."""
    text = haystack("train")

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        starts = torch.randint(0, len(text) - LENGTH, (ROWS, 1), generator=g)
        rows = text[starts + torch.arange(LENGTH)]
        return rows, rows

    return batch_at


def depth_exam(rows: int) -> Tensor:
    """[rows, LENGTH] consecutive bytes of the held-out books."""
    return haystack("heldout")[EXAM_START : EXAM_START + rows * LENGTH].view(rows, LENGTH)


def size_name(block_size: float | None) -> str:
    """'plain', 'full' or 'block-2'."""
    return "plain" if block_size is None else "full" if block_size == 0.5 else f"block-{block_size:g}"


def parse_size(text: str) -> float | None:
    """Block size in layers from 'plain', 'full' or a number; raises ValueError."""
    if text in ("plain", "full"):
        return None if text == "plain" else 0.5
    try:
        size = float(text)
    except ValueError as e:
        raise ValueError(f"block size: got {text!r}, wanted plain, full, or a number of layers") from e
    return int(size) if size.is_integer() else size


# ---- watching


@dataclass
class Read:
    """One sub-layer's read. weights: [n, B, T] shares of its n sources, None for a plain sum."""

    what: Tensor  # [B,T,d], as it goes into the sub-layer's norm
    weights: Tensor | None


class WatchedStream(DepthStream):
    """A stream that keeps what was read and what was added, and can hide one source from every reader."""

    hidden: int | None = None  # number of a source that no one may read; 0 is the embedding

    def __init__(self, embedding: Tensor, block_size: float | None, eps: float) -> None:
        super().__init__(embedding, block_size, eps)
        self.reads: list[Read] = []
        self.outputs: list[Tensor] = []
        self.sums: list[Tensor] = []

    def read(self, owner: nn.Module, name: str) -> Tensor:
        sources, weights = [*self.blocks, self.live], None
        if self.blocks:
            query = depth_query(getattr(owner, f"{name}_norm").weight, getattr(owner, f"{name}_proj").weight)
            V = torch.stack(sources)
            scores = depth_scores(V, query, self.eps)
            if self.hidden is not None and self.hidden < len(sources):
                scores = scores.index_fill(0, torch.tensor([self.hidden]), -torch.inf)
            weights = scores.softmax(0)
            what = torch.einsum("n...,n...d->...d", weights, V)
        else:
            what = self.live
        self.reads.append(Read(what, weights))
        return what

    def add(self, output: Tensor) -> None:
        super().add(output)
        self.outputs.append(output)
        self.sums.append(self.live)


@contextlib.contextmanager
def watching(model: K3ForCausalLM, hidden: int | None = None) -> Iterator[list[WatchedStream]]:
    """Within it, every forward pass appends its stream to the list. hidden: a source that no one may read."""
    streams: list[WatchedStream] = []

    def make(*args) -> WatchedStream:
        streams.append(WatchedStream(*args))
        streams[-1].hidden = hidden
        return streams[-1]

    model.model.stream_type = make
    try:
        yield streams
    finally:
        del model.model.stream_type  # back to the class's own


# ---- measuring


@torch.no_grad()
def read_shares(stream: WatchedStream, token: int | None = None) -> list[list[float]]:
    """For each read, its sources' shares: a mean over all tokens, or those of one token of the first row.

    A read that has nothing to choose from (layer 0's attention) reads its one source with share 1.
    """
    rows = []
    for read in stream.reads:
        if read.weights is None:
            rows.append([1.0])
        else:
            w = read.weights.flatten(1).mean(1) if token is None else read.weights[:, 0, token]
            rows.append(w.tolist())
    return rows


@dataclass(frozen=True)
class Measured:
    """What one model shows on held-out rows. Lists run over the sub-layers, lowest first."""

    loss: float  # nats per byte
    read_rms: list[float]  # size of what each sub-layer reads, the final read last
    output_rms: list[float]  # size of what it adds
    live_rms: list[float]  # size of the running sum after it added
    gradients: list[float]  # norm of the loss's gradient by each layer's MLP weights, the part all layers have alike
    shares: list[list[float]]  # of each read, over its sources, mean over tokens; empty for plain


def measure(model: K3ForCausalLM, rows: Tensor) -> Measured:
    """One forward and one backward pass over rows [N, T]; the gradients are taken off again."""
    with watching(model) as streams:
        loss = model(rows, labels=rows).loss
    loss.backward()
    layers = [[p.grad for p in layer.mlp.parameters()] for layer in model.model.layers]
    norms = [float(torch.nn.utils.get_total_norm(gradients)) for gradients in layers]
    model.zero_grad(set_to_none=True)
    (stream,) = streams
    return Measured(
        loss=float(loss.detach()),
        read_rms=[rms(r.what) for r in stream.reads],
        output_rms=[rms(x) for x in stream.outputs],
        live_rms=[rms(x) for x in stream.sums],
        gradients=norms,
        shares=read_shares(stream) if stream.block_size else [],
    )


@torch.no_grad()
def loss_when_cut(model: K3ForCausalLM, rows: Tensor, hidden: int | None) -> float:
    """Nats per byte of rows [N, T] when no one may read source `hidden`; None: as trained."""
    with watching(model, hidden):
        return float(model(rows, labels=rows).loss)


def rms(x: Tensor) -> float:
    return float(x.detach().square().mean().sqrt())
