"""Routed experts that stay in MXFP4: their weights are decoded a few rows at a time, inside the product.

    y = x W^T      W [out, in] as weight_packed [out, in/2] and weight_scale [out, in/32] (see `mx.pack_mxfp4`)

Only routed experts are packed; attention, router, latent projections, shared experts and the rest keep their dtype
(k3-architecture §2.6). Packed weights do not learn: `unpack_experts` first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3lite.moe import Experts, LatentMoE, rounded_inputs
from k3lite.mx import BLOCK, DTYPES, check_packed, pack_mxfp4, unpack_mxfp4
from k3lite.ops.experts import by_expert
from k3lite.ops.pointwise import upcast

TILE = 2**16  # numbers of W that are decoded at once
BACKENDS = ("auto", "torch", "triton")


def packed_linear_naive(x: Tensor, weight_packed: Tensor, weight_scale: Tensor) -> Tensor:
    """The definition: decode all of W, then multiply. Shapes as in `packed_linear`."""
    return x @ unpack_mxfp4(weight_packed, weight_scale, x.dtype).T


def packed_linear(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, backend: str = "auto") -> Tensor:
    """[..., in] -> [..., out] in x's dtype, with a gradient to x; W is never held in full, on the way back neither.

    x: fp32, bf16 or fp64.   weight_packed: [out, in/2].   weight_scale: [out, in/32], both uint8.
    backend: "torch" decodes `TILE` numbers after another; "triton" runs on a GPU; "auto" takes it for tensors on one.
    Raises ValueError that names the argument.
    """
    check_packed(weight_packed, weight_scale)
    if x.dtype not in DTYPES or weight_packed.dim() != 2 or x.dim() == 0 or x.shape[-1] != 2 * weight_packed.shape[1]:
        raise ValueError(
            f"x: got {x.dtype} {tuple(x.shape)} for weight_packed {tuple(weight_packed.shape)}, "
            f"wanted fp32, bf16 or fp64 [..., in] for [out, in/2]"
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, wanted one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = "triton" if x.is_cuda and _triton(missing_is_an_error=False) else "torch"
    y = _PackedLinear.apply(x.reshape(-1, x.shape[-1]), weight_packed, weight_scale, backend)
    return y.view(*x.shape[:-1], len(weight_packed))


class _PackedLinear(torch.autograd.Function):
    """By hand, since autograd would keep every decoded tile for the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_packed: Tensor, weight_scale: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(weight_packed, weight_scale)
        if backend == "triton":
            return _triton()(x, weight_packed, weight_scale)
        y = x.new_empty(x.shape[0], weight_packed.shape[0])
        for rows in _tiles(weight_packed):
            y[:, rows] = packed_linear_naive(x, weight_packed[rows], weight_scale[rows])
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        weight_packed, weight_scale = ctx.saved_tensors
        total = upcast(grad.new_zeros(grad.shape[0], 2 * weight_packed.shape[1]))
        for rows in _tiles(weight_packed):
            total += grad[:, rows] @ unpack_mxfp4(weight_packed[rows], weight_scale[rows], grad.dtype)
        return total.to(grad.dtype), None, None, None


def _tiles(weight_packed: Tensor) -> list[slice]:
    """Row ranges of W that hold about `TILE` numbers each."""
    out, half = weight_packed.shape
    step = max(1, TILE // max(1, 2 * half))
    return [slice(start, start + step) for start in range(0, out, step)]


def _triton(missing_is_an_error: bool = True):
    """The Triton form, if triton can be imported."""
    try:
        from k3lite.ops.mx_triton import packed_linear_triton
    except ImportError as e:
        if missing_is_an_error:
            raise ValueError("backend: 'triton' is not installed here (it exists for Linux); use 'torch'") from e
        return None
    return packed_linear_triton


# ---- in a model


class PackedExperts(nn.Module):
    """`moe.Experts` with w1, w3, w2 as `{w}_packed` and `{w}_scale` [E, out, ...], uint8. Made without values.

    input_rounding: the scale rule under which inputs are rounded to MXFP8, or None to leave them. From a file it is what
    quantization_config says of input_activations: null, as in the release, leaves them (k3-architecture §7.13).
    """

    def __init__(self, experts: Experts) -> None:
        """Shapes, device, activation and rounding of inputs are those of `experts`.

        Raises ValueError if an input width is no multiple of 32.
        """
        super().__init__()
        for name, w in experts.named_parameters():
            E, out, width = w.shape
            if width % BLOCK:
                raise ValueError(f"{name}: got an input width of {width}, wanted a multiple of {BLOCK} to pack it")
            for suffix, columns in (("packed", width // 2), ("scale", width // BLOCK)):
                empty = torch.empty(E, out, columns, dtype=torch.uint8, device=w.device)
                self.register_buffer(f"{name}_{suffix}", empty)
        self.act = experts.act
        self.input_rounding = experts.rounding

    def forward(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As `Experts`: z [N,D], ids and weights [N,k] -> [N,D]."""
        return by_expert(z, chosen, weights, self._expert)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        act = self.act
        if self.input_rounding is not None:
            x, act = rounded_inputs(x, act, self.input_rounding)
        hidden = act(*(packed_linear(x, p[e], s[e]) for p, s in (self.pair("w1"), self.pair("w3"))))
        packed, scale = self.pair("w2")
        return packed_linear(hidden, packed[e], scale[e])

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """weight_packed and weight_scale of all experts, for "w1", "w3" or "w2"."""
        return getattr(self, f"{name}_packed"), getattr(self, f"{name}_scale")


@torch.no_grad()
def pack_experts(model: nn.Module, scale_rule: str | None = None) -> None:
    """Round the routed experts of every layer to MXFP4 and keep nothing else of them. In place.

    scale_rule: None for the one under which the model rounds (`qat.set_rounding`), and floor if it does not.
    A model that rounds goes on rounding the inputs of its experts.
    """
    for layer in _layers(model, Experts):
        packed, rule = PackedExperts(layer.experts), scale_rule or layer.experts.rounding or "floor"
        for name, w in layer.experts.named_parameters():
            for into, made in zip(packed.pair(name), pack_mxfp4(w, rule), strict=True):
                into.copy_(made)
        layer.experts = packed.train(layer.training)


@torch.no_grad()
def unpack_experts(model: nn.Module) -> None:
    """Turn packed experts into weights that can be trained, of the same values, in the router's dtype. In place.

    model: one with its K3Config as `model.config`. If it rounds the inputs of its experts, it rounds weights too from now on.
    """
    for layer in _layers(model, PackedExperts):
        weight = layer.gate.weight
        with weight.device:
            dense = Experts(model.config).to(weight.dtype)
        for name, w in dense.named_parameters():
            w.copy_(unpack_mxfp4(*layer.experts.pair(name), weight.dtype))
        dense.rounding = layer.experts.input_rounding
        layer.experts = dense.train(layer.training)


def _layers(model: nn.Module, kind: type[nn.Module]) -> list[LatentMoE]:
    return [m for m in model.modules() if isinstance(m, LatentMoE) and isinstance(m.experts, kind)]
