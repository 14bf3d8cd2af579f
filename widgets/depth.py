"""Which depths a sub-layer reads: a trained model of eight layers, its shares for one byte, and a source cut out.

source 0   the embedding; then one for each block of layers, or for each sub-layer's output (Full AttnRes)
reader     every sub-layer, and the final read in front of the head
share      softmax over the sources that exist when the reader reads; the last of them is the live sum
cut        no one may read the source: its score becomes -inf everywhere, and the other shares grow

Nothing is made up: the models are data/models/depth, and every change of a control runs one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ipywidgets as w
import plotly.graph_objects as go
import torch
import torch.nn.functional as F

from k3lite.checkpoint import load_model
from k3lite.config import K3Config
from k3lite.model import K3ForCausalLM
from k3lite.tasks.depth import LENGTH, read_shares, size_name, watching
from k3lite.tasks.text import DATA, encode
from widgets import common
from widgets.common import labelled, whole
from widgets.depth_figure import figure

__all__ = ["FOLDER", "SIZES", "TEXT", "Depths", "compute", "describe", "explorer", "figure", "spelled"]

FOLDER = DATA / "models" / "depth"
SIZES = {0.5: "Full: every sub-layer", 1: "blocks of 1 layer", 4: "blocks of 4 layers"}
TEXT = "It was the best thing that she had seen in all the long winter"
BARS = 6  # next bytes that are drawn
NOTHING = -1  # in the control of the source to cut: ipywidgets draws a chosen None as an empty box


@dataclass(frozen=True)
class Depths:
    """Result of compute()."""

    size: float
    text: str
    token: int  # of the text, counted from 1
    mean: bool  # shares over all bytes of the text, and not of this one
    cut: int | None  # number of the source that no one may read
    readers: tuple[str, ...]
    sources: tuple[str, ...]
    shares: tuple[tuple[float | None, ...], ...]  # of each reader, by source; None: not there yet
    answer: tuple[tuple[str, float, float], ...]  # next byte; its probability as trained, and with the cut
    losses: tuple[float, float]  # nats per byte over the text, as trained and with the cut

    @property
    def embedding(self) -> float:
        """Mean share of the embedding over all readers."""
        return sum(row[0] for row in self.shares) / len(self.shares)

    @property
    def live(self) -> float:
        """Mean share of the newest source, where there are others."""
        newest = [[x for x in row if x is not None] for row in self.shares]
        newest = [row[-1] for row in newest if len(row) > 1]
        return sum(newest) / len(newest)


def compute(
    *, size: float = 1, text: str = TEXT, token: int = 20, mean: bool = False, cut: int | None = None
) -> Depths:
    """Run the model of block size `size` over `text`, as trained and with source `cut` hidden from every reader.

    token: byte of the text, from 1, after which the next one is asked.   mean: shares over all bytes instead.
    Raises ValueError that names the value.
    """
    if size not in SIZES:
        raise ValueError(f"block size: got {size!r}, wanted one of {', '.join(f'{s:g}' for s in SIZES)}.")
    if not text.isascii() or not 2 <= len(text) <= LENGTH:
        raise ValueError(f"text: got {len(text)} characters, wanted 2 to {LENGTH}, all of them ASCII.")
    whole("byte", token, 1, len(text))
    model = _model(size)
    readers, sources = names(model.config)
    if cut is not None:
        whole("source to cut", cut, 0, len(sources) - 1)
    trained, with_cut = _run(size, text, None), _run(size, text, cut)
    before, after = (probabilities[token - 1] for probabilities, _, _ in (trained, with_cut))
    top = torch.maximum(before, after).topk(BARS).indices
    top = top[before[top].argsort(descending=True)]
    answer = tuple((spelled(int(b)), float(before[b]), float(after[b])) for b in top)
    rows = with_cut[2] if mean else with_cut[1][token - 1]
    padded = tuple(tuple(row) + (None,) * (len(sources) - len(row)) for row in rows)
    losses = tuple(_loss(p, text) for p, _, _ in (trained, with_cut))
    return Depths(size, text, token, mean, cut, readers, sources, padded, answer, losses)


def names(config: K3Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Readers and sources of a model, as axes spell them. Layers count from 1."""
    kinds = [(f"{i} {kind.upper()}", f"{i} MLP") for i, kind in enumerate(config.layer_kinds, 1)]
    parts = tuple(part for both in kinds for part in both)
    if config.attn_res_block_size == 0.5:
        return (*parts, "final"), ("embedding", *parts)
    step, layers = int(config.attn_res_block_size), config.num_hidden_layers
    blocks = [(start, min(start + step - 1, layers)) for start in range(1, layers + 1, step)]
    named = (f"layer {a}" if a == b else f"layers {a}–{b}" for a, b in blocks)
    return (*parts, "final"), ("embedding", *named)


