"""transformers' Kimi Linear: what it saves loads by name, and both compute the same.

Both sides are fp32 and sum in another order: transformers unrolls the triangular inverse row by row in chunks of 64
and attends with SDPA. Measured: 8e-6 on the logits of the worst token, 1e-4 on the worst gradient. The limits leave
room for another CPU, and a wrong eps in any one norm still breaks them (tried: the weights keep what is normed small).
"""

import copy

import pytest
import torch
from safetensors.torch import load_file

from k3lite.checkpoint import load_model, released_tensors
from tests.helpers import assert_all_close, assert_close, randomise

LOGITS, GRADIENTS = 1e-4, 5e-4


@pytest.fixture(scope="module")
def pair(kimi_linear, tmp_path_factory):
    """The same random weights in both: one dense and five MoE layers, both layer kinds, softplus gate."""
    config = kimi_linear.KimiLinearConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=2,
        num_local_experts=8,
        num_experts_per_tok=3,
        routed_scaling_factor=2.446,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        first_k_dense_replace=1,
        linear_attn_config={
            "kda_layers": [1, 2, 3, 5],
            "full_attn_layers": [4, 6],
            "num_heads": 3,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    )
    theirs = kimi_linear.KimiLinearForCausalLM(config).eval()
    randomise(theirs.state_dict().items(), seed=1)
    folder = tmp_path_factory.mktemp("kimi-linear")
    theirs.save_pretrained(folder)  # config and tensors are read as transformers writes them
    return theirs, load_model(folder)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 96, (2, 100), generator=torch.Generator().manual_seed(2))


def test_config_is_read(pair):
    config = pair[1].config
    assert config.layer_kinds == ("kda", "kda", "kda", "mla", "kda", "mla")
    assert config.num_moe_layers == 5
    assert config.routed_scaling_factor == 2.446
    assert config.linear_attn_config.gate_lower_bound is None


@torch.no_grad()
def test_prefill(pair, ids):
    theirs, ours = pair
    assert_close("logits", ours(ids).logits, theirs(ids).logits, LOGITS)


@torch.no_grad()
def test_prefill_70_then_decode_30(pair, ids):
    theirs, ours = pair
    whole = theirs(ids).logits
    seen, cache = theirs(ids[:, :70], use_cache=True), ours.new_cache(batch=2)
    assert_close("prefill", ours(ids[:, :70], cache=cache).logits, seen.logits, LOGITS)
    for t in range(70, 100):
        seen = theirs(ids[:, t : t + 1], cache=seen.cache, use_cache=True)
        got = ours(ids[:, t : t + 1], cache=cache).logits
        assert_close(f"token {t}", got, seen.logits, LOGITS)
        assert_close(f"token {t} of the whole", got, whole[:, t : t + 1], LOGITS)


def test_loss_and_gradients(pair, ids, tmp_path):
    theirs, ours = (copy.deepcopy(model) for model in pair)
    labels = ids.clone()
    labels[:, :5] = -100
    want = theirs(ids, labels=labels).loss
    want.backward()
    got = ours(ids, labels=labels).loss
    got.backward()
    assert_close("loss", got, want, LOGITS)

    # Written in place of the weights, their gradients get the released names from transformers itself.
    for p in theirs.parameters():
        p.data = p.grad
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    wanted = {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): g for name, g in saved.items()}
    for p in ours.parameters():
        if p.grad is not None:
            p.data = p.grad
    gradients = {n: p for n, p in released_tensors(ours) if "correction_bias" not in n}
    wanted = {n: g.view_as(gradients[n]) for n, g in wanted.items() if "correction_bias" not in n}
    assert_all_close(gradients, wanted, GRADIENTS)
