"""The macro-cycle: its rows sum to the budget of the whole model, and the drawing says what the rows say."""

from __future__ import annotations

import dataclasses

import pytest

from k3lite import budget
from k3lite.attn_res import sources_per_read
from k3lite.config import K3Config, presets
from tests.helpers import tiny
from widgets.macro_cycle import compute, cycles, describe, figure

K3 = K3Config.preset("kimi-k3")
CONFIGS = {name: K3Config.preset(name) for name in presets()} | {
    "all-MLA": K3.all_mla_twin(),
    "dense": tiny("k3", num_experts=0, num_experts_per_token=0, num_shared_experts=0),
    "sparse-moe": tiny("k3", layers=9, first_k_dense_replace=3, moe_layer_freq=2),
}


def test_cycles_of_k3():
    every = cycles(K3)
    assert len(every) == 24 and every[0] == (0, 1, 2, 3) and every[22] == (88, 89, 90, 91) and every[23] == (92,)
    assert cycles(K3Config.preset("kimi-linear-48b"))[-1] == (24, 25, 26)
    kda = dataclasses.replace(K3.linear_attn_config, kda_layers=tuple(range(2, 94)), full_attn_layers=(1,))
    assert cycles(dataclasses.replace(K3, linear_attn_config=kda))[-1] == tuple(range(1, 93))


def test_the_second_cycle_of_k3():
    rows = compute(K3, 2, 131_072).rows
    kinds = [row.kind for row in rows]
    assert kinds == ["read", "kda", "read", "moe", "experts"] * 3 + ["read", "mla", "read", "moe", "experts"]
    assert [row.layer for row in rows] == [4] * 5 + [5] * 5 + [6] * 5 + [7] * 5
    kda, mla, experts, read = rows[1], rows[16], rows[4], rows[0]
    assert (kda.parameters, kda.token_bytes, kda.fixed_bytes) == (443_740_384 + 7168, 0, 6 * 2**20 + 221_184)
    assert kda.flops == 2 * kda.parameters + 7 * 96 * 128**2
    assert (mla.parameters, mla.token_bytes, mla.fixed_bytes) == (232_196_096 + 7168, 1152, 0)
    assert mla.flops == 2 * mla.parameters + 2 * 96 * (576 + 512) * 131_073
    assert (experts.parameters, experts.met, experts.bits, experts.experts) == (
        29_595_009_024,
        16 * 33_030_144,
        4.25,
        (16, 896),
    )
    assert (read.sources, read.parameters, read.flops) == (2, 14_336, 4 * 7168 * 2)
    assert rows[3].parameters == 6_423_424 + 51_383_808 + 132_120_576 + 7168 and rows[3].bits == 16


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tokens", [0, 4096])
def test_all_cycles_sum_to_the_budget(name, tokens):
    c = CONFIGS[name]
    rows = [row for n in range(1, len(cycles(c)) + 1) for row in compute(c, n, tokens).rows]
    parts, d = budget.parameters(c), c.hidden_size
    final = 3 * d if c.attn_res_block_size else d  # norm, and the last read's norm and query
    ends = parts["embed_tokens"] + parts["lm_head"] + final
    assert sum(row.parameters for row in rows) + ends == sum(parts.values())
    assert sum(row.met for row in rows) + final + parts["lm_head"] == budget.active_parameters(c)
    width = {"float32": 4, "bfloat16": 2}[c.dtype]
    cache = budget.cache_bytes(c, 1, 1, width)
    assert sum(row.token_bytes for row in rows) == cache.latent
    assert sum(row.fixed_bytes for row in rows) == cache.state + cache.conv
    # The budget counts a read as a product with its norm and query, not source by source.
    flops = sum(2 * row.parameters if row.kind == "read" else row.flops for row in rows)
    assert flops + 2 * (final + parts["lm_head"]) == budget.forward_work(c, 1, tokens).flops
    sources = [row.sources for row in rows if row.kind == "read"]
    assert sources == (
        sources_per_read(c.num_hidden_layers, c.attn_res_block_size)[:-1] if c.attn_res_block_size else []
    )


def test_reads_of_k3():
    rows = [row for n in range(1, 25) for row in compute(K3, n).rows if row.kind == "read"]
    assert len(rows) == 186 and {row.sources for row in rows} == set(range(1, 10))


@pytest.mark.parametrize(
    "values, message",
    [
        ((K3, 0), "cycle: got 0, wanted a whole number from 1 to 24"),
        ((K3, 25), "cycle: got 25"),
        ((K3, 1, -1), "tokens: got -1, wanted a whole number from 0"),
    ],
)
def test_nonsense_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        compute(*values)


def test_words():
    text = describe(compute(K3, 2)).splitlines()
    assert text[0] == "Cycle 2 of 24, layers 4 to 7, one token after 131,072 others:" and len(text) == 21
    assert text[1] == "layer 4: AttnRes read of 2 depths; 14.34k parameters, 16 bits each; keeps nothing; 57.34 kFLOP"
    assert text[2] == "layer 4: KDA; 443.7M parameters, 16 bits each; keeps 6.211 MiB, always; 898.5 MFLOP"
    assert text[5] == (
        "layer 4: routed experts; 29.6B parameters of which a token meets 528.5M, 4.25 bits each; keeps nothing; 1.057 GFLOP"
    )
    assert "layer 7: gated MLA; 232.2M parameters, 16 bits each; keeps 1,152 B a token; 27.85 GFLOP" in text
    assert describe(compute(K3, 24)).startswith("Cycle 24 of 24, layer 92,")
    assert "layer 0: dense MLP" in describe(compute(K3, 1))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_drawing_has_a_box_for_each_row(name):
    cycle = compute(CONFIGS[name], 1)
    fig = figure(cycle)
    assert len(fig.data) == len(cycle.rows)
    for trace, row in zip(fig.data, cycle.rows, strict=True):
        assert trace.text in {
            f"layer {row.layer}: {line.split(': ', 1)[1]}" for line in describe(cycle).splitlines()[1:]
        }
        assert (trace.fillpattern.shape == "/") is (row.bits < 8) and trace.x[0] < cycle.layers.index(
            row.layer
        ) < trace.x[1]
    assert sum(trace.showlegend for trace in fig.data) == len({row.kind for row in cycle.rows})
    texts = [a.text for a in fig.layout.annotations]
    assert [t for t in texts if t.startswith("layer ")] == [f"layer {n}" for n in cycle.layers]


def test_boxes_of_a_column_stand_on_each_other():
    fig = figure(compute(K3, 2))
    for column in range(4):
        boxes = [t for t in fig.data if t.x[0] < column < t.x[1]]
        assert len(boxes) == 5 and all(a.y[2] <= b.y[0] for a, b in zip(boxes, boxes[1:], strict=False))
    caption = next(a.text for a in fig.layout.annotations if "gated MLA" in a.text)
    assert caption == "<b>gated MLA</b><br>232.2M parameters<br>27.85 GFLOP<br>keeps 1,152 B a token"
    assert fig.layout.title.text == "<b>Cycle 2 of 24: 3 KDA, 1 MLA; one token after 131,072 others</b>"
