"""Options that several commands of the command line share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: what torch chooses)")


def list_of(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse(text: str) -> tuple[T, ...]:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = f"comma-separated list of {kind.__name__}"  # argparse shows it in its error
    return parse


def each_of(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """`list_of`, with the reason of a ValueError, which argparse would drop."""

    def read(text: str) -> tuple[T, ...]:
        try:
            return list_of(parse)(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from e

    return read
