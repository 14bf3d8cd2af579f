"""The published figures of K3 and Kimi Linear come out of the released fields (shared sheet §3; hazards T10, T16)."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from k3lite import budget
from k3lite.cache import K3Cache
from k3lite.config import K3Config, presets
from k3lite.model import K3ForCausalLM
from tests.helpers import tiny

K3 = K3Config.preset("kimi-k3")
LINEAR = K3Config.preset("kimi-linear-48b")
FP32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
MILLION = 1_048_576  # the context limit of both


# ---- parameters


def test_k3_by_part():
    assert budget.parameters(K3) == {
        "embed_tokens": 1_174_405_120,
        "lm_head": 1_174_405_120,
        "kda": 30_618_088_704 - 69 * 32,  # the files pad 96 decay rates to 128
        "mla": 5_572_706_304,
        "norms": 1_340_416,
        "attn_res": 2_680_832,
        "dense_mlp": 726_663_168,
        "router": 590_955_008,
        "latent": 4_727_310_336,
        "shared_experts": 12_155_092_992,
        "routed_experts": 2_722_740_830_208,
    }


def test_k3_by_layer():
    assert budget.kda_layer_parameters(K3) == 443_740_384
    assert budget.mla_layer_parameters(K3) == 232_196_096
    assert budget.expert_parameters(K3) == 33_030_144
    assert K3.num_moe_layers * K3.num_experts == 82_432


def test_k3_totals():
    assert sum(budget.parameters(K3).values()) == 2_779_484_476_000
    assert budget.active_parameters(K3) == 104_189_612_640
    assert budget.active_parameters(K3, input_embedding=True) == 105_364_017_760
    assert budget.active_parameters(K3) - budget.parameters(K3)["lm_head"] == 103_015_207_520


def test_t16_experts_work_on_the_latent():
    routed = budget.parameters(K3)["routed_experts"]
    assert routed * K3.num_experts_per_token // K3.num_experts == 48_620_371_968
    full = dataclasses.replace(K3, routed_expert_hidden_size=None, latent_moe_use_norm=False)
    assert budget.parameters(full)["routed_experts"] == 5_445_481_660_416
    assert budget.parameters(full)["latent"] == 0


def test_kimi_linear_totals():
    assert sum(budget.parameters(LINEAR).values()) == 49_122_681_728
    assert budget.active_parameters(LINEAR, input_embedding=True) == 3_484_459_904
    assert budget.active_parameters(LINEAR) == 3_106_972_544
    assert budget.active_parameters(LINEAR) - budget.parameters(LINEAR)["lm_head"] == 2_729_485_184


def test_k3_tiny_totals():
    config = K3Config.preset("k3-tiny")
    assert sum(budget.parameters(config).values()) == 125_988
    assert budget.active_parameters(config) == 107_556


# ---- bytes of a checkpoint


def test_bytes_of_k3s_checkpoint():
    """k3-architecture §3.4. The released files pad 69 x (128 - 96) decay rates in fp32."""
    made, padding = budget.checkpoint_bytes(K3), 69 * 32 * 4
    assert (made.experts, made.scales) == (1_361_370_415_104, 85_085_650_944)
    assert made.routed == 1_446_456_066_048 and made.rest + padding == 113_509_540_864
    vision = 2 * (401_214_464 + 46_144_512)
    assert made.total + padding + vision == 1_560_860_324_864
    assert made.routed / (made.total + padding + vision) == pytest.approx(0.9267, abs=5e-5)


def test_what_packing_saves():
    plain = budget.checkpoint_bytes(dataclasses.replace(K3, quantization_config=None))
    packed = budget.checkpoint_bytes(K3)
    assert plain.experts == plain.routed == 5_445_481_660_416 and plain.scales == 0 and plain.rest == packed.rest
    assert packed.routed / plain.routed == 17 / 64  # 4.25 bits of 16: 26.56 %
    assert plain.routed / packed.routed == pytest.approx(3.765, abs=5e-4)
    stored = sum(budget.parameters(K3).values())
    assert 8 * packed.routed / budget.parameters(K3)["routed_experts"] == 4.25
    assert 8 * packed.total / stored == pytest.approx(4.49, abs=5e-3)


def test_bytes_of_one_expert_and_of_those_a_token_meets():
    assert budget.expert_bytes(K3) == 17_547_264
    assert K3.num_moe_layers * K3.num_experts_per_token * budget.expert_bytes(K3) == 25_829_572_608
    assert budget.expert_bytes(LINEAR) == 2 * budget.expert_parameters(LINEAR)


@pytest.mark.parametrize("kind", ["k3", "linear"])
@pytest.mark.parametrize("dtype, number_bytes", [("float32", 4), ("bfloat16", 2)])
def test_bytes_are_those_of_the_tensors(kind, dtype, number_bytes):
    config = tiny(kind, dtype=dtype)
    with torch.device("meta"):
        tensors = K3ForCausalLM(config).state_dict()
    made = budget.checkpoint_bytes(config, number_bytes)
    assert made.total == sum(t.numel() * t.element_size() for t in tensors.values())
    assert budget.fp32_numbers(config) == sum(t.numel() for n, t in tensors.items() if n.endswith(FP32))


CONFIGS = {name: K3Config.preset(name) for name in presets()} | {
    "tiny-k3": tiny("k3"),
    "tiny-linear": tiny("linear"),
    "all-dense": tiny("k3", num_experts=0, num_experts_per_token=0, num_shared_experts=0),
    "late-and-sparse-moe": tiny("k3", layers=9, first_k_dense_replace=3, moe_layer_freq=2),
    "no-shared-experts": tiny("linear", num_shared_experts=0),
    "all-mla": K3.all_mla_twin(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_budget_is_the_model(name):
    """Part by part, against the tensors of the model that is really built."""
    with torch.device("meta"):
        model = K3ForCausalLM(CONFIGS[name])
    built = model.parameter_parts()
    assert {k: v for k, v in budget.parameters(CONFIGS[name]).items() if v} == built
    assert sum(built.values()) == sum(p.numel() for p in model.parameters())


# ---- cache


def test_t10_layers():
    assert (K3.num_kda_layers, K3.num_mla_layers) == (69, 24)
    assert K3.layer_kinds[-2:] == ("mla", "mla")
    assert [i for i, kind in enumerate(K3.layer_kinds) if kind == "mla"] == [*range(3, 92, 4), 92]
    assert (LINEAR.num_kda_layers, LINEAR.num_mla_layers) == (20, 7)


def test_t10_k3_cache():
    cache = budget.cache_bytes(K3, MILLION)
    assert cache.latent == 28_991_029_248 == 27 * budget.GIB
    assert cache.state == 434_110_464 == 414 * budget.MIB
    assert cache.conv == 15_261_696
    assert cache.total == 29_440_401_408
    assert budget.cache_bytes(K3, 1).latent == 27_648
    assert budget.cache_bytes(K3, 4096).latent == 108 * budget.MIB
    assert budget.cache_bytes(K3, 4096, number_bytes=4).latent == 216 * budget.MIB
    assert budget.cache_bytes(K3, 0, number_bytes=4).conv == 30_523_392
    assert budget.cache_bytes(K3, 15_701).latent < cache.state < budget.cache_bytes(K3, 15_702).latent


def test_cache_of_a_batch():
    one, five = (budget.cache_bytes(K3, 1000, batch=n) for n in (1, 5))
    assert five == budget.CacheBytes(5 * one.latent, 5 * one.state, 5 * one.conv)


def test_k3_against_other_layouts():
    twin = K3.all_mla_twin()
    assert budget.cache_bytes(twin, 1) == budget.CacheBytes(107_136, 0, 0)
    assert budget.cache_bytes(twin, MILLION).total == 112_340_238_336 == 104.625 * budget.GIB
    assert budget.mha_cache_bytes(93, 96, 128, 1) == 4_571_136
    assert budget.mha_cache_bytes(93, 96, 128, MILLION) == 4_793_183_502_336
    whole = budget.cache_bytes(K3, MILLION).total
    assert 112_340_238_336 / whole == pytest.approx(3.82, abs=0.005)
    assert 4_793_183_502_336 / whole == pytest.approx(162.8, abs=0.05)
    assert 4_571_136 / 27_648 == pytest.approx(165.3, abs=0.05)


@pytest.mark.parametrize(
    "tokens, saved", [(1024, -335), (4096, -28), (8192, 23), (32_768, 61), (131_072, 71), (MILLION, 73.8)]
)
def test_up_to_75_percent_depends_on_the_context(tokens, saved):
    whole, twin = (budget.cache_bytes(c, tokens).total for c in (K3, K3.all_mla_twin()))
    assert 100 * (1 - whole / twin) == pytest.approx(saved, abs=0.5)


def test_kimi_linear_cache():
    assert budget.cache_bytes(LINEAR, 1).latent == 8_064
    assert budget.cache_bytes(LINEAR, MILLION).latent == 7.875 * budget.GIB
    assert budget.cache_bytes(LINEAR.all_mla_twin(), MILLION).total == 30.375 * budget.GIB
    assert budget.cache_bytes(LINEAR, 0).state == 40 * budget.MIB
    assert 1 - 8_064 / budget.cache_bytes(LINEAR.all_mla_twin(), 1).total == pytest.approx(0.7407, abs=5e-5)


def test_break_even():
    assert budget.break_even_tokens(K3) == 5_461
    assert budget.break_even_tokens(K3, conv=True) == 5_653
    assert budget.break_even_tokens(K3, state_bytes=2) == 2_730  # 2,730.67: the sheet rounds it, this is the floor
    assert budget.break_even_tokens(K3.all_mla_twin()) is None
    for tokens, cheaper in ((5_461, False), (5_462, True)):
        k3, twin = budget.cache_bytes(K3, tokens), budget.cache_bytes(K3.all_mla_twin(), tokens)
        assert (k3.latent + k3.state < twin.latent) is cheaper


def test_other_head_layouts():
    assert budget.mha_cache_bytes(1, 1, 64, 1) == 256  # K and V, two bytes each
    gqa, mqa = (budget.mha_cache_bytes(93, heads, 128, 1) for heads in (8, 1))
    assert (4_571_136 // gqa, 4_571_136 // mqa) == (12, 96)
    for tokens, kept in ((4095, 4095), (4096, 4096), (MILLION, 4096)):
        assert budget.mha_cache_bytes(93, 8, 128, tokens, window=4096) == kept * gqa


def test_pages_round_latents_up_and_cost_a_table():
    page = 64 * 27_648  # 64 tokens of K3
    one = budget.paged_cache_bytes(K3, 1)
    assert (one.latent, one.table) == (page, 4) and one.total == one.latent + one.state + one.conv + one.table
    full, more = budget.paged_cache_bytes(K3, 128), budget.paged_cache_bytes(K3, 129)
    assert full.latent == budget.cache_bytes(K3, 128).latent == 2 * page and more.latent == 3 * page
    assert budget.paged_cache_bytes(K3, 129, page_size=1).latent == budget.cache_bytes(K3, 129).latent
    whole = budget.paged_cache_bytes(K3, MILLION)
    assert whole.latent == 27 * budget.GIB and whole.table == 64 * budget.KIB
    assert budget.paged_cache_bytes(LINEAR, 100, 3).table == 3 * 2 * 4


def test_pages_that_are_shared_are_counted_once():
    page = 64 * 27_648
    for tokens, shared, pages in ((1000, 0, 64), (1000, 1000, 16), (1001, 1000, 15 + 4), (1025, 1024, 16 + 4)):
        held = budget.paged_cache_bytes(K3, tokens, 4, shared=shared)
        assert held.latent == pages * page, (tokens, shared)
        assert held.state == budget.cache_bytes(K3, 0, 4).state, "a state is shared by nobody"
        assert held.table == 4 * budget.pages_of(tokens, 64) * 4
    with pytest.raises(ValueError, match="shared: got 5 tokens, wanted 0 to 4"):
        budget.paged_cache_bytes(K3, 4, shared=5)


def test_longest_context():
    assert budget.longest_context(100, 10, 35) == 6
    assert budget.longest_context(100, 10) == 10
    assert budget.longest_context(34, 10, 35) == 0
    assert budget.longest_context(100, 0, 35) is None
    fixed = budget.cache_bytes(K3, 0).total
    tokens = budget.longest_context(80 * budget.GIB, 27_648, fixed)
    assert budget.cache_bytes(K3, tokens).total <= 80 * budget.GIB < budget.cache_bytes(K3, tokens + 1).total


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_an_empty_cache_has_the_predicted_size(name, dtype):
    """Counted on meta tensors, so for K3 itself too. (`test_model` fills the caches of small models.)"""
    config = CONFIGS[name]
    cache = K3Cache.empty(config, 3, dtype, "meta")
    predicted = budget.cache_bytes(config, 0, batch=3, number_bytes=dtype.itemsize)
    assert cache.bytes() == predicted
    assert cache.nbytes() == predicted.total


# ---- work


def test_k3_decodes_one_token_after_a_million():
    step = budget.forward_work(K3, 1, MILLION)
    assert step.weight_flops == 2 * 104_189_612_640
    assert budget.mla_attention_flops(K3, 1, MILLION - 1) == 2 * 96 * (576 + 512) * MILLION == 219_043_332_096
    assert step.memory_flops == pytest.approx(5.26e12, rel=0.001)  # the sheet's figure, §3.4
    assert budget.weight_bytes(K3, 1) == 25_829_572_608 + 113_487_291_584 - 2 * 1_174_405_120
    constant = budget.cache_bytes(K3, 0).total
    assert step.cache_bytes == budget.cache_bytes(K3, MILLION + 1).total + constant, "states are read and written"
    assert budget.forward_work(K3, 4).cache_bytes == budget.cache_bytes(K3, 4).total, (
        "at first there is nothing to read"
    )


def test_a_prefill_meets_every_weight_once_and_makes_logits_once():
    one, many = budget.forward_work(K3, 1), budget.forward_work(K3, 100_000)
    head = budget.parameters(K3)["lm_head"]
    assert many.weight_flops == 100_000 * (one.weight_flops - 2 * head) + 2 * head
    packed = 2_722_740_830_208 * 17 // 32
    assert many.weight_bytes == 113_487_291_584 - 2 * 1_174_405_120 + packed
    assert budget.experts_met(K3, 1) == pytest.approx(16) and budget.experts_met(K3, 10**6) == 896
    assert budget.experts_met(K3, 2) == pytest.approx(32 - 16 * 16 / 896)


def test_a_batch_shares_weights_and_no_cache():
    one, eight = (
        budget.forward_work(LINEAR.all_mla_twin(), 1, 1000),
        budget.forward_work(LINEAR.all_mla_twin(), 1, 1000, batch=8),
    )
    assert eight.flops == 8 * one.flops and eight.cache_bytes == 8 * one.cache_bytes
    assert one.weight_bytes < eight.weight_bytes < 8 * one.weight_bytes
    dense = dataclasses.replace(LINEAR, num_experts=0, num_experts_per_token=0, num_shared_experts=0)
    assert budget.weight_bytes(dense, 8) == budget.weight_bytes(dense, 1)


def test_roofline_time_is_the_larger_part():
    step = budget.Work(weight_flops=60, memory_flops=40, weight_bytes=15, cache_bytes=5)
    assert (step.flops, step.bytes, step.intensity) == (100, 20, 5.0)
    assert (step.seconds(10, 4), step.seconds(10, 1)) == (10.0, 20.0)


def counted(config, new: int, tokens: int) -> int:
    """FLOPs of the products that the real model makes, as torch counts them."""
    model, ids = K3ForCausalLM(config).eval(), torch.ones(1, max(new, tokens), dtype=torch.long)
    cache = model.new_cache()
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        if tokens:
            model(ids[:, :tokens], cache=cache, logits_to_keep=1)
        before = flops.get_total_flops()
        model(ids[:, :new], cache=cache, logits_to_keep=1)
    return flops.get_total_flops() - before


@pytest.mark.parametrize("kind", ["k3", "linear"])
def test_work_is_what_the_model_multiplies(kind):
    """All-MLA, where every product is a matrix product: the growth with the context exactly, the rest but for norms."""
    config = tiny(kind).all_mla_twin()
    for new, tokens in ((1, 40), (1, 90)):
        growth = counted(config, new, tokens + 10) - counted(config, new, tokens)
        assert (
            growth
            == budget.forward_work(config, new, tokens + 10).flops - budget.forward_work(config, new, tokens).flops
            > 0
        )
    real, paper = counted(config, 1, 40), budget.forward_work(config, 1, 40).flops
    assert 0.98 * paper <= real <= paper, "paper counts norms and gates as products too"


def test_work_needs_a_token():
    with pytest.raises(ValueError, match="forward_work: got new=0, tokens=0, batch=1, wanted at least 1, 0, 1"):
        budget.forward_work(K3, 0)


def test_attention_takes_the_cheaper_form_and_a_state_costs_the_same_at_any_context():
    pairs = 8192 * 8193 // 2
    assert budget.mla_attention_flops(K3, 8192, 0) == 2 * 96 * (192 + 128) * pairs, "expanded: nothing to unfold again"
    assert budget.mla_attention_flops(K3, 1, 8192) == 2 * 96 * (576 + 512) * 8193, "absorbed"
    for tokens in (0, 1000):
        step = budget.forward_work(K3, 1, tokens)
        assert step.memory_flops - 24 * budget.mla_attention_flops(K3, 1, tokens) == 69 * 11_010_048
