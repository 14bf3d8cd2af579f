"""MX blocks: scales by three rules, any axis and length, edges of E8M0, straight-through gradients, the released packing.

Hazards T19 to T23 are tested here; independent implementations are in tests/oracles/test_mx.py.
"""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lite import mx
from k3lite.mx import FORMATS, SCALE_RULES, decode, encode, fake_quantize, pack_mxfp4, scale_values, unpack_mxfp4

rules = pytest.mark.parametrize("rule", SCALE_RULES)
formats = pytest.mark.parametrize("name", FORMATS)
dtypes = pytest.mark.parametrize("dtype", mx.DTYPES, ids=str)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def blocks_of_all_sizes(n, dtype=torch.float32):
    """Gaussian blocks, each of its own size, 2^-40 to 2^40."""
    rng = torch.Generator().manual_seed(1)
    return (randn(n, 32) * 2.0 ** torch.randint(-40, 41, (n, 1), generator=rng)).to(dtype)


def bits(x):
    """So that -0 differs from 0 and NaN equals itself."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


# ---- scales


@pytest.mark.parametrize(
    "amax, floor, ceil",
    [(4, 4, 4), (5, 4, 4), (6, 6, 6), (6.5, 6, 6), (7, 6, 8), (7.5, 6, 8), (8, 8, 8), (3.4, 3, 3), (3.6, 3, 4)],
)
def test_t19_largest_value_under_floor_and_ceil(amax, floor, ceil):
    x = torch.tensor([[amax] + [0.0] * 31])
    assert fake_quantize(x, scale_rule="floor")[0, 0] == floor
    assert fake_quantize(x, scale_rule="ceil")[0, 0] == ceil


@pytest.mark.parametrize(
    "rule, error, clipped", [("floor", 0.1155, 0.303), ("ceil", 0.1163, 0.0), ("nearest", 0.1222, 0.419)]
)
def test_t19_gaussian_blocks(rule, error, clipped):
    """The sheet's 4096 blocks are other ones: shares of 16,384 blocks lie within 0.02 of theirs."""
    x = randn(16_384, 32)
    _, scales = encode(x, "e2m1", scale_rule=rule)
    q = fake_quantize(x, scale_rule=rule)
    assert float((q - x).norm() / x.norm()) == pytest.approx(error, abs=0.0025)
    assert float((x.abs().amax(-1) / scale_values(scales)[:, 0] > 6).float().mean()) == pytest.approx(clipped, abs=0.02)


@formats
@rules
@dtypes
def test_scales_are_the_formulas(name, rule, dtype):
    """In exact integers: log2 is compared by powers, never computed."""
    f = FORMATS[name]
    edges = torch.tensor([f.largest, 1.0, 2.0, f.largest * math.sqrt(0.5), 1.5, 1.75, 3.0], dtype=dtype)
    for amax in (*edges, *(torch.nextafter(e, e * k) for e in edges for k in (0, 2)), *randn(50, dtype=dtype).abs()):
        got = int(mx.scale_bytes(mx.upcast(amax), f, rule)) - 127
        amax = float(amax)
        if rule == "floor":
            assert 2.0 ** (got + f.e_max) <= amax < 2.0 ** (got + f.e_max + 1)
        elif rule == "ceil":
            assert f.largest * 2.0 ** (got - 1) < amax <= f.largest * 2.0**got
        else:
            ratio = amax / f.largest / 2.0**got
            assert math.sqrt(0.5) * (1 - 1e-15) <= ratio < math.sqrt(2) * (1 + 1e-15)


def test_t20_bytes():
    worth = scale_values(torch.tensor([0, 1, 127, 128, 254, 255], dtype=torch.uint8))
    assert worth[:5].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0, 2.0**127] and worth[5].isnan()
    assert float(worth[0]) == pytest.approx(5.877e-39, rel=1e-3)
    assert scale_values(torch.tensor([0], dtype=torch.uint8), torch.bfloat16).double() == 2.0**-127


