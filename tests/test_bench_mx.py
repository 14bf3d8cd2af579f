"""The MX bench gives everyone the same work and names who is missing. No time is asserted."""

import itertools

import pytest
import torch

from k3lite import bench, bench_mx
from k3lite.mx import encode, pack_mxfp4, unpack_mxfp4


@pytest.fixture
def w():
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def test_everybody_packs_the_same_matrix(w):
    """compressed-tensors rounds some scales up, so its bytes are compared where they agree; torchao's all agree."""
    absent = []
    (_, ao), (_, ct) = bench_mx._torchao(w, absent), bench_mx._compressed_tensors(w, absent)
    assert absent == []
    packed, scales = pack_mxfp4(w)
    their_scales, codes = ao["pack fp32 to MXFP4"]()
    assert torch.equal(codes, packed) and torch.equal(their_scales.view(torch.uint8), scales)
    assert torch.equal(ao["unpack MXFP4 to bf16"](), unpack_mxfp4(packed, scales, torch.bfloat16))
    assert torch.equal(ao["encode fp32 in MXFP8 E4M3"]()[1].view(torch.uint8), encode(w, "e4m3")[0])
    theirs, same = ct["pack fp32 to MXFP4"](), None
    same = (theirs["weight_scale"] == scales).repeat_interleave(16, 1)
    assert same.any() and torch.equal(theirs["weight_packed"][same], packed[same])
    back = ct["unpack MXFP4 to bf16"]()["weight"]
    assert torch.equal(back, unpack_mxfp4(theirs["weight_packed"], theirs["weight_scale"], torch.bfloat16))


def test_turns_and_medians(monkeypatch):
    taken = itertools.chain([1.0, 10.0, 5.0, 30.0, 2.0, 20.0])
    order = []
    monkeypatch.setattr(bench, "seconds", lambda work, device, repeats: work() or next(taken))
    works = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    assert bench_mx.turns(works, 3) == {"a": 2.0, "b": 20.0}
    assert order == ["a", "b"] * 3


def test_rows_and_remarks(w, monkeypatch):
    monkeypatch.setattr(bench, "seconds", lambda work, device, repeats: work() is None or 1.0)
    monkeypatch.setattr(bench_mx, "OUT", 8)
    monkeypatch.setattr(bench_mx, "IN", 64)
    made = list(bench_mx.cases("cpu"))
    rows = [x for x in made if isinstance(x, bench.Row)]
    assert [(r.case.split(" [")[0], r.peer) for r in rows] == [
        ("pack fp32 to MXFP4", "torchao"),
        ("pack fp32 to MXFP4", "compressed-tensors"),
        ("unpack MXFP4 to bf16", "torchao"),
        ("unpack MXFP4 to bf16", "compressed-tensors"),
        ("encode fp32 in MXFP8 E4M3", "torchao"),
        *((f"packed product, {n} tokens", "dense bf16") for n in bench_mx.TOKENS),
    ]
    assert [x for x in made if isinstance(x, str)] == ["weights [8, 64]: 272 bytes packed, 1,024 in bf16, 26.6%"]
    assert all(r.bench == "mx" for r in rows)


def test_who_is_missing_is_named(w, monkeypatch):
    monkeypatch.setattr(bench, "imported", lambda module, absent: absent.append(f"without {module}"))
    made = list(bench_mx.conversions(w, 1))
    assert [m.split(".")[0] for m in made] == ["without torchao", "without compressed_tensors"]
