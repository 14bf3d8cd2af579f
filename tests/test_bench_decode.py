"""The decoding bench decodes from the caches it claims, and reckons its floors from what torch counts. No time is asserted."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from k3lite import bench, bench_decode, budget
from k3lite.model import K3ForCausalLM
from k3lite.ops import latent_attention as op


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench_decode, "COPY", 2**16)
    monkeypatch.setattr(bench_decode, "PRODUCT", 32)


def test_models_differ_in_their_layers_only():
    kinds = {name: bench_decode.config(mla).layer_kinds for name, mla in bench_decode.MODELS.items()}
    assert kinds["all-MLA"] == ("mla",) * 8 and kinds["KDA only"] == ("kda",) * 8
    assert kinds["hybrid 3:1"] == ("kda", "kda", "kda", "mla") * 2
    hybrid, twin = (bench_decode.config(bench_decode.MODELS[n]) for n in ("hybrid 3:1", "all-MLA"))
    assert hybrid.all_mla_twin() == twin


def test_caches_are_real_and_as_large_as_predicted():
    for mla in bench_decode.MODELS.values():
        config = bench_decode.config(mla)
        cache = bench_decode.filled_cache(K3ForCausalLM(config), 100, 2)
        assert cache.seen == 100
        assert cache.reserved() == budget.paged_cache_bytes(config, 100, 2, number_bytes=4)
        if mla:
            assert all(layer.latents.std() > 0.5 for layer in cache.layers if hasattr(layer, "latents"))


def test_flops_are_what_torch_counts(monkeypatch):
    """Of the products with the latents; those with kv_b do not grow with the context."""
    monkeypatch.setattr(op, "BLOCK", 2**12)
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # its products are not counted
    model = K3ForCausalLM(bench_decode.config(bench_decode.MODELS["all-MLA"]))
    counted = []
    for tokens in (99, 199):
        cache = bench_decode.filled_cache(model, tokens)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
        counted.append(counter.get_total_flops())
    assert counted[1] - counted[0] == bench_decode.attention_flops(100)


def test_floors():
    floors = bench_decode.Floors(copy_bytes_s=1e9, product_flop_s=1e10)
    assert floors.read_s(1000, 2) == pytest.approx(2 * 1000 * 8 * 64 * 4 / 1e9)  # 4.1 ms
    assert floors.products_s(1000, 2) == pytest.approx(2 * 1000 * 8 * 48 * 64 * 4 / 1e10)  # 19.7 ms
    said = bench_decode.nearness(bench_decode.Step("all-MLA", 1000, 2, 0.0393216, 0), floors)
    assert "): 4.1 ms" in said and "): 19.7 ms" in said and "2.00 times the larger" in said


def test_steps_grow_the_cache_and_take_turns(monkeypatch):
    """Each round times every model at every context; a cache is a token longer with each run."""
    ran = []
    forward = K3ForCausalLM.forward

    def watched(*args, cache, **options):
        ran.append((cache.kinds, cache.seen))
        return forward(*args, cache=cache, **options)

    monkeypatch.setattr(K3ForCausalLM, "forward", watched)
    steps, floors = bench_decode.measure((50, 90), 2, rounds=2)
    assert [seen for _, seen in ran] == [50, 51, 90, 91] * 3 + [92, 93, 52, 53] * 3  # one run is not counted
    assert [kinds for kinds, _ in ran[12::4]] == [kinds for kinds, _ in ran[:12:4]][
        ::-1
    ]  # the second round goes backwards
    assert len({kinds for kinds, _ in ran[:12]}) == 3
    assert {name: [s.tokens for s in of] for name, of in steps.items()} == dict.fromkeys(bench_decode.MODELS, [50, 90])
    assert floors.copy_bytes_s > 0 and floors.product_flop_s > 0


def test_the_best_counts(monkeypatch):
    taken = iter(x for x in (3.0, 2.0, 9.0) for _ in range(5))  # three rounds of copy, product and three models
    monkeypatch.setattr(bench, "seconds", lambda work, repeats: next(taken))
    steps, floors = bench_decode.measure((10,), rounds=3)
    assert [s.seconds for of in steps.values() for s in of] == [2.0] * 3
    assert floors == bench_decode.Floors(2 * 2**16 / 2.0, 2 * 32**3 / 2.0)


def test_rows_and_remarks():
    made = list(bench_decode.cpu_cases((40, 80), (1, 2), rounds=1))
    rows = [x for x in made if isinstance(x, bench.Row)]
    assert [r.case for r in rows[:2]] == ["hybrid 3:1, 40 tokens, batch 1", "hybrid 3:1, 80 tokens, batch 1"]
    assert len(rows) == 8 and all(r.peer == "all-MLA" and r.ratio == r.peer_s / r.ours_s for r in rows)
    remarks = [x for x in made if isinstance(x, str)]
    assert "random latents" in remarks[0] and sum("times the larger" in r for r in remarks) == 2
    assert "caches at 40 tokens, batch 1: all-MLA 0.13 MiB" in remarks[1]
    assert "times the fastest" in remarks[-1]


def test_the_cpu_only():
    with pytest.raises(ValueError, match="device: got 'cuda', wanted 'cpu'"):
        list(bench_decode.cases("cuda"))
