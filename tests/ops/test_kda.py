"""KDA on tensors: reported faults as cases (shared hazards T01-T07), and the chunk form against the recurrence."""

import inspect
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3lite.ops.kda import bounded_gate, kda, l2norm, softplus_gate
from tests.helpers import assert_all_close, assert_close, dims, kda_inputs, outputs_and_gradients

BACKENDS = ["recurrent", "chunk"]
backends = pytest.mark.parametrize("backend", BACKENDS)
every_backend = pytest.mark.parametrize("backend", [*BACKENDS, "triton"])  # its own tests: test_kda_triton.py
gates = pytest.mark.parametrize("gate", ["bounded", "softplus"])
precisions = pytest.mark.parametrize("dtype, rel", [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["fp64", "fp32"])


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def one_head(q, k, v, g, beta, **options):
    """q, k, g: [T,K].   v: [T,V].   beta: [T].   One sequence of one head; returns o [T,V] and S [K,V] or [N,K,V]."""
    q, k, v, g = (x[None, :, None] for x in (q, k, v, g))
    o, S = kda(q, k, v, g, beta[None, :, None], **options)
    return o[0, :, 0], S[:, 0].squeeze(0)


def scalar(v, **options):
    """One head of width 1, k = q = 1, decay and beta one half. Returns the final states."""
    n = len(v)
    one = torch.ones(n, 1, dtype=torch.float64)
    v = torch.tensor(v, dtype=torch.float64).view(n, 1)
    half = torch.full((n,), 0.5, dtype=torch.float64)
    return one_head(one, one, v, math.log(0.5) * one, half, **options)[1].flatten()


# ---- reported faults


def test_t01_bounded_gate_is_its_own_formula_with_one_A_log_a_head():
    z = t([-1, 0], [1, 3]) + t([0.5, -0.5], [0, 1])
    g = bounded_gate(z, t(0, math.log(2)), -5.0)
    torch.testing.assert_close(g, t([-1.887703344, -1.887703344], [-4.403985390, -4.998323249]), rtol=0, atol=5e-10)


def test_t01_softplus_gate():
    g = softplus_gate(t([-1, 0], [1, 3]), t(0, math.log(2)))
    want = [[-math.log1p(math.exp(-1)), -math.log(2)], [-2 * math.log1p(math.e), -2 * math.log1p(math.exp(3))]]
    torch.testing.assert_close(g, torch.tensor(want, dtype=torch.float64))


@every_backend
def test_t02_delta_reads_the_decayed_state(backend):
    o, S = one_head(
        t([0.6, 0.8]), t([0.6, 0.8]), t([1, 1]), t([math.log(0.5), math.log(0.25)]), t(0.5),
        initial_state=t([2, 0], [0, 4])[None, None], backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(S, t([1.12, 0.06], [0.16, 1.08]))
    torch.testing.assert_close(o, t([0.565685, 0.636396]), rtol=0, atol=5e-7)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 32])
@every_backend
def test_t03_decay_per_channel(backend, chunk_size):
    o, S = one_head(
        t([1, 0], [0.6, 0.8], [0, 1]), t([0.6, 0.8], [0.8, 0.6], [1, 0]), t([1], [2], [-1]),
        t([-0.1, -2], [-1.5, -0.2], [-0.3, -0.7]), t(0.5, 0.9, 0.3), backend=backend, chunk_size=chunk_size,
    )  # fmt: skip
    torch.testing.assert_close(o.flatten(), t(0.212132034, 1.282774426, 0.446812626), rtol=0, atol=1e-9)
    torch.testing.assert_close(S.flatten(), t(0.388097031, 0.631888475), rtol=0, atol=1e-9)


@every_backend
def test_t04_state_is_key_by_value(backend):
    o, _ = one_head(
        t([0.6, 0.8]), t([0.8, 0.6]), t([1, -1]), t([math.log(0.5), math.log(0.9)]), t(0.5),
        initial_state=t([1, 2], [3, 4])[None, None], backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(o, t([1.393283, 1.116663]), rtol=0, atol=5e-7)


@every_backend
def test_t04_wide_values_and_no_stray_arguments(backend):
    inputs = kda_inputs(1, 5, 1, 2, 3)
    assert kda(**inputs, backend=backend)[1].shape == (1, 1, 2, 3)
    with pytest.raises(ValueError, match=r"initial_state: got shape \(1, 1, 3, 2\), wanted \(1, 1, 2, 3\)"):
        kda(**inputs | {"initial_state": torch.zeros(1, 1, 3, 2)}, backend=backend)
    with pytest.raises(TypeError, match="transpose_state"):
        kda(**inputs, backend=backend, transpose_state=True)
    assert not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kda).parameters.values())


