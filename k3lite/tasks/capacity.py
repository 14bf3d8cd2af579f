"""How much a state holds: pairs of random keys and values written by one of four rules, then asked for.

One write of key k and value v with strength beta into a state S [K, V], in K3's order:

    S <- Diag(e^log_decay) S                    forget
    u  = beta (v - S^T k)                       the delta rules: what the decayed state gets wrong about k
    u  = beta v                                 the sum: no look at what is there
    S <- S + k u^T                              write; reading comes after

    sum           no look; log_decay one number (0: plain linear attention)
    delta         a look; forgets nothing
    gated delta   a look; log_decay one number for all channels
    kda           a look; log_decay one number for each key channel

No training and no model: this is what the operation itself can hold. `theory` is the expected error where it can be
worked out exactly: for keys that are drawn independently and values that are unit vectors with mean zero.
Source of the rules: k3-architecture §2.3; the expectations are derived below and checked by measurement in
tests/tasks/test_capacity.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RULES = ("sum", "delta", "gated delta", "kda")


@dataclass(frozen=True)
class Retrieval:
    """What came back for each key, in the order of writing. error: [..., N], |S^T k - v|^2 / |v|^2: 0 perfect, 1 as
    good as no answer.   right: [..., N], whether of all values written the right one is the nearest to the answer.
    """

    error: Tensor
    right: Tensor


def step(S: Tensor, k: Tensor, v: Tensor, rule: str, beta: float = 1.0, log_decay: float | Tensor = 0.0) -> Tensor:
    """One write. S: [..., K, V].   k: [..., K], unit length for what the rules promise.   v: [..., V].

    beta: write strength, 0 or more (a model's is below 1).   log_decay: 0 or less; one number, or [K] for "kda".
    Returns the new state; the old one is not changed.   Raises ValueError that names the argument.
    """
    _check_rule(rule, beta, log_decay, S.shape[-2])
    if k.shape[-1] != S.shape[-2] or v.shape[-1] != S.shape[-1]:
        raise ValueError(
            f"S: got shape {tuple(S.shape)} for a key of {k.shape[-1]} and a value of {v.shape[-1]}, wanted [..., K, V]"
        )
    return forget_look_write(S, k, v, rule, beta, _retention(log_decay, S))


def forget_look_write(S: Tensor, k: Tensor, v: Tensor, rule: str, beta: float, keep: Tensor) -> Tensor:
    """The rules themselves, unchecked. keep: e^log_decay as [1, 1] or [K, 1]; rest as in `step`."""
    S = keep * S  # rows are key channels
    held = 0.0 if rule == "sum" else (k.unsqueeze(-2) @ S).squeeze(-2)  # S^T k
    return S + k.unsqueeze(-1) * (beta * (v - held)).unsqueeze(-2)


def write_pairs(
    keys: Tensor,
    values: Tensor,
    rule: str,
    beta: float = 1.0,
    log_decay: float | Tensor = 0.0,
    *,
    initial_state: Tensor | None = None,
) -> Tensor:
    """The state after all pairs, written one after another.

    keys: [..., N, K].   values: [..., N, V].   Leading axes are independent states (seeds).   Rest as in `step`.
    initial_state: [..., K, V], zeros by default.   Returns S [..., K, V] in the dtype of values, fp32 or fp64.
    """
    _check_rule(rule, beta, log_decay, keys.shape[-1])
    if keys.dim() < 2 or keys.shape[:-1] != values.shape[:-1]:
        raise ValueError(f"values: got shape {tuple(values.shape)} for keys {tuple(keys.shape)}, wanted [..., N, V]")
    shape = (*keys.shape[:-2], keys.shape[-1], values.shape[-1])
    S = values.new_zeros(shape) if initial_state is None else initial_state
    if tuple(S.shape) != shape:
        raise ValueError(f"initial_state: got shape {tuple(S.shape)}, wanted {shape}")
    keep = _retention(log_decay, S)
    for k, v in zip(keys.unbind(-2), values.unbind(-2), strict=True):
        S = forget_look_write(S, k, v, rule, beta, keep)
    return S


def draw_pairs(
    pairs: int,
    key_width: int,
    value_width: int,
    correlation: float,
    generator: torch.Generator,
    *,
    draws: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Random unit keys [pairs, key_width] and unit values [pairs, value_width]; with `draws`, that many on a first axis.

    correlation: expected cosine between two keys, 0 (all directions alike) to 1 (all keys equal). Each draw has one
    direction m that its keys share: their component along m has mean sqrt(correlation), the rest has none.
    """
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation: got {correlation}, wanted 0 to 1")
    for name, size, least in (("pairs", pairs, 1), ("key_width", key_width, 2), ("value_width", value_width, 2)):
        if size < least:
            raise ValueError(f"{name}: got {size}, wanted {least} or more")
    lead = () if draws is None else (draws,)

    def unit(*shape: int) -> Tensor:
        # fp64, because what a key near m has across it is a small difference.
        x = torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)
        return x / x.norm(dim=-1, keepdim=True)

    free, values = unit(pairs, key_width), unit(pairs, value_width)
    if correlation == 0:
        return free.float(), values.float()
    m = unit(1, key_width)
    along = (free * m).sum(-1, keepdim=True)
    across = free - along * m
    across = across / across.norm(dim=-1, keepdim=True)
    shared = correlation**0.5
    along = (shared + (1 - shared) * along).clamp(-1, 1)  # mean `shared`, never beyond 1
    keys = along * m + (1 - along.square()).sqrt() * across
    return keys.float(), values.float()


