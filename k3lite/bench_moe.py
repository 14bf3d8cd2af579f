"""A layer of many experts: time against their number, with tokens and top-k held fixed.

K3's MoE layer at a sixteenth of its widths (hidden 448, latent 224, experts 192 wide); 2048 tokens choose 4 of 16 to 896
experts. The products are the same for any number of experts; what grows is the weights that must be read. So the limit
is 2 times (the layer with 16 experts + reading the added weights once at the speed of a copy), measured in the same run.
Beside it: two loops over all experts with masks, transformers' MoE block, and one token, whose bytes are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3lite import bench
from k3lite.bench_kda import kimi_linear
from k3lite.budget import MIB
from k3lite.config import K3Config, LinearAttnConfig
from k3lite.moe import Experts, LatentMoE
from k3lite.ops.experts import Activation, grouped_experts
from k3lite.ops.pointwise import upcast

HIDDEN, LATENT, WIDTH = 448, 224, 192  # K3 / 16
EXPERTS, TOKENS, TOP = (16, 64, 256, 896), 2048, 4
ROUNDS = 3  # the best counts
COPY = 256 * MIB  # bytes, far more than a cache holds


def config(experts: int, hidden: int, latent: int | None) -> K3Config:
    """Fields of one MoE layer. Without a latent width: SwiGLU and no norm, as in Kimi Linear."""
    return K3Config(
        vocab_size=16, hidden_size=hidden, num_hidden_layers=1, num_attention_heads=1, intermediate_size=hidden,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=0, v_head_dim=16, num_experts=experts,
        num_experts_per_token=TOP, num_shared_experts=2, moe_intermediate_size=WIDTH, routed_expert_hidden_size=latent,
        latent_moe_use_norm=latent is not None, hidden_act="situ" if latent else "silu", linear_attn_config=
        LinearAttnConfig(kda_layers=(1,), full_attn_layers=(), num_heads=1, head_dim=16),
    )  # fmt: skip


@torch.no_grad()
def layer(experts: int, hidden: int, latent: int | None) -> LatentMoE:
    """A layer with random weights, fp32."""
    made, rng = LatentMoE(config(experts, hidden, latent)), torch.Generator().manual_seed(0)
    for p in made.parameters():
        if p.requires_grad and p.dim() > 1:
            p.normal_(0, p.shape[-1] ** -0.5, generator=rng)
    return made


def forward(module: Callable[..., Tensor], *given: Tensor) -> None:
    with torch.no_grad():
        module(*given)


def forward_backward(module: nn.Module, *given: Tensor) -> None:
    module(*given).sum().backward()
    module.zero_grad()


PASSES = {"forward": forward, "forward+backward": forward_backward}


# ---- the loops that grouping replaces; arguments as in `grouped_experts`


def masked_rows(
    z: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: Activation
) -> Tensor:
    """Each of all experts looks for its tokens by a mask, works on those and adds them to the sum."""
    total = upcast(torch.zeros_like(z))
    for e, (a, b, c) in enumerate(zip(w1.unbind(), w3.unbind(), w2.unbind(), strict=True)):
        token, slot = (experts == e).nonzero(as_tuple=True)
        x = z[token]
        total.index_add_(0, token, weights[token, slot, None] * upcast(act(x @ a.T, x @ b.T) @ c.T))
    return total.to(z.dtype)


def masked_outputs(
    z: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: Activation
) -> Tensor:
    """Each of all experts works on every token; a mask keeps what was asked for."""
    total = upcast(torch.zeros_like(z))
    for e, (a, b, c) in enumerate(zip(w1.unbind(), w3.unbind(), w2.unbind(), strict=True)):
        total = total + (weights * (experts == e)).sum(-1, keepdim=True) * upcast(act(z @ a.T, z @ b.T) @ c.T)
    return total.to(z.dtype)


class Looped(nn.Module):
    """`Experts` with another function in place of `grouped_experts`, on the same weights."""

    def __init__(self, experts: Experts, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.experts, self.function = experts, function

    def forward(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        e = self.experts
        return self.function(z, chosen, weights, e.w1, e.w3, e.w2, e.act)


# ---- bytes


class Reads(TorchDispatchMode):
    """Counts the bytes of given tensors that operations are handed inside; making a view reads nothing."""

    def __init__(self, *watched: Tensor) -> None:
        super().__init__()
        self.storages = {t.untyped_storage().data_ptr() for t in watched}
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            for x in tree_leaves((args, kwargs or {})):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self.storages:
                    self.nbytes += x.numel() * x.element_size()
        return func(*args, **(kwargs or {}))


def decode_bytes(moe: LatentMoE, token: Tensor) -> tuple[int, int]:
    """Bytes that a forward pass of one token [1,1,d] reads of the experts' weights and of the router's."""
    with torch.no_grad(), Reads(*moe.experts.parameters()) as experts:
        moe(token)
    with torch.no_grad(), Reads(moe.gate.weight) as router:
        moe(token)
    return experts.nbytes, router.nbytes


# ---- the bench


def cases(device: str) -> Iterator[bench.Row | str]:
    """Every row and remark of `k3lite bench moe`. Raises ValueError for another device than the CPU."""
    if device != "cpu":
        raise ValueError(f"device: got {device!r}, wanted 'cpu': experts are measured there only")
    yield from cpu_cases(EXPERTS, TOKENS)


def cpu_cases(experts: tuple[int, ...], tokens: int, rounds: int = ROUNDS) -> Iterator[bench.Row | str]:
    """The layer beside its limit, the grouped experts beside the loops, transformers' block, and one token."""
    x = torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    layers = {E: layer(E, HIDDEN, LATENT) for E in experts}
    yield from against_limit(layers, x, rounds)
    yield from against_loops(layers, tokens, rounds)
    yield from one_token({E: moe.eval() for E, moe in layers.items()}, x[:, :1], rounds)
    layers.clear()  # transformers' block is as large as ours
    yield from against_transformers(experts[-1], tokens, rounds)


