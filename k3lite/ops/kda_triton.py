"""KDA as Triton kernels: the equations of `ops/kda.py`, a chunk of 16 tokens to a program.

Forward:   prepare   every chunk and head at once: A, P, L = (I + Diag(beta) A)^-1, M = L Diag(beta), U = M V, W = M (Gamma K)
           scan      chunk after chunk, a program for each sequence, head and block of value columns: V~, O, S
Backward:  the forward again, keeping S and V~ of each chunk; then
           scan_backward   from the last chunk to the first: gradients of V~ and S
           gradients       every chunk and head at once: from those to q, k, v, g and beta
Decode:    decode    one token: the four lines of the recurrence

A row is one token of one head; tensors are read as [rows, width]. Chunks never cross the border of a sequence: a table
gives the first token of each chunk and the end of its sequence, and tokens past the end are read as zeros, which
change nothing. So a batch and packed sequences are the same to the kernels, and any T will do. Widths are padded
to a power of two. All arithmetic is fp32 (fp64 for fp64 inputs); bf16 inputs are multiplied in TF32 on a GPU.

Run on a CPU with TRITON_INTERPRET=1, set before triton is imported. Only public names of Triton are used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 16  # tl.dot wants sixteen rows, and e^-5 a token leaves e^-80 over sixteen tokens
MAX_WIDTH = 256
MAX_DECAY = tl.constexpr(80.0)  # as in ops/kda.py


# ---- what the kernels share


@triton.jit
def _load_rows(x, rows, live, width, columns, DTYPE: tl.constexpr):
    """[C, columns] of a tensor [rows, width]; zeros past the end of the sequence and of the width."""
    inside = live[:, None] & (columns < width)[None, :]
    return tl.load(x + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(DTYPE)


@triton.jit
def _store_rows(x, rows, live, width, columns, values):
    inside = live[:, None] & (columns < width)[None, :]
    tl.store(x + rows[:, None] * width + columns[None, :], values, mask=inside)


@triton.jit
def _load_square(x, n, C: tl.constexpr):
    """[C, C]: the n-th matrix of a tensor [N*H, C, C]."""
    i = tl.arange(0, C)
    return tl.load(x + n * C * C + i[:, None] * C + i[None, :])


@triton.jit
def _store_square(x, n, values, C: tl.constexpr):
    i = tl.arange(0, C)
    tl.store(x + n * C * C + i[:, None] * C + i[None, :], values)


@triton.jit
def _state(n, K, V, d, e):
    """Offsets and mask of a block [BK, BV] of the n-th state in a tensor [N*H, K, V]."""
    return n * K * V + d[:, None] * V + e[None, :], (d < K)[:, None] & (e < V)[None, :]


@triton.jit
def _row(x, i, C: tl.constexpr):
    """[width]: row i of x [C, width]."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == i, x, 0.0), 0)


@triton.jit
def _column(x, j, C: tl.constexpr):
    """[C]: column j of x [C, C]."""
    return tl.sum(tl.where(tl.arange(0, C)[None, :] == j, x, 0.0), 1)


@triton.jit
def _chunk_rows(chunk_start, chunk_end, n, h, H, C: tl.constexpr):
    """Row numbers of chunk n in head h, and which of them are tokens of its sequence."""
    t = tl.load(chunk_start + n).to(tl.int64) + tl.arange(0, C)
    return t * H + h, t < tl.load(chunk_end + n)


# ---- forward