def test_t05_l2norm_has_its_eps_inside_the_sum():
    torch.testing.assert_close(l2norm(t(3e-4, 4e-4, 0, 0)), t(0.268328157, 0.357770876, 0, 0), rtol=0, atol=5e-10)
    zero = torch.zeros(4, requires_grad=True)
    l2norm(zero).sum().backward()
    torch.testing.assert_close(zero.grad, torch.full((4,), 1000.0))


def test_t06_gates_are_fp32():
    """With A_log = 12 the rate is 162754.79, which fp16 cannot hold."""
    g = softplus_gate(torch.zeros(1, 1, dtype=torch.float16), torch.tensor([12.0], dtype=torch.float16))
    assert g.dtype == torch.float32
    torch.testing.assert_close(g, torch.tensor([[-162754.79 * math.log(2)]]))
    g = bounded_gate(torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([12.0], dtype=torch.bfloat16), -5.0)
    assert g.dtype == torch.float32 and g.item() == -5.0


@backends
def test_t06_state_is_fp32(backend):
    """Small steps towards a target: in bf16 the first state would stay at 256 and the second stop at 0.516."""

    def settle(steps, start, target, beta, dtype):
        one = torch.ones(steps, 1, dtype=dtype)
        v = torch.full((steps, 1), target)
        start = torch.full((1, 1, 1, 1), start)
        strength = torch.full((steps,), beta, dtype=dtype)
        return one_head(one, one, v, 0 * one, strength, initial_state=start, backend=backend)[1]

    for dtype in (torch.float32, torch.bfloat16):
        S = settle(20, 256.0, 257.0, 0.5, dtype)
        assert S.dtype == torch.float32
        assert abs(S.item() - 256.999999) < 5e-5  # fp32 near 257 is spaced by 3e-5
        S = settle(4096, 0.0, 1.0, 0.004, dtype)
        assert abs(S.item() - 0.99999993) < 1e-5  # fp32 stops where .004 of what is missing rounds away


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_t06_low_precision_inputs(backend, dtype):
    """o comes back in v's dtype; nothing between is rounded to it, so only the inputs' and o's rounding remain."""
    inputs = kda_inputs(2, 70, 2, 8, 12)
    low = {n: x if n == "initial_state" else x.to(dtype) for n, x in inputs.items()}
    o, S = kda(**low, backend=backend)
    assert o.dtype == dtype and S.dtype == torch.float32
    want_o, want_S = kda(**{n: x.float() for n, x in low.items()}, backend=backend)
    assert torch.equal(o, want_o.to(dtype)) and torch.equal(S, want_S)


@every_backend
def test_t07_packed_scalars(backend):
    starts, state = torch.tensor([0, 3, 3, 5]), t(0, 7, 0).view(3, 1, 1, 1)
    states = scalar([1, 2, 3, 4, 5], cu_seqlens=starts, initial_state=state, backend=backend)
    torch.testing.assert_close(states, t(1.78125, 7.0, 3.0), rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [(5, 0, 40, 1, 17), (0, 3), (3, 0), (64,)], ids=str)
