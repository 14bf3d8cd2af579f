"""How the command line and the explorers spell bytes, times and counts. Standard library only."""

from __future__ import annotations


def format_bytes(n: float, short: bool = False) -> str:
    """Bytes in binary units with three or four figures: 434110464 -> '414.0 MiB'; short, as on an axis: '414 MiB'."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    size, unit = float(n), 0
    while size >= 1023.95 and unit < len(units) - 1:  # 1023.95 would print as 1024.0
        size, unit = size / 1024, unit + 1
    digits = 0 if unit == 0 else 2 if size < 9.995 else 1
    return f"{size:.4g} {units[unit]}" if short else f"{size:,.{digits}f} {units[unit]}"


def format_seconds(seconds: float) -> str:
    """A time with three figures: 0.00758 -> '7.58 ms'."""
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-6:,.3g} µs"


def format_si(n: float, unit: str) -> str:
    """In powers of a thousand with four figures: (219043541016, 'FLOP') -> '219 GFLOP'."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= 0.99995 * size:
            return f"{n / size:.4g} {prefix}{unit}"
    return f"{n:.4g} {unit}"