@triton.jit
def prepare_kernel(
    q, k, v, g, beta,  # read
    q_in, k_out, W, U, keep, A_out, P_out, L_out,  # written
    chunk_start, chunk_end, scale, H, K, V,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0), tl.program_id(1)
    rows, live = _chunk_rows(chunk_start, chunk_end, n, h, H, C)
    d = tl.arange(0, BK)
    q_c = _load_rows(q, rows, live, K, d, DTYPE) * scale
    k_c = _load_rows(k, rows, live, K, d, DTYPE)
    c = tl.cumsum(_load_rows(g, rows, live, K, d, DTYPE), 0)
    beta_c = tl.load(beta + rows, mask=live, other=0.0).to(DTYPE)
    first, last = _row(c, 0, C), _row(c, C - 1, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]

    # A and P: by products of two factors where both stay within e^40, else pair by pair.
    if tl.max(first - last, 0) <= MAX_DECAY:
        decay = tl.exp(c - (0.5 * (first + last))[None, :])
        right = tl.trans(k_c / decay)
        A = tl.dot(k_c * decay, right, input_precision=PRECISION, out_dtype=DTYPE)
        P = tl.dot(q_c * decay, right, input_precision=PRECISION, out_dtype=DTYPE)
    else:
        A = tl.zeros([C, C], DTYPE)
        P = tl.zeros([C, C], DTYPE)
        for m in range(C):
            pair = tl.exp(tl.minimum(c - _row(c, m, C)[None, :], 0.0)) * _row(k_c, m, C)[None, :]
            A += tl.where(j == m, tl.sum(k_c * pair, 1)[:, None], 0.0)
            P += tl.where(j == m, tl.sum(q_c * pair, 1)[:, None], 0.0)
    A = tl.where(i > j, A, 0.0)
    P = tl.where(i >= j, P, 0.0)

    # L = (I + Diag(beta) A)^-1, row after row: row m is e_m minus the rows above it, as far as token m saw them.
    L = tl.where(i == j, 1.0, 0.0).to(DTYPE)
    for m in range(1, C):
        seen = _row(beta_c[:, None] * A, m, C)
        L -= tl.where(i == m, tl.sum(seen[:, None] * L, 0)[None, :], 0.0)
    M = L * beta_c[None, :]

    gamma = tl.exp(c)
    _store_rows(q_in, rows, live, K, d, q_c * gamma)
    _store_rows(k_out, rows, live, K, d, k_c * tl.exp(last[None, :] - c))
    _store_rows(W, rows, live, K, d, tl.dot(M, k_c * gamma, input_precision=PRECISION, out_dtype=DTYPE))
    for block in range(0, tl.cdiv(V, BV)):
        e = block * BV + tl.arange(0, BV)
        v_c = _load_rows(v, rows, live, V, e, DTYPE)
        _store_rows(U, rows, live, V, e, tl.dot(M, v_c, input_precision=PRECISION, out_dtype=DTYPE))
    n_h = (n * H + h).to(tl.int64)
    tl.store(keep + n_h * K + d, tl.exp(last), mask=d < K)
    _store_square(A_out, n_h, A, C)
    _store_square(P_out, n_h, P, C)
    _store_square(L_out, n_h, L, C)


@triton.jit
def scan_kernel(
    q_in, k_out, W, U, keep, P, initial_state,  # read
    o, final_state, states, corrected,  # written; the last two only if SAVE
    chunk_start, chunk_end, first_chunk, H, K, V,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SAVE: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, h, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    at, inside = _state((sequence * H + h).to(tl.int64), K, V, d, e)
    S = tl.load(initial_state + at, mask=inside, other=0.0)
    for n in range(tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)):
        rows, live = _chunk_rows(chunk_start, chunk_end, n, h, H, C)
        n_h = h + H * tl.cast(n, tl.int64)
        W_c = _load_rows(W, rows, live, K, d, DTYPE)
        V_c = _load_rows(U, rows, live, V, e, DTYPE) - tl.dot(W_c, S, input_precision=PRECISION, out_dtype=DTYPE)
        if SAVE:
            here, _ = _state(n_h, K, V, d, e)
            tl.store(states + here, S, mask=inside)
            _store_rows(corrected, rows, live, V, e, V_c)
        o_c = tl.dot(_load_rows(q_in, rows, live, K, d, DTYPE), S, input_precision=PRECISION, out_dtype=DTYPE)
        o_c += tl.dot(_load_square(P, n_h, C), V_c, input_precision=PRECISION, out_dtype=DTYPE)
        _store_rows(o, rows, live, V, e, o_c)
        k_c = _load_rows(k_out, rows, live, K, d, DTYPE)
        S *= tl.load(keep + n_h * K + d, mask=d < K, other=0.0)[:, None]
        S += tl.dot(tl.trans(k_c), V_c, input_precision=PRECISION, out_dtype=DTYPE)
    tl.store(final_state + at, S, mask=inside)


# ---- backward: names starting with d are gradients


