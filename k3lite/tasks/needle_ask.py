"""Hide a fact in a text of your own and ask a trained model for it."""

from __future__ import annotations

import re

from k3lite.generate import generate
from k3lite.model import K3ForCausalLM
from k3lite.tasks.needle import DIGITS
from k3lite.tasks.text import clean, decode, encode

FACT = re.compile(r"^([a-z]{3})=([0-9]{4})$", re.MULTILINE)


def prepare_document(raw: bytes, hide: str | None = None, depth: float = 50) -> tuple[str, dict[str, str]]:
    """A reader's own text as the model knows texts, and the facts in it (key -> value).

    Lines like `abc=4071` are facts and stay; elsewhere digits, '=' and '?' are taken out, as in training.
    hide: a fact to put in at `depth` percent.   Raises ValueError if it is none, or depth is out of range.
    """
    if not 0 <= depth <= 100:
        raise ValueError(f"depth: got {depth:g}, wanted 0 to 100 percent")
    text = raw.decode("utf-8", errors="replace").replace("\r\n", "\n")
    parts, end = [], 0
    for match in FACT.finditer(text):
        parts += [_filler(text[end : match.start()]), match[0]]
        end = match.end()
    document = "".join([*parts, _filler(text[end:])])
    if hide is not None:
        if not FACT.fullmatch(hide):
            raise ValueError(f"fact: got {hide!r}, wanted three small letters, '=' and four digits, like abc=4071")
        at = round(len(document) * depth / 100)
        document = f"{document[:at]}\n{hide}\n{document[at:]}"
    return document, {match[1]: match[2] for match in FACT.finditer(document)}  # of a repeated key the last counts


def _filler(text: str) -> str:
    return clean(text.encode()).decode()


def ask(model: K3ForCausalLM, document: str, key: str) -> tuple[str, int]:
    """The model's answer about `key` after reading `document` (greedy, from its cache), and that cache's bytes."""
    if not re.fullmatch("[a-z]{3}", key):
        raise ValueError(f"key: got {key!r}, wanted three small letters, like abc")
    cache = model.new_cache()
    answer = generate(model, encode(f"{document}?{key}=")[None], DIGITS, cache=cache)
    return decode(answer[0]), cache.bytes().total
