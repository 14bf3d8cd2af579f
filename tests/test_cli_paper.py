"""`k3lite params` and `k3lite budget`: the figures of k3-architecture §3, and one line for nonsense."""

import dataclasses
import json
import re

import pytest

from k3lite import budget
from k3lite.cli import main
from k3lite.cli_paper import params_text, read_config, with_precision
from k3lite.config import PRESET_DIR, K3Config, presets

K3 = K3Config.preset("kimi-k3")


def said(capsys, *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def params():
    return params_text("kimi-k3", K3)


@pytest.mark.parametrize(
    "line",
    [
        "kimi-k3: 93 layers, 69 KDA and 24 MLA, 92 with experts",
        "embed_tokens 1,174,405,120 1,174,405,120",
        "lm_head 1,174,405,120 1,174,405,120",
        "mla 5,572,706,304 5,572,706,304",
        "norms 1,340,416 1,340,416",
        "attn_res 2,680,832 2,680,832",
        "dense_mlp 726,663,168 726,663,168",
        "router 590,955,008 590,955,008",
        "latent 4,727,310,336 4,727,310,336",
        "shared_experts 12,155,092,992 12,155,092,992",
        "routed_experts 2,722,740,830,208 48,620,371,968",
        "total 2,779,484,476,000 105,364,017,760",
        "all that a token meets 105,364,017,760",
        "without the input embedding, as published 104,189,612,640",
        "without embedding and head 103,015,207,520",
        "routed experts, MXFP4 codes 1,361,370,415,104 1.24 TiB",
        "their scales 85,085,650,944 79.2 GiB",
        "one routed expert 17,547,264 16.7 MiB",
        "4.49 bits a parameter, 28.06% of bf16 throughout",
        "the released layout pads A_log by 2,208 numbers: 2,779,484,478,208 stored, everything else 113,509,540,864 "
        "bytes, all of it 1,559,965,606,912",
    ],
)
def test_params_of_k3_are_the_sheets(params, line):
    assert line in [" ".join(row.split()) for row in params.splitlines()]


def test_the_released_total_is_text_and_vision(params):
    """1,560,860,324,864 bytes with the vision tower and the projector, in bf16 (§3, §1.1)."""
    text = int(re.search(r"all of it ([\d,]+)$", params).group(1).replace(",", ""))
    assert text + 2 * (401_214_464 + 46_144_512) == 1_560_860_324_864


def test_params_of_kimi_linear(capsys):
    out = said(capsys, "params", "kimi-linear-48b")
    for figure in ("49,122,681,728", "3,484,459,904", "3,106,972,544", "2,729,485,184", "routed experts, bf16"):
        assert figure in out
    assert "pads" not in out and "MXFP4" not in out


@pytest.mark.parametrize("name", presets())
def test_parts_sum_for_every_preset(capsys, name):
    rows = re.findall(r"^(\w+) +([\d,]+) +([\d,]+)$", said(capsys, "params", name), re.MULTILINE)
    numbers = {part: tuple(int(n.replace(",", "")) for n in both) for part, *both in rows}
    total = numbers.pop("total")
    assert total == tuple(map(sum, zip(*numbers.values(), strict=True)))
    assert total[0] == sum(budget.parameters(K3Config.preset(name)).values())


def test_budget_at_a_million_tokens_is_the_sheets(capsys):
    rows = [" ".join(row.split()) for row in said(capsys, "budget", "kimi-k3").splitlines()]
    for line in (
        "kimi-k3, experts in MXFP4, bfloat16: 1 sequence of 1,048,576 tokens",
        "latents, 27,648 a token 28,991,029,248 27.0 GiB",
        "KDA states, fp32 434,110,464 414.0 MiB",
        "convolution inputs 15,261,696 14.6 MiB",
        "in all 29,440,401,408 27.4 GiB",
        "the all-MLA twin 112,340,238,336 104.6 GiB",
        "the twin keeps 3.82 times as much",
        "break-even at 5,461 tokens, with the convolution inputs at 5,653",
        "stored 1,559,965,598,080 1.42 TiB",
        "a layer's experts that the step meets, in the mean: 16.0 of 896; one token reads 25,829,572,608 bytes of them",
        "of the decode step, one sequence: an MLA layer over its slots 219 GFLOP",
        "of the decode step, one sequence: a KDA layer over its state 11.01 MFLOP",
        "decode 208.4 GFLOP 5.258 TFLOP 127.6 GiB 27.8 GiB 32.8",
        "12 x H200: 1.54 TiB, 57.6 TB/s, 11.87 PFLOP/s, 206 FLOP a byte (data sheets: k3lite/devices.json)",
    ):
        assert line in rows, line


def test_times_are_the_rooflines(capsys):
    out = said(capsys, "budget", "kimi-k3", "--context", "32768", "--batch", "64", "--gpu", "b200", "--gpus", "16")
    step, fill = budget.forward_work(K3, 1, 32_768, 64), budget.forward_work(K3, 32_768, 0, 64)
    memory, arithmetic = step.bytes / (16 * 8e12), step.flops / (16 * 2250e12)
    assert f"decode  memory {1e3 * memory:.3g} ms, arithmetic {1e6 * arithmetic:.3g} µs: memory is the limit" in out
    assert f"arithmetic {fill.flops / (16 * 2250e12):.3g} s: arithmetic is the limit" in out
    assert "16 x B200" in out and "does not fit" not in out and "64 sequences of 32,768 tokens" in out


def test_several_new_tokens_and_one_machine(capsys):
    out = said(capsys, "budget", "kimi-linear-48b", "--context", "0", "--new", "8", "--gpu", "laptop", "--gpus", "1")
    assert (
        "prefill" not in out and "links" not in out and "does not fit: 91.5 GiB of weights and cache, 14.9 GiB" in out
    )
    work = budget.forward_work(K3Config.preset("kimi-linear-48b"), 8)
    assert f"{work.intensity:,.1f}" in out and "8 times" not in out


def test_an_all_mla_model_has_no_break_even(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(K3.all_mla_twin().to_dict()))
    out = said(capsys, "budget", str(path), "--context", "2000000")
    assert "break-even" not in out and "over its state" not in out and "(more than its 1,048,576)" in out
    assert "0 KDA and 93 MLA" in said(capsys, "params", str(tmp_path)), "a folder with a config.json"


def test_precision():
    plain = with_precision(K3, "bf16")
    assert budget.checkpoint_bytes(plain).routed == 5_445_481_660_416, "§3.4"
    assert with_precision(K3, None) is K3 and with_precision(K3, "mxfp4") == K3
    linear = K3Config.preset("kimi-linear-48b")
    assert budget.expert_bytes(with_precision(linear, "mxfp4")) == budget.expert_parameters(linear) * 17 // 32
    tiny = K3Config.preset("k3-tiny")
    assert tiny.dtype == "float32" and with_precision(tiny, "mxfp4").dtype == "bfloat16"


def test_precision_of_a_budget(capsys):
    args = ("budget", "kimi-k3", "--context", "1024")
    packed, plain = said(capsys, *args, "--precision", "mxfp4"), said(capsys, *args, "--precision", "bf16")
    assert packed == said(capsys, *args) and "12 x H200" in packed
    assert "40 x H200" in plain and "MXFP4" not in plain and "5,558,991,192,448" in plain


def test_a_path_is_a_preset_too():
    assert read_config(str(PRESET_DIR / "kimi-k3.json")) == read_config("kimi-k3") == K3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["params", "kimi-k4"], "model: got 'kimi-k4', wanted one of k3-tiny, kimi-k3, "),
        (["budget", "kimi-k3", "--context", "-1"], "context: got -1, wanted 0 or more"),
        (["budget", "kimi-k3", "--batch", "0"], "batch: got 0, wanted 1 or more"),
        (["budget", "kimi-k3", "--new", "0"], "new: got 0, wanted 1 or more"),
        (["budget", "kimi-k3", "--gpus", "0"], "gpus: got 0, wanted 1 or more"),
        (["budget", "kimi-k3", "--gpu", "abacus"], "device: got 'abacus', wanted one of H200, B200"),
    ],
)
def test_nonsense_is_one_line(argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith(f"k3lite: {message}")


def test_a_config_that_is_none_is_one_line(capsys, tmp_path):
    for text, message in (("{", "not valid JSON"), ('{"vocab_size": 5}', "missing config field(s): ")):
        (tmp_path / "config.json").write_text(text)
        assert main(["budget", str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and message in err


def test_what_is_not_packed_cannot_be(capsys, tmp_path):
    dense = dataclasses.replace(K3, num_experts=0, num_experts_per_token=0, num_shared_experts=0)
    (tmp_path / "config.json").write_text(json.dumps(dense.to_dict()))
    assert main(["budget", str(tmp_path), "--precision", "mxfp4"]) == 2
    assert "without routed experts" in capsys.readouterr().err
    out = said(capsys, "budget", str(tmp_path), "--precision", "bf16", "--context", "8")
    assert "experts" not in out.replace("experts' rows", "")