@triton.jit
def scan_backward_kernel(
    q_in, k_out, W, keep, P, do, d_final_state,  # read
    d_initial_state, d_states, d_corrected,  # written
    chunk_start, chunk_end, first_chunk, H, K, V,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, h, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    at, inside = _state((sequence * H + h).to(tl.int64), K, V, d, e)
    dS = tl.load(d_final_state + at, mask=inside, other=0.0)
    begin, end = tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)
    for back in range(begin, end):
        n = end - 1 - (back - begin)
        rows, live = _chunk_rows(chunk_start, chunk_end, n, h, H, C)
        n_h = h + H * tl.cast(n, tl.int64)
        here, _ = _state(n_h, K, V, d, e)
        tl.store(d_states + here, dS, mask=inside)  # of the state that chunk n hands on
        do_c = _load_rows(do, rows, live, V, e, DTYPE)
        k_c, W_c = _load_rows(k_out, rows, live, K, d, DTYPE), _load_rows(W, rows, live, K, d, DTYPE)
        dV_c = tl.dot(tl.trans(_load_square(P, n_h, C)), do_c, input_precision=PRECISION, out_dtype=DTYPE)
        dV_c += tl.dot(k_c, dS, input_precision=PRECISION, out_dtype=DTYPE)
        _store_rows(d_corrected, rows, live, V, e, dV_c)
        q_c = _load_rows(q_in, rows, live, K, d, DTYPE)
        dS *= tl.load(keep + n_h * K + d, mask=d < K, other=0.0)[:, None]
        dS += tl.dot(tl.trans(q_c), do_c, input_precision=PRECISION, out_dtype=DTYPE)
        dS -= tl.dot(tl.trans(W_c), dV_c, input_precision=PRECISION, out_dtype=DTYPE)
    tl.store(d_initial_state + at, dS, mask=inside)


