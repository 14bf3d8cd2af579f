"""Machines on paper: the data sheets are whole and have sources, the bounds are the arithmetic that they say."""

import dataclasses
import json
from itertools import product

import pytest

from k3lite import budget
from k3lite.config import K3Config
from k3lite.devices import DEVICE_FILE, Device, expert_row_bytes, find_device, read_devices, sent_bytes
from tests.helpers import tiny

K3 = K3Config.preset("kimi-k3")
FIGURES = {"memory", "memory_bandwidth", "bf16", "link"}


def test_every_figure_has_a_source_and_a_label():
    for name, row in json.loads(DEVICE_FILE.read_text())["devices"].items():
        assert set(row) == FIGURES | {"label", "sources"}, name
        assert all(row[figure] > 0 for figure in FIGURES)
        sourced = [figure for figures in row["sources"] for figure in figures.split(", ")]
        assert sorted(sourced) == sorted(FIGURES), name
        assert row["label"] == ("arithmetic" if name == "laptop" else "vendor-reported")


def test_data_sheets():
    h200 = find_device("h200")
    assert (h200.memory, h200.memory_bandwidth, h200.bf16, h200.link) == (141e9, 4.8e12, 989e12, 450e9)
    assert h200.ridge == pytest.approx(206.04, abs=0.01) and read_devices()["B200"].ridge == 281.25
    assert find_device("H100-sxm") == find_device("H100 SXM")
    with pytest.raises(ValueError, match="device: got 'TPU', wanted one of H200, B200, H100 SXM, RTX 4090, laptop"):
        find_device("TPU")


def test_several_devices_are_one_with_their_sums():
    two = Device("x", 10, 4, 100, 2).times(3)
    assert (two.memory, two.memory_bandwidth, two.bf16, two.link, two.count, two.ridge) == (30, 12, 300, 6, 3, 25)
    assert two.times(2).count == 6
    with pytest.raises(ValueError, match="devices: got 0, wanted 1 or more"):
        two.times(0)


def test_the_fewest_devices_that_hold_it():
    device = Device("x", 10, 4, 100, 2)
    assert [device.to_hold(n) for n in (0, 1, 10, 10.5, 11, 20, 21)] == [1, 1, 1, 2, 2, 2, 3]
    packed = budget.checkpoint_bytes(K3).total
    assert find_device("H200").to_hold(packed) == 12 and find_device("B200").to_hold(packed) == 9


def test_a_step_waits_for_the_longer_of_two_and_then_for_the_links():
    device = Device("x", 10, 4, 100, 2)
    work = budget.Work(weight_flops=150, memory_flops=50, weight_bytes=10, cache_bytes=2)
    step = device.step(work, sent=3)
    assert (step.memory, step.arithmetic, step.link) == (3.0, 2.0, 1.5)
    assert step.seconds == work.seconds(100, 4) + 1.5 == 4.5 and step.limit == "memory"
    assert device.step(budget.Work(500, 0, 1, 0)).limit == "arithmetic" and device.step(work, sent=20).limit == "link"
    assert device.times(2).step(work, sent=3).seconds == 2.25


def test_rows_to_experts():
    assert expert_row_bytes(K3) == 59_136 / 16 + 114_688 / 16, "the sheet's two payloads of 16 copies, §2.7"
    assert sent_bytes(K3, 10, 1) == 0, "one device holds all experts"
    assert sent_bytes(K3, 1, 2) == pytest.approx(92 * (1 - 0.5**16) * 10_864)
    many = sent_bytes(K3, 1, 10**9)
    assert many == pytest.approx(92 * 16 * 10_864, rel=1e-6), "so many devices that each expert is on another"
    assert sent_bytes(K3, 7, 32) == pytest.approx(7 * sent_bytes(K3, 1, 32))
    assert sent_bytes(tiny("k3", num_experts=0, num_experts_per_token=0, num_shared_experts=0), 5, 4) == 0


@pytest.mark.parametrize("count, k", [(2, 3), (4, 2), (5, 5)])
def test_devices_met_are_those_of_all_draws(count, k):
    """Against every equally likely choice of k devices, own device 0 left out."""
    config = dataclasses.replace(K3, num_experts_per_token=k)
    draws = list(product(range(count), repeat=k))
    mean = sum(len(set(draw) - {0}) for draw in draws) / len(draws)
    assert sent_bytes(config, 1, count) == pytest.approx(mean * 92 * expert_row_bytes(K3))
