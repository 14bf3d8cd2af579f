"""KDA against its peers: the recurrence, fla's naive chunk form, transformers' torch form; on a GPU fla's kernels.

The peers are test-only packages; one that cannot be imported is left out, and a remark says so.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from k3lite import bench
from k3lite.ops.kda import CHUNK, kda, kda_chunk, kda_recurrent, l2norm

Op = Callable[..., tuple[Tensor, Tensor]]
HEADS, WIDTH = 4, 64
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PRODUCT = 1024  # side of the product that says what the machine can do
GPU_HEADS, GPU_WIDTH, GPU_LENGTH = 64, 128, 8192


def inputs(T: int, H: int, K: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    """q, k, v, g, beta for one sequence, K = V, with decays all over K3's range."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, H, K, generator=rng) for _ in range(3))
    g = -5 * torch.rand(1, T, H, K, generator=rng) ** 3
    beta = torch.rand(1, T, H, generator=rng)
    q, k, v, beta = (x.to(device, dtype) for x in (l2norm(q), l2norm(k), v, beta))
    return q, k, v, g.to(device), beta


def cases(device: str) -> Iterator[bench.Row | str]:
    """Every row and remark of `k3lite bench kda`."""
    if device == "cpu":
        yield from cpu_cases(LENGTHS)
    else:
        yield from gpu_cases(device)


def cpu_cases(lengths: tuple[int, ...]) -> Iterator[bench.Row | str]:
    """The chunk form beside each peer, forward and forward + backward, H heads of K = V = 64, fp32."""
    peers, absent = cpu_peers()
    yield from absent
    for T in lengths:
        given = inputs(T, HEADS, WIDTH)
        for what, work in (("forward", forward), ("forward+backward", forward_backward)):
            case = f"{what} T={T} H={HEADS} K=V={WIDTH}"
            ours = bench.seconds(lambda w=work, x=given: w(kda_chunk, x))
            for name, op in peers.items():
                theirs = bench.seconds(lambda w=work, x=given, op=op: w(op, x))
                yield bench.row("kda", case, ours, name, theirs, torch.float32)
    yield from reckoning(4096)


def forward(op: Op, given: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        op(*given)


def forward_backward(op: Op, given: tuple[Tensor, ...]) -> None:
    leaves = [x.clone().requires_grad_() for x in given]
    o, state = op(*leaves)
    (o.sum() + state.sum()).backward()


def cpu_peers() -> tuple[dict[str, Op], list[str]]:
    """What the chunk form is compared with, and a remark for each peer that is not installed."""
    peers: dict[str, Op] = {"step by step": kda_recurrent}
    absent = []
    fla = bench.imported("fla.ops.kda.naive", absent)
    if fla:
        peers["fla naive chunk"] = lambda *x: fla.naive_chunk_kda(*x, output_final_state=True)
    transformers = kimi_linear(absent)
    if transformers:
        peers["transformers"] = lambda *x: transformers.chunk_kimi_delta_attention(*x, output_final_state=True)
    return peers, absent


def kimi_linear(absent: list[str]):
    """transformers' Kimi Linear, on its plain PyTorch path; None, and a remark in `absent`, without transformers."""
    # transformers binds its names to fla's GPU kernels if it can import fla.
    hidden = {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] == "fla"}
    sys.modules["fla"] = None
    try:
        module = bench.imported("transformers.models.kimi_linear.modeling_kimi_linear", absent)
    finally:
        del sys.modules["fla"]
        sys.modules.update(hidden)
    if module:
        importlib.import_module("transformers").logging.set_verbosity_error()  # else: a word about fla's absence
    return module


# ---- where the time goes


def flops(T: int, H: int, K: int, V: int) -> int:
    """Floating-point operations of the matrix products in a forward pass of the chunk form with C = CHUNK; a multiply-add is two.

    Per token: A and P 4CK; M V, M Gamma K 2CV + 2CK; W S, (Gamma Q) S, K^T V~ 6KV; P V~ 2CV.
    """
    return T * H * (6 * CHUNK * K + 4 * CHUNK * V + 6 * K * V)


