"""Machines on paper: what a data sheet says of a device, and how long a pass takes at best on several of them.

    seconds = max( bytes / memory bandwidth, FLOPs / arithmetic ) + bytes sent / links

The first two overlap, as on a roofline. The links do not: what is sent is what the next product waits for. Work is spread
evenly over the devices, nothing else is lost: no latency, no launch, no exchange but the experts'. A real step takes longer.
The figures, their sources and labels are in devices.json. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from k3lite import budget
from k3lite.config import K3Config

DEVICE_FILE = Path(__file__).parent / "devices.json"


@dataclass(frozen=True)
class Device:
    """One device, or several as one: then the figures are sums. Per second where there is a time."""

    name: str
    memory: float  # bytes
    memory_bandwidth: float  # bytes a second
    bf16: float  # dense FLOPs a second
    link: float  # bytes a second that leave it for the others
    count: int = 1

    @property
    def ridge(self) -> float:
        """FLOPs that it can do while it moves a byte."""
        return self.bf16 / self.memory_bandwidth

    def times(self, count: int) -> Device:
        """So many of them, all at work."""
        if count < 1:
            raise ValueError(f"devices: got {count}, wanted 1 or more")
        sums = (count * x for x in (self.memory, self.memory_bandwidth, self.bf16, self.link))
        return Device(self.name, *sums, count=count * self.count)

    def to_hold(self, nbytes: float) -> int:
        """The fewest devices whose memory holds so many bytes."""
        return max(1, int(-(-nbytes // self.memory)))

    def step(self, work: budget.Work, sent: float = 0) -> Step:
        """What `work` costs at best. sent: bytes that leave their device, all devices together."""
        return Step(work.bytes / self.memory_bandwidth, work.flops / self.bf16, sent / self.link)


@dataclass(frozen=True)
class Step:
    """Seconds of one pass, by what they wait for."""

    memory: float
    arithmetic: float
    link: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic) + self.link

    @property
    def limit(self) -> str:
        """Which of the three is the longest."""
        return max(("memory", "arithmetic", "link"), key=lambda name: getattr(self, name))


def read_devices() -> dict[str, Device]:
    """All of devices.json, by name."""
    raw = json.loads(DEVICE_FILE.read_text())["devices"]
    figures = ("memory", "memory_bandwidth", "bf16", "link")
    return {name: Device(name, *(row[figure] for figure in figures)) for name, row in raw.items()}


def find_device(name: str) -> Device:
    """By name; case does not matter, and a hyphen is as good as a space. Raises ValueError with the names there are."""
    known = read_devices()
    for device in known.values():
        if device.name.lower() == name.lower().replace("-", " "):
            return device
    raise ValueError(f"device: got {name!r}, wanted one of {', '.join(known)}")


def expert_row_bytes(c: K3Config) -> int:
    """One token to one expert's device and back: MXFP8 there, bf16 back, in the experts' width (k3-architecture §2.7)."""
    return budget.row_bytes(c.expert_width, "mxfp8") + budget.row_bytes(c.expert_width, "bf16")


def others_met(count: int, k: float) -> float:
    """Of `count` devices, the others that hold one of a token's k experts, in the mean, if choices are like fair draws."""
    return (count - 1) * (1 - (1 - 1 / count) ** k)


def sent_bytes(c: K3Config, rows: int, count: int) -> float:
    """Bytes between `count` devices in a pass over `rows` tokens in all, routed experts spread evenly over them.

    A token goes once to each other device that holds one of its experts. Every other exchange is left out.
    """
    if not c.num_experts:
        return 0.0
    return rows * c.num_moe_layers * others_met(count, c.num_experts_per_token) * expert_row_bytes(c)
