"""Spelling of bytes, times and counts at the edges between units. (Bytes: also tests/widgets/test_cache_explorer.)"""

import pytest

from k3lite.spell import format_bytes, format_seconds, format_si


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0 µs"), (4.2e-8, "0.042 µs"), (0.000461, "461 µs"), (0.00758, "7.58 ms"), (0.9, "900 ms"), (86.62, "86.6 s"), (330_524.2, "330,524 s")],
)  # fmt: skip
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    "n, text",
    [(0, "0 FLOP"), (7, "7 FLOP"), (3584, "3.584 kFLOP"), (219_043_332_096, "219 GFLOP"), (5.258e12, "5.258 TFLOP"), (999_960, "1 MFLOP"), (8.1e17, "810 PFLOP"), (2e21, "2000 EFLOP")],
)  # fmt: skip
def test_powers_of_a_thousand(n, text):
    assert format_si(n, "FLOP") == text


def test_bytes():
    assert (format_bytes(434_110_464), format_bytes(434_110_464, short=True)) == ("414.0 MiB", "414 MiB")
