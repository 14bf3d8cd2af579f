"""`k3lite generate`: a model goes on with a text, and its memory can be watched while it does."""

from __future__ import annotations

import argparse
import codecs
from pathlib import Path

import torch

from k3lite.checkpoint import load_model
from k3lite.cli_options import threads
from k3lite.generate import metered
from k3lite.tasks.text import encode

METER = f"{'tokens':>8}{'next':>8}{'state B':>12}{'conv B':>10}{'latents B':>12}{'all B':>12}"


def add(commands: argparse._SubParsersAction) -> None:
    """Put `generate` among the commands."""
    parser = commands.add_parser("generate", help="go on with a text, byte by byte, from a trained model")
    parser.add_argument("--model", type=Path, required=True, help="folder of a model that reads bytes")
    parser.add_argument("--prompt", required=True, help="the text to go on with")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to write (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest (default %(default)s)")
    parser.add_argument("--top-p", type=float, help="sample from the likeliest bytes that make up this share")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default %(default)s)")
    parser.add_argument("--meter", action="store_true", help="print a line a byte, with what the cache takes")
    parser.set_defaults(run=_generate)
    threads(parser)


def _generate(args: argparse.Namespace) -> int:
    if not args.prompt:
        raise ValueError("prompt: got nothing, wanted at least one character to go on from")
    model = load_model(args.model)
    ids = encode(args.prompt)
    if int(ids.max()) >= model.config.vocab_size:
        raise ValueError(f"prompt: got byte {int(ids.max())}, wanted bytes below {model.config.vocab_size}")
    steps = metered(
        model, ids[None], args.tokens,
        temperature=args.temperature, top_p=args.top_p, generator=torch.Generator().manual_seed(args.seed),
    )  # fmt: skip
    text = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be several bytes
    written = args.prompt
    print(METER if args.meter else args.prompt, end="\n" if args.meter else "", flush=True)
    for n, (token, held) in enumerate(steps, len(ids)):
        byte = bytes(token.tolist())
        piece = text.decode(byte)
        written += piece
        if args.meter:
            print(f"{n:>8}{byte!r:>8}{held.state:>12,}{held.conv:>10,}{held.latent:>12,}{held.total:>12,}", flush=True)
        else:
            print(piece, end="", flush=True)
    rest = text.decode(b"", final=True)
    print(f"\n{written}{rest}" if args.meter else rest)
    return 0
