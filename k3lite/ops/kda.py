"""Kimi Delta Attention on tensors: one state per head, decayed per channel and corrected by the delta rule.

For one head with state S [K, V], log-decay g [K], write strength beta:

    S <- Diag(e^g) S                 forget, each key channel at its own rate
    u  = beta (v - S^T k)            what the decayed state gets wrong about k
    S <- S + k u^T                   correct it
    o  = S^T q / sqrt(K)             read after the write

`kda_recurrent` is these four lines in a loop, and the definition. `kda_chunk` computes the same for C tokens
at once: inside a chunk every token's correction depends on the earlier ones only through a triangular matrix,

    c = cumsum(g),  Gamma = e^c
    A_ij = sum_d k_id k_jd e^(c_id - c_jd)   j < i        P_ij = sum_d q_id k_jd e^(c_id - c_jd)   j <= i
    M = (I + Diag(beta) A)^-1 Diag(beta)
    U = M V,   W = M (Gamma * K)
    V~ = U - W S_in
    O  = (Gamma * Q) S_in + P V~
    S_out = Diag(Gamma_C) S_in + (K * e^(c_C - c))^T V~

so that the loop over tokens becomes a loop over chunks with matrix products in it. `ops/kda_triton.py` holds the
same equations as GPU kernels.
Sources: Kimi K3 report §2.1.1 Eq. 1 and 4; Kimi Linear paper Eq. 6-9; k3-architecture §2.3.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from k3lite.ops.pointwise import check_cu_seqlens, upcast

Backend = Literal["auto", "recurrent", "chunk", "triton"]
BACKENDS = get_args(Backend)

CHUNK = 16  # tokens; at K3's bound of e^-5 each, their decay is e^-80 and can be split into two factors
MAX_DECAY = 80.0  # over a chunk, as a positive exponent: e^80 = 5.5e34 < 3.4e38, the largest fp32
SEGMENT = 512  # tokens whose intermediate results are made together: few enough to stay in a core's cache


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run KDA over a sequence and return (o [B,T,H,V], final state [B,H,K,V]).

    q, k: [B,T,H,K], already L2-normalised (see `l2norm`).   v: [B,T,H,V]; V may differ from K.
    g: [B,T,H,K] log-decay, <= 0.   beta: [B,T,H] write strength, 0..1.
    scale: factor on q, K^-1/2 by default.
    initial_state: [B,H,K,V], zeros by default. It is read, never written to.
    cu_seqlens: [N+1] starts of packed sequences, first 0, last T; needs B = 1. States are then [N,H,K,V]
        and nothing passes from one sequence to the next.
    chunk_size: tokens that "chunk" takes at once; any gives the same numbers.
    backend: "recurrent" (the definition), "chunk" (matrix products), "triton" (GPU kernels; on a CPU only under
        TRITON_INTERPRET=1), "auto" (triton on a GPU; on a CPU chunk, recurrent for one token).

    State and arithmetic are fp32 whatever the inputs' dtype (fp64 for fp64 inputs); o has v's dtype.
    Raises ValueError that names the argument when a shape, dtype, value or name is outside this contract. Values
    (NaN, g > 0) are looked at on a CPU only: on a GPU every look would wait for the device.
    """
    _check(q, k, v, g, beta, initial_state, cu_seqlens, chunk_size, backend)
    if backend == "auto" and q.is_cuda and find_spec("triton"):
        backend = "triton"
    if backend == "triton" and q.shape[1]:
        return _triton(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    if cu_seqlens is not None:
        return _packed(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, backend)
    if backend == "recurrent" or (backend == "auto" and q.shape[1] <= 1):
        return kda_recurrent(q, k, v, g, beta, scale, initial_state)
    return kda_chunk(q, k, v, g, beta, scale, initial_state, chunk_size)


def kda_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one token after another. Shapes as in `kda`."""
    out_dtype = v.dtype
    q, k, v, g, beta, S = _prepare(q, k, v, g, beta, initial_state)
    q = q * _scale(q, scale)
    outputs = []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = q[:, t], k[:, t], v[:, t]  # [B,H,K], [B,H,K], [B,H,V]
        S = g[:, t].exp().unsqueeze(-1) * S
        u = beta[:, t].unsqueeze(-1) * (v_t - torch.einsum("bhkv,bhk->bhv", S, k_t))
        S = S + torch.einsum("bhk,bhv->bhkv", k_t, u)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q_t))
    o = torch.stack(outputs, dim=1) if outputs else v.new_zeros(v.shape)
    return o.to(out_dtype), S


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The same numbers, a chunk at a time. Shapes as in `kda`; any T, any chunk_size."""
    out_dtype = v.dtype
    q, k, v, g, beta, S = _prepare(q, k, v, g, beta, initial_state)
    if q.shape[1] == 0:
        return v.to(out_dtype), S
    tokens = max(1, SEGMENT // chunk_size) * chunk_size
    outputs = []
    for part in zip(*(x.split(tokens, 1) for x in (q, k, v, g, beta.unsqueeze(-1))), strict=True):
        o, S = _segment(*part, S, _scale(q, scale), chunk_size)
        outputs.append(o)
    return torch.cat(outputs, 1).to(out_dtype), S


def _segment(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, scale: float, C: int
) -> tuple[Tensor, Tensor]:
    """`kda_chunk` for a few chunks: all that does not need the state for all of them at once, then one by one."""
    B, T, H, V = v.shape
    # A token with k = 0, beta = 0, g = 0 changes nothing, so the last chunk may be filled up with them.
    q, k, v, g, beta = (_chunks(x, C) for x in (q, k, v, g, beta))  # [N, B, H, C, K, V or 1]
    kq = torch.stack([k, q], 3).flatten(1, 2)  # [N, B*H, 2, C, K]: A and P take the same path
    v, g, beta = (x.flatten(1, 2) for x in (v, g, beta))
    k_in, q_in, k_out, keep, A, P, origin = _decayed(kq, g.cumsum(-2))
    # A triangular solve stays accurate when keys repeat; in a series of powers of A the terms would grow
    # without bound and cancel. It reads only what is below the diagonal, so A needs no mask.
    M = torch.linalg.solve_triangular(beta * A, torch.diag_embed(beta.squeeze(-1)), upper=False, unitriangular=True)

    # The only sequential part: one state a chunk, decayed to where its chunk measures from.
    S = origin[0].exp().mT * S.flatten(0, 1)  # [B*H, K, V]
    states, corrected = [], []
    for U_n, W_n, k_n, keep_n in zip(*(x.unbind(0) for x in (M @ v, M @ k_in, k_out.mT, keep.mT)), strict=True):
        states.append(S)
        corrected.append(torch.baddbmm(U_n, W_n, S, alpha=-1))
        S = (keep_n * S).baddbmm_(k_n, corrected[-1])
    o = (q_in @ torch.stack(states)).add_(P @ torch.stack(corrected)).mul_(scale)  # [N, B*H, C, V]
    o = o.unflatten(1, (B, H)).permute(1, 0, 3, 2, 4).reshape(B, -1, H, V)
    return o[:, :T], S.unflatten(0, (B, H))


def _decayed(kq: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """What the module's equations make of k and q [N, .., 2, C, K] and c [N, .., C, K], measured from an origin:

    k_in, q_in = k e^(c - origin), q e^(c - origin)      meet the state
    k_out = k e^(c_C - c + next origin)                  go into the next state
    keep = e^(c_C - origin + next origin)   [.., 1, K]   is left of this one; after the last chunk the origin is 0
    A (valid below the diagonal), P (zero above it)      [.., C, C]

    e^(c_i - c_j) is at most 1 for j <= i, but its factors e^c_i and e^-c_j are not. From the middle of the chunk's decay
    they stay below e^40 with K3's bound of -5 a token. A gate without a bound (Kimi Linear) may exceed that;
    then the origin is the chunk's start, and A and P are made pair by pair, without factors.
    """
    C, first, last = c.shape[-2], c[..., :1, :], c[..., -1:, :]
    bounded = bool((first - last <= MAX_DECAY).all())
    origin = (first + last) / 2 if bounded else torch.zeros_like(last)
    keep = (last - origin + torch.cat([origin[1:], torch.zeros_like(origin[:1])])).exp()
    decay = (c - origin).exp()
    kq_in = (kq * decay.unsqueeze(-3)).flatten(-3, -2)  # [.., 2 C, K]
    if bounded:
        k_out = kq[..., 0, :, :] / decay
        A, P = (kq_in @ k_out.mT).split(C, -2)
        k_out = k_out * keep
    else:
        ahead = torch.ones(C, C, dtype=torch.bool, device=c.device).triu(1).unsqueeze(-1)
        pair = (c.unsqueeze(-2) - c.unsqueeze(-3)).masked_fill(ahead, 0).exp()  # [.., i, j, K]
        k = kq[..., 0, :, :]
        A, P = torch.einsum("...sik,...jk,...ijk->...sij", kq, k, pair).unbind(-3)
        k_out = k * (last - c).exp()
    return *kq_in.split(C, -2), k_out, keep, A, P.tril(), origin


def _chunks(x: Tensor, C: int) -> Tensor:
    """[B,T,H,D] -> [N,B,H,C,D], the last chunk filled with zeros."""
    if x.shape[1] % C:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4)


def _prepare(q, k, v, g, beta, initial_state):
    """Everything in the working precision, and a state to start from."""
    S = _start(q, v, q.shape[0], initial_state)
    return *(x.to(S.dtype) for x in (q, k, v, g, beta)), S


def _start(q: Tensor, v: Tensor, sequences: int, initial_state: Tensor | None) -> Tensor:
    """The state to begin with, fp32, or fp64 where v is."""
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    if initial_state is not None:
        return initial_state.to(dtype)
    return torch.zeros(sequences, q.shape[2], q.shape[3], v.shape[3], dtype=dtype, device=v.device)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _triton(q, k, v, g, beta, scale, initial_state, cu_seqlens):
    try:
        from k3lite.ops.kda_triton import kda_triton
    except ImportError as e:
        raise ValueError(f"backend: 'triton' is not installed here ({e}); 'auto' picks what runs here") from e
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    S = _start(q, v, sequences, initial_state)
    return kda_triton(q, k, v, g, beta, _scale(q, scale), S, cu_seqlens)


def _packed(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, backend):
    """Lay the packed sequences side by side as a batch, filled with tokens that change nothing."""
    lengths = cu_seqlens.diff().tolist()
    batch = [torch.nn.utils.rnn.pad_sequence(x[0].split(lengths), batch_first=True) for x in (q, k, v, g, beta)]
    o, state = kda(*batch, scale=scale, initial_state=initial_state, chunk_size=chunk_size, backend=backend)
    return torch.cat([o[i, :n] for i, n in enumerate(lengths)]).unsqueeze(0), state


def bounded_gate(z: Tensor, A_log: Tensor, lower_bound: float) -> Tensor:
    """K3's log-decay: lower_bound * sigmoid(e^A_log * z), between lower_bound and 0.

    z: [..., H, K] with dt_bias already added.   A_log: [H], one number per head.   fp32 out (fp64 in, fp64 out).
    """
    z = upcast(z)
    return lower_bound * torch.sigmoid(A_log.to(z.dtype).exp().unsqueeze(-1) * z)


def softplus_gate(z: Tensor, A_log: Tensor) -> Tensor:
    """Kimi Linear's log-decay: -e^A_log * softplus(z), without a lower bound. Shapes as in `bounded_gate`."""
    z = upcast(z)
    return -A_log.to(z.dtype).exp().unsqueeze(-1) * F.softplus(z)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis, eps inside the root (fla; k3-architecture §7.3)."""
    x = upcast(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _check(q, k, v, g, beta, initial_state, cu_seqlens, chunk_size, backend) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, wanted one of {', '.join(BACKENDS)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, wanted 1 or more")
    for name, x in {"q": q, "v": v}.items():
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted [B, T, H, {'K' if name == 'q' else 'V'}]")
    B, T, H, K = q.shape
    V = v.shape[-1]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    given = {"q": (q, (B, T, H, K)), "k": (k, (B, T, H, K)), "v": (v, (B, T, H, V)), "g": (g, (B, T, H, K))}
    given["beta"] = (beta, (B, T, H))
    if initial_state is not None:
        given["initial_state"] = (initial_state, (N, H, K, V))
    for name, (x, shape) in given.items():
        if tuple(x.shape) != shape:
            hint = "; the state is [.., K, V], this looks like [.., V, K]" if tuple(x.shape) == (N, H, V, K) else ""
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted {shape} (q is {tuple(q.shape)}){hint}")
        if not x.is_floating_point():
            raise ValueError(f"{name}: got dtype {x.dtype}, wanted a floating-point dtype")
        if x.device != q.device:
            raise ValueError(f"{name}: got a tensor on {x.device}, wanted {q.device}, where q is")
    if initial_state is not None and initial_state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"initial_state: got dtype {initial_state.dtype}, wanted float32 (the state is never rounded)")
    if q.device.type == "cpu":
        _check_values({name: x.detach() for name, (x, _) in given.items()})


def _check_values(given: dict[str, Tensor]) -> None:
    """Raise ValueError for NaN, infinity, or a decay that grows. One pass over each tensor while all is well."""
    for name, x in given.items():
        if not math.isfinite(x.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).item()):
            bad = torch.nonzero(~torch.isfinite(x))
            if len(bad):  # else finite values so large that only their sum is not
                at = bad[0].tolist()
                raise ValueError(f"{name}: got {x[tuple(at)].item()} at {at} ({len(bad)} such), wanted finite numbers")
    g = given["g"]
    if g.numel() and g.max() > 0:
        at = torch.nonzero(g > 0)[0].tolist()
        raise ValueError(f"g: got {g[tuple(at)].item():g} at {at}, wanted a log-decay of 0 or less")
