"""Linear attention on tensors: softmax attention without the softmax, and therefore a sum of fixed size.

    o_t = sum over j <= t of (q_t . k_j) v_j / sqrt(K)       one score for every earlier token
        = S_t^T q_t / sqrt(K),   S_t = sum k_j v_j^T         the same sum, brackets set the other way

`recurrent` keeps S [K, V] and adds one outer product a token: the definition of the state. `parallel` makes all
T x T scores, masks the future and multiplies by V, as softmax attention has to. `auto` makes
the scores inside pieces of PIECE tokens and hands the state from piece to piece.

Nothing is normalised and no feature map is applied: q and k come in as they are to be multiplied.
Sources: Katharopoulos et al. 2020 (arXiv 2006.16236), whose feature map and normaliser are left out here as in
DeltaNet and KDA; fla ops/linear_attn/naive.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "recurrent", "parallel"]

PIECE = 64  # tokens that "auto" takes at once: scores and state then cost about the same at widths around 64


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run linear attention over a sequence and return (o [B,T,H,V], final state [B,H,K,V]).

    q, k: [B,T,H,K].   v: [B,T,H,V]; V may differ from K.   Any T.
    scale: factor on q, K^-1/2 by default.
    initial_state: [B,H,K,V], zeros by default. It is read, never written to.
    backend: "recurrent" (a running sum), "parallel" (masked T x T scores), "auto" (pieces of PIECE tokens).

    State and arithmetic are fp32 whatever the inputs' dtype (fp64 for fp64 inputs); o has v's dtype.
    Raises ValueError that names the argument when a shape, dtype or name is outside this contract.
    """
    _check(q, k, v, initial_state, backend)
    dtype, out_dtype = torch.float64 if v.dtype == torch.float64 else torch.float32, v.dtype
    q, k, v = (x.to(dtype) for x in (q, k, v))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    B, T, H, K = q.shape
    S = v.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    form = write_then_read if backend == "recurrent" else masked_product
    length = {"recurrent": 1, "parallel": max(T, 1), "auto": PIECE}[backend]
    outputs = [v[:, :0]]
    for start in range(0, T, length):
        o, S = form(*(x[:, start : start + length] for x in (q, k, v)), S)
        outputs.append(o)
    return torch.cat(outputs, 1).to(out_dtype), S


def write_then_read(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token: write, then read. q, k: [B,1,H,K].   v: [B,1,H,V].   S: [B,H,K,V]."""
    S = S + k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)
    return torch.einsum("bhkv,bhk->bhv", S, q[:, 0]).unsqueeze(1), S


def masked_product(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens at once, by their scores. q, k: [B,T,H,K].   v: [B,T,H,V].   S: [B,H,K,V], what came before."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B,H,T,.]
    scores = (q @ k.mT).tril()  # a token sees itself and what came before
    return (scores @ v + q @ S).transpose(1, 2), S + k.mT @ v


def _check(q, k, v, initial_state, backend) -> None:
    if backend not in ("auto", "recurrent", "parallel"):
        raise ValueError(f"backend: got {backend!r}, wanted 'auto', 'recurrent' or 'parallel'")
    if q.dim() != 4:
        raise ValueError(f"q: got shape {tuple(q.shape)}, wanted [B, T, H, K]")
    B, T, H, K = q.shape
    V = v.shape[-1] if v.dim() else 0
    wanted = {"k": (k, (B, T, H, K)), "v": (v, (B, T, H, V))}
    if initial_state is not None:
        wanted["initial_state"] = (initial_state, (B, H, K, V))
    for name, (x, shape) in wanted.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted {shape} (q is {tuple(q.shape)})")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not x.is_floating_point():
            raise ValueError(f"{name}: got dtype {x.dtype}, wanted a floating-point dtype")
    if initial_state is not None and initial_state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"initial_state: got dtype {initial_state.dtype}, wanted float32 (the state is never rounded)")