@triton.jit
def gradients_kernel(
    q, k, v, g, beta, keep, A_in, L_in, states, corrected, do, d_states, d_corrected,  # read
    dq, dk, dv, dg, dbeta,  # written
    chunk_start, chunk_end, scale, H, K, V,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0), tl.program_id(1)
    rows, live = _chunk_rows(chunk_start, chunk_end, n, h, H, C)
    n_h = (n * H + h).to(tl.int64)
    d = tl.arange(0, BK)
    beta_c = tl.load(beta + rows, mask=live, other=0.0).to(DTYPE)
    L = _load_square(L_in, n_h, C)
    M = L * beta_c[None, :]

    # O = (Gamma Q) S + P V~,  S_out = Diag(keep) S + K_out^T V~,  V~ = M V - W S
    dP = tl.zeros([C, C], DTYPE)
    dM = tl.zeros([C, C], DTYPE)
    dq_in = tl.zeros([C, BK], DTYPE)
    dk_out = tl.zeros([C, BK], DTYPE)
    dW = tl.zeros([C, BK], DTYPE)
    d_last = tl.zeros([BK], DTYPE)
    for block in range(0, tl.cdiv(V, BV)):
        e = block * BV + tl.arange(0, BV)
        here, inside = _state(n_h, K, V, d, e)
        S = tl.load(states + here, mask=inside, other=0.0)
        dS = tl.load(d_states + here, mask=inside, other=0.0)
        do_c, v_c = _load_rows(do, rows, live, V, e, DTYPE), _load_rows(v, rows, live, V, e, DTYPE)
        V_c = _load_rows(corrected, rows, live, V, e, DTYPE)
        dV_c = _load_rows(d_corrected, rows, live, V, e, DTYPE)
        dP += tl.dot(do_c, tl.trans(V_c), input_precision=PRECISION, out_dtype=DTYPE)
        dq_in += tl.dot(do_c, tl.trans(S), input_precision=PRECISION, out_dtype=DTYPE)
        dk_out += tl.dot(V_c, tl.trans(dS), input_precision=PRECISION, out_dtype=DTYPE)
        dW -= tl.dot(dV_c, tl.trans(S), input_precision=PRECISION, out_dtype=DTYPE)
        dM += tl.dot(dV_c, tl.trans(v_c), input_precision=PRECISION, out_dtype=DTYPE)
        d_last += tl.sum(S * dS, 1)
        _store_rows(dv, rows, live, V, e, tl.dot(tl.trans(M), dV_c, input_precision=PRECISION, out_dtype=DTYPE))
    d_last *= tl.load(keep + n_h * K + d, mask=d < K, other=0.0)

    # W = M (Gamma K),  M = L Diag(beta),  L = (I + Diag(beta) A)^-1
    q_c = _load_rows(q, rows, live, K, d, DTYPE) * scale
    k_c = _load_rows(k, rows, live, K, d, DTYPE)
    c = tl.cumsum(_load_rows(g, rows, live, K, d, DTYPE), 0)
    first, last = _row(c, 0, C), _row(c, C - 1, C)
    gamma, rest = tl.exp(c), tl.exp(last[None, :] - c)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    A = _load_square(A_in, n_h, C)
    dM += tl.dot(dW, tl.trans(k_c * gamma), input_precision=PRECISION, out_dtype=DTYPE)
    dk_in = tl.dot(tl.trans(M), dW, input_precision=PRECISION, out_dtype=DTYPE)
    d_beta = tl.sum(L * dM, 0)
    dL = tl.dot(tl.trans(L), dM * beta_c[None, :], input_precision=PRECISION, out_dtype=DTYPE)
    d_beta_A = -tl.dot(dL, tl.trans(L), input_precision=PRECISION, out_dtype=DTYPE)
    d_beta_A = tl.where(i > j, d_beta_A, 0.0)
    d_beta += tl.sum(d_beta_A * A, 1)
    dA = beta_c[:, None] * d_beta_A
    dP = tl.where(i >= j, dP, 0.0)

    # A_ij = sum_d k_i k_j e^(c_i - c_j),  P_ij = sum_d q_i k_j e^(c_i - c_j)
    if tl.max(first - last, 0) <= MAX_DECAY:
        decay = tl.exp(c - (0.5 * (first + last))[None, :])
        right = k_c / decay
        dq_c = decay * tl.dot(dP, right, input_precision=PRECISION, out_dtype=DTYPE)
        dk_left = decay * tl.dot(dA, right, input_precision=PRECISION, out_dtype=DTYPE)
        dk_right = tl.dot(tl.trans(dA), k_c * decay, input_precision=PRECISION, out_dtype=DTYPE)
        dk_right += tl.dot(tl.trans(dP), q_c * decay, input_precision=PRECISION, out_dtype=DTYPE)
        dk_right /= decay
    else:
        dq_c = tl.zeros([C, BK], DTYPE)
        dk_left = tl.zeros([C, BK], DTYPE)
        dk_right = tl.zeros([C, BK], DTYPE)
        for m in range(C):
            pair = tl.exp(tl.minimum(c - _row(c, m, C)[None, :], 0.0))
            dA_m, dP_m = _column(dA, m, C)[:, None] * pair, _column(dP, m, C)[:, None] * pair
            k_m = _row(k_c, m, C)[None, :]
            dq_c += dP_m * k_m
            dk_left += dA_m * k_m
            dk_right += tl.where(i == m, tl.sum(dA_m * k_c + dP_m * q_c, 0)[None, :], 0.0)

    # Gamma Q, Gamma K, K_out = K e^(c_C - c), keep = e^(c_C); every exponent is a sum of g
    dq_c += dq_in * gamma
    dk_left += dk_in * gamma
    dk_right += dk_out * rest
    dc = dq_c * q_c + (dk_left - dk_right) * k_c
    d_last += tl.sum(dk_out * rest * k_c, 0)
    dc += tl.where(i == C - 1, d_last[None, :], 0.0)
    _store_rows(dq, rows, live, K, d, dq_c * scale)
    _store_rows(dk, rows, live, K, d, dk_left + dk_right)
    _store_rows(dg, rows, live, K, d, tl.cumsum(dc, 0, reverse=True))
    tl.store(dbeta + rows, d_beta, mask=live)


# ---- one token


