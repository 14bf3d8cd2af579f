"""The bench of generation compares models with the same weights that make the same tokens. No time is asserted."""

import pytest
import torch

from k3lite import bench, bench_generate
from k3lite.bench_generate import Shape
from k3lite.bench_kda import kimi_linear
from k3lite.generate import generate
from tests.helpers import assert_close

SMALL = (Shape("tiny", 32, 4, 2, 8, 1), Shape("tiny batch", 32, 5, 2, 6, 3))


@pytest.fixture(scope="module", params=SMALL, ids=lambda s: s.name)
def given(request):
    """Both models and a prompt of a length that no chunk divides."""
    ours, theirs = bench_generate.pair(kimi_linear([]), request.param.config())
    rng = torch.Generator().manual_seed(1)
    return ours, theirs, torch.randint(3, 128, (request.param.batch, 37), generator=rng)


def test_three_shapes_one_of_them_a_batch():
    assert len(bench_generate.SHAPES) == 3 and max(s.batch for s in bench_generate.SHAPES) == 4
    for shape in bench_generate.SHAPES:
        kinds = shape.config().layer_kinds
        assert kinds == ("kda", "kda", "kda", "mla") * (shape.layers // 4)
        assert shape.config().num_moe_layers == shape.layers - 1


def test_a_pair_has_the_same_weights(given):
    ours, theirs, _ = given
    assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters() + sum(
        b.numel() for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")
    )
    assert torch.equal(ours.model.layers[3].self_attn.o_proj.weight, theirs.model.layers[3].self_attn.o_proj.weight)


@pytest.mark.parametrize("way", bench_generate.WAYS["decode"])
@torch.no_grad()
def test_every_way_of_the_peer_computes_the_same(given, way):
    ours, theirs, ids = given
    bench_generate.run_as(theirs, way)
    assert_close("logits", bench_generate.read(theirs, ids)[1], ours(ids).logits[:, -1], 1e-4)
    assert torch.equal(bench_generate.write(theirs, ids, 9), generate(ours, ids, 9))


@torch.no_grad()
def test_the_peer_decodes_from_its_cache(given):
    _, theirs, ids = given
    cache, _ = bench_generate.read(theirs, ids)
    asked = []
    hook = theirs.register_forward_pre_hook(lambda _, args: asked.append(args[0].shape[1]))
    bench_generate.write(theirs, ids[:, -1:], 4, cache)
    hook.remove()
    assert asked == [1] * 4 and cache.get_seq_length() == 37 + 4


def test_other_tokens_and_weights_are_noticed(given):
    ours, theirs, ids = given
    assert bench_generate.agreement(ours, theirs, ids, 6).startswith(f"{6 * len(ids)} of {6 * len(ids)} greedy tokens")
    head = ours.lm_head.weight.detach()
    with torch.no_grad():
        head.neg_()
        told = bench_generate.agreement(ours, theirs, ids, 6)
        head.neg_()
    assert told.startswith(f"0 of {6 * len(ids)}") and told.endswith("differ by 2.0e+00")


def test_turns_go_over_the_same_tokens(given, monkeypatch):
    """Every decoding has a cache of its own, so none has a longer context than another."""
    ours, theirs, ids = given
    read, written = [], []
    real = bench_generate.write
    monkeypatch.setattr(bench_generate, "write", lambda *x: (written.append(x[3].get_seq_length()), real(*x))[1])
    monkeypatch.setattr(bench_generate, "stream", lambda m, t, n, cache: read.append(cache.seen) or [])
    best = bench_generate.measure(ours, theirs, ids, 3, rounds=1)
    assert read == [37, 37] and written == [37, 40] * 3  # each turn runs twice, the first time uncounted
    assert set(best) == {(what, w) for what, ways in bench_generate.WAYS.items() for w in (*ways, "ours")}


def test_rows_and_remarks():
    made = list(bench_generate.cpu_cases(SMALL, prompt=20, new=4, rounds=1))
    rows = [x for x in made if isinstance(x, bench.Row)]
    assert [r.case.partition(",")[0] for r in rows] == [
        f"{name}: {what}" for name in ("tiny", "tiny batch") for what in ("prefill", "decode")
    ]
    assert all((r.bench, r.peer, r.dtype, r.device) == ("generate", "transformers", "float32", "cpu") for r in rows)
    remarks = [x for x in made if isinstance(x, str)]
    assert "tiny: 4 of 4 greedy tokens are the same in both" in remarks[2]
    assert "tiny batch: 12 of 12 greedy tokens are the same in both" in remarks[5]


def test_the_fastest_way_counts(monkeypatch):
    seconds = {("prefill", "ours"): 2.0, ("prefill", "eager"): 3.0, ("prefill", "grouped_mm"): 5.0}
    seconds |= {("decode", "ours"): 1.0, ("decode", "eager"): 7.0, ("decode", "grouped_mm"): 6.0}
    monkeypatch.setattr(bench_generate, "measure", lambda *x: seconds | {("decode", "batched_mm"): 4.0})
    rows = [x for x in bench_generate.cpu_cases(SMALL[:1], 20, 4) if isinstance(x, bench.Row)]
    assert [r.ratio for r in rows] == [1.5, 4.0]


def test_transformers_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(bench_generate, "kimi_linear", lambda absent: absent.append("not compared with transformers"))
    assert list(bench_generate.cpu_cases(SMALL, 20, 4)) == ["not compared with transformers"]


def test_the_cpu_only():
    with pytest.raises(ValueError, match="device: got 'cuda', wanted 'cpu'"):
        list(bench_generate.cases("cuda"))