@gates
@backends
def test_t07_packed_equals_each_sequence_alone(backend, gate, lengths):
    inputs = kda_inputs(1, sum(lengths), 2, 8, 12, gate=gate, start=False, dtype=torch.float64)
    states = torch.randn(len(lengths), 2, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    o, S = kda(**inputs, initial_state=states, cu_seqlens=starts, backend=backend, chunk_size=16)
    for i, (a, b) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        part = {n: x[:, a:b] for n, x in inputs.items()}
        want_o, want_S = kda(**part, initial_state=states[i : i + 1], backend="recurrent")
        assert_close(f"o {i}", o[:, a:b], want_o, 1e-9)
        assert_close(f"S {i}", S[i : i + 1], want_S, 1e-9)


@every_backend
def test_t08_resume_from_a_snapshot(backend):
    states = [scalar([1, 2, 3, 4][:n], backend=backend).item() for n in (1, 2, 3, 4)]
    assert states == [0.5, 1.125, 1.78125, 2.4453125]
    assert scalar([3, 4], initial_state=t(1.125).view(1, 1, 1, 1), backend=backend).item() == 2.4453125


# ---- chunk form = recurrence


@dims("B T H K V", *((2, T, 2, 8, 5) for T in (1, 15, 16, 17, 37, 63, 64, 65)), (1, 37, 3, 16, 16), (3, 20, 1, 5, 7))
@pytest.mark.parametrize("chunk_size", [1, 8, 16, 37, 64], ids="C{}".format)
@gates
@pytest.mark.parametrize("start", [False, True], ids=["zero", "state"])
@precisions
def test_chunk_equals_recurrent(B, T, H, K, V, chunk_size, gate, start, dtype, rel):
    inputs = kda_inputs(B, T, H, K, V, gate=gate, start=start, dtype=dtype)
    want, want_gradients = outputs_and_gradients(kda, inputs, backend="recurrent")
    got, gradients = outputs_and_gradients(kda, inputs, backend="chunk", chunk_size=chunk_size)
    assert_all_close(got, want, rel)
    assert_all_close(gradients, want_gradients, rel)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (3, 70, 3, 9, 9))),
    chunk_size=st.integers(1, 80),
    gate=st.sampled_from(["bounded", "softplus"]),
    seed=st.integers(0, 2**16),
)
def test_chunk_equals_recurrent_for_any_shape(shape, chunk_size, gate, seed):
    inputs = kda_inputs(*shape, gate=gate, dtype=torch.float64, seed=seed)
    want, want_gradients = outputs_and_gradients(kda, inputs, backend="recurrent")
    got, gradients = outputs_and_gradients(kda, inputs, backend="chunk", chunk_size=chunk_size)
    assert_all_close(got | gradients, want | want_gradients, 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5), backend=st.sampled_from(BACKENDS))
def test_any_split_gives_the_same(lengths, backend):
    """Pieces that hand on their state make up the whole."""
    inputs = kda_inputs(2, sum(lengths), 2, 4, 3, dtype=torch.float64)
    want_o, want_S = kda(**inputs, backend="recurrent")
    state, outputs = inputs.pop("initial_state"), []
    for piece in zip(*(x.split(lengths, dim=1) for x in inputs.values()), strict=True):
        o, state = kda(*piece, initial_state=state, backend=backend, chunk_size=8)
        outputs.append(o)
    assert_all_close({"o": torch.cat(outputs, 1), "S": state}, {"o": want_o, "S": want_S}, 1e-9)


@precisions
@pytest.mark.parametrize("chunk_size", [16, 32, 64], ids="C{}".format)
def test_gate_at_its_bound_for_4096_tokens(dtype, rel, chunk_size):
    """g = -5 everywhere: a factor e^(-5 * 64) per chunk, whose inverse no fp32 holds."""
    inputs = kda_inputs(1, 4096, 1, 4, 3, dtype=dtype)
    inputs["g"] = torch.full_like(inputs["g"], -5)
    o, S = kda(**inputs, backend="recurrent")
    got, gradients = outputs_and_gradients(kda, inputs, backend="chunk", chunk_size=chunk_size)
    assert_all_close(got, {"o": o, "S": S}, rel)
    assert all(torch.isfinite(g).all() for g in gradients.values())


@precisions
@pytest.mark.parametrize("g", [-40.0, -6.0, -5.0, 0.0])
def test_constant_gates_with_gradients(dtype, rel, g):
    """On both sides of the tile's limit: at -5 the tile factors e^c, at -6 it goes pair by pair."""
    inputs = kda_inputs(1, 70, 2, 4, 3, dtype=dtype)
    inputs["g"] = torch.full_like(inputs["g"], g)
    want, want_gradients = outputs_and_gradients(kda, inputs, backend="recurrent")
    got, gradients = outputs_and_gradients(kda, inputs, backend="chunk")
    # The gradient of g is a small difference of terms of size 1 (c_i in one factor, -c_i in the other), so its error
    # is a rounding of 1 and not of itself: at g = -5 it measures 1e-4 in fp32, at -40 nothing of it is left.
    dg, want_dg = gradients.pop("dg"), want_gradients.pop("dg")
    assert_all_close(got | gradients, want | want_gradients, rel)
    assert (dg - want_dg).abs().max() < 100 * torch.finfo(dtype).eps


