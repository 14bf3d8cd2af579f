"""The language model's data and ablations: what a step sees, and that each ablation changes its one thing."""

import dataclasses

import pytest
import torch

from k3lite.kda import KimiDeltaAttention
from k3lite.tasks.lm import (
    ABLATIONS,
    FACT_SHARES,
    TEXT_LENGTHS,
    TOKENS_PER_STEP,
    Preset,
    ablated_config,
    batches,
    lm_config,
    lm_model,
    stage_recipe,
    text_third,
)
from k3lite.tasks.needle import DIGITS, IGNORE

PRESET = Preset(text=9, recall=10)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_rows_of_prose_grow_and_depend_on_the_step_alone():
    batch_at = batches("text", stage_recipe("text", PRESET, 0))
    lengths = [batch_at(step)[0].shape[1] for step in range(9)]
    assert lengths == [n for n in TEXT_LENGTHS for _ in range(3)]
    for step in (0, 4, 8):
        ids, labels = batch_at(step)
        assert ids.numel() == TOKENS_PER_STEP and int(ids.max()) < lm_config().vocab_size
        facts = (labels == IGNORE).any(1)
        assert facts.double().mean() == FACT_SHARES[text_third(step, 9)]
        assert torch.equal(ids[~facts], labels[~facts])
        asked = labels[facts]
        assert bool(((asked == IGNORE) | (asked >= ord("0")) & (asked <= ord("9"))).all())
        assert bool((asked[:, -DIGITS:] != IGNORE).all()), "a row ends in an answer"
        assert torch.equal(ids, batch_at(step)[0])
    assert not torch.equal(batch_at(0)[0], batch_at(1)[0])
    assert not torch.equal(batch_at(0)[0], batches("text", stage_recipe("text", PRESET, 1))(0)[0])


def test_the_recall_stage_has_prose_beside_documents():
    batch_at = batches("recall", stage_recipe("recall", PRESET, 0))
    for step in range(10):
        ids, labels = batch_at(step)
        prose = (labels != IGNORE).all(1)
        assert prose.sum() == max(1, len(ids) // 8)
        assert torch.equal(ids[prose], labels[prose]) and not ids[prose].lt(32).logical_and(ids[prose] != 10).any()
        asked = labels[~prose]
        assert bool(((asked == IGNORE) | (asked >= ord("0")) & (asked <= ord("9"))).all())


def changes(a, b):
    return {k for k in a if a[k] != b[k]}


@pytest.mark.parametrize(
    ("ablation", "field"),
    [
        ("no-conv", "short_conv_kernel_size"),
        ("no-output-gate", "mla_use_output_gate"),
        ("ratio-1-1", "kda_layers"),
        ("ratio-all-kda", "kda_layers"),
        ("no-attn-res", "attn_res_block_size"),
        ("no-latent-norm", "latent_moe_use_norm"),
        ("softplus-gate", "gate_lower_bound"),
    ],
)
def test_an_ablation_changes_one_thing_and_runs(ablation, field):
    whole, other = lm_config().to_dict(), ablated_config(ablation).to_dict()
    changed = changes(whole, other) - {"linear_attn_config"}
    changed |= changes(whole["linear_attn_config"], other["linear_attn_config"]) - {"full_attn_layers"}
    assert changed == {field}
    ids = torch.arange(40).view(2, 20) + 60
    model = lm_model(0, ablation)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)
    with torch.no_grad():  # from the cache too, whatever the layers
        model.eval()
        cache = model.new_cache(2)
        both = [model(ids[:, :13], cache=cache).logits, model(ids[:, 13:], cache=cache).logits]
        torch.testing.assert_close(torch.cat(both, 1), model(ids).logits, rtol=1e-3, atol=1e-4)
    assert set(ABLATIONS) >= {ablation}


def test_without_an_output_gate_a_kda_layer_is_its_norm_alone():
    kda = next(m for m in lm_model(0, "no-output-gate").modules() if isinstance(m, KimiDeltaAttention))
    seen = {}
    kda.o_norm.register_forward_hook(lambda _, __, out: seen.update(norm=out))
    kda.o_proj.register_forward_hook(lambda _, inputs, __: seen.update(gated=inputs[0]))
    kda(torch.randn(1, 5, 96))
    torch.testing.assert_close(seen["gated"], seen["norm"].flatten(-2) / 2)
    torch.testing.assert_close(kda.o_norm.weight, torch.full_like(kda.o_norm.weight, 2.0))
    assert not kda.g_proj.weight.requires_grad


def test_an_unknown_ablation_is_refused():
    with pytest.raises(ValueError, match="ablation: got 'no-head', wanted one of no-conv"):
        ablated_config("no-head")


def test_recipes_name_the_ablation():
    plain, other = (stage_recipe("text", PRESET, 0, a) for a in (None, "no-conv"))
    assert dataclasses.replace(plain, task=other.task) == other and plain.task != other.task
