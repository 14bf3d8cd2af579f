"""fla's plain PyTorch linear attention, step by step and in chunks of 64, without its normaliser.

fla's naive code computes in fp32, so the limits are a few of its roundings.
"""

import pytest
import torch

from k3lite.ops.linear_attention import linear_attention
from tests.helpers import assert_all_close, assert_close, dims, outputs_and_gradients
from tests.oracles.conftest import load

backends = pytest.mark.parametrize("backend", ["recurrent", "parallel", "auto"])


@pytest.fixture(scope="module")
def fla():
    return load("fla.ops.linear_attn.naive")


def inputs(B, T, H, K, V, start=True):
    rng = torch.Generator().manual_seed(0)
    sizes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V)} | (
        {"initial_state": (B, H, K, V)} if start else {}
    )
    return {name: torch.randn(size, generator=rng) for name, size in sizes.items()}


@dims("B T H K V", (2, 1, 2, 8, 12), (2, 37, 2, 8, 12), (1, 64, 3, 16, 4), (1, 65, 1, 5, 7), (2, 130, 2, 8, 8))
@pytest.mark.parametrize("start", [False, True], ids=["zero", "state"])
@backends
def test_naive_recurrent(fla, B, T, H, K, V, start, backend):
    x = inputs(B, T, H, K, V, start)

    def naive(**arguments):
        o, S = fla.naive_recurrent_linear_attn(**arguments, output_final_state=True)
        return o, S

    want, want_gradients = outputs_and_gradients(naive, x)
    got, gradients = outputs_and_gradients(linear_attention, x, backend=backend)
    assert_all_close(got, want, 5e-6)
    assert_all_close(gradients, want_gradients, 2e-5)


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
@backends
def test_naive_chunk(fla, scale, backend):
    x = inputs(2, 192, 2, 8, 12, start=False)
    want = fla.naive_chunk_linear_attn(**x, scale=scale)
    assert_close("o", linear_attention(**x, scale=scale, backend=backend)[0], want, 5e-6)