@precisions
def test_one_key_again_and_again(dtype, rel):
    """Identical keys with beta near 1: the worst case for an inverse by powers of A, none for a triangular solve."""
    inputs = kda_inputs(1, 256, 1, 8, 8, dtype=dtype)
    inputs["k"] = inputs["k"][:, :1].expand(-1, 256, -1, -1)
    inputs["beta"] = torch.full_like(inputs["beta"], 0.9999)
    inputs["g"] = torch.full_like(inputs["g"], -1e-3)
    want, want_gradients = outputs_and_gradients(kda, inputs, backend="recurrent")
    got, gradients = outputs_and_gradients(kda, inputs, backend="chunk", chunk_size=64)
    assert_all_close(got, want, rel)
    assert_all_close(gradients, want_gradients, 10 * rel)


@every_backend
def test_nothing_is_written_to_the_inputs(backend):
    inputs = kda_inputs(2, 37, 2, 8, 5)
    before = {n: x.clone() for n, x in inputs.items()}
    kda(**inputs, backend=backend)
    assert all(torch.equal(x, before[n]) for n, x in inputs.items())


@every_backend
def test_no_tokens(backend):
    inputs = kda_inputs(2, 0, 2, 8, 5)
    o, S = kda(**inputs, backend=backend)
    assert o.shape == (2, 0, 2, 5) and torch.equal(S, inputs["initial_state"])


def test_auto_takes_the_recurrence_for_one_token(monkeypatch):
    calls = []
    for name in ("kda_recurrent", "kda_chunk"):
        monkeypatch.setattr(f"k3lite.ops.kda.{name}", lambda *_, name=name: calls.append(name))
    kda(**kda_inputs(1, 1, 1, 4, 4))
    kda(**kda_inputs(1, 2, 1, 4, 4))
    assert calls == ["kda_recurrent", "kda_chunk"]


def test_auto_takes_triton_on_a_gpu(monkeypatch):
    """As far as that can be told without one: a tensor that claims to be there."""
    monkeypatch.setattr("k3lite.ops.kda._triton", lambda *_: "triton")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert kda(**kda_inputs(1, 5, 1, 4, 4)) == kda(**kda_inputs(1, 1, 1, 4, 4)) == "triton"
    assert kda(**kda_inputs(1, 5, 1, 4, 4), backend="chunk")[0].shape == (1, 5, 1, 4)


