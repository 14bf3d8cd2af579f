"""INT4 and FP8 with one scale, against torch's own float8 and by hand."""

import pytest
import torch

from k3lite.other_formats import round_fp8, round_int4


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_int4_by_hand():
    x = torch.tensor([[7.0, -7, 0.4, 0.6, 2.5, -3.5], [0.7, 0, 0, 0.03, 0.04, -0.36]])
    scale = float(torch.tensor(0.1, dtype=torch.float16))
    assert torch.equal(round_int4(x)[0], torch.tensor([7.0, -7, 0, 1, 2, -4]))  # ties to even
    assert torch.allclose(round_int4(x)[1], torch.tensor([7.0, 0, 0, 0, 0, -4]) * scale)


def test_int4_groups_are_rows_of_their_own():
    x = randn(5, 3, 64)
    assert torch.equal(round_int4(x, 32), round_int4(x.view(5, 6, 32)).view(5, 3, 64))
    assert torch.equal(round_int4(x, 64), round_int4(x))
    assert (round_int4(x, 32) - x).square().mean() < (round_int4(x) - x).square().mean()
    assert int(round_int4(x)[0, 0].unique().numel()) <= 15


def test_int4_ends_where_fp16_does():
    x = torch.tensor([[1e9, 1e5, 0.0], [1e-9, -1e-9, 0.0]])
    assert torch.equal(round_int4(x), torch.tensor([[7.0 * 65504, 2 * 65504, 0], [0, 0, 0]]))


@pytest.mark.parametrize("group", [0, 5, 128])
def test_int4_refuses_groups_that_do_not_fit(group):
    with pytest.raises(ValueError, match=f"group: got {group} for 64 columns, wanted a divisor"):
        round_int4(randn(2, 64), group)


def test_fp8_is_torchs_own():
    x = randn(40, 33)
    scale = x.abs().max() / 448
    assert torch.equal(round_fp8(x), (x / scale).to(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize("function", [round_int4, round_fp8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_and_dtypes(function, dtype):
    assert torch.equal(function(torch.zeros(3, 4, dtype=dtype)), torch.zeros(3, 4, dtype=dtype))
    assert function(randn(3, 4).to(dtype)).dtype == dtype
