"""Experts on 1, 2 and 4 ranks are the dense model, whatever the ranks hold; mistakes and deaths are everybody's, at once."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from k3lite import parallel
from k3lite.budget import row_bytes
from k3lite.checkpoint import load_model, save_model
from k3lite.config import K3Config
from k3lite.moe import Experts, LatentMoE
from k3lite.parallel import RankExperts, load_shared, save_shared, share_experts
from k3lite.train import Recipe, train

from .helpers import assert_all_close, assert_close, random_model, tiny
from .ranks import World

ROOT = Path(__file__).resolve().parents[1]
SIZES = (1, 2, 4)
TOKENS = 11
CLOSE = {"float32": 1e-5, "float64": 1e-12}


@pytest.fixture(scope="module")
def worlds():
    made: dict[int, World] = {}

    def of(size: int) -> World:
        if size not in made:
            made[size] = World(size)
        return made[size]

    yield of
    for world in made.values():
        world.close()


@pytest.fixture(params=SIZES, ids=lambda size: f"R{size}")
def world(request, worlds):
    return worlds(request.param)


# ---- the layer


def layer_of(kind, dtype="float64", **changes) -> LatentMoE:
    model = random_model(tiny(kind, **{"num_experts": 8} | changes))
    return next(m for m in model.modules() if isinstance(m, LatentMoE)).to(getattr(torch, dtype)).train()


def cut(split, size) -> list[slice]:
    """Which of TOKENS tokens each rank holds."""
    if split == "odd":
        ends = [0, *(round((r + 1) * TOKENS / size) for r in range(size))]
    else:  # all on the last rank, none on the others
        ends = [0] * size + [TOKENS]
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def outputs_and_gradients(layer, x, weighting):
    x = x.clone().requires_grad_()
    y = layer(x)
    layer.zero_grad()
    (y * weighting).sum().backward()
    return y.detach(), x.grad


def rank_layer_is_dense(ranks, kind, dtype, split, favoured):
    layer = layer_of(kind, dtype)
    if favoured is not None:  # every token chooses these two experts: one rank computes all, others nothing
        layer.gate.e_score_correction_bias.data[favoured : favoured + 2] += 10
    shared = share_experts(copy.deepcopy(layer), ranks)
    rng = torch.Generator().manual_seed(1)
    x, weighting = (torch.randn(1, TOKENS, 32, generator=rng, dtype=getattr(torch, dtype)) for _ in range(2))
    mine = cut(split, ranks.size)[ranks.rank]

    y, dx = outputs_and_gradients(layer, x, weighting)
    got_y, got_dx = outputs_and_gradients(shared, x[:, mine], weighting[:, mine])
    assert_close("y", got_y, y[:, mine], CLOSE[dtype])
    assert_close("dx", got_dx, dx[:, mine], CLOSE[dtype])
    ranks.sum_gradients(shared)
    assert_close(
        "norm", ranks.gradient_norm(shared), torch.nn.utils.get_total_norm(grads(layer).values()), CLOSE[dtype]
    )
    want = {name: ranks.mine(g, dict(shared.named_parameters())[name]) for name, g in grads(layer).items()}
    assert_all_close(grads(shared), want, CLOSE[dtype])
    return shared.experts.traffic.rows


def grads(module):
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("split", ["odd", "one has all"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["k3", "linear"])
def test_a_layer_gives_the_dense_outputs_and_gradients(world, kind, dtype, split):
    world.check(rank_layer_is_dense, kind, dtype, split, None)


@pytest.mark.parametrize("favoured", [0, 6])
def test_also_when_one_rank_gets_every_token_and_the_others_none(world, favoured):
    rows = world.check(rank_layer_is_dense, "k3", "float64", "odd", favoured)[0]
    received = rows.sum(0).tolist()
    assert received.count(0) == len(received) - 1 and max(received) == 2 * TOKENS


def ids_across_ranks(ranks):
    """Hazard T17: expert e multiplies by 10^e."""
    config = tiny("linear", num_experts=4, num_experts_per_token=1, hidden_size=1, moe_intermediate_size=1)
    dense = Experts(config)
    dense.act = lambda gate, up: up
    with torch.no_grad():
        dense.w1.zero_(), dense.w3.fill_(1), dense.w2.copy_((10.0 ** torch.arange(4)).view(4, 1, 1))
    experts = RankExperts(dense, ranks)
    tokens, chosen = torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([3, 0, 2, 1, 3])
    mine = [slice(0, 2), slice(2, 5)][ranks.rank]
    y = experts(tokens[mine, None], chosen[mine, None], torch.ones(len(tokens[mine]), 1))
    return y.flatten().tolist()


def test_an_expert_is_the_same_expert_on_every_rank(worlds):
    assert worlds(2).check(ids_across_ranks) == [[1000, 2], [300, 40, 5000]]


def balanced_bias(ranks, rule):
    layer = layer_of("k3", "float64")
    layer.gate.rule, layer.gate.rate = rule, 0.01
    shared = share_experts(copy.deepcopy(layer), ranks)
    x = torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    mask[0, 3] = False
    mine = cut("odd", ranks.size)[ranks.rank]
    before = layer.gate.e_score_correction_bias.clone()
    for _ in range(2):
        layer(x, mask), shared(x[:, mine], mask[:, mine])
        layer.gate.balance(), shared.gate.balance()
    bias = layer.gate.e_score_correction_bias
    assert not torch.equal(bias, before)
    assert_close("bias", shared.gate.e_score_correction_bias, bias, 1e-12)
    return shared.gate.e_score_correction_bias.tolist()


@pytest.mark.parametrize("rule", ["quantile", "histogram", "sign"])
def test_balance_is_kept_over_the_tokens_of_all_ranks(world, rule):
    biases = world.check(balanced_bias, rule)
    assert biases == [biases[0]] * len(biases), "the same bit for bit on every rank"


def bytes_counted(ranks):
    sent, real = [], dist.all_to_all_single

    def counting(out, rows, received, splits):
        away = sum(splits) - splits[ranks.rank]
        sent.append(away * rows[:1].numel() * rows.element_size())
        return real(out, rows, received, splits)

    shared = share_experts(layer_of("k3", "float32"), ranks)
    x = torch.randn(1, 5 + ranks.rank, 32, generator=torch.Generator().manual_seed(ranks.rank))
    try:
        dist.all_to_all_single = counting
        shared(x)
    finally:
        dist.all_to_all_single = real
    return sent, shared.experts.traffic.rows.tolist(), shared.experts.traffic.wire_bytes("fp32")


def test_bytes_on_the_wire_are_those_of_the_latent_rows_that_leave_their_rank(worlds):
    answers = worlds(2).check(bytes_counted)
    _, rows, counted = answers[0]
    assert [sum(row) for row in rows] == [2 * 5, 2 * 6]
    away = rows[0][1] + rows[1][0]
    assert counted == away * 24 * 4, "the latent is 24 wide, the model 32"
    dispatch, combine = (sum(sent[i] for sent, _, _ in answers) for i in (-2, -1))
    assert dispatch == combine == counted


def test_bytes_of_a_row_on_paper():
    k3 = K3Config.preset("kimi-k3")
    k, latent = k3.num_experts_per_token, k3.expert_width
    assert (k * row_bytes(latent, "bf16"), k * row_bytes(latent, "mxfp8")) == (114_688, 59_136)  # k3-architecture §2.7
    assert k * row_bytes(k3.hidden_size, "bf16") == 2 * 114_688
    assert row_bytes(33, "mxfp8") == 35, "a block that is not full has a scale too"
    with pytest.raises(ValueError, match="number: got 'fp4', wanted one of"):
        row_bytes(32, "fp4")


# ---- training and checkpoints

RECIPE = Recipe(steps=4, lr=5e-3, warmup=2, task="ranks")
CONFIG = tiny(layers=3, num_experts=8, dtype="float64")


def batches(step):
    """Five rows: two ranks have three and two. Some labels are not asked, so shares of the loss differ by rank too."""
    ids = torch.randint(48, (5, 9), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, 4:] = -100
    return ids, labels


def fresh():
    return random_model(CONFIG).double()  # gates and convolutions too, whose gradients would be sums in fp32


def train_shared(ranks, folder=None, die_at=None):
    def batch_at(step):
        if step == die_at:
            raise SystemError("killed")
        return batches(step)

    model = share_experts(fresh(), ranks)
    losses = train(model, batch_at, RECIPE, folder=folder, save_every=2, progress=False, ranks=ranks)
    return model, losses


def same_as_one_rank(ranks, folder):
    model, losses = train_shared(ranks)
    dense = fresh()
    want = train(dense, batches, RECIPE, progress=False)
    assert_close("losses", torch.tensor(losses), torch.tensor(want), 1e-10)
    whole = parallel.whole_model(model, ranks)
    assert_all_close(whole.state_dict(), dense.state_dict(), 1e-8)  # AdamW divides by the root of tiny squares
    save_shared(model, folder, ranks)
    return [p.sum().item() for p in whole.parameters()]


def test_training_gives_the_losses_and_weights_of_one_rank(world, tmp_path):
    sums = world.check(same_as_one_rank, tmp_path)
    assert sums == [sums[0]] * len(sums), "replicas never drift apart"
    dense = fresh()
    train(dense, batches, RECIPE, progress=False)
    assert_all_close(load_model(tmp_path).state_dict(), dense.state_dict(), 1e-6)  # read as the config's fp32 gates


def logits_of(ranks, folder):
    model = load_shared(folder, ranks)
    ids = batches(0)[0].tensor_split(ranks.size)[ranks.rank]
    with torch.no_grad():
        return model(ids).logits


def saved_again(ranks, folder, other):
    save_shared(load_shared(folder, ranks), other, ranks)


def test_a_checkpoint_of_any_number_of_ranks_loads_on_any_other(worlds, tmp_path):
    dense = random_model(CONFIG)
    save_model(dense, tmp_path / "1")
    worlds(4).check(saved_again, tmp_path / "1", tmp_path / "4")
    worlds(2).check(saved_again, tmp_path / "4", tmp_path / "2")
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("1", "4", "2")]
    assert weights[0] == weights[1] == weights[2]
    for size in (2, 4):
        logits = torch.cat(worlds(size).check(logits_of, tmp_path / "2"))
        assert_close("logits", logits, dense(batches(0)[0]).logits, 1e-12)
    assert [p.name for p in sorted(tmp_path.rglob("*")) if p.suffix not in (".safetensors", ".json", "")] == []


def killed(ranks, folder, at):
    try:
        train_shared(ranks, folder, die_at=at)
    except SystemError:
        return True


def resumed(ranks, folder):
    model, losses = train_shared(ranks, folder)
    return losses, {n: p for n, p in parallel.whole_model(model, ranks).state_dict().items()}


def test_a_killed_training_ends_bit_for_bit_like_one_that_was_not(worlds, tmp_path):
    world = worlds(2)
    want_losses, want = world.check(resumed, None)[0]
    assert world.check(killed, tmp_path, 3) == [True, True]
    losses, got = world.check(resumed, tmp_path)[0]
    assert losses == want_losses
    assert all(torch.equal(got[name], p) for name, p in want.items())


def test_a_training_goes_on_with_another_number_of_ranks(worlds, tmp_path):
    dense = fresh()
    want = train(dense, batches, RECIPE, progress=False)
    worlds(4).check(killed, tmp_path, 2)
    losses, got = worlds(2).check(resumed, tmp_path)[0]
    assert losses == pytest.approx(want, abs=1e-10)
    assert_all_close(got, dense.state_dict(), 1e-8)
    one = fresh()  # and the finished state is one that a single rank reads
    assert train(one, batches, RECIPE, folder=tmp_path, progress=False) == losses
    assert all(torch.equal(got[name], p) for name, p in one.state_dict().items())


def stopped(ranks, folder):
    def interrupted_on_one(step):
        if step == 1 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return batches(step)

    train(share_experts(fresh(), ranks), interrupted_on_one, RECIPE, folder=folder, progress=False, ranks=ranks)


def test_an_interrupt_of_one_rank_stops_all_after_the_same_step(worlds, tmp_path):
    assert worlds(2).ask(stopped, tmp_path) == ["Stopped: stopped after 2 steps"] * 2
    assert worlds(2).check(resumed, tmp_path)[0][0] == worlds(2).check(resumed, None)[0][0]


# ---- mistakes: one clear error on every rank, and the ranks can go on


def share(ranks, num_experts):
    layer = LatentMoE(tiny(num_experts=num_experts))
    share_experts(layer, ranks)


def nan_on_one(ranks, culprit, value):
    shared = share_experts(layer_of("k3"), ranks)
    x = torch.ones(1, 3, 32, dtype=torch.float64)
    x[0, 1] = value if ranks.rank == culprit else 1
    shared(x)


def bad_id_on_one(ranks, culprit, bad):
    experts = share_experts(layer_of("k3"), ranks).experts
    chosen = torch.tensor([[0, 1], [2, bad if ranks.rank == culprit else 3]])
    experts(torch.ones(2, 24, dtype=torch.float64), chosen, torch.ones(2, 2, dtype=torch.float64))


def top_k(ranks, k):
    experts = share_experts(layer_of("k3"), ranks).experts
    experts(torch.ones(2, 24, dtype=torch.float64), torch.zeros(2, k, dtype=torch.long), torch.ones(2, k))


def top_k_of_a_config(ranks, k):
    tiny(num_experts=8, num_experts_per_token=k)


def wrong_size(ranks):
    parallel.Ranks(3)


def small_batch(ranks):
    ranks.part((torch.ones(3, 8, dtype=torch.long),) * 2)


def folders_differ(ranks, folder):
    train_shared(ranks, folder if ranks.rank == 0 else None)


def damaged(ranks, folder):
    load_shared(folder if ranks.rank else folder / "none", ranks)


def nothing_asked_on_one(ranks):
    ids, labels = batches(0)
    labels = labels.clone()
    labels[:3] = -100
    train(share_experts(fresh(), ranks), lambda step: (ids, labels), RECIPE, progress=False, ranks=ranks)


def auxiliary(ranks):
    layer = layer_of("k3")
    layer.gate.rule = "auxiliary"
    share_experts(layer, ranks)


MISTAKES = [
    (4, share, (3,), "ranks: 4 for 3 experts, wanted no more ranks than experts"),
    (4, share, (6,), "ranks: 4 do not divide 6 experts evenly"),
    (2, nan_on_one, (1, float("nan")), "rank 1: router: got NaN as a logit of token 1"),
    (2, nan_on_one, (0, float("inf")), "rank 0: router: got NaN as a logit of token 1"),
    (4, nan_on_one, (2, float("nan")), "rank 2: router: got NaN as a logit of token 1"),
    (2, bad_id_on_one, (1, 8), "rank 1: experts: got ids 0..8, wanted 0..7"),
    (2, bad_id_on_one, (0, -1), "rank 0: experts: got ids -1..2, wanted 0..7"),
    (2, top_k, (0,), "top-k: got 0 experts a token, wanted 1 to 8"),
    (2, top_k, (9,), "top-k: got 9 experts a token, wanted 1 to 8"),
    (2, top_k_of_a_config, (9,), "num_experts_per_token: got 9, wanted 1 to num_experts (8)"),
    (2, wrong_size, (), "ranks: 2 were started, wanted 3"),
    (4, small_batch, (), "batch: got 3 row(s) for 4 ranks, wanted one each at least"),
    (2, nothing_asked_on_one, (), "rank 0: labels: no token is asked for in this rank's rows"),
    (2, auxiliary, (), "rule: got 'auxiliary', a loss over the tokens of one rank"),
]


def fine(ranks):
    return ranks.gather(torch.tensor([ranks.rank])).tolist()


@pytest.mark.parametrize(("size", "mistake", "args", "message"), MISTAKES, ids=lambda x: getattr(x, "__name__", None))
def test_a_mistake_is_one_clear_error_on_every_rank(worlds, size, mistake, args, message):
    answers = worlds(size).ask(mistake, *args)
    assert answers == [answers[0]] * size, "everybody says the same"
    kind, _, text = answers[0].partition(": ")
    assert kind in ("ValueError", "ConfigError") and text.startswith(message), answers[0]
    assert worlds(size).check(fine) == [list(range(size))] * size, "nobody is left waiting in an exchange"


def test_folders_that_differ_are_an_error(worlds, tmp_path):
    worlds(2).check(killed, tmp_path / "run", 3)
    answers = worlds(2).ask(folders_differ, tmp_path / "run")
    assert answers == ["ValueError: finished steps in the folder: [2, 0] by rank, wanted the same on all "
                       "(a folder that all ranks see)"] * 2  # fmt: skip
    save_model(fresh(), tmp_path / "model")
    answers = worlds(2).ask(damaged, tmp_path / "model")
    assert answers == [answers[0]] * 2 and answers[0].startswith("ValueError: rank 0:") and "none" in answers[0]


def test_where_there_are_no_ranks_it_is_said(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="ranks: none to join; start with torchrun"), parallel.start():
        pass
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(ValueError, match="this PyTorch was built without torch.distributed"), parallel.start():
        pass


def test_it_can_be_imported_where_torch_has_no_distributed():
    code = """
