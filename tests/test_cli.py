"""The command line as a user types it: one clear line for a mistake, a non-zero exit, never half a file."""

import json
import signal
import subprocess
import sys

import pytest

from k3lite import bench, cli
from k3lite.cli import main

QUICK = ["--steps", "2", "--lengths", "32", "--depths", "0,100", "--needles", "1", "--trials", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("needle")
    assert main(["needle", *QUICK, "--out", str(out)]) == 0
    return out


def one_line(capsys) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("k3lite")]
    assert len(lines) == 1, lines
    return lines[0]


def test_needle_prints_a_table_and_names_its_files(tmp_path, capsys):
    assert main(["needle", *QUICK, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "training a small K3 for 2 steps" in out
    assert "recall in % of 2 documents a cell" in out and "all-MLA KiB" in out
    assert str(tmp_path / "needle.json") in out
    assert json.loads((tmp_path / "needle.json").read_text())["complete"]


def test_a_finished_model_is_measured_again_and_not_trained(finished, capsys):
    before = (finished / "model" / "model.safetensors").stat().st_mtime_ns
    assert main(["needle", *QUICK, "--out", str(finished)]) == 0
    assert "is trained already: measuring only" in capsys.readouterr().out
    assert (finished / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_ask_says_what_it_read_and_whether_the_answer_is_right(finished, tmp_path, capsys):
    text = tmp_path / "mine.txt"
    text.write_text("Some prose of my own.\nxyz=1234\nAnd more of it.\n")
    assert main(["needle", "ask", "--model", str(finished / "model"), "--text", str(text), "--key", "xyz"]) == 0
    out = capsys.readouterr().out
    assert "?xyz=" in out and "wrong: the text says 1234" in out, "two steps teach nothing"
    assert main(["needle", "ask", "--model", str(finished / "model"), "--text", str(text), "--key", "aaa"]) == 0
    assert "there is no line aaa=dddd in the text: this answer is a guess" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--depths", "120"], "depth: got 120, wanted 0 to 100 percent"),
        (["--lengths", "14"], "length: got 14 bytes for 1 needle(s), wanted 15 to"),
        (["--threads", "0"], "threads: got 0"),
        (["--steps", "0"], "steps: got 0"),
        (["--seed", "5"], "another recipe or seed"),
    ],
)
def test_bad_options_are_one_line_and_a_failure(finished, capsys, options, message):
    assert main(["needle", *QUICK, "--out", str(finished), *options]) == 2
    assert message in one_line(capsys)


def test_options_of_the_wrong_kind_are_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["needle", "--lengths", "long"])
    assert stop.value.code == 2
    assert "comma-separated list of int" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt", "--key", "abc"], "--text nowhere.txt: No such file"),
        (["--text", "{text}", "--key", "ABC"], "key: got 'ABC'"),
        (["--text", "{text}", "--key", "abc", "--hide", "abc=1"], "fact: got 'abc=1'"),
        (["--text", "{text}", "--key", "abc", "--depth", "-3"], "depth: got -3"),
        (["--text", "{text}", "--key", "abc", "--model", "{empty}"], "no finished needle model"),
    ],
)
def test_bad_questions(finished, tmp_path, capsys, arguments, message):
    text = tmp_path / "text.txt"
    text.write_text("prose")
    filled = [a.format(text=text, empty=tmp_path) for a in arguments]
    assert main(["needle", "ask", "--model", str(finished / "model"), *filled]) == 2
    assert message in one_line(capsys)


def test_a_corrupt_model_is_one_line(finished, tmp_path, capsys):
    import shutil

    copy = tmp_path / "out"
    shutil.copytree(finished, copy)
    weights = copy / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["needle", *QUICK, "--out", str(copy)]) == 2
    assert "damaged or replaced" in one_line(capsys)


