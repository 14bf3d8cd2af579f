"""What the tests share: one measure of closeness, small models whose weights are all random."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from k3lite.config import K3Config, LinearAttnConfig
from k3lite.model import K3ForCausalLM
from k3lite.ops.kda import bounded_gate, l2norm, softplus_gate


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`; where `want` is all zero, that of `got` itself."""
    got, want = got.detach().double(), want.detach().double()
    if want.numel() == 0:
        return 0.0
    size = want.square().mean().sqrt()
    error = (got - want).square().mean().sqrt()
    return float(error / size if size > 0 else error)


def assert_close(name: str, got: Tensor, want: Tensor, rel: float) -> None:
    """Same shape, no NaN or inf, and a relative RMS error of at most `rel`."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{name}: not finite"
    error = relative_error(got, want)
    assert error <= rel, f"{name}: relative error {error:.3g}, wanted at most {rel:g}"


def assert_all_close(got: dict[str, Tensor], want: dict[str, Tensor], rel: float) -> None:
    """`assert_close` under each name; both hold the same names."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    for name, value in want.items():
        assert_close(name, got[name], value, rel)


def not_public(tree: ast.Module, **modules: ModuleType) -> set[str]:
    """What code reaches through these modules, by the names it has for them, that is not in their __all__."""
    used = {
        (n.value.id, n.attr)
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in modules
    }
    assert {module for module, _ in used} == modules.keys()
    return {f"{module}.{name}" for module, name in used if name not in modules[module].__all__}


def dims(names: str, *shapes: tuple[int, ...]) -> pytest.MarkDecorator:
    """Parametrise by tuples of sizes, with ids that spell them out: dims("T K", (1, 2)) gives T1-K2."""
    ids = ["-".join(f"{n}{x}" for n, x in zip(names.split(), shape, strict=True)) for shape in shapes]
    return pytest.mark.parametrize(names.replace(" ", ","), shapes, ids=ids)


def kda_inputs(
    B: int, T: int, H: int, K: int, V: int, *, gate: str = "bounded", start: bool = True,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Random arguments of `kda`. gate: "bounded" (K3, -5 to 0), "softplus" (Kimi Linear; here down to -40)."""
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=dtype)

    z, A_log = 2 * randn(B, T, H, K), 0.5 * randn(H)
    g = bounded_gate(z, A_log, -5.0) if gate == "bounded" else softplus_gate(z, A_log)
    if gate == "softplus":
        g.view(-1)[:: max(7, g.numel() // 20)] = -40
    inputs = {
        "q": l2norm(randn(B, T, H, K)),
        "k": l2norm(randn(B, T, H, K)),
        "v": randn(B, T, H, V),
        "g": g,
        "beta": randn(B, T, H).sigmoid(),
    }
    return inputs | ({"initial_state": randn(B, H, K, V)} if start else {})


def outputs_and_gradients(
    f: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor], **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """o and final state of a KDA, and the gradient of a random weighting of both with respect to every input."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o, S = f(**leaves, **options)
    rng = torch.Generator().manual_seed(0)
    loss = sum((x * torch.randn(x.shape, generator=rng, dtype=x.dtype)).sum() for x in (o, S))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "S": S}, {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


# What these give is normed next, by rsqrt(mean + eps) or rsqrt(sum + eps). Kept small, a wrong eps shows.
SMALL = {
    "embed_tokens": 0.05,
    "k_proj": 0.02,
    "q_a_proj": 0.02,
    "kv_a_proj_with_mqa": 0.02,
    "routed_expert_down_proj": 0.1,
}


@torch.no_grad()
def randomise(tensors: Iterable[tuple[str, Tensor]], seed: int = 0) -> None:
    """Give every weight a value that matters: no norm at one, no query, gate bias or correction bias at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in tensors:
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("A_log"):
            p.copy_(0.5 * noise)
        elif name.endswith("e_score_correction_bias"):
            p.copy_(0.1 * noise)
        elif "norm" in name:
            p.copy_(1 + 0.3 * noise)
        elif "dt_bias" in name:
            p.copy_(noise)
        elif "conv1d" in name:
            p.copy_(0.5 * noise)
        elif "embed_tokens" in name:
            p.copy_(SMALL["embed_tokens"] * noise)
        else:
            size = next((s for part, s in SMALL.items() if f".{part}." in name), 1.0)
            p.copy_(size * noise * p.shape[-1] ** -0.5)  # [out, in]: keeps the size of what goes through


def random_model(config: K3Config, seed: int = 0) -> K3ForCausalLM:
    """A model with all weights random, in eval mode."""
    model = K3ForCausalLM(config)
    randomise(model.named_parameters(), seed)
    return model.eval()


def tiny(kind: str = "k3", layers: int = 5, mla: Iterable[int] | None = None, **changes: Any) -> K3Config:
    """A small config of either kind, the last two layers MLA; `mla` lists the MLA layers from 1."""
    mla = tuple(mla) if mla is not None else (layers - 1, layers)
    k3 = kind == "k3"
    config = K3Config(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=40,
        kv_lora_rank=12,
        q_lora_rank=20 if k3 else None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=10,
        mla_use_output_gate=k3,
        hidden_act="situ" if k3 else "silu",
        num_experts=6,
        num_experts_per_token=2,
        num_shared_experts=2 if k3 else 1,
        moe_intermediate_size=16,
        routed_expert_hidden_size=24 if k3 else None,
        latent_moe_use_norm=k3,
        routed_scaling_factor=1.0 if k3 else 2.446,
        attn_res_block_size=2 if k3 else None,
        linear_attn_config=LinearAttnConfig(
            kda_layers=tuple(i for i in range(1, layers + 1) if i not in mla),
            full_attn_layers=mla,
            num_heads=2,
            head_dim=8,
            use_full_rank_gate=k3,
            gate_lower_bound=-5.0 if k3 else None,
        ),
    )
    return dataclasses.replace(config, **changes)