def retrieval(S: Tensor, keys: Tensor, values: Tensor) -> Retrieval:
    """Read every key. S: [..., K, V].   keys: [..., N, K].   values: [..., N, V]. Equal values count as one another."""
    read = keys @ S
    error = (read - values).square().sum(-1) / values.square().sum(-1)
    # |read - value|^2 without |read|^2, which is the same for all values.
    distance = values.square().sum(-1).unsqueeze(-2) - 2 * read @ values.mT
    own = distance.diagonal(dim1=-2, dim2=-1)
    return Retrieval(error, own <= distance.amin(-1))


def theory(
    rule: str,
    pairs: int,
    width: int,
    beta: float = 1.0,
    log_decay: float | Tensor = 0.0,
    correlation: float = 0.0,
) -> Tensor | None:
    """Expected squared error of each key by order of writing, [pairs] in fp64; None where no closed form is known.

    width: of the keys; that of the values does not matter. Exact for the pairs of `draw_pairs` (values with mean zero).
    None: a delta rule with correlated keys, and decay that differs between channels.
    """
    _check_rule(rule, beta, log_decay, width)
    rate = torch.as_tensor(log_decay, dtype=torch.float64).flatten()
    if (rate != rate[0]).any() or (correlation and rule != "sum"):
        return None
    a = math.exp(rate[0])
    age = torch.arange(pairs - 1, -1, -1, dtype=torch.float64)
    if rule == "sum":
        return _sum_theory(a**age, _squared_cosine(width, correlation), beta)
    return _delta_theory(pairs, width, beta, a)


def _sum_theory(kept: Tensor, cosine2: float, beta: float) -> Tensor:
    """Own value faded to beta a^age; every other value comes along, times its cosine."""
    others = kept.square().sum() - kept.square()
    return (1 - beta * kept).square() + beta**2 * cosine2 * others


def _delta_theory(pairs: int, d: int, beta: float, a: float) -> Tensor:
    """Follow the read vector x backwards through the writes: x <- a (I - beta k k^T) x, from x = k_i at the end.

    Then S_N^T k_i = sum of beta (k_t . x_t) v_t over all writes t, and the values are independent, so squares add:
    later writes, the pair's own, and what the pair's write left of everything before it (mean |S|_F^2 / d, since S
    then knows nothing of k_i). For unit k of random direction, with w = E|x|^2, u = E(k_i . x)^2, p = E(k_i . x):
    E(k.x)^2 = w / d and E(k.x)^2 (k.k_i)^2 = (w + 2u) / (d (d + 2)).
    """
    g = beta * (2 - beta)  # a write takes g of the squared length along its key
    frobenius = [0.0]  # E|S|_F^2 before the first write, the second, ...
    for _ in range(pairs - 1):
        frobenius.append(a * a * (1 - g / d) * frobenius[-1] + beta * beta)
    p = w = u = 1.0
    later = 0.0
    errors = []
    for before in reversed(frobenius):  # the newest pair first
        errors.append(a * a * before / d * (w - g * u) + 1 - 2 * beta * p + beta * beta * u + later)
        later += beta * beta * w / d
        u = a * a * (u * (1 - 2 * beta / d) + beta * beta * (w + 2 * u) / (d * (d + 2)))
        w *= a * a * (1 - g / d)
        p *= a * (1 - beta / d)
    return torch.tensor(errors[::-1], dtype=torch.float64)


def _squared_cosine(width: int, correlation: float) -> float:
    """E(k . k')^2 of two keys of `draw_pairs`: squared mean component along m, and the rest in width - 1 directions."""
    along2 = correlation + (1 - correlation**0.5) ** 2 / width
    return along2**2 + (1 - along2) ** 2 / (width - 1)


def _retention(log_decay: float | Tensor, S: Tensor) -> Tensor:
    """e^log_decay, to be multiplied onto S: [1, 1] or [K, 1]."""
    return torch.as_tensor(log_decay, dtype=S.dtype).exp().reshape(-1, 1)


def _check_rule(rule: str, beta: float, log_decay: float | Tensor, width: int) -> None:
    if rule not in RULES:
        raise ValueError(f"rule: got {rule!r}, wanted one of {', '.join(map(repr, RULES))}")
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta: got {beta}, wanted a number of 0 or more")
    rate = torch.as_tensor(log_decay)
    allowed = [(), (width,)] if rule == "kda" else [()]
    if tuple(rate.shape) not in allowed:
        wanted = f"one number or [{width}]" if rule == "kda" else "one number"
        raise ValueError(f"log_decay: got shape {tuple(rate.shape)} for rule {rule!r}, wanted {wanted}")
    if not bool((rate <= 0).all()):
        raise ValueError(f"log_decay: got {rate.max().item():g} as its largest, wanted 0 or less")
    if rule == "delta" and bool((rate != 0).any()):
        raise ValueError(f"log_decay: got {rate.item():g}, but 'delta' forgets nothing; 'gated delta' does")
