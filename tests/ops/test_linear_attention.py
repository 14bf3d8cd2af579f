"""Linear attention: the running sum, the masked product and the pieces are one function, and it is the plain formula."""

import inspect

import pytest
import torch

from k3lite.ops.kda import kda
from k3lite.ops.linear_attention import PIECE, linear_attention
from tests.helpers import assert_all_close, assert_close, dims, outputs_and_gradients

BACKENDS = ["recurrent", "parallel", "auto"]
backends = pytest.mark.parametrize("backend", BACKENDS)
shapes = dims(
    "B T H K V", *((2, T, 2, 8, 12) for T in (1, 2, 17, PIECE - 1, PIECE, PIECE + 1, 150)), (1, 37, 3, 16, 4), (1, 70, 1, 1, 7)
)  # fmt: skip


def inputs(B, T, H, K, V, start=True, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    sizes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V)} | (
        {"initial_state": (B, H, K, V)} if start else {}
    )
    return {name: torch.randn(size, generator=rng, dtype=dtype) for name, size in sizes.items()}


def by_hand(q, k, v, scale=None):
    """The sum over earlier tokens, token by token, with nothing clever in it: o [B,T,H,V]."""
    o = torch.zeros_like(v)
    for t in range(q.shape[1]):
        for j in range(t + 1):
            score = (q[:, t] * k[:, j]).sum(-1, keepdim=True) * (q.shape[-1] ** -0.5 if scale is None else scale)
            o[:, t] += score * v[:, j]
    return o


@backends
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_it_is_the_sum_over_earlier_tokens(backend, scale):
    x = inputs(2, 67, 2, 5, 3, start=False)
    o, S = linear_attention(**x, scale=scale, backend=backend)
    assert_close("o", o, by_hand(**x, scale=scale), 1e-12)
    assert_close("S", S, torch.einsum("bthk,bthv->bhkv", x["k"], x["v"]), 1e-12)


@shapes
@pytest.mark.parametrize("start", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("backend", ["parallel", "auto"])
def test_backends_agree_in_outputs_states_and_gradients(B, T, H, K, V, start, backend):
    x = inputs(B, T, H, K, V, start)
    want, want_gradients = outputs_and_gradients(linear_attention, x, backend="recurrent")
    got, gradients = outputs_and_gradients(linear_attention, x, backend=backend)
    assert_all_close(got, want, 1e-12)
    assert_all_close(gradients, want_gradients, 1e-12)


@backends
def test_it_is_kda_without_forgetting_where_keys_are_at_right_angles(backend):
    """Nothing is stored yet under a new direction, so there is nothing for the delta rule to correct."""
    k = torch.eye(6, dtype=torch.float64)[None, :, None]
    x = inputs(1, 6, 1, 6, 4, start=False) | {"k": k}
    o, S = kda(**x, g=torch.zeros_like(k), beta=torch.ones(1, 6, 1, dtype=torch.float64))
    got = linear_attention(**x, backend=backend)
    assert_all_close(dict(zip("oS", got, strict=True)), {"o": o, "S": S}, 1e-12)


@backends
@pytest.mark.parametrize("cuts", [(1, 2), (64, 65), (33, 100), (0, 150)])
def test_pieces_with_the_state_between_them_are_the_whole(backend, cuts):
    x = inputs(2, 150, 2, 8, 5)
    whole, final = linear_attention(**x, backend=backend)
    S, outputs = x.pop("initial_state"), []
    for a, b in zip((0, *cuts), (*cuts, 150), strict=True):
        o, S = linear_attention(*(x[n][:, a:b] for n in "qkv"), initial_state=S, backend=backend)
        outputs.append(o)
    assert_close("o", torch.cat(outputs, 1), whole, 1e-12)
    assert_close("S", S, final, 1e-12)


@backends
def test_the_future_is_not_seen(backend):
    x = inputs(1, 100, 1, 8, 5)
    before = linear_attention(**x, backend=backend)[0]
    for name in "qkv":
        x[name][:, 70:] = 1e3
    assert torch.equal(linear_attention(**x, backend=backend)[0][:, :70], before[:, :70])


@backends
def test_nothing_to_read_and_a_given_state_stays_as_it_was(backend):
    x = inputs(2, 0, 3, 4, 5)
    given = x["initial_state"].clone()
    o, S = linear_attention(**x, backend=backend)
    assert o.shape == (2, 0, 3, 5) and torch.equal(S, given)
    x = inputs(2, 9, 3, 4, 5)
    given = x["initial_state"].clone()
    linear_attention(**x, backend=backend)
    assert torch.equal(x["initial_state"], given)


@backends
def test_the_state_is_fp32_whatever_comes_in(backend):
    """A thousand values of 1 under one key: bf16 would stop counting at 256."""
    one = torch.ones(1, 1000, 1, 1, dtype=torch.bfloat16)
    o, S = linear_attention(one, one, one, scale=1.0, backend=backend)
    assert o.dtype == torch.bfloat16 and S.dtype == torch.float32 and S.item() == 1000
    assert linear_attention(*(x.double() for x in (one, one, one)), backend=backend)[1].dtype == torch.float64


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"backend": "chunk"}, r"backend: got 'chunk', wanted 'auto', 'recurrent' or 'parallel'"),
        ({"q": torch.zeros(5, 2, 4)}, r"q: got shape \(5, 2, 4\), wanted \[B, T, H, K\]"),
        ({"k": torch.zeros(1, 5, 2, 3)}, r"k: got shape \(1, 5, 2, 3\), wanted \(1, 5, 2, 4\)"),
        ({"v": torch.zeros(1, 4, 2, 6)}, r"v: got shape \(1, 4, 2, 6\), wanted \(1, 5, 2, 6\)"),
        ({"v": torch.tensor(1.0)}, r"v: got shape \(\), wanted"),
        ({"v": torch.zeros(1, 5, 2, 6, dtype=torch.long)}, r"v: got dtype torch.int64, wanted a floating-point dtype"),
        ({"initial_state": torch.zeros(1, 2, 6, 4)}, r"initial_state: got shape \(1, 2, 6, 4\), wanted \(1, 2, 4, 6\)"),
        ({"initial_state": torch.zeros(1, 2, 4, 6).half()}, r"initial_state: got dtype torch.float16, wanted float32"),
    ],
)
def test_errors_name_the_argument(changes, message):
    x = inputs(1, 5, 2, 4, 6, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_attention(**x | changes)


def test_no_stray_arguments():
    with pytest.raises(TypeError, match="normalize"):
        linear_attention(**inputs(1, 5, 2, 4, 6), normalize=True)
    assert not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(linear_attention).parameters.values())
