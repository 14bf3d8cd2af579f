"""Norm, activations and the short convolution (shared hazards T18)."""

import pytest
import torch
import torch.nn.functional as F

from k3lite.ops.pointwise import position_in_sequence, rms_norm, sequence_of_token, short_conv, situ_glu, swiglu
from tests.helpers import assert_close


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- SiTU


@pytest.mark.parametrize(
    "gate, up, want",
    [
        (0, 1, 0),
        (2, 3, 4.861066551),
        (-2, 3, -0.657873819),
        (8, 50, 92.903751778),
        (-8, 50, -0.031165737),
        (100, 100, 99.932929974),
        (1, -40, -16.502465256),
    ],
)
def test_t18_situ(gate, up, want):
    got = situ_glu(torch.tensor(float(gate)).double(), torch.tensor(float(up)).double())
    assert got.item() == pytest.approx(want, abs=5e-10)


def test_t18_situ_is_bounded_and_starts_as_swiglu():
    gate, up = 1e3 * randn(10_000), 1e3 * randn(10_000, seed=1)
    assert situ_glu(gate, up).abs().max() <= 100
    assert situ_glu(gate, up, beta=2.0, linear_beta=3.0).abs().max() <= 6
    small = 1e-2 * gate / 1e3, 1e-2 * up / 1e3
    assert_close("near zero", situ_glu(*small), swiglu(*small), 1e-4)


def test_situ_is_computed_in_fp32():
    gate, up = randn(1000).bfloat16(), randn(1000, seed=1).bfloat16()
    got = situ_glu(gate, up)
    assert got.dtype == torch.bfloat16 and torch.equal(got, situ_glu(gate.float(), up.float()).bfloat16())


def test_swiglu():
    gate, up = randn(7), randn(7, seed=1)
    torch.testing.assert_close(swiglu(gate, up), gate * torch.sigmoid(gate) * up)


# ---- RMS norm


def test_rms_norm():
    x, w = randn(3, 5, 8), randn(8, seed=1)
    torch.testing.assert_close(rms_norm(x, w, 1e-5), F.rms_norm(x, (8,), w, 1e-5))
    want = torch.tensor([3.0, 4.0]).double() / torch.tensor(12.5 + 0.5).double().sqrt()
    torch.testing.assert_close(rms_norm(torch.tensor([3.0, 4.0]).double(), torch.ones(2).double(), 0.5), want)


def test_rms_norm_rounds_before_the_weight():
    """As in the released code: the quotient returns to bf16, then meets the weight."""
    x, w = randn(4, 8).bfloat16(), randn(8, seed=1).bfloat16()
    want = w * F.rms_norm(x.float(), (8,), None, 1e-5).bfloat16()
    assert torch.equal(rms_norm(x, w, 1e-5), want)


def test_rms_norm_of_zero():
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-5).sum().backward()
    assert torch.isfinite(x.grad).all()


# ---- short convolution


def reference(x, w):
    """F.conv1d over one sequence [B,T,D] with zeros before it."""
    y = F.conv1d(F.pad(x.transpose(1, 2), (w.shape[-1] - 1, 0)), w, groups=w.shape[0])
    return F.silu(y).transpose(1, 2)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("W", [1, 2, 4])
def test_short_conv(T, W):
    x, w = randn(2, T, 6), randn(6, 1, W, seed=1)
    y, window = short_conv(x, w)
    assert_close("y", y, reference(x, w), 1e-12)
    assert_close("window", window, F.pad(x, (0, 0, W - 1, 0))[:, T:], 0)


@pytest.mark.parametrize("pieces", [(1,) * 9, (4, 5), (0, 9), (2, 1, 0, 6)], ids=str)
def test_short_conv_in_pieces(pieces):
    x, w = randn(2, 9, 6), randn(6, 1, 4, seed=1)
    whole, last = short_conv(x, w)
    window, outputs = None, []
    for piece in x.split(list(pieces), dim=1):
        y, window = short_conv(piece, w, window)
        outputs.append(y)
    assert_close("y", torch.cat(outputs, 1), whole, 1e-12)
    assert torch.equal(window, last)


@pytest.mark.parametrize("lengths", [(5, 0, 1, 3), (9,), (0, 2, 7), (1,) * 9], ids=str)
def test_short_conv_packed(lengths):
    x, w = randn(1, 9, 6), randn(6, 1, 4, seed=1)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    want = torch.cat([reference(part, w) for part in x.split(lengths, dim=1) if part.shape[1]], 1)
    assert_close("y", short_conv(x, w, cu_seqlens=starts)[0], want, 1e-12)


def test_short_conv_keeps_its_inputs_dtype_and_owns_its_window():
    """fp32 weights (as released) on bf16 inputs; a view as window would keep the whole prompt alive."""
    x = randn(1, 1000, 6).bfloat16()
    y, window = short_conv(x, randn(6, 1, 4).float())
    assert y.dtype == window.dtype == torch.bfloat16
    assert window.untyped_storage().nbytes() == window.nbytes


def test_places_in_packed_sequences():
    starts = torch.tensor([0, 3, 3, 5])
    assert sequence_of_token(starts, 5).tolist() == [0, 0, 0, 2, 2]
    assert position_in_sequence(starts, 5).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((2, 5), (4, 1, 3), None), r"x, weight: got shapes \(2, 5\), \(4, 1, 3\)"),
        (((1, 2, 5), (4, 1, 3), None), r"x, weight: got shapes \(1, 2, 5\), \(4, 1, 3\)"),
        (((1, 2, 4), (4, 3), None), r"x, weight: got shapes .*wanted \[B,T,D\] and \[D,1,W\]"),
        (((1, 2, 4), (4, 1, 3), (1, 3, 4)), r"window: got shape \(1, 3, 4\), wanted \(1, 2, 4\)"),
    ],
)
def test_short_conv_refuses_other_shapes(shapes, message):
    x, weight, window = (torch.zeros(shape) if shape else None for shape in shapes)
    with pytest.raises(ValueError, match=message):
        short_conv(x, weight, window)