@formats
@rules
@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_t20_a_block_with_nan_or_inf_is_nan_and_its_neighbours_are_not(name, rule, dtype, bad):
    x = randn(3, 64, dtype=dtype)
    want = fake_quantize(x, name, scale_rule=rule)
    x[1, 40] = bad
    codes, scales = encode(x, name, scale_rule=rule)
    assert (scales == 255).nonzero().tolist() == [[1, 1]] and not codes[1, 32:].any()
    got = fake_quantize(x, name, scale_rule=rule)
    assert got[1, 32:].isnan().all()
    got[1, 32:] = want[1, 32:]
    assert torch.equal(got, want)


@formats
@rules
def test_zeros_stay_and_keep_their_signs(name, rule):
    x = torch.zeros(2, 32)
    x[1, ::3] = -0.0
    codes, scales = encode(x, name, scale_rule=rule)
    assert not scales.any() and set(codes.flatten().tolist()) == {0, FORMATS[name].sign}
    assert torch.equal(bits(fake_quantize(x, name, scale_rule=rule)), bits(x))
    x[0, 5] = -1e-6  # not all zero: small ones become zeros of their sign
    x[0, 6] = 1.0
    assert fake_quantize(x, scale_rule=rule)[0, 5].signbit()


@formats
def test_the_lower_end_of_e8m0(name):
    """fp32 subnormals: the scale stays 2^-127 and numbers lose bits, in steps of the format's smallest value."""
    f = FORMATS[name]
    x = torch.tensor([2.0**-149, 3 * 2.0**-149, 2.0**-140, 2.0**-130, -(2.0**-130)] + [0.0] * 27)
    codes, scales = encode(x, name)
    assert scales.item() == 0
    step = float(f.values[1])
    want = [round(float(a) * 2.0**127 / step) * step for a in x[:5].double()]
    assert [float(f.values[c]) for c in codes[:5].long()] == want
    assert decode(codes, scales, name).tolist()[:5] == [v * 2.0**-127 for v in want]


def test_the_upper_end_of_e8m0():
    """Only fp64 gets there: 2^127 is the largest scale, what lies above its reach saturates."""
    x = torch.tensor([1e300, -(2.0**128), 2.0**127] + [0.0] * 29, dtype=torch.float64)
    codes, scales = encode(x, "e2m1")
    assert scales.item() == 254 and codes[:3].tolist() == [7, 8 + 4, 2]
    assert fake_quantize(x)[:3].tolist() == [6 * 2.0**127, -(2.0**128), 2.0**127]
    largest = torch.full((32,), torch.finfo(torch.float32).max)
    assert encode(largest, "e2m1")[1].item() == 127 + 125 and fake_quantize(largest).isfinite().all()


def test_the_largest_number_of_fp32_rounds_up_under_ceil():
    x = torch.full((32,), torch.finfo(torch.float32).max)
    codes, scales = encode(x, "e2m1", scale_rule="ceil")
    assert (decode(codes, scales, "e2m1", dtype=torch.float64) == 2.0**128).all()
    assert fake_quantize(x, scale_rule="ceil").isposinf().all()