@triton.jit
def decode_kernel(
    q, k, v, g, beta, state, o, new_state, scale, H, K, V, BK: tl.constexpr, BV: tl.constexpr, DTYPE: tl.constexpr
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d, e = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    at, inside = _state(row, K, V, d, e)
    q_t = tl.load(q + row * K + d, mask=d < K, other=0.0).to(DTYPE) * scale
    k_t = tl.load(k + row * K + d, mask=d < K, other=0.0).to(DTYPE)
    g_t = tl.load(g + row * K + d, mask=d < K, other=0.0).to(DTYPE)
    v_t = tl.load(v + row * V + e, mask=e < V, other=0.0).to(DTYPE)
    S = tl.load(state + at, mask=inside, other=0.0)
    S *= tl.exp(g_t)[:, None]
    u = tl.load(beta + row).to(DTYPE) * (v_t - tl.sum(S * k_t[:, None], 0))
    S += k_t[:, None] * u[None, :]
    tl.store(o + row * V + e, tl.sum(S * q_t[:, None], 0), mask=e < V)
    tl.store(new_state + at, S, mask=inside)


# ---- from tensors to launches

INTERPRETED = not isinstance(decode_kernel, triton.JITFunction)


def kda_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The "triton" backend of `ops.kda.kda`, which checks the arguments; shapes as there.

    initial_state is given, in fp32 (fp64 for fp64 inputs). Gradients to all six tensors; not twice differentiable.
    Raises ValueError where neither a GPU nor the interpreter is there, and for widths above MAX_WIDTH.
    """
    K, V = q.shape[-1], v.shape[-1]
    if not (q.is_cuda or INTERPRETED):
        raise ValueError(
            f"backend: 'triton' got tensors on {q.device}, wanted a GPU, or TRITON_INTERPRET=1 in the environment before "
            "triton is imported (it then runs on the CPU, slowly); 'auto' picks what runs here"
        )
    if max(K, V) > MAX_WIDTH:
        raise ValueError(f"backend: 'triton' got K = {K} and V = {V}, wanted at most {MAX_WIDTH}")
    q, k, v, g, beta, initial_state = (x.contiguous() for x in (q, k, v, g, beta, initial_state))
    with torch.cuda.device_of(q):
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta, initial_state))
        if q.shape[1] == 1 and cu_seqlens is None and not tracked:
            return _decode(q, k, v, g, beta, scale, initial_state)
        return _Kda.apply(q, k, v, g, beta, initial_state, scale, cu_seqlens)


def _decode(q, k, v, g, beta, scale, state) -> tuple[Tensor, Tensor]:
    B, _, H, K = q.shape
    V = v.shape[-1]
    o, new_state = torch.empty_like(v), torch.empty_like(state)
    BK, BV = _blocks(K, V)
    decode_kernel[(triton.cdiv(V, BV), B * H)](
        q, k, v, g, beta, state, o, new_state, scale, H, K, V, BK=BK, BV=BV, DTYPE=_triton_dtype(state)
    )
    return o, new_state


class _Kda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, scale, cu_seqlens):
        table = _chunk_table(q, cu_seqlens)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, *table)
        ctx.scale = scale
        made = _prepare(q, k, v, g, beta, scale, initial_state, table)
        o, S, _, _ = _scan(v, made, initial_state, table, save=False)
        return o, S

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_final_state):
        q, k, v, g, beta, initial_state, *table = ctx.saved_tensors
        do, d_final_state = do.contiguous(), d_final_state.contiguous()
        sizes, options = _sizes(q, v), _options(q, v, initial_state)
        with torch.cuda.device_of(q):
            made = _prepare(q, k, v, g, beta, ctx.scale, initial_state, table)
            q_in, k_out, W, _, keep, A, P, L = made
            _, _, states, corrected = _scan(v, made, initial_state, table, save=True)
            d_initial_state, d_states = torch.empty_like(initial_state), torch.empty_like(states)
            d_corrected = torch.empty_like(corrected)
            scan_backward_kernel[_scan_grid(q_in, v, table)](
                q_in, k_out, W, keep, P, do, d_final_state, d_initial_state, d_states, d_corrected,
                *table, *sizes, **options,
            )  # fmt: skip
            gradients = [torch.empty_like(x) for x in (q, k, v, g, beta)]
            gradients_kernel[_chunk_grid(q, table)](
                q, k, v, g, beta, keep, A, L, states, corrected, do, d_states, d_corrected, *gradients,
                *table[:2], ctx.scale, *sizes, **options,
            )  # fmt: skip
        return *gradients, d_initial_state, None, None


def _prepare(q, k, v, g, beta, scale, initial_state, table) -> tuple[Tensor, ...]:
    """q_in, k_out, W like q; U like v; keep [N,H,K]; A, P, L [N,H,C,C], for N chunks. All in the state's dtype."""
    H, K, _ = _sizes(q, v)
    N = table[0].numel()
    rows = [torch.empty_like(x, dtype=initial_state.dtype) for x in (q, q, q, v)]
    keep = initial_state.new_empty(N, H, K)
    squares = [initial_state.new_empty(N, H, CHUNK, CHUNK) for _ in range(3)]
    prepare_kernel[_chunk_grid(q, table)](
        q, k, v, g, beta, *rows, keep, *squares, *table[:2], scale, *_sizes(q, v), **_options(q, v, initial_state)
    )
    return *rows, keep, *squares


def _scan(v, made, initial_state, table, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o like v, final states, and if `save` the state before each chunk [N,H,K,V] and V~ like v."""
    q_in, k_out, W, U, keep, _, P, _ = made
    o, final_state = torch.empty_like(v), torch.empty_like(initial_state)
    N, H, K = keep.shape
    states = keep.new_empty(N if save else 0, H, K, v.shape[-1])
    corrected = torch.empty_like(U) if save else states
    scan_kernel[_scan_grid(q_in, v, table)](
        q_in, k_out, W, U, keep, P, initial_state, o, final_state, states, corrected,
        *table, *_sizes(q_in, v), SAVE=save, **_options(q_in, v, initial_state),
    )  # fmt: skip
    return o, final_state, states, corrected


def _chunk_table(q: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """First token of each chunk [N], end of its sequence [N], first chunk of each sequence [sequences + 1]; int32.

    Tokens are counted through the whole batch: B sequences of T tokens are packed sequences of equal length.
    """
    B, T = q.shape[:2]
    starts = T * torch.arange(B + 1) if cu_seqlens is None else cu_seqlens.cpu()
    chunks = (starts.diff() + CHUNK - 1) // CHUNK
    first_chunk = torch.cat([chunks.new_zeros(1), chunks.cumsum(0)])
    sequence = torch.repeat_interleave(torch.arange(len(chunks)), chunks)
    chunk_start = starts[sequence] + CHUNK * (torch.arange(len(sequence)) - first_chunk[sequence])
    return tuple(x.to(q.device, torch.int32) for x in (chunk_start, starts[sequence + 1], first_chunk))


def _chunk_grid(q: Tensor, table) -> tuple[int, int]:
    return table[0].numel(), q.shape[2]


def _scan_grid(q: Tensor, v: Tensor, table) -> tuple[int, int, int]:
    _, BV = _blocks(q.shape[-1], v.shape[-1])
    return triton.cdiv(v.shape[-1], BV), v.shape[2], table[2].numel() - 1


def _sizes(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    return q.shape[2], q.shape[3], v.shape[3]


def _blocks(K: int, V: int) -> tuple[int, int]:
    """Widths padded to a power of two, at least the 16 that tl.dot wants. A program holds [BK, BV] of a state:

    with these sizes and eight warps the kernels for K = V = 128 in bf16 compile for sm_90 with few or no registers spilled
    (read off ptxas; they were not timed).
    """
    BK = max(16, triton.next_power_of_2(K))
    return BK, min(32 if BK <= 128 else 16, max(16, triton.next_power_of_2(V)))


def _options(q: Tensor, v: Tensor, state: Tensor) -> dict:
    BK, BV = _blocks(q.shape[-1], v.shape[-1])
    # TF32 keeps more bits of a product's factors than bf16 inputs have.
    precision = "tf32" if v.dtype in (torch.bfloat16, torch.float16) else "ieee"
    sizes = {"C": CHUNK, "BK": BK, "BV": BV, "DTYPE": _triton_dtype(state), "PRECISION": precision}
    return sizes | {"num_warps": 8, "num_stages": 2}


def _triton_dtype(state: Tensor) -> tl.dtype:
    return tl.float64 if state.dtype == torch.float64 else tl.float32
