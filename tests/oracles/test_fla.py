"""fla's plain PyTorch definitions: KDA step by step and in chunks, its two gates, and attention over depth.

fla's naive code computes in fp32 whatever it gets, so the limits are a few of its roundings: measured at most 1e-6 on
values and 3e-6 on gradients.
"""

import pytest
import torch

from k3lite.attn_res import depth_mix
from k3lite.ops.kda import bounded_gate, kda, softplus_gate
from tests.helpers import assert_all_close, assert_close, dims, kda_inputs, outputs_and_gradients

VALUES, GRADIENTS = 5e-6, 2e-5

shapes = dims(
    "B T H K V", *((2, T, 2, 8, 12) for T in (1, 15, 16, 17, 37, 63, 64, 65)), (1, 37, 3, 16, 4), (1, 20, 1, 5, 7)
)
backends = pytest.mark.parametrize("backend", ["recurrent", "chunk", "triton"])
gates = pytest.mark.parametrize("gate", ["bounded", "softplus"])
starts = pytest.mark.parametrize("start", [False, True], ids=["zero", "state"])


@shapes
@backends
@gates
@starts
def test_naive_recurrent_kda(fla_kda, B, T, H, K, V, backend, gate, start):
    inputs = kda_inputs(B, T, H, K, V, gate=gate, start=start)
    want, want_gradients = outputs_and_gradients(fla_kda.naive_recurrent_kda, inputs, output_final_state=True)
    got, gradients = outputs_and_gradients(kda, inputs, backend=backend)
    assert_all_close(got, want, VALUES)
    assert_all_close(gradients, want_gradients, GRADIENTS)


@dims("T C", (16, 16), (64, 16), (64, 32), (63, 21), (34, 17))
@backends
@gates
def test_naive_chunk_kda(fla_kda, T, C, backend, gate):
    inputs = kda_inputs(2, T, 2, 8, 12, gate=gate)
    o, S = fla_kda.naive_chunk_kda(**inputs, output_final_state=True, chunk_size=C)
    got, state = kda(**inputs, backend=backend, chunk_size=C)
    assert_all_close({"o": got, "S": state}, {"o": o, "S": S}, VALUES)


@dims("T C", (16, 16), (64, 16), (34, 17))
@backends
def test_gradients_of_naive_chunk_kda(fla_kda, T, C, backend):
    """Small chunks and the bounded gate only: fla computes e^(c_i - c_j) for future j too and masks it afterwards, so
    that its gradient is NaN where that overflows."""
    inputs = kda_inputs(2, T, 2, 8, 12)
    _, want = outputs_and_gradients(fla_kda.naive_chunk_kda, inputs, output_final_state=True, chunk_size=C)
    _, got = outputs_and_gradients(kda, inputs, backend=backend, chunk_size=C)
    assert_all_close(got, want, GRADIENTS)


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_scale(fla_kda, scale):
    inputs = kda_inputs(1, 37, 2, 8, 12)
    o, S = fla_kda.naive_recurrent_kda(**inputs, scale=scale, output_final_state=True)
    for backend in ("recurrent", "chunk", "triton"):
        got, state = kda(**inputs, scale=scale, backend=backend)
        assert_all_close({"o": got, "S": state}, {"o": o, "S": S}, VALUES)


def gate_inputs():
    rng = torch.Generator().manual_seed(0)
    z, A_log, dt_bias = (torch.randn(*shape, generator=rng) for shape in ((2, 9, 3, 5), (3,), (15,)))
    return 3 * z, A_log, dt_bias  # K3Lite's gates take z with the bias already added, fla adds it


def test_naive_kda_lowerbound_gate(fla_gate):
    z, A_log, dt_bias = gate_inputs()
    want = fla_gate.naive_kda_lowerbound_gate(z, A_log, dt_bias, lower_bound=-5.0)
    assert_close("g", bounded_gate(z + dt_bias.view(3, 5), A_log, -5.0), want, 1e-6)


def test_naive_kda_gate(fla_gate):
    z, A_log, dt_bias = gate_inputs()
    want = fla_gate.naive_kda_gate(z, A_log, dt_bias)
    assert_close("g", softplus_gate(z + dt_bias.view(3, 5), A_log), want, 1e-6)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_naive_attnres(fla_attnres, n):
    rng = torch.Generator().manual_seed(n)
    sources, norm, proj = (torch.randn(*shape, generator=rng) for shape in ((n, 2, 5, 32), (32,), (1, 32)))
    leaves = [*(s.clone().requires_grad_() for s in sources), norm.requires_grad_(), proj.requires_grad_()]
    weighting = torch.randn(2, 5, 32, generator=rng)

    want = fla_attnres.naive_attnres(proj, leaves[:n], norm, rms_eps=1e-5)
    got = depth_mix(leaves[:n], norm, proj, 1e-5)
    assert_close("mix", got, want, VALUES)
    if n > 1:  # with one source nothing depends on norm and proj
        wanted, gradients = (torch.autograd.grad((x * weighting).sum(), leaves) for x in (want, got))
        for i, (g, w) in enumerate(zip(gradients, wanted, strict=True)):
            assert_close(f"gradient {i}", g, w, GRADIENTS)
