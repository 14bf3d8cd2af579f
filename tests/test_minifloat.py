"""Small floats: every code's value, and the nearest code of any number, ties and edges included."""

import math

import pytest
import torch

from k3lite.minifloat import FORMATS, nearest_codes, nearest_codes_naive

E2M1 = FORMATS["e2m1"]
formats = pytest.mark.parametrize("f", FORMATS.values(), ids=FORMATS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def test_all_values_of_e2m1():
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1.values.tolist() == positive + [-x for x in positive]
    assert E2M1.values.signbit().tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_values_are_those_of_torch(name, dtype):
    want = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    assert torch.equal(FORMATS[name].values.nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))
    assert torch.equal(FORMATS[name].values.isinf(), want.isinf())


def test_limits():
    assert {n: (f.bits, f.largest, f.e_max, f.largest_code) for n, f in FORMATS.items()} == {
        "e2m1": (4, 6, 2, 7),
        "e4m3": (8, 448, 8, 0x7E),
        "e5m2": (8, 57344, 15, 0x7B),
    }


@formats
def test_magnitudes_rise_with_their_codes(f):
    finite = f.values[: f.largest_code + 1]
    assert (finite.diff() > 0).all() and finite[0] == 0


@formats
@dtypes
def test_every_value_is_its_own_code(f, dtype):
    codes = torch.arange(2 * f.sign)
    codes = codes[f.values.isfinite()]
    got = nearest_codes(f.values[codes].to(dtype), f)
    assert got.dtype == torch.uint8 and got.tolist() == codes.tolist()


@formats
@dtypes
def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearer(f, dtype):
    grid = f.values[: f.largest_code + 1].to(dtype)
    middle, below = (grid[1:] + grid[:-1]) / 2, torch.arange(f.largest_code)
    up, down = (torch.nextafter(middle, torch.full_like(middle, x)) for x in (math.inf, 0.0))
    assert torch.equal(nearest_codes(middle, f).long(), below + below % 2)
    assert torch.equal(nearest_codes(up, f).long(), below + 1)
    assert torch.equal(nearest_codes(down, f).long(), below)
    assert torch.equal(nearest_codes(-up, f).long(), below + 1 + f.sign)


def test_midpoints_of_e2m1():
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert E2M1.values[nearest_codes(middle, E2M1).long()].tolist() == [0, 1, 1, 2, 2, 4, 4]


@formats
@dtypes
def test_what_is_too_large_saturates_and_what_is_too_small_keeps_its_sign(f, dtype):
    huge = torch.tensor([f.largest * 1.01, f.largest * 1.9, 1e30, torch.finfo(dtype).max], dtype=dtype)
    assert nearest_codes(huge, f).tolist() == [f.largest_code] * 4
    assert nearest_codes(-huge, f).tolist() == [f.largest_code + f.sign] * 4
    tiny = torch.tensor([0.0, 1e-30, torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 4], dtype=dtype)
    assert nearest_codes(tiny, f).tolist() == [0] * 4 and nearest_codes(-tiny, f).tolist() == [f.sign] * 4


@formats
@dtypes
def test_random_numbers_of_all_sizes(f, dtype):
    rng = torch.Generator().manual_seed(0)
    v = torch.randn(20_000, generator=rng, dtype=dtype) * 2.0 ** torch.randint(-25, 18, (20_000,), generator=rng)
    assert torch.equal(nearest_codes(v, f), nearest_codes_naive(v, f))