import sys, types, torch
import k3lite.train
bare = types.ModuleType("torch.distributed")
bare.is_available = lambda: False
sys.modules["torch.distributed"] = torch.distributed = bare
from k3lite import parallel
try:
    with parallel.start():
        pass
except ValueError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "ranks: this PyTorch was built without torch.distributed\n"


# ---- a rank that is lost


def lose_rank_1(ranks, when, how):
    shared = share_experts(layer_of("k3", num_experts=6), ranks)
    x = torch.ones(1, 3, 32, dtype=torch.float64, requires_grad=True)

    def lost():
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL) if how == "dies" else signal.pause()

    if when == "before dispatch":
        lost()
    y = shared(x)
    if when == "before backward":
        lost()
    y.sum().backward()


@pytest.mark.parametrize(
    ("when", "how"), [("before dispatch", "dies"), ("before backward", "dies"), ("before backward", "is silent")]
)
def test_a_lost_rank_is_an_error_on_the_others_in_time(when, how):
    world = World(3, timeout=2)
    try:
        for pipe in world.pipes:
            pipe.send((lose_rank_1, (when, how)))
        for rank in (0, 2):  # never a hang: the answer comes, or `_answer` fails
            answer = world._answer(world.pipes[rank])
            assert answer.startswith("RankError: another rank is gone, or silent for 2 s ("), answer
    finally:
        for process in world.processes:
            process.kill()
        world.close()