class Allocations(TorchDispatchMode):
    """Bytes of every result computed inside."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(x.nbytes for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


@backends
@gates
def test_memory_is_linear_in_the_tokens(backend, gate):
    """Counted for the values and for what is kept for the backward pass."""

    def measure(T):
        inputs = kda_inputs(1, T, 2, 8, 8, gate=gate)
        if gate == "softplus":
            inputs["g"][:, 3::16] = -90  # so that every length takes the pairwise path
        inputs = {n: x.requires_grad_() for n, x in inputs.items()}
        kept = {}

        def pack(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with Allocations() as made, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            result = kda(**inputs, backend=backend)
        del result
        return made.bytes, sum(kept.values())

    sizes = [measure(T) for T in (512, 1024, 2048)]
    for small, large in zip(sizes, sizes[1:], strict=False):
        for a, b in zip(small, large, strict=True):
            assert 1.8 < b / a < 2.2, sizes


def test_k3_gate_needs_no_pairs():
    """What the bound of -5 is for: a tile of 16 tokens stays a matrix product, where an unbounded gate costs pairs."""
    sizes = []
    for g in (-5.0, -6.0):
        inputs = kda_inputs(1, 512, 2, 32, 32)
        inputs["g"] = torch.full_like(inputs["g"], g)
        with Allocations() as made:
            kda(**inputs, backend="chunk")
        sizes.append(made.bytes)
    assert sizes[1] > 2 * sizes[0], sizes


# ---- wrong arguments


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(1, 5, 2)}, r"q: got shape \(1, 5, 2\), wanted \[B, T, H, K\]"),
        ({"v": torch.zeros(1, 5, 2)}, r"v: got shape \(1, 5, 2\), wanted \[B, T, H, V\]"),
        ({"k": torch.zeros(1, 5, 2, 3)}, r"k: got shape \(1, 5, 2, 3\), wanted \(1, 5, 2, 4\)"),
        ({"v": torch.zeros(1, 4, 2, 3)}, r"v: got shape \(1, 4, 2, 3\), wanted \(1, 5, 2, 3\)"),
        ({"g": torch.zeros(1, 5, 2, 1)}, r"g: got shape \(1, 5, 2, 1\), wanted \(1, 5, 2, 4\)"),
        ({"beta": torch.zeros(1, 5, 2, 1)}, r"beta: got shape \(1, 5, 2, 1\), wanted \(1, 5, 2\)"),
        ({"v": torch.zeros(1, 5, 2, 3, dtype=torch.long)}, "v: got dtype torch.int64, wanted a floating-point"),
        ({"initial_state": torch.zeros(1, 2, 4, 3, dtype=torch.bfloat16)}, "initial_state: got dtype torch.bfloat16"),
        ({"initial_state": torch.zeros(2, 2, 4, 3)}, r"initial_state: got shape \(2, 2, 4, 3\)"),
        ({"initial_state": torch.zeros(1, 2, 3, 4)}, r"initial_state: .* the state is \[.., K, V\], this looks like"),
        ({"k": torch.zeros(1, 5, 2, 4, device="meta")}, "k: got a tensor on meta, wanted cpu, where q is"),
        ({"backend": "cuda"}, "backend: got 'cuda', wanted one of auto, recurrent, chunk, triton"),
        ({"chunk_size": 0}, "chunk_size: got 0, wanted 1 or more"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens: got \[0, 4\], wanted a rising list from 0 to T = 5"),
        ({"cu_seqlens": torch.tensor([1, 5])}, r"cu_seqlens: got \[1, 5\]"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        kda(**kda_inputs(1, 5, 2, 4, 3) | change)


@every_backend
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_numbers_that_are_none(name, value, backend):
    inputs = kda_inputs(1, 5, 2, 4, 3)
    inputs[name].view(-1)[3] = value
    at = [int(i) for i in torch.unravel_index(torch.tensor(3), inputs[name].shape)]
    with pytest.raises(ValueError, match=rf"^{name}: got {value} at {re.escape(str(at))} \(1 such\), wanted finite"):
        kda(**inputs, backend=backend)


@every_backend
def test_a_decay_that_grows(backend):
    inputs = kda_inputs(1, 5, 2, 4, 3)
    inputs["g"][0, 2, 1, 3] = 0.25
    with pytest.raises(ValueError, match=r"g: got 0.25 at \[0, 2, 1, 3\], wanted a log-decay of 0 or less"):
        kda(**inputs, backend=backend)


def test_large_finite_numbers_are_numbers():
    """Their sum is infinite in fp32, or in fp16, and they are not."""
    kda(**kda_inputs(1, 5, 2, 4, 3) | {"v": torch.full((1, 5, 2, 3), 3e38)})
    kda(**kda_inputs(1, 64, 2, 4, 3) | {"v": torch.full((1, 64, 2, 3), 6e4, dtype=torch.float16)})


@pytest.mark.parametrize("starts", [[0, 3, 2, 5], []], ids=str)
def test_wrong_starts(starts):
    inputs = kda_inputs(1, 5, 2, 4, 3, start=False)
    with pytest.raises(ValueError, match="cu_seqlens"):
        kda(**inputs, cu_seqlens=torch.tensor(starts, dtype=torch.long))


def test_packed_needs_one_row():
    with pytest.raises(ValueError, match="cu_seqlens: packed sequences need B = 1, got B = 2"):
        kda(**kda_inputs(2, 5, 2, 4, 3) | {"cu_seqlens": torch.tensor([0, 2, 5])})
