"""Generation beside transformers' Kimi Linear with the same weights: a prompt read, then token after token.

transformers makes the weights and saves them; ours loads them by name. Its experts can run in several ways, of which the
fastest counts. Both read the prompt in one forward pass into a new cache. Then ours is `generate.stream` as it is, while
transformers runs in a bare loop of forward passes, without what its own `generate` does around them.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from k3lite import bench
from k3lite.bench_kda import kimi_linear
from k3lite.checkpoint import load_model
from k3lite.config import K3Config, LinearAttnConfig
from k3lite.generate import generate, prefill, stream
from k3lite.model import K3ForCausalLM

PROMPT, NEW = 512, 32  # tokens a sequence
ROUNDS = 7  # the best counts
# batched_mm copies the weights of every chosen expert for every token: for a prompt that is gigabytes.
WAYS = {"prefill": ("eager", "grouped_mm"), "decode": ("eager", "grouped_mm", "batched_mm")}


@dataclass(frozen=True)
class Shape:
    """A Kimi Linear: three KDA layers to one MLA layer, the first layer dense, the others top-4 of `experts`."""

    name: str
    width: int
    layers: int
    heads: int
    experts: int
    batch: int

    def config(self) -> K3Config:
        """Sizes in the proportions of Kimi Linear 48B, fp32; initialised wide enough that every layer matters."""
        mla, head = tuple(range(4, self.layers + 1, 4)), self.width // self.heads
        return K3Config(
            vocab_size=4 * self.width, hidden_size=self.width, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.heads, intermediate_size=4 * self.width,
            kv_lora_rank=self.width // 4, qk_nope_head_dim=head, qk_rope_head_dim=head // 2, v_head_dim=head,
            num_experts=self.experts, num_experts_per_token=4, num_shared_experts=1,
            moe_intermediate_size=self.width // 2, routed_scaling_factor=2.446, initializer_range=self.width**-0.5,
            bos_token_id=1, eos_token_id=2, pad_token_id=0, linear_attn_config=LinearAttnConfig(
                kda_layers=tuple(i for i in range(1, self.layers + 1) if i not in mla), full_attn_layers=mla,
                num_heads=self.heads, head_dim=head,
            ),
        )  # fmt: skip


SHAPES = (
    Shape("small", width=128, layers=4, heads=4, experts=16, batch=1),
    Shape("middle", width=384, layers=8, heads=6, experts=32, batch=1),
    Shape("batch of 4", width=256, layers=8, heads=8, experts=32, batch=4),
)


def cases(device: str) -> Iterator[bench.Row | str]:
    """Every row and remark of `k3lite bench generate`. Raises ValueError for another device than the CPU."""
    if device != "cpu":
        raise ValueError(f"device: got {device!r}, wanted 'cpu': generation is measured there only")
    yield from cpu_cases(SHAPES, PROMPT, NEW)


def cpu_cases(shapes: tuple[Shape, ...], prompt: int, new: int, rounds: int = ROUNDS) -> Iterator[bench.Row | str]:
    """Prefill and decoding of each shape beside transformers, and whether both made the same tokens."""
    absent: list[str] = []
    kimi = kimi_linear(absent)
    yield from absent
    if kimi is None:
        return
    for shape in shapes:
        ours, theirs = pair(kimi, shape.config())
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(3, ours.config.vocab_size, (shape.batch, prompt), generator=rng)
        best = measure(ours, theirs, ids, new, rounds)
        for what, count in (("prefill", prompt), ("decode", new)):
            mine = best.pop((what, "ours"))
            way = min(WAYS[what], key=lambda w, what=what: best[what, w])
            case = (
                f"{shape.name}: {what}, {count} tokens, width {shape.width}, {shape.layers} layers, batch {shape.batch}"
            )
            yield bench.row("generate", case, mine, "transformers", best[what, way], torch.float32)
            each = ", ".join(f"{w} {best[what, w] * 1e3:.1f} ms" for w in WAYS[what])
            yield f"{shape.name}, {what}: {shape.batch * count / mine:,.0f} tokens/s; transformers' experts: {each}"
        yield f"{shape.name}: {agreement(ours, theirs, ids, new)}"


def pair(kimi: ModuleType, config: K3Config) -> tuple[K3ForCausalLM, nn.Module]:
    """Our model and transformers' with the same weights, which went through a checkpoint."""
    importlib.import_module("transformers").logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = kimi.KimiLinearForCausalLM(kimi.KimiLinearConfig.from_dict(config.to_dict())).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load_model(folder).eval(), theirs


@torch.no_grad()
def measure(ours: K3ForCausalLM, theirs: nn.Module, ids: Tensor, new: int, rounds: int) -> dict[tuple[str, str], float]:
    """Best seconds of ("prefill" or "decode", "ours" or one of WAYS): they take turns.

    Each decoding goes on from where its last turn ended, all over the same number of tokens.
    """
    cache, (seen, _) = ours.new_cache(len(ids)), read(theirs, ids)
    prefill(ours, ids, cache)
    last = ids[:, -1:]
    works = {
        ("prefill", "ours"): lambda: prefill(ours, ids, ours.new_cache(len(ids)), piece=ids.shape[1]),
        ("decode", "ours"): lambda: list(stream(ours, last, new, cache=cache)),
    }
    for way in WAYS["prefill"]:
        works["prefill", way] = lambda way=way: read(run_as(theirs, way), ids)
    for way in WAYS["decode"]:
        mine = copy.deepcopy(seen)
        works["decode", way] = lambda way=way, mine=mine: write(run_as(theirs, way), last, new, mine)
    return bench.turns(works, rounds)


# ---- transformers: a cache is made, or filled further, by the forward pass


def run_as(theirs: nn.Module, way: str) -> nn.Module:
    """The model, told how to run its experts."""
    theirs.config._experts_implementation = way
    return theirs


def read(theirs: nn.Module, ids: Tensor, cache: Any = None) -> tuple[Any, Tensor]:
    """Read ids [B,T]: the cache, and the logits after the last token [B,vocab]."""
    made = theirs(ids, cache=cache, use_cache=True, logits_to_keep=1)
    return made.cache, made.logits[:, -1]


def write(theirs: nn.Module, ids: Tensor, new: int, cache: Any = None) -> Tensor:
    """`new` greedy tokens after ids, [B,new], in as many forward passes."""
    tokens = []
    for _ in range(new):
        cache, logits = read(theirs, ids, cache)
        tokens.append(logits.argmax(-1, keepdim=True))
        ids = tokens[-1]
    return torch.cat(tokens, 1)


@torch.no_grad()
def agreement(ours: K3ForCausalLM, theirs: nn.Module, ids: Tensor, new: int) -> str:
    """A remark: how many greedy tokens are the same in both before the first that is not, and how near logits are."""
    mine, other = generate(ours, ids, new), write(theirs, ids, new)
    alike = int((mine == other).long().cumprod(1).sum())
    got, want = prefill(ours, ids, ours.new_cache(len(ids))), read(theirs, ids)[1]
    error = float((got - want).norm() / want.norm())
    return (
        f"{alike} of {mine.numel()} greedy tokens are the same in both; logits after the prompt differ by {error:.1e}"
    )