def against_limit(layers: dict[int, LatentMoE], x: Tensor, rounds: int) -> Iterator[bench.Row | str]:
    """Time of the layer beside twice (that of the fewest experts + moving the added weights), by rows named "limit".

    Forward reads the added weights once; forward+backward reads them twice and writes their gradient once.
    """
    source, target = torch.ones(COPY // 4), torch.ones(COPY // 4)
    works = {(E, what): lambda m=moe, f=f: f(m, x) for E, moe in layers.items() for what, f in PASSES.items()}
    best = bench.turns(works | {"copy": lambda: target.copy_(source)}, rounds)
    rate, fewest = 2 * COPY / best["copy"], min(layers)
    one = sum(p[0].nbytes for p in layers[fewest].experts.parameters())
    yield f"a copy moves {rate / 1e9:.1f} GB/s, read and written; one expert holds {one / 1e3:.0f} kB"
    for what, times in (("forward", 1), ("forward+backward", 3)):
        for E in layers:
            limit = 2 * (best[fewest, what] + times * (E - fewest) * one / rate)
            yield bench.row("moe", f"layer {what}, {E} experts", best[E, what], "limit", limit, torch.float32)
    most = max(layers)
    yield (
        f"the added weights of {most} experts once: {(most - fewest) * one / rate * 1e3:.1f} ms; limit = 2 x ({fewest} experts "
        "+ that time), with it three times for forward+backward (read twice, gradient written)"
    )


def against_loops(layers: dict[int, LatentMoE], tokens: int, rounds: int) -> Iterator[bench.Row]:
    """`grouped_experts` beside both loops; the one that masks outputs forward only, as its backward keeps them all."""
    rng = torch.Generator().manual_seed(2)
    z, weights = torch.randn(tokens, LATENT, generator=rng), torch.rand(tokens, TOP, generator=rng)
    for E, moe in layers.items():
        given = z, torch.rand(tokens, E, generator=rng).topk(TOP).indices, weights
        grouped, rows, outputs = (Looped(moe.experts, f) for f in (grouped_experts, masked_rows, masked_outputs))
        for what, work in PASSES.items():
            best = bench.turns({m: lambda m=m, w=work, x=given: w(m, *x) for m in (grouped, rows)}, rounds)
            case = f"experts {what}, {E}"
            yield bench.row("moe", case, best[grouped], "loop, masked rows", best[rows], torch.float32)
            if what == "forward":
                took = bench.seconds(lambda m=outputs, x=given: forward(m, *x), repeats=1)
                yield bench.row("moe", case, best[grouped], "loop, masked outputs", took, torch.float32)


def one_token(layers: dict[int, LatentMoE], token: Tensor, rounds: int) -> Iterator[bench.Row | str]:
    """Decoding: time beside that of the fewest experts, and the bytes of weights that it reads."""
    best = bench.turns({E: lambda m=moe: forward(m, token) for E, moe in layers.items()}, 10 * rounds)
    fewest = min(layers)
    for E in layers:
        yield bench.row("moe", f"one token, {E} experts", best[E], f"{fewest} experts", best[fewest], torch.float32)
    for E, moe in layers.items():
        experts, router = decode_bytes(moe, token)
        stored = sum(p.nbytes for p in moe.experts.parameters())
        yield (
            f"one token, {E} experts: reads {experts / MIB:.2f} MiB of {stored / MIB:.2f} MiB of experts, and all of the "
            f"router, {router / MIB:.2f} MiB"
        )


def against_transformers(experts: int, tokens: int, rounds: int) -> Iterator[bench.Row | str]:
    """A layer without latent beside transformers' Kimi Linear block of the same shape, its plain and its fast path."""
    absent: list[str] = []
    kimi = kimi_linear(absent)
    yield from absent
    if kimi is None:
        return
    ours = layer(experts, LATENT, None)
    blocks = {name: theirs(kimi, ours, name) for name in ("eager", "grouped_mm")}
    x = torch.randn(1, tokens, LATENT, generator=torch.Generator().manual_seed(3))
    for what, work in PASSES.items():
        modules = {"ours": ours} | blocks
        best = bench.turns({n: lambda m=m, w=work: w(m, x) for n, m in modules.items()}, rounds)
        for name in blocks:
            case = f"plain layer {what}, {experts} experts"
            yield bench.row("moe", case, best["ours"], f"transformers {name}", best[name], torch.float32)
        blocks.pop("eager", None)  # its backward makes a gradient of all experts for each expert: minutes


@torch.no_grad()
def theirs(kimi: ModuleType, ours: LatentMoE, implementation: str) -> nn.Module:
    """transformers' block with the weights of `ours`; eager loops with masks over the experts that were chosen."""
    E, hidden = ours.gate.weight.shape
    config = kimi.KimiLinearConfig(
        hidden_size=hidden, moe_intermediate_size=WIDTH, n_shared_experts=2, num_local_experts=E, num_experts_per_tok=TOP,
        routed_scaling_factor=ours.gate.scaling, n_group=1, topk_group=1,
    )  # fmt: skip
    config._experts_implementation = implementation
    block, shared = kimi.KimiLinearMoE(config), ours.shared_experts
    block.gate.weight.copy_(ours.gate.weight)
    block.experts.gate_up_proj.copy_(torch.cat([ours.experts.w1, ours.experts.w3], 1))
    block.experts.down_proj.copy_(ours.experts.w2)
    block.shared_experts.load_state_dict(shared.state_dict())
    return block