def test_an_output_folder_that_is_a_file(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert main(["needle", *QUICK, "--out", str(tmp_path / "out")]) == 2
    assert "out" in one_line(capsys)


@pytest.mark.timeout(120)
def test_ctrl_c_in_a_real_process_keeps_what_is_done(tmp_path):
    command = [
        sys.executable,
        "-m",
        "k3lite.cli",
        "needle",
        *QUICK,
        "--steps",
        "500",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "training a small K3" in process.stdout.readline()
    while "1/500" not in (seen := process.stderr.read(1) + process.stderr.readline(40)):  # a step is done
        assert process.poll() is None, seen
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED
    assert err.splitlines()[-1].startswith("k3lite: stopped after ")
    assert [p.name for p in tmp_path.iterdir()] == ["train_state.safetensors"]


def test_bench_prints_a_table_and_writes_rows(tmp_path, capsys, monkeypatch):
    one = bench.Row("kda", "forward T=1", 1.0, "step by step", 2.5, 2.5, 1, "float32", "cpu")
    monkeypatch.setattr(bench, "run", lambda name, device: ([one], ["a remark"]))
    assert main(["bench", "kda", "--json", str(tmp_path / "rows.json")]) == 0
    out = capsys.readouterr().out
    assert "forward T=1" in out and out.endswith("a remark\n")
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert list(row) == ["bench", "case", "ours_s", "peer", "peer_s", "ratio", "threads", "dtype", "device"]


def test_bench_of_a_device_that_is_not_here(capsys):
    assert main(["bench", "kda", "--device", "nonsense"]) == 2
    assert capsys.readouterr().err == "k3lite: device: got 'nonsense', which is not here; wanted 'cpu'\n"


def test_restart_trains_anew_and_touches_nothing_else_in_the_folder(tmp_path, capsys):
    assert main(["needle", *QUICK, "--out", str(tmp_path)]) == 0
    notes = tmp_path / "model" / "my notes.txt"
    notes.write_text("mine")
    assert main(["needle", *QUICK, "--out", str(tmp_path), "--seed", "1", "--restart"]) == 0
    assert "training a small K3 for 2 steps" in capsys.readouterr().out
    assert json.loads((tmp_path / "model" / "card.json").read_text())["recipe"]["seed"] == 1
    assert notes.read_text() == "mine"


QUICK_MQAR = ["--widths", "4,8", "--seeds", "0", "--pairs", "2,4", "--rows", "10", "--steps", "2"]


def test_train_mqar_prints_a_table_and_keeps_its_models(tmp_path, capsys):
    command = ["train", "mqar", *QUICK_MQAR, "--out", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "2 models of 2 steps on 1 CPU thread(s): 0 trained already, 0 to go on with, 2 to begin" in out
    assert "accuracy in % by number of pairs, 1 seed(s)" in out and "4 x 4" in out and "8 x 8" in out
    assert f"written: {tmp_path / 'mqar.json'}" in out
    assert json.loads((tmp_path / "mqar.json").read_text())["complete"]

    assert main(command) == 0
    assert "2 trained already, 0 to go on with, 0 to begin" in capsys.readouterr().out
    assert main([*command, "--restart"]) == 0
    assert "0 trained already, 0 to go on with, 2 to begin" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--widths", "0"], "width: got 0, wanted a whole number, 1 or more"),
        (["--pairs", "4,257"], "pairs: got 257, wanted 1 to 256, since keys differ"),
        (["--seeds", "1,1"], "seeds: got 1, 1, wanted each once"),
        (["--rows", "1"], "rows: got 1, wanted 2 or more"),
        (["--steps", "0"], "steps: got 0, wanted 1 or more"),
        (["--threads", "0"], "threads: got 0, wanted 1 or more"),
    ],
)
def test_bad_options_of_train_mqar(tmp_path, capsys, options, message):
    assert main(["train", "mqar", *QUICK_MQAR, "--out", str(tmp_path / "out"), *options]) == 2
    assert message in one_line(capsys)
    assert not (tmp_path / "out").exists()


QUICK_BALANCE = ["--methods", "none,sign:0.01", "--data", "skewed", "--seeds", "0", "--steps", "20"]


def test_train_balance_prints_a_table_and_keeps_what_is_finished(tmp_path, capsys):
    command = ["train", "balance", *QUICK_BALANCE, "--out", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "2 runs of 20 steps on 1 CPU thread(s)" in out and "data 'skewed', 20 steps, 1 seed(s)" in out
    assert "sign:0.01" in out and f"written: {tmp_path / 'balance.json'}" in out
    before = (tmp_path / "balance.json").stat().st_mtime_ns
    assert main(command) == 0 and (tmp_path / "balance.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "even"], "data: got 'even', wanted one of shared, skewed"),
        (["--seeds", "-1"], "seeds: got -1, wanted 0 or more"),
        (["--steps", "1"], "steps: got 1, wanted 20 or more"),
    ],
)
def test_bad_options_of_train_balance(tmp_path, capsys, options, message):
    assert main(["train", "balance", *QUICK_BALANCE, "--out", str(tmp_path / "out"), *options]) == 2
    assert message in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_method_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["train", "balance", "--methods", "none,best"])
    assert "method 'best': rule: got 'best', wanted one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [(["train"], "required: TASK"), (["train", "chess"], "argument TASK: invalid choice: 'chess'")],
)
def test_train_wants_a_task(capsys, command, message):
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_ask_refuses_a_model_of_another_task(tmp_path, capsys):
    assert main(["train", "mqar", *QUICK_MQAR, "--out", str(tmp_path)]) == 0
    text = tmp_path / "text.txt"
    text.write_text("prose")
    folder = str(tmp_path / "w4-s0" / "model")
    assert main(["needle", "ask", "--model", folder, "--text", str(text), "--key", "abc"]) == 2
    assert "no finished needle model (card.json says 'mqar:" in one_line(capsys)


QUICK_RECALL = [
    "--variants", "kda,mla-conv", "--seeds", "0", "--lengths", "64", "--facts", "1,4", "--questions", "8", "--steps", "2",
]  # fmt: skip


def test_train_recall_prints_tables_and_keeps_its_models(tmp_path, capsys):
    command = ["train", "recall", *QUICK_RECALL, "--out", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "2 models of 2 steps on 1 CPU thread(s): 0 trained already, 0 to go on with, 2 to begin" in out
    assert "in %, 1 seed(s), lowest to highest" in out and "values, 4 facts (chance 6.2)" in out
    assert "cache of one sequence in KiB" in out and "mla-conv" in out
    assert f"written: {tmp_path / 'recall.json'}" in out
    assert json.loads((tmp_path / "recall.json").read_text())["complete"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kda-s0", "mla-conv-s0", "recall.json"]

    assert main(command) == 0
    assert "2 trained already, 0 to go on with, 0 to begin" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variants", "kda,rwkv"], "variant: got 'rwkv', wanted one of kda, hybrid"),
        (["--variants", "7:1"], "layers: got 4, wanted a multiple of 8 for 7:1"),
        (["--lengths", "30"], "lengths: got 30, wanted a multiple of 4"),
        (["--facts", "0"], "facts: got 0, wanted 1 to 256"),
        (["--questions", "0"], "questions: got 0, wanted 1 or more"),
    ],
)
def test_bad_options_of_train_recall(tmp_path, capsys, options, message):
    assert main(["train", "recall", *QUICK_RECALL, "--out", str(tmp_path / "out"), *options]) == 2
    assert message in one_line(capsys)
    assert not (tmp_path / "out").exists()
