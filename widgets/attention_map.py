"""Where one head of a trained MLA layer looks: a text with hidden facts, a question, and the weights of any query.

weight      share of a head's attention on one earlier token (here a byte, so mostly a character); they add up to 1
entropy     bits, H = sum of weight x log2(1 / weight)
effective   2^H: evenly spread over so many tokens, attention would have the same entropy

The model is data/models/needle. What its layer is given is run once for each text and kept; the sliders only ask
that run again. A sharpness other than 1 and a lifted mask are what-ifs: the model was trained with neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ipywidgets as w
import plotly.graph_objects as go
import torch
from torch import Tensor

from k3lite.checkpoint import load_model
from k3lite.mla import GatedMLA
from k3lite.model import K3ForCausalLM
from k3lite.ops.attention import causal_attention
from k3lite.tasks.needle_ask import FACT
from k3lite.tasks.text import DATA, clean, decode, encode, haystack
from widgets import common
from widgets.attention_map_figure import figure, spell
from widgets.common import labelled, whole

__all__ = ["FACTS", "AttentionMap", "compute", "describe", "document", "explorer", "figure", "mla_layers", "unfold"]

FACTS = ("abc=4071", "kqz=8352", "mwd=1926", "xop=6743")
MAX_FACTS = 8
MAX_TEXT = 480  # characters of a reader's own text: with four facts and question eight rows of the picture
SHARPNESS = tuple(2 ** (k / 2) for k in range(-8, 5))  # factors on the scores, 1/16 to 4
TOP = 5


@dataclass(frozen=True)
class AttentionMap:
    """Result of compute(): the weights of one query over the whole text, 0 where it may not look."""

    text: str  # document and question
    lines: tuple[tuple[int, int], ...]  # first and last+1 place of each hidden fact; the asked one first
    query: int  # place of the query token
    layer: int  # counted from 1, as in the released configuration
    head: int  # counted from 1
    sharpness: float
    causal: bool
    weights: list[float]
    top: tuple[int, ...]  # the places with the largest weights, largest first
    entropy: float  # bits

    @property
    def seen(self) -> int:
        """Tokens that the query may look at."""
        return self.query + 1 if self.causal else len(self.text)

    @property
    def effective(self) -> float:
        return 2**self.entropy

    @property
    def on_asked(self) -> float:
        """Share of the attention on the line that the question asks for."""
        return self._on(self.lines[:1])

    @property
    def on_others(self) -> float:
        return self._on(self.lines[1:])

    def _on(self, lines) -> float:
        return sum(sum(self.weights[a:b]) for a, b in lines)


# ---- the run behind the picture


@lru_cache(1)
def _model() -> K3ForCausalLM:
    return load_model(DATA / "models" / "needle")


def mla_layers() -> list[int]:
    """The layers that have attention weights at all, counted from 1. Of a KDA state no such map can be drawn."""
    return [i for i, kind in enumerate(_model().config.layer_kinds, 1) if kind == "mla"]


@lru_cache(16)
@torch.no_grad()
def _run(text: str) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """{layer: (queries, keys, values), each [1,T,H,.]} of every MLA layer after reading `text`."""
    model, out = _model(), {}

    def keep(number):
        def hook(mla, given):
            x = given[0]
            out[number] = mla.query(x), *unfold(mla, mla.latents(x))

        return hook

    layers = [(n, model.model.layers[n - 1].self_attn) for n in mla_layers()]
    hooks = [layer.register_forward_pre_hook(keep(n)) for n, layer in layers]
    try:
        model(encode(text)[None])
    finally:
        for hook in hooks:
            hook.remove()
    return out


def unfold(mla: GatedMLA, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Every head's keys and values, each [B,T,H,.], of latents [B,T,rank+rope]."""
    kv = torch.einsum("blr,hnr->blhn", latents[..., : mla.rank], mla.kv_b())
    k_n, v = kv.tensor_split([mla.nope_dim], dim=-1)
    shared = latents[:, :, None, mla.rank :].expand(-1, -1, mla.heads, -1)
    return torch.cat([k_n, shared], -1), v