def test_tables_made_while_shapes_are_planned_are_real():
    """Tables are kept; one made under the meta device must not be without values."""
    code = (
        "import torch\nfrom k3lite import mx\nwith torch.device('meta'):\n"
        "    w = mx.unpack_mxfp4(*mx.pack_mxfp4(torch.ones(2, 32, device='cpu')))\nassert w.tolist() == [[1.0] * 32] * 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- blocks


@formats
@rules
@dtypes
def test_decoded_codes_are_values_times_scales(name, rule, dtype):
    f, x = FORMATS[name], blocks_of_all_sizes(64, dtype)
    codes, scales = encode(x, name, scale_rule=rule)
    want = f.values[codes.long()] * 2.0 ** (scales.double() - 127)
    got = decode(codes, scales, name, dtype=dtype)
    assert got.dtype == dtype and torch.equal(got.double(), want)
    assert torch.equal(got, fake_quantize(x, name, scale_rule=rule))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@formats
def test_any_axis(axis, name):
    x = randn(40, 33, 5)
    codes, scales = encode(x, name, axis)
    last, last_scales = encode(x.movedim(axis, -1).contiguous(), name)
    assert torch.equal(codes, last.movedim(-1, axis)) and torch.equal(scales, last_scales.movedim(-1, axis))
    assert codes.shape == x.shape and scales.shape[axis] == -(-x.shape[axis] // 32)
    assert torch.equal(decode(codes, scales, name, axis), fake_quantize(x, name, axis))


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 63, 64, 65, 97])
@formats
def test_a_short_last_block_has_its_own_scale(n, name):
    x = randn(3, n)
    codes, scales = encode(x, name)
    assert codes.shape == (3, n) and scales.shape == (3, -(-n // 32))
    for i in range(scales.shape[1]):
        part = slice(32 * i, min(n, 32 * i + 32))
        alone = encode(x[:, part].contiguous(), name)
        assert torch.equal(codes[:, part], alone[0]) and torch.equal(scales[:, i : i + 1], alone[1])


def test_pieces_do_not_show(monkeypatch):
    x = blocks_of_all_sizes(100)
    want = (*encode(x, "e4m3"), fake_quantize(x), *pack_mxfp4(x))
    for piece in (1, 7, 100):
        monkeypatch.setattr(mx, "PIECE", piece)
        got = (*encode(x, "e4m3"), fake_quantize(x), *pack_mxfp4(x))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@dtypes
@pytest.mark.parametrize("rule", ["floor", "ceil"])
@formats
def test_t23_rounding_twice_changes_nothing(name, rule, dtype):
    once = fake_quantize(blocks_of_all_sizes(1000, dtype), name, scale_rule=rule)
    assert torch.equal(bits(fake_quantize(once, name, scale_rule=rule)), bits(once))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70), st.sampled_from(["floor", "ceil"]))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_no_number_is_off_by_more_than_half_a_step(numbers, rule):
    """Against fractions: within half the gap to the next value, or clipped (floor)."""
    x = torch.tensor(numbers)
    codes, scales = encode(x, "e2m1", scale_rule=rule)
    grid = FORMATS["e2m1"].values[:8]
    for value, code, scale in zip(x.double(), codes.long(), scales.long().repeat_interleave(32), strict=False):
        v = value.abs() / 2.0 ** (scale - 127).double()
        near = grid[code & 7]
        assert (v - near).abs() == (v - grid).abs().min() and (rule == "floor" or v <= 6 or scale == 254)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": "e3m2"}, "format: got 'e3m2', wanted one of e2m1, e4m3, e5m2"),
        ({"scale_rule": "even"}, "scale_rule: got 'even', wanted one of floor, ceil, nearest"),
        ({"axis": 2}, r"axis: got 2 for shape \(2, 32\), wanted one of its axes"),
        ({"axis": -3}, r"axis: got -3 for shape \(2, 32\)"),
        ({"x": torch.zeros(2, 32, dtype=torch.float16)}, "x: got torch.float16, wanted one of torch.float32, torch.bf"),
        ({"x": torch.zeros(2, 32, dtype=torch.long)}, "x: got torch.int64"),
        ({"x": torch.zeros(())}, r"axis: got -1 for shape \(\)"),
    ],
)
def test_bad_arguments(change, message):
    options = {"x": torch.zeros(2, 32), "format": "e2m1"} | change
    for function in (encode, fake_quantize):
        with pytest.raises(ValueError, match=message):
            function(**options)


def test_decode_refuses_what_does_not_fit():
    codes, scales = encode(randn(2, 40), "e2m1")
    with pytest.raises(ValueError, match=r"codes, scales: got .* wanted uint8 of that shape and uint8 \(2, 2\)"):
        decode(codes, scales[:, :1], "e2m1")
    with pytest.raises(ValueError, match="codes, scales: got torch.int64"):
        decode(codes.long(), scales, "e2m1")
    with pytest.raises(ValueError, match="codes: got 16, wanted 0..15 for e2m1"):
        decode(torch.full_like(codes, 16), scales, "e2m1")
    with pytest.raises(ValueError, match="dtype: got torch.float16"):
        decode(codes, scales, "e2m1", dtype=torch.float16)


# ---- gradients


@dtypes
def test_t22_straight_through(dtype):
    """7.5 is clipped to 6 and still gets its whole gradient."""
    x = torch.tensor([7.5, 6, 1] + [0.0] * 29, dtype=dtype, requires_grad=True)
    y = fake_quantize(x)
    assert y[:3].tolist() == [6, 6, 1] and y.dtype == dtype
    (y[:3] * torch.tensor([1, 2, 3])).sum().backward()
    assert x.grad.tolist() == [1, 2, 3] + [0.0] * 29


