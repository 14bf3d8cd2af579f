"""transformers' Kimi Linear: what it saves loads by name, and both compute the same.

Both sides are fp32 and sum in another order: transformers unrolls the triangular inverse row by row in chunks of 64
and attends with SDPA. Measured: 4e-6 on logits, 3e-5 on the gradient of a decay rate (the worst). The limits leave a
factor of five for another CPU.
"""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3lite.checkpoint import load_model, released_tensors
from tests.helpers import assert_all_close, assert_close, randomise

LOGITS, GRADIENTS = 2e-5, 2e-4

# Written by transformers, unknown to K3Config: each repeats another field, or asks for nothing when it has this value.
TRANSFORMERS_ONLY = {
    "attention_bias": False,
    "output_router_logits": False,
    "pretraining_tp": 1,
    "qk_head_dim": 24,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
}


def save(model, folder):
    """save_pretrained, with two things set right that transformers 5.24 writes in its own way."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in TRANSFORMERS_ONLY.items():
        assert config.pop(name) == value
    path.write_text(json.dumps(config))
    # It turns every `mlp` back into `block_sparse_moe`, that of the dense layer too; the released name is `mlp`.
    path = folder / "model.safetensors"
    dense = "layers.0.block_sparse_moe."
    tensors = {name.replace(dense, "layers.0.mlp."): t.clone() for name, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


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
    save(theirs, folder)
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
    save(theirs, tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    for p in ours.parameters():
        if p.grad is not None:
            p.data = p.grad
    gradients = {n: p for n, p in released_tensors(ours) if "correction_bias" not in n}
    wanted = {n: g.view_as(gradients[n]) for n, g in wanted.items() if "correction_bias" not in n}
    assert_all_close(gradients, wanted, GRADIENTS)