def spelled(byte: int) -> str:
    """A byte for human eyes."""
    return {32: "space", 10: "new line"}.get(byte, chr(byte) if 32 < byte < 127 else f"byte {byte}")


@lru_cache(maxsize=len(SIZES))
def _model(size: float) -> K3ForCausalLM:
    return load_model(FOLDER / size_name(size))


@lru_cache(maxsize=64)
@torch.no_grad()
def _run(size: float, text: str, cut: int | None) -> tuple[torch.Tensor, list, list]:
    """Probabilities [T, vocab] of the byte after each; shares of every byte; shares in the mean."""
    model, ids = _model(size), encode(text).unsqueeze(0)
    with watching(model, cut) as streams:
        probabilities = model(ids).logits[0].softmax(-1)
    (stream,) = streams
    return probabilities, [read_shares(stream, t) for t in range(len(text))], read_shares(stream)


def _loss(probabilities: torch.Tensor, text: str) -> float:
    return float(F.nll_loss(probabilities[:-1].log(), encode(text)[1:]))


def describe(d: Depths) -> str:
    """The result in plain sentences: what the picture says, also for readers who do not see it."""
    where = "Over the whole text" if d.mean else f"After byte {d.token}, {spelled(ord(d.text[d.token - 1]))!r}"
    words = (
        f"{where}, the embedding gets {d.embedding:.0%} of the average reader's mix, the newest source {d.live:.0%}."
    )
    best, (whole_loss, cut_loss) = d.answer[0], d.losses
    if d.cut is None:
        return f"{words} The next byte is expected to be {best[0]!r}, at {best[1]:.0%}; {whole_loss:.2f} nats per byte over the text."
    change = f"the loss over the text goes from {whole_loss:.2f} to {cut_loss:.2f} nats per byte"
    return f"{words} Without “{d.sources[d.cut]}” {change}; {best[0]!r} as the next byte goes from {best[1]:.0%} to {best[2]:.0%}."


def explorer(size: float = 1, text: str = TEXT, token: int = 20, cut: int | None = None) -> common.Explorer:
    """Fresh controls around the picture: choose a model, a byte of a text, and a source to cut out."""
    first = compute(size=size, text=text, token=token, cut=cut)
    c = _controls(first)

    def react(name: str) -> None:
        sources = names(_model(c["size"].value).config)[1]
        if name == "size":
            c["cut"].options = _cuts(sources)  # which also goes back to "nothing"
        if name == "text" and c["text"].value.isascii():
            c["token"].max = max(1, min(len(c["text"].value), LENGTH))
        d = compute(**{n: control.value for n, control in c.items() if n != "cut"}, cut=_source(c["cut"].value))
        common.redraw(drawn, figure(d))
        spoken.value = common.spoken(describe(d))
        message.show("")

    drawn = go.FigureWidget(figure(first))  # traces in the constructor: those added later are lost on reload
    spoken, message = w.HTML(common.spoken(describe(first))), common.Message()
    message.watch(c, react)
    columns = [[c["size"], c["mean"], c["cut"]], [c["text"], c["token"]]]
    return common.Explorer("depth", c, drawn, spoken, message, [common.side_by_side(columns), message, drawn, spoken])


def _cuts(sources: tuple[str, ...]) -> list[tuple[str, int]]:
    return [("nothing", NOTHING), *((name, n) for n, name in enumerate(sources))]


def _source(chosen: int) -> int | None:
    return None if chosen == NOTHING else chosen


def _controls(d: Depths) -> dict[str, w.Widget]:
    waits = {"continuous_update": False}
    return {
        "size": labelled(w.Dropdown, "Sources (block size)", options=[(v, k) for k, v in SIZES.items()], value=d.size),
        "text": labelled(w.Text, f"Text (up to {LENGTH} bytes)", value=d.text, **waits),
        "token": labelled(w.IntSlider, "Look at (byte of the text)", min=1, max=len(d.text), value=d.token),
        "mean": labelled(w.Dropdown, "Shares of", options=[("this byte", False), ("the whole text, mean", True)], value=d.mean),
        "cut": labelled(w.Dropdown, "Cut out (source)", options=_cuts(d.sources), value=NOTHING if d.cut is None else d.cut),
    }  # fmt: skip
