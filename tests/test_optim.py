"""Muon and AdamW as one: each parameter gets what torch's own optimizer would give it; a killed run ends the same."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from k3lite import train as train_module
from k3lite.checkpoint import CheckpointError
from k3lite.model import K3ForCausalLM
from k3lite.optim import MuonAdamW, is_matrix, matrices, muon_blocks
from k3lite.train import MuonRecipe, OneRank, Recipe, make_optimizer, train

from .small_needle import SMALL, small_batches

RECIPE = MuonRecipe(steps=6, lr=5e-3, warmup=2, task="test", weight_decay=0.1)
BATCHES = small_batches(tokens=256)
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def stepped(model, optimizer, steps=3):
    for seed in range(steps):
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed * 1000 + p.numel()))
            p.grad = noise if p.requires_grad else None
        optimizer.step()


def test_a_plain_model_gets_what_torch_gives_it():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    theirs = copy.deepcopy(ours)
    muon = torch.optim.Muon(
        [p for p in theirs.parameters() if p.dim() == 2], momentum=0.9, adjust_lr_fn="match_rms_adamw", **SETTINGS
    )
    adamw = torch.optim.AdamW(
        [p for p in theirs.parameters() if p.dim() == 1], lr=0.02, betas=(0.9, 0.95), weight_decay=0
    )
    stepped(ours, MuonAdamW(ours, 0.02, 0.1, (0.9, 0.95), 0.9))
    for seed in range(3):  # the same noise: a gradient depends on the parameter's size alone
        for p in theirs.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed * 1000 + p.numel()))
        muon.step()
        adamw.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_each_expert_and_each_head_is_a_matrix_of_its_own():
    model = K3ForCausalLM(SMALL)
    before = copy.deepcopy(model)
    stepped(model, MuonAdamW(model, 0.02, 0.1, (0.9, 0.95), 0.95), steps=1)
    olds = dict(before.named_parameters())
    for name, parts in (
        ("model.layers.1.block_sparse_moe.experts.w1", SMALL.num_experts),
        ("model.layers.0.self_attn.k_proj.weight", 2),
        ("model.layers.1.self_attn.kv_b_proj.weight", 2),
        ("model.layers.0.self_attn.o_proj.weight", 1),
    ):
        new, old = model.get_parameter(name), olds[name]
        noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(old.numel()))
        blocks = zip(
            old.detach().view(parts, -1, old.shape[-1]), noise.view(parts, -1, old.shape[-1]),
            new.view(parts, -1, old.shape[-1]), strict=True,
        )  # fmt: skip
        for alone, gradient, got in blocks:
            alone = alone.clone()
            alone.grad = gradient.clone()
            torch.optim.Muon([alone], momentum=0.95, adjust_lr_fn="match_rms_adamw", **SETTINGS).step()
            assert torch.equal(alone, got), name


def test_who_takes_what():
    model = K3ForCausalLM(SMALL)
    optimizer = make_optimizer(model, RECIPE)
    taken = {name: parts for name, _, parts in muon_blocks(model)}
    assert taken["model.layers.1.block_sparse_moe.experts.w2"] == SMALL.num_experts
    assert taken["model.layers.1.block_sparse_moe.routed_expert_down_proj.weight"] == 1
    for name, p in model.named_parameters():
        adamw = any(p is q for q in optimizer.adamw.param_groups[0]["params"])
        assert adamw + (name in taken) == p.requires_grad, name
    left = (
        "embed_tokens",
        "lm_head",
        "norm.weight",
        "conv1d",
        "A_log",
        "dt_bias",
        ".gate.weight",
        "res_proj",
        ".b_proj",
    )
    assert not any(mark in name for name in taken for mark in left)
    assert all(g["weight_decay"] == 0 for g in optimizer.adamw.param_groups)
    assert not is_matrix("x", torch.zeros(2, 2)), "what takes no gradient is nobody's"


def test_views_share_storage():
    p = torch.zeros(6, 4)
    views = matrices(p, 3)
    views[1].fill_(1)
    assert [tuple(v.shape) for v in views] == [(2, 4)] * 3 and p[2:4].sum() == p.sum() == 8


def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tmp_path):
    def run(folder, batches=BATCHES):
        model = K3ForCausalLM(SMALL)
        return model, train(model, batches, RECIPE, folder=folder, save_every=2, progress=False)

    def killed_at_step_5(step):
        if step == 5:
            raise SystemError("killed")
        return BATCHES(step)

    whole, losses = run(None)
    with pytest.raises(SystemError):
        run(tmp_path, killed_at_step_5)
    resumed, resumed_losses = run(tmp_path)
    assert resumed_losses == losses
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_adamw_is_not_continued_with_muon(tmp_path):
    plain = Recipe(**{f.name: getattr(RECIPE, f.name) for f in dataclasses.fields(Recipe)})
    train(K3ForCausalLM(SMALL), BATCHES, plain, folder=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="belongs to another recipe"):
        train(K3ForCausalLM(SMALL), BATCHES, RECIPE, folder=tmp_path, progress=False)
    assert "momentum" not in dataclasses.asdict(plain), "what AdamW's recipes say stays as it was"


def test_muon_on_several_ranks_is_refused():
    with pytest.raises(ValueError, match="got Muon on several ranks"):
        train(K3ForCausalLM(SMALL), BATCHES, RECIPE, ranks=OneRank(), progress=False)
    assert train_module.ONE_RANK.first
