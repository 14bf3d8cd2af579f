"""The Triton kernel on a CPU, interpreted: the same numbers as the dense product; and it compiles for a GPU.

The interpreter cuts fp32 to bf16 instead of rounding (stack-notes), so bf16 outputs are compared loosely.
"""

import ast
import json
from pathlib import Path

import pytest
import torch

from k3lite.mx import pack_mxfp4, scale_values, unpack_mxfp4
from k3lite.packed import packed_linear, packed_linear_naive
from tests.absent import absent
from tests.helpers import assert_close, dims, not_public
from tests.ops.test_kda_triton import python

try:
    import triton
    import triton.language as tl

    from k3lite.ops import mx_triton
except ImportError as e:
    absent(f"triton cannot be imported ({e}); it exists for Linux")

FILE = Path(mx_triton.__file__)
precisions = pytest.mark.parametrize(
    "dtype, rel", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp64", "fp32", "bf16"]
)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dims("M N K", (1, 1, 32), (1, 64, 64), (3, 70, 96), (16, 65, 128), (17, 5, 160), (70, 130, 32))
@precisions
def test_equals_the_dense_product(M, N, K, dtype, rel):
    weights, x = pack_mxfp4(randn(N, K)), randn(M, K, seed=1).to(dtype).requires_grad_()
    y = packed_linear(x, *weights, backend="triton")
    want = packed_linear_naive(x, *weights)
    assert y.dtype == dtype
    assert_close("y", y, want, rel)
    gradient = randn(M, N, seed=2).to(dtype)
    (got_dx,), (want_dx,) = (torch.autograd.grad(out, x, gradient) for out in (y, want))
    assert_close("dx", got_dx, want_dx, rel)


def test_every_code_under_every_scale_is_decoded_exactly():
    """One row of W a scale, x a row of the unit matrix: y is W itself."""
    code = torch.arange(16, dtype=torch.uint8)
    weight_packed = (code | code.flip(0) << 4).repeat(256, 1)
    weight_scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    y = packed_linear(torch.eye(32, dtype=torch.float64), weight_packed, weight_scale, backend="triton").T
    want = unpack_mxfp4(weight_packed, weight_scale, torch.float64)
    assert torch.equal(y[:255], want[:255]) and y[255].isnan().all()
    assert y[0, 4] == float(scale_values(weight_scale[0], torch.float64)) == 2.0**-127


def test_tensors_that_are_not_contiguous():
    weight_packed, weight_scale = pack_mxfp4(randn(20, 64))
    x = randn(64, 3).T
    views = weight_packed.T.contiguous().T, weight_scale.T.contiguous().T
    got = packed_linear(x, *views, backend="triton")
    assert torch.equal(got, packed_linear(x, weight_packed, weight_scale, backend="triton"))


def test_no_tokens():
    assert packed_linear(torch.zeros(0, 32), *pack_mxfp4(randn(4, 32)), backend="triton").shape == (0, 4)


# ---- where it runs

TRY = (
    "import torch; from k3lite.mx import pack_mxfp4; from k3lite.packed import packed_linear\n"
    "x, w = torch.zeros(2, 32), pack_mxfp4(torch.zeros(3, 32))\n"
    "assert packed_linear(x, *w).shape == (2, 3)\n"  # auto finds what runs
    "try: packed_linear(x, *w, backend='triton')\n"
    "except ValueError as e: print(e)"
)


def test_without_gpu_and_interpreter_there_is_one_clear_error():
    done = python(TRY, TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("backend: 'triton' got tensors on cpu, wanted a GPU, or TRITON_INTERPRET=1")


def test_where_triton_is_not_installed_the_error_says_so():
    done = python("import sys; sys.modules['triton'] = None\n" + TRY)
    assert done.stdout.startswith("backend: 'triton' is not installed here"), done.stderr


def test_only_public_names_of_triton():
    assert not not_public(ast.parse(FILE.read_text()), triton=triton, tl=tl)


COMPILE = """
import json, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from k3lite.ops import mx_triton as m

for x, dtype, precision in (("*bf16", tl.float32, "tf32"), ("*fp32", tl.float32, "ieee")):
    constants = dict(BM=64, BN=m.BN, GROUPS=m.GROUPS, DTYPE=dtype, PRECISION=precision)
    types = dict(x=x, y=x, packed="*u8", scales="*u8", M="i32", N="i32", K="i32")
    names = m.packed_linear_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    fixed = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    source = ASTSource(fn=m.packed_linear_kernel, signature=signature, constexprs=fixed)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=2))
    print(json.dumps([x, binary.metadata.shared, len(binary.asm["cubin"])]))
"""


def test_it_compiles_for_a_gpu(tmp_path):
    """The interpreter accepts more than the compiler does. Compiling needs no GPU; nothing is run."""
    done = python(COMPILE, TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 2
    for name, shared, size in compiled:
        assert size > 0
        assert shared <= 99 * 1024, f"{name} wants more shared memory than a consumer GPU gives a block"