def matmul_rate() -> float:
    """FLOP/s of one fp32 product of PRODUCT x PRODUCT with the threads set now: what this machine can do at best."""
    a = torch.randn(PRODUCT, PRODUCT)
    return 2 * PRODUCT**3 / bench.seconds(lambda: a @ a, repeats=20)


def time_shares(T: int) -> dict[str, float]:
    """Shares of a forward pass's time in matrix products, exp, the triangular solve, and all that moves data."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library greets on stderr
    given = inputs(T, HEADS, WIDTH)
    forward(kda_chunk, given)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(5):
            forward(kda_chunk, given)
    kinds = {"aten::bmm": "products", "aten::baddbmm": "products", "aten::exp": "exp"}
    kinds["aten::linalg_solve_triangular"] = "solve"
    spent: dict[str, float] = {"products": 0.0, "exp": 0.0, "solve": 0.0, "the rest": 0.0}
    for event in seen.key_averages():
        spent[kinds.get(event.key, "the rest")] += event.self_cpu_time_total
    return {kind: t / sum(spent.values()) for kind, t in spent.items()}


def reckoning(T: int) -> Iterator[str]:
    """Remarks: how far the chunk form is from the rate of a large product measured now, and where its time goes."""
    given = inputs(T, HEADS, WIDTH)
    took, work, rate = bench.seconds(lambda: forward(kda_chunk, given)), flops(T, HEADS, WIDTH, WIDTH), matmul_rate()
    yield (
        f"forward T={T}: {work / 1e9:.2f} GFLOP in {took * 1e3:.1f} ms = {work / took / 1e9:.0f} GFLOP/s; a product of "
        f"{PRODUCT} x {PRODUCT} ran at {rate / 1e9:.0f} GFLOP/s, so {work / took / rate:.0%} of it"
    )
    yield "its time: " + ", ".join(f"{kind} {share:.0%}" for kind, share in time_shares(T).items())


# ---- on a GPU


def gpu_cases(device: str, H: int = GPU_HEADS, K: int = GPU_WIDTH, T: int = GPU_LENGTH) -> Iterator[bench.Row | str]:
    """The Triton kernels in bf16 beside fla's: forward, forward + backward, one token; errors against the fp32 recurrence."""
    absent: list[str] = []
    fla = bench.imported("fla.ops.kda", absent)
    yield from absent
    dtype = torch.bfloat16
    given = inputs(T, H, K, dtype, device)
    token = tuple(x[:, :1].contiguous() for x in given)
    state = torch.randn(1, H, K, K, generator=torch.Generator().manual_seed(1)).to(device)
    precise = [x.float() for x in given]

    def ours(*x: Tensor, **options) -> tuple[Tensor, Tensor]:
        return kda(*x, backend="triton", **options)

    o, S = ours(*given)
    want_o, want_S = kda_recurrent(*precise)
    for name, got, want in (("o", o, want_o), ("state", S, want_S)):
        error = float((got.float() - want).norm() / want.norm())
        yield f"T={T} H={H} K=V={K} {dtype}: {name} is {error:.1e} from the fp32 recurrence (relative RMS)"
    case, name = f"T={T} H={H} K=V={K}", str(dtype).removeprefix("torch.")
    chunk = (lambda *x: fla.chunk_kda(*x, output_final_state=True)) if fla else None
    step = (lambda *x: fla.fused_recurrent_kda(*x, initial_state=state, output_final_state=True)) if fla else None
    runs = [
        ("forward " + case, lambda op: forward(op, given), ours, "fla chunk_kda", chunk),
        ("forward+backward " + case, lambda op: forward_backward(op, given), ours, "fla chunk_kda", chunk),
        (
            f"one token H={H} K=V={K}", lambda op: forward(op, token),
            lambda *x: ours(*x, initial_state=state), "fla fused_recurrent_kda", step,
        ),
    ]  # fmt: skip
    for what, work, op, peer, peer_op in runs:
        mine = bench.seconds(lambda w=work, op=op: w(op), device)
        if peer_op is None:
            yield f"{what} {name}: {mine:.6f} s, without a peer"
            continue
        yield bench.row("kda", what, mine, peer, bench.seconds(lambda w=work, op=peer_op: w(op), device), dtype, device)