def test_fake_quantize_leaves_its_input_alone():
    x = randn(4, 50)
    before = x.clone()
    fake_quantize(x), pack_mxfp4(x[:, :32])
    assert torch.equal(x, before)


# ---- the released packing


def test_t21_the_even_column_is_in_the_low_nibble():
    packed, scales = pack_mxfp4(torch.tensor([[0.5, -6, 3, -0.0] + [0.0] * 28]))
    assert packed[0, :3].tolist() == [241, 133, 0] and scales.tolist() == [[127]]


@rules
@dtypes
def test_t23_fake_quantised_is_what_is_unpacked(rule, dtype):
    w = blocks_of_all_sizes(10_000, dtype).view(1250, 256)
    packed, scales = pack_mxfp4(w, rule)
    assert torch.equal(bits(unpack_mxfp4(packed, scales, dtype)), bits(fake_quantize(w, scale_rule=rule)))
    codes, want = encode(w, "e2m1", scale_rule=rule)
    assert torch.equal(packed, codes[:, ::2] | codes[:, 1::2] << 4) and torch.equal(scales, want)


@dtypes
def test_every_byte_under_every_scale(dtype):
    byte = torch.arange(256, dtype=torch.uint8)
    packed, scales = byte.repeat(256, 1), byte.unsqueeze(1).repeat(1, 16)
    got = unpack_mxfp4(packed, scales, dtype)
    values = FORMATS["e2m1"].values
    pairs = torch.stack([values[(byte & 15).long()], values[(byte >> 4).long()]], -1).flatten()
    want = (pairs * scale_values(byte.unsqueeze(1), torch.float64)).to(dtype)
    assert got.dtype == dtype and got[255].isnan().all() and torch.equal(bits(got[:255]), bits(want[:255]))


def test_stacked_experts_pack_like_each_alone():
    w = randn(3, 5, 64)
    packed, scales = pack_mxfp4(w)
    assert packed.shape == (3, 5, 32) and scales.shape == (3, 5, 2)
    for e in range(3):
        assert all(torch.equal(a[e], b) for a, b in zip((packed, scales), pack_mxfp4(w[e]), strict=True))
    assert torch.equal(unpack_mxfp4(packed, scales), fake_quantize(w))


@pytest.mark.parametrize(
    "shape, packed, scales",
    [((3072, 3584), (3072, 1792), (3072, 112)), ((3584, 3072), (3584, 1536), (3584, 96))],
    ids=["w1-w3", "w2"],
)
def test_shapes_of_the_released_experts(shape, packed, scales):
    """k3-architecture §4; one expert is 17,547,264 bytes."""
    w = torch.zeros(shape, dtype=torch.bfloat16)
    got = pack_mxfp4(w)
    assert [tuple(t.shape) for t in got] == [packed, scales]
    assert 3 * sum(t.numel() for t in got) == 17_547_264
    assert unpack_mxfp4(*got, torch.bfloat16).shape == shape


def test_not_contiguous_weights():
    w = randn(64, 6).T
    assert torch.equal(unpack_mxfp4(*pack_mxfp4(w)), fake_quantize(w.contiguous()))


@pytest.mark.parametrize("width", [1, 31, 33, 48])
def test_the_released_layout_has_no_short_blocks(width):
    with pytest.raises(
        ValueError, match=rf"weights: got shape \(4, {width}\), wanted an input width .* multiple of 32"
    ):
        pack_mxfp4(torch.zeros(4, width))


def test_unpack_refuses_what_does_not_fit():
    packed, scales = pack_mxfp4(randn(4, 64))
    for p, s in ((packed, scales[:, :1]), (packed[:, :8], scales), (packed.long(), scales), (packed, scales.float())):
        with pytest.raises(
            ValueError, match=r"weight_packed, weight_scale: got .*, wanted uint8 \[\.\.\., out, in/2\]"
        ):
            unpack_mxfp4(p, s)
    with pytest.raises(ValueError, match="dtype: got torch.float16"):
        unpack_mxfp4(packed, scales, torch.float16)
