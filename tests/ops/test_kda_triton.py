"""The Triton kernels on a CPU, interpreted: the same numbers as the recurrence, in values, states and every gradient."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3lite.ops.kda import kda
from tests.absent import absent
from tests.helpers import assert_all_close, assert_close, dims, kda_inputs, not_public, outputs_and_gradients

try:
    import triton
    import triton.language as tl

    from k3lite.ops import kda_triton
except ImportError as e:
    absent(f"triton cannot be imported ({e}); it exists for Linux")

FILE = Path(kda_triton.__file__)
gates = pytest.mark.parametrize("gate", ["bounded", "softplus"])
precisions = pytest.mark.parametrize(
    "dtype, rel", [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["fp64", "fp32"]
)


def compare(inputs, rel, **options):
    want, want_gradients = outputs_and_gradients(kda, inputs, backend="recurrent", **options)
    got, gradients = outputs_and_gradients(kda, inputs, backend="triton", **options)
    assert_all_close(got, want, rel)
    assert_all_close(gradients, want_gradients, rel)


@dims("B T H K V", *((1, T, 1, 16, 16) for T in (1, 2, 15, 16, 17, 37)), (2, 33, 2, 17, 20), (1, 20, 2, 5, 3))
@gates
@pytest.mark.parametrize("start", [False, True], ids=["zero", "state"])
@precisions
def test_equals_the_recurrence(B, T, H, K, V, gate, start, dtype, rel):
    compare(kda_inputs(B, T, H, K, V, gate=gate, start=start, dtype=dtype), rel)


@dims("K V", (16, 256), (256, 16), (256, 256), (33, 65), (100, 31), (128, 128), (129, 127), (255, 249))
@precisions
def test_every_width_from_16_to_256(K, V, dtype, rel):
    compare(kda_inputs(1, 18, 1, K, V, dtype=dtype), rel)


@pytest.mark.parametrize("lengths", [(5, 0, 20, 1), (0, 3), (3, 0), (16, 32)], ids=str)
@gates
def test_packed_sequences(lengths, gate):
    inputs = kda_inputs(1, sum(lengths), 2, 16, 20, gate=gate, start=False, dtype=torch.float64)
    rng = torch.Generator().manual_seed(1)
    inputs["initial_state"] = torch.randn(len(lengths), 2, 16, 20, dtype=torch.float64, generator=rng)
    compare(inputs, 1e-10, cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))


@gates
def test_bf16_inputs_keep_an_fp32_state(gate):
    inputs = kda_inputs(2, 37, 2, 24, 20, gate=gate)
    low = {n: x if n in ("g", "initial_state") else x.bfloat16() for n, x in inputs.items()}
    got, gradients = outputs_and_gradients(kda, low, backend="triton")
    assert got["o"].dtype == gradients["dq"].dtype == torch.bfloat16 and got["S"].dtype == torch.float32
    want, want_gradients = outputs_and_gradients(kda, inputs, backend="recurrent")
    assert_all_close({n: x.float() for n, x in (got | gradients).items()}, want | want_gradients, 2e-2)


@pytest.mark.parametrize("dtype, rel", [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
@dims("B H K V", (1, 1, 16, 16), (3, 2, 17, 40), (1, 2, 256, 255), (2, 1, 5, 3))
def test_one_token(B, H, K, V, dtype, rel, monkeypatch):
    """With nothing to differentiate, a single token takes the decode kernel, and leaves the given state alone."""
    monkeypatch.setattr(kda_triton, "_Kda", None)
    inputs = kda_inputs(B, 1, H, K, V, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    low = {n: x if n in ("g", "initial_state") else x.to(dtype) for n, x in inputs.items()}
    before = low["initial_state"].clone()
    o, S = kda(**low, backend="triton")
    want_o, want_S = kda(**inputs, backend="recurrent")
    assert o.dtype == dtype and S.dtype == before.dtype
    assert_all_close({"o": o.to(want_o.dtype), "S": S}, {"o": want_o, "S": want_S}, rel)
    assert torch.equal(low["initial_state"], before)


def test_prefill_then_decode():
    inputs = kda_inputs(2, 21, 2, 16, 16)
    want, state = kda(**inputs, backend="recurrent")
    S, outputs = inputs.pop("initial_state"), []
    for piece in zip(*(x.split([17, 1, 1, 1, 1], dim=1) for x in inputs.values()), strict=True):
        o, S = kda(*piece, initial_state=S, backend="triton")
        outputs.append(o)
    assert_all_close({"o": torch.cat(outputs, 1), "S": S}, {"o": want, "S": state}, 1e-5)


def test_gradients_to_some_inputs_and_through_the_state_alone():
    inputs = kda_inputs(1, 18, 1, 16, 16, dtype=torch.float64)
    gradients = []
    for backend in ("triton", "recurrent"):
        k = inputs["k"].clone().requires_grad_()
        kda(**inputs | {"k": k}, backend=backend)[1].square().sum().backward()
        gradients.append(k.grad)
    assert_close("dk", *gradients, 1e-10)


@pytest.mark.parametrize("g", [-40.0, -6.0, -5.0, 0.0])
def test_constant_gates(g):
    """On both sides of the limit above which a chunk goes pair by pair."""
    inputs = kda_inputs(1, 35, 1, 16, 16, dtype=torch.float64)
    inputs["g"] = torch.full_like(inputs["g"], g)
    want, want_gradients = outputs_and_gradients(kda, inputs, backend="recurrent")
    got, gradients = outputs_and_gradients(kda, inputs, backend="triton")
    dg, want_dg = gradients.pop("dg"), want_gradients.pop("dg")  # a difference of terms of size 1: see test_kda.py
    assert_all_close(got | gradients, want | want_gradients, 1e-10)
    assert (dg - want_dg).abs().max() < 1e-13


def test_one_key_again_and_again():
    inputs = kda_inputs(1, 48, 1, 16, 16)
    inputs["k"] = inputs["k"][:, :1].expand(-1, 48, -1, -1)
    inputs["beta"] = torch.full_like(inputs["beta"], 0.9999)
    inputs["g"] = torch.full_like(inputs["g"], -1e-3)
    compare(inputs, 1e-4)


def test_beta_of_zero_writes_nothing_and_has_a_gradient():
    inputs = kda_inputs(1, 20, 1, 16, 16, dtype=torch.float64)
    inputs["beta"][:, ::3] = 0
    compare(inputs, 1e-10)


def test_tensors_that_are_not_contiguous():
    inputs = kda_inputs(2, 18, 2, 16, 16)
    views = {n: x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in inputs.items()}
    assert not views["q"].is_contiguous()
    got = kda(**views, backend="triton")
    want = kda(**inputs, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- where it runs


def python(code: str, **env: str | None) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in (os.environ | env).items() if v is not None}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=FILE.parents[2]
    )


def test_without_gpu_and_interpreter_there_is_one_clear_error():
    code = (
        "import torch; from k3lite.ops.kda import kda\n"
        "x = torch.zeros(1, 3, 1, 16)\n"
        "assert kda(x, x, x, x, x[..., 0])[0].shape == x.shape\n"  # auto finds what runs
        "try: kda(x, x, x, x, x[..., 0], backend='triton')\n"
        "except ValueError as e: print(e)"
    )
    done = python(code, TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("backend: 'triton' got tensors on cpu, wanted a GPU, or TRITON_INTERPRET=1")
    assert done.stdout.count("\n") == 1


def test_where_triton_is_not_installed_the_error_says_so():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from k3lite.ops.kda import kda\n"
        "x = torch.zeros(1, 3, 1, 16)\n"
        "try: kda(x, x, x, x, x[..., 0], backend='triton')\n"
        "except ValueError as e: print(e)"
    )
    assert python(code).stdout.startswith("backend: 'triton' is not installed here")


def test_too_wide():
    with pytest.raises(ValueError, match="backend: 'triton' got K = 257 and V = 16, wanted at most 256"):
        kda(**kda_inputs(1, 2, 1, 257, 16), backend="triton")


def test_only_public_names_of_triton():
    """Everything reached through triton and tl is what they export; nothing else of triton is imported."""
    tree = ast.parse(FILE.read_text())
    imported = [
        ast.unparse(n)
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom)) and "triton" in ast.unparse(n)
    ]
    assert imported == ["import triton", "import triton.language as tl"]
    assert not not_public(tree, triton=triton, tl=tl)


COMPILE = """
import json, sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from k3lite.ops import kda_triton as m

constants = dict(C=16, BK=128, BV=32, SAVE=True, DTYPE=tl.float32, PRECISION="tf32")
types = dict(chunk_start="*i32", chunk_end="*i32", first_chunk="*i32", H="i32", K="i32", V="i32", scale="fp32")
types |= {n: "*bf16" for n in ("q", "k", "v", "g", "beta", "o", "do", "dq", "dk", "dv", "dg", "dbeta")}
for kernel in (m.prepare_kernel, m.scan_kernel, m.scan_backward_kernel, m.gradients_kernel, m.decode_kernel):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in names}
    fixed = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8, num_stages=2))
    print(json.dumps([kernel.__name__, binary.metadata.shared, len(binary.asm["cubin"])]))
"""


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """The interpreter accepts more than the compiler does. Compiling needs no GPU; nothing is run."""
    done = python(COMPILE, TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 5
    for name, shared, size in compiled:
        assert size > 0
        assert shared <= 99 * 1024, f"{name} wants more shared memory than a consumer GPU gives a block"
