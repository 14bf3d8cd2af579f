"""The bench of experts compares what computes the same, reckons its limit as it says and counts bytes. No time is asserted."""

import pytest
import torch

from k3lite import bench, bench_moe
from k3lite.bench_kda import kimi_linear
from k3lite.budget import MIB
from k3lite.ops.experts import grouped_experts
from tests.helpers import assert_close

FORMS = (grouped_experts, bench_moe.masked_rows, bench_moe.masked_outputs)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("HIDDEN", 32), ("LATENT", 16), ("WIDTH", 8), ("COPY", 2**16)):
        monkeypatch.setattr(bench_moe, name, value)


def layer(experts, hidden=32, latent=16):
    return bench_moe.layer(experts, hidden, latent)


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_the_shape_is_a_sixteenth_of_k3(monkeypatch):
    monkeypatch.undo()
    moe = bench_moe.layer(896, bench_moe.HIDDEN, bench_moe.LATENT)
    assert [16 * n for n in moe.experts.w1.shape[1:]] == [3072, 3584]  # k3-architecture §1.1
    assert moe.gate.weight.shape == (896, 7168 // 16) and moe.gate.k == 4
    assert moe.shared_experts.up_proj.weight.shape[0] * 16 == 6144
    assert bench_moe.EXPERTS == (16, 64, 256, 896) and bench_moe.TOKENS == 2048


@pytest.mark.parametrize("passes", bench_moe.PASSES)
def test_the_loops_compute_the_same(passes):
    moe, z, weights = layer(12), randn(40, 16).requires_grad_(), torch.rand(40, 4).requires_grad_()
    chosen = torch.rand(40, 12).topk(4).indices
    results = []
    for form in FORMS:
        out = bench_moe.Looped(moe.experts, form)(z, chosen, weights)
        results.append([out, *torch.autograd.grad(out.square().sum(), [z, weights, *moe.experts.parameters()])])
    for other in results[1:]:
        for name, got, want in zip(("out", "dz", "dp", "dw1", "dw3", "dw2"), other, results[0], strict=True):
            assert_close(name, got, want, 1e-5)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@torch.no_grad()
def test_transformers_block_computes_the_same(implementation):
    absent = []
    ours = layer(12, hidden=16, latent=None)
    block = bench_moe.theirs(kimi_linear(absent), ours, implementation)
    x = randn(2, 9, 16)
    assert_close("y", block(x), ours(x), 1e-5)


def test_transformers_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(bench_moe, "kimi_linear", lambda absent: absent.append("not compared with transformers"))
    assert list(bench_moe.against_transformers(8, 10, 1)) == ["not compared with transformers"]


def test_bytes_of_one_token_do_not_grow_with_the_experts():
    read = {E: bench_moe.decode_bytes(layer(E).eval(), randn(1, 1, 32)) for E in (8, 64, 256)}
    assert {experts for experts, _ in read.values()} == {
        4 * 3 * 16 * 8 * 4
    }  # experts x matrices x latent x width x fp32
    assert {E: router for E, (_, router) in read.items()} == {E: E * 32 * 4 for E in read}


def test_bytes_are_counted_where_they_are_read():
    w = randn(6, 5, 4)
    with bench_moe.Reads(w) as seen:
        view = w[2].T
        assert seen.nbytes == 0
        view @ randn(5, 3)
        assert seen.nbytes == 5 * 4 * 4
        w[torch.tensor([0, 1])] + randn(1)  # a copy of two that is made by an operation handed all
    assert seen.nbytes == (5 * 4 + 6 * 5 * 4) * 4


def test_the_limit_is_twice_the_fewest_and_the_reading(monkeypatch):
    monkeypatch.setattr(bench, "turns", lambda works, rounds: dict.fromkeys(works, 1.0))
    layers = {E: layer(E) for E in (8, 24)}
    made = list(bench_moe.against_limit(layers, randn(1, 6, 32), 1))
    rate, added = 2 * 2**16 / 1.0, 16 * 3 * 16 * 8 * 4
    limits = {r.case: r.peer_s for r in made if isinstance(r, bench.Row)}
    assert limits == {
        "layer forward, 8 experts": 2,
        "layer forward, 24 experts": pytest.approx(2 * (1 + added / rate)),
        "layer forward+backward, 8 experts": 2,
        "layer forward+backward, 24 experts": pytest.approx(2 * (1 + 3 * added / rate)),
    }
    assert all(r.ours_s == 1 and r.peer == "limit" for r in made if isinstance(r, bench.Row))


def test_rows_and_remarks():
    made = list(bench_moe.cpu_cases((8, 16), 20, rounds=1))
    rows = [x for x in made if isinstance(x, bench.Row)]
    assert len(rows) == 4 + 2 * 3 + 2 + 3 and all(r.bench == "moe" and r.ours_s > 0 for r in rows)
    peers = ["limit", "loop, masked rows", "loop, masked outputs", "8 experts", "transformers eager"]
    assert list(dict.fromkeys(r.peer for r in rows)) == [*peers, "transformers grouped_mm"]
    remarks = [x for x in made if isinstance(x, str)]
    one = 4 * 3 * 16 * 8 * 4 / MIB
    assert f"one token, 16 experts: reads {one:.2f} MiB of {4 * one:.2f} MiB of experts" in remarks[-1]


def test_the_cpu_only():
    with pytest.raises(ValueError, match="device: got 'cuda', wanted 'cpu'"):
        list(bench_moe.cases("cuda"))
