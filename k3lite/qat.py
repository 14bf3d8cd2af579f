"""Training with rounding: the forward pass sees the experts as they will be stored, and the weights behind them learn.

    y = Q4(w2) Q8(act(Q4(w1) Q8(z), Q4(w3) Q8(z)))     Q4 = MXFP4, Q8 = MXFP8 (E4M3), blocks of 32 along the input axis

Only routed experts and their inputs; router, latent projections, shared experts, attention, embeddings and head are not
touched. The parameters stay as they are, unrounded, and take the gradient as if nothing had been rounded.

Vendor-reported for K3: MXFP4 weights and MXFP8 inputs of the routed experts, in all of post-training (report §4.1.4).
Seen in the release: experts packed in MXFP4, and `input_activations: null`, which does not mention MXFP8.
Not confirmed for K3: E4M3 as the element of the inputs, the scale rule, rounding to nearest even and the straight-through
gradient (k3-architecture §2.6, §7.12-13). They are choices here.
"""

from __future__ import annotations

from torch import nn

from k3lite.moe import Experts
from k3lite.mx import SCALE_RULES
from k3lite.packed import PackedExperts


def set_rounding(model: nn.Module, on: bool, scale_rule: str = "floor") -> None:
    """Switch rounding on or off in all routed experts of `model`, in train and in eval mode alike. In place.

    Packed experts have their weights rounded already: of theirs only the inputs are switched.
    A part of what `train` resumes: a checkpoint with rounding does not go on without. Call it before `train`.
    Raises ValueError for an unknown scale rule, and for a model without routed experts.
    """
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"scale_rule: got {scale_rule!r}, wanted one of {', '.join(SCALE_RULES)}")
    found = [m for m in model.modules() if isinstance(m, Experts | PackedExperts)]
    if not found:
        raise ValueError("model: got one without routed experts; there is nothing to round")
    for experts in found:
        setattr(experts, _attribute(experts), scale_rule if on else None)


def rounding_of(model: nn.Module) -> list[str | None]:
    """The scale rule of each layer of routed experts, None where nothing is rounded."""
    return [getattr(m, _attribute(m)) for m in model.modules() if isinstance(m, Experts | PackedExperts)]


def _attribute(experts: Experts | PackedExperts) -> str:
    return "rounding" if isinstance(experts, Experts) else "input_rounding"
