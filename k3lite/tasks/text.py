"""Real text as tokens: a token is a byte, so a reader can use any text file of their own."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

DATA = Path(__file__).resolve().parents[2] / "data"
RESERVED = b"0123456789=?"  # the characters that needles and questions are made of


def encode(text: str | bytes) -> Tensor:
    """[T] byte values 0..255."""
    raw = text.encode("utf-8") if isinstance(text, str) else text
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.zeros(0, dtype=torch.long)


def decode(ids: Tensor) -> str:
    """Text of byte values; bytes that form no character become U+FFFD."""
    return bytes(ids.tolist()).decode("utf-8", errors="replace")


def clean(raw: bytes) -> bytes:
    """Filler: `raw` without the reserved characters, so that no needle can stand in it by chance.

    Bytes outside ASCII, which the haystacks do not hold and a model has therefore never seen, become spaces.
    """
    text = raw.decode("utf-8", errors="replace").replace("\r\n", "\n")
    return re.sub(r"[^\x00-\x7f]", " ", text).encode("ascii").translate(None, RESERVED)


def haystack(split: str) -> Tensor:
    """Cleaned public-domain prose from data/haystack: "train" or "heldout" (other books). [T] byte values."""
    path = DATA / "haystack" / f"{split}.txt"
    try:
        return encode(clean(path.read_bytes()))
    except OSError as e:
        raise FileNotFoundError(
            f"{path}: haystack text cannot be read ({e.strerror}); run k3lite from its checkout"
        ) from e
