"""Training with rounding: the routed experts compute with the numbers that a packed model will have.

    W' = mxfp4(W)    w1, w3, w2 along their input width
    x' = mxfp8(x)    what goes into them: the latent z before w1 and w3, the gated hidden before w2
    y  = x' W'^T     forward;  backward: dW = dW', dx = dx' (straight-through, `mx.fake_quantize`)

The parameters stay as they are, in full precision, and the optimizer moves them: steps far smaller than a gap between two MXFP4
values add up until a number is rounded the other way. K3 trains so from its supervised fine-tuning on, in its routed experts only.

Stated for K3: the parts, MXFP4 and MXFP8, and from which stage on (Kimi K3 report §4.1.4). Not stated: E4M3 rather than
E5M2, the scale rule, the rounding, the straight-through gradient (k3-architecture §2.6, §7.13); those are MX convention here.
"""

from __future__ import annotations

from torch import Tensor, nn

from k3lite.mx import check_scale_rule, fake_quantize
from k3lite.ops.experts import Activation

WEIGHTS_IN, INPUTS_IN = "e2m1", "e4m3"


def round_weight(w: Tensor, scale_rule: str = "floor") -> Tensor:
    """[..., out, in] as unpacking its MXFP4 form would give it."""
    return fake_quantize(w, WEIGHTS_IN, scale_rule=scale_rule)


def round_input(x: Tensor, scale_rule: str = "floor") -> Tensor:
    """[..., in] in MXFP8."""
    return fake_quantize(x, INPUTS_IN, scale_rule=scale_rule)


def rounding_after(act: Activation, scale_rule: str) -> Activation:
    """act(gate, up), which is what w2 reads, in MXFP8."""
    return lambda gate, up: round_input(act(gate, up), scale_rule)


def set_rounding(model: nn.Module, on: bool = True, scale_rule: str = "floor") -> None:
    """Let the routed experts of a model round, or stop rounding, in training and in use. In place.

    Packed experts have MXFP4 weights anyway: there it is their inputs that are rounded or not. A loaded model rounds its
    inputs if its config says so; the released one does not (`input_activations: null`, weights alone in four bits).
    Raises ValueError for a model without routed experts, and for an unknown scale rule.
    """
    check_scale_rule(scale_rule)
    layers = [m for m in model.modules() if hasattr(m, "rounding")]
    if not layers:
        raise ValueError(f"set_rounding: got a {type(model).__name__} without routed experts, wanted some to round")
    for layer in layers:
        layer.rounding = scale_rule if on else None


def rounding_of(model: nn.Module) -> str | None:
    """The scale rule with which a model's experts round, None where they do not."""
    return next((m.rounding for m in model.modules() if getattr(m, "rounding", None)), None)
