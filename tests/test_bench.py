"""The bench measures what it says, and its reckoning counts what torch counts. No time is asserted."""

import importlib
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from k3lite import bench, bench_kda
from k3lite.ops.kda import kda_chunk, kda_recurrent
from tests.helpers import assert_close


def test_a_row_is_two_times_and_their_ratio():
    row = bench.row("x", "case", 0.5, "slow", 2.0, torch.bfloat16)
    assert (row.ratio, row.dtype, row.device, row.threads) == (4.0, "bfloat16", "cpu", torch.get_num_threads())


def test_seconds_are_the_best_run_after_one_that_is_not_counted(monkeypatch):
    clock = itertools.accumulate([0, 9, 1, 3, 1, 2, 1, 4])  # runs of 9, 3, 2 and 4 seconds, a second between them
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(bench, "PATIENCE", 1e9)
    assert bench.seconds(lambda: None, repeats=3) == 2


def test_a_slow_case_is_measured_once(monkeypatch):
    clock = itertools.accumulate([0, 9, 1, 3, 1, 2])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    runs = []
    assert bench.seconds(lambda: runs.append(1)) == 9 and len(runs) == 1
    monkeypatch.setattr(bench, "PATIENCE", 9.0)
    clock = itertools.accumulate([0, 9, 1, 10, 1, 2])
    assert bench.seconds(lambda: runs.append(1)) == 10 and len(runs) == 3


def test_every_peer_computes_the_same():
    peers, absent = bench_kda.cpu_peers()
    assert list(peers) == ["step by step", "fla naive chunk", "transformers"] and absent == []
    given = bench_kda.inputs(128, 2, 16)
    o, S = kda_chunk(*given)
    for name, op in peers.items():
        their_o, their_S = op(*given)
        assert_close(f"{name}: o", their_o, o, 1e-5)
        assert_close(f"{name}: state", their_S, S, 1e-5)


def test_a_peer_that_is_not_there_is_named(monkeypatch):
    def find(name):
        if name.startswith("transformers"):
            raise ImportError(f"no {name}")
        return real(name)

    real = importlib.import_module
    monkeypatch.setattr(bench_kda.importlib, "import_module", find)
    peers, absent = bench_kda.cpu_peers()
    assert "transformers" not in peers
    assert len(absent) == 1 and absent[0].startswith("not compared with transformers")


def test_cpu_cases_cover_every_peer_forward_and_backward():
    made = list(bench_kda.cpu_cases((64, 128)))
    rows = [x for x in made if isinstance(x, bench.Row)]
    assert len(rows) == 2 * 2 * 3
    assert all(r.ours_s > 0 and r.peer_s > 0 and r.ratio == r.peer_s / r.ours_s for r in rows)
    rate, shares = made[len(rows) :]
    assert "0.57 GFLOP" in rate and "products" in shares
    assert "forward T=128" in bench.table(rows)


@pytest.mark.parametrize("T, H, K, V", [(64, 4, 64, 64), (512, 2, 16, 48), (32, 1, 128, 16)])
def test_flops_are_what_torch_counts(T, H, K, V):
    q, k, _, g, beta = bench_kda.inputs(T, H, K)
    # torch's counter leaves out the in-place form: [b,n,m] @ [b,m,p]
    in_place = {torch.ops.aten.baddbmm_: lambda _, x, y, **__: 2 * x[0] * x[1] * x[2] * y[2]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, torch.no_grad():
        kda_chunk(q, k, torch.ones(1, T, H, V), g, beta)
    assert bench_kda.flops(T, H, K, V) == counter.get_total_flops()


def test_time_shares_add_up():
    shares = bench_kda.time_shares(256)
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0


def test_the_script_for_a_gpu_runs_interpreted(monkeypatch):
    """Sizes aside, all of it but fla's kernels, which need a GPU."""
    monkeypatch.setattr(bench, "imported", lambda module, absent: absent.append(f"without {module}"))
    monkeypatch.setattr(bench, "seconds", lambda work, device: work() or 1.0)
    made = list(bench_kda.gpu_cases("cpu", H=1, K=16, T=20))
    assert [m for m in made if "without a peer" in m] == made[3:] and len(made) == 6
    for remark in made[1:3]:
        assert float(remark.split(" is ")[1].split()[0]) < 2e-2, remark


def test_recurrence_and_chunk_are_what_is_timed(monkeypatch):
    """Ours is the chunk form; the first peer is the definition."""
    assert bench_kda.cpu_peers()[0]["step by step"] is kda_recurrent
    seen = []
    monkeypatch.setattr(bench, "seconds", lambda work, *_, **__: work() or 1.0)
    monkeypatch.setattr(bench_kda, "forward", lambda op, given: seen.append(op))
    monkeypatch.setattr(bench_kda, "reckoning", lambda T: [])
    list(bench_kda.cpu_cases((64,)))
    assert seen[:2] == [kda_chunk, kda_recurrent]