def document(text: str, facts: tuple[str, ...], depth: float, asked: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text with the facts in it and the question for number `asked`; the places of the facts, the asked one first.

    The first fact stands at `depth` percent, the others at even distances behind it, going on from the front.
    """
    filler = clean(text.encode()).decode()
    cuts = [round(len(filler) * ((depth + 100 * i / len(facts)) % 100.001) / 100) for i in range(len(facts))]
    for i in sorted(range(len(facts)), key=lambda i: cuts[i], reverse=True):
        filler = f"{filler[: cuts[i]]}\n{facts[i]}\n{filler[cuts[i] :]}"
    places = {m[0]: m.span() for m in FACT.finditer(filler)}
    order = [facts[asked - 1], *facts[: asked - 1], *facts[asked:]]
    return f"{filler}?{facts[asked - 1][:3]}=", tuple(places[f] for f in order)


def default_text() -> str:
    """A passage of prose from the books that the model was not trained on."""
    return decode(haystack("heldout")[20_000:20_240])


# ---- the three functions of an explorer


@torch.no_grad()
def compute(
    *,
    text: str | None = None,
    facts: tuple[str, ...] = FACTS,
    needles: int = 1,
    depth: float = 40,
    asked: int = 1,
    query: int | None = None,
    layer: int | None = None,
    head: int = 1,
    sharpness: float = 1.0,
    causal: bool = True,
) -> AttentionMap:
    """The weights of one query token in a text with hidden facts.

    text: the reader's own; None for a passage of held-out prose. Digits, '=' and '?' are taken out of it.
    facts: lines like "abc=4071" with different keys.   needles, asked: how many of them are hidden, and the number
    (from 1) of the one asked for.   depth: percent of the text before the first.
    query: place in the text, the last token by default.   layer, head: counted from 1; the last MLA layer by default.
    sharpness: factor on the scores.   causal: False lets the query look ahead.
    Raises ValueError that names the value, what came and what was wanted.
    """
    text = default_text() if text is None else text
    if len(text.encode()) > MAX_TEXT:
        raise ValueError(f"text: got {len(text.encode())} bytes, wanted at most {MAX_TEXT}.")
    _check_facts(facts)
    whole("hidden facts", needles, 1, len(facts))
    whole("fact asked for", asked, 1, needles)
    if not 0 <= depth <= 100:
        raise ValueError(f"place: got {depth!r}, wanted 0 to 100 percent.")
    if not 0 < sharpness < float("inf"):
        raise ValueError(f"sharpness: got {sharpness!r}, wanted a factor above 0.")
    layer = mla_layers()[-1] if layer is None else layer
    if layer not in mla_layers():
        raise ValueError(f"layer: got {layer!r}, wanted one with attention weights ({_listed(mla_layers())}).")
    whole("head", head, 1, _model().config.num_attention_heads)
    full, lines = document(text, facts[:needles], depth, asked)
    query = len(full) - 1 if query is None else query
    whole("query token", query, 0, len(full) - 1)

    q, k, v = (x[:, :, head - 1 : head].double() for x in _run(full)[layer])
    reach = query + 1 if causal else len(full)  # one query over all keys that are there: the mask is what we leave out
    scale = sharpness * q.shape[-1] ** -0.5
    _, seen = causal_attention(q[:, query : query + 1], k[:, :reach], v[:, :reach], scale=scale)
    p = seen.flatten()
    entropy = float(-torch.xlogy(p, p).sum() / torch.log(torch.tensor(2.0)))
    top = p.topk(min(TOP, reach)).indices.tolist()
    weights = [round(x, 6) for x in p.tolist()] + [0.0] * (len(full) - reach)
    return AttentionMap(full, lines, query, layer, head, sharpness, causal, weights, tuple(top), max(0.0, entropy))


def _check_facts(facts: tuple[str, ...]) -> None:
    wrong = [f for f in facts if not FACT.fullmatch(f)]
    if wrong or not 1 <= len(facts) <= MAX_FACTS:
        what = repr(wrong[0]) if wrong else f"{len(facts)} facts"
        raise ValueError(f"facts: got {what}, wanted 1 to {MAX_FACTS}: three small letters, '=', four digits each.")
    keys = [f[:3] for f in facts]
    if len(set(keys)) < len(keys):
        raise ValueError(f"facts: got the keys {', '.join(keys)}, wanted each once.")


def describe(r: AttentionMap) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    who = f"Head {r.head} of layer {r.layer}, asked by {spell(r.text, r.query)}, may look at {r.seen} tokens"
    tops = ", ".join(f"{100 * r.weights[i]:.0f} % on {spell(r.text, i)}" for i in r.top if r.weights[i] >= 0.005)
    tops = tops or "less than half a percent on each"
    spread = f"Entropy {r.entropy:.2f} bits: as if spread evenly over {r.effective:.1f} tokens."
    lines = f"The line asked for gets {100 * r.on_asked:.0f} %"
    lines += f", the {len(r.lines) - 1} other hidden line{'s' * (len(r.lines) > 2)} {100 * r.on_others:.0f} %"
    what_if = [f"scores multiplied by {r.sharpness:.2g}"] * (r.sharpness != 1) + ["the mask lifted"] * (not r.causal)
    note = f" What-if: {' and '.join(what_if)}; the model was not trained so." if what_if else ""
    return f"{who}: {tops}. {spread} {lines if len(r.lines) > 1 else lines.split(',')[0]}.{note}"


def _listed(numbers) -> str:
    return ", ".join(map(str, numbers))


def explorer(text: str | None = None, needles: int = 1) -> common.Explorer:
    """Fresh controls around the picture: hide facts in a text, choose a query token, see where a head looks.

    text: as in compute().   needles: 1 to 4.   Whatever changes the text puts the query back to its last token.
    """
    first = compute(text=text, needles=needles)
    c = _controls(default_text() if text is None else text, needles, first)

    def result(**changes) -> AttentionMap:
        place = dict(zip(("layer", "head"), c["head"].value, strict=True))
        values = {n: control.value for n, control in c.items() if n != "head"}
        return compute(**values | place | {"facts": facts()} | changes)

    def facts() -> tuple[str, ...]:
        return tuple(c["facts"].value.split())

    def react(name: str) -> None:
        if name in ("needles", "facts"):
            _check_facts(facts())
            c["needles"].max = len(facts())  # takes the value down with it
            keys = _questions(facts()[: c["needles"].value])
            c["asked"].options, c["asked"].value = keys, min(c["asked"].value or 1, len(keys))
        new_text = name in ("text", "facts", "needles", "depth", "asked")
        r = result(query=None) if new_text else result()
        if new_text:
            # In a message of its own: the browser cuts a value at the old end, and says so.
            c["query"].max = len(r.text) - 1
            c["query"].value = r.query
        common.redraw(drawn, figure(r))
        said.value = common.spoken(describe(r))
        message.show("")

    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    said, message = w.HTML(common.spoken(describe(first))), common.Message()
    message.watch(c, react)
    columns = [
        [c[n] for n in ("facts", "needles", "asked", "depth", "text")],
        [c[n] for n in ("query", "head", "sharpness", "causal")],
    ]
    return common.Explorer(
        "attention map", c, drawn, said, message, [common.side_by_side(columns), message, drawn, said]
    )  # fmt: skip


def _controls(text: str, needles: int, first: AttentionMap) -> dict[str, w.Widget]:
    heads = [
        (f"layer {n}, head {h}", (n, h))
        for n in mla_layers()
        for h in range(1, _model().config.num_attention_heads + 1)
    ]
    factors = [(f"× {x:.3g}", x) for x in SHARPNESS]
    masks = [("on: no look ahead", True), ("off (what-if)", False)]
    return {
        "text": labelled(w.Textarea, f"Text (up to {MAX_TEXT} bytes)", value=text, continuous_update=False, rows=4),
        "needles": labelled(w.IntSlider, "Hidden facts (number)", min=1, max=len(FACTS), value=needles),
        "facts": labelled(w.Text, "Facts (key=digits each)", value=" ".join(FACTS), continuous_update=False),
        "asked": labelled(w.Dropdown, "Question (key asked for)", options=_questions(FACTS[:needles]), value=1),
        "depth": labelled(w.IntSlider, "First fact's place (% of text)", min=0, max=100, step=5, value=40),
        "query": labelled(w.IntSlider, "Query token (place)", min=0, max=len(first.text) - 1, value=first.query),
        "head": labelled(w.Dropdown, "Who looks (layer, head)", options=heads, value=(first.layer, first.head)),
        "sharpness": labelled(w.SelectionSlider, "Sharpness (factor on scores)", options=factors, value=1.0),
        "causal": labelled(w.Dropdown, "Causal mask (on or off)", options=masks, value=True),
    }


def _questions(facts: tuple[str, ...]) -> list[tuple[str, int]]:
    return [(f"?{fact[:3]}=", i) for i, fact in enumerate(facts, 1)]
