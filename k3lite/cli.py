"""The command line: `k3lite needle`, `k3lite needle ask`, `k3lite train TASK`, `k3lite generate`, `k3lite params`,
`k3lite budget`, `k3lite verify`, `k3lite bench`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from k3lite import bench, cli_generate, cli_paper, cli_train, cli_verify, parallel
from k3lite.checkpoint import load_model
from k3lite.cli_options import list_of, threads
from k3lite.tasks import needle_job
from k3lite.tasks.needle_ask import ask, prepare_document
from k3lite.tasks.needle_report import text_table
from k3lite.tasks.trained import CARD, forget
from k3lite.train import STATE, Stopped

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Bad input is one line on stderr and status 2."""
    args = _parser().parse_args(argv)
    try:
        if args.threads is not None:
            if args.threads < 1:
                raise ValueError(f"threads: got {args.threads}, wanted 1 or more")
            torch.set_num_threads(args.threads)
        return args.run(args)
    except Stopped as e:
        return _fail(f"{e}; type the same command again to go on from there", INTERRUPTED)
    except KeyboardInterrupt:
        return _fail("stopped; what was finished is kept, the same command goes on", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing more to say
        return 1
    except OSError as e:
        return _fail(f"{e.filename2 or e.filename or 'output'}: {e.strerror or e}")
    except SafetensorError as e:  # how safetensors reports a disk that is full
        return _fail(f"weights could not be written or read: {e}")
    except (ValueError, parallel.RankError) as e:
        return _fail(str(e))


def _fail(message: str, status: int = 2) -> int:
    print(f"k3lite: {message}", file=sys.stderr)
    return status


def _needle(args: argparse.Namespace) -> int:
    job = needle_job.Job(
        out=args.out,
        recipe=dataclasses.replace(needle_job.RECIPE, steps=args.steps, seed=args.seed),
        lengths=args.lengths,
        depths=args.depths,
        needles=args.needles,
        trials=args.trials,
    )
    job.check()
    model_folder = args.out / "model"
    if args.restart:
        forget(args.out)
    if (model_folder / CARD).exists():
        print(f"{model_folder} is trained already: measuring only (--restart trains anew)")
    elif (args.out / STATE).exists():
        print(f"going on from the last checkpoint in {args.out}")
    else:
        print(f"training a small K3 for {args.steps} steps on {torch.get_num_threads()} CPU thread(s)")
    result = needle_job.run(job)
    print(text_table(result))
    print(f"\nwritten: {args.out / 'needle.json'} and {args.out / 'needle.html'}")
    program = os.path.relpath(sys.argv[0]) if os.sep in sys.argv[0] else sys.argv[0]
    if max(job.needles) == 1:
        print(
            f"one needle proves little; several, without new training:  {program} needle --needles 1,4,8 --out {args.out}"
        )
    print(f"ask it:  {program} needle ask --model {model_folder} --text FILE --hide abc=4071 --depth 30 --key abc")
    return 0


def _ask(args: argparse.Namespace) -> int:
    try:
        raw = args.text.read_bytes()
    except OSError as e:
        raise ValueError(f"--text {args.text}: {e.strerror}") from e
    document, facts = prepare_document(raw, args.hide, args.depth)
    needle_job.read_card(args.model)
    answer, nbytes = ask(load_model(args.model), document, args.key)
    print(f"read {len(document):,} bytes, keeping {nbytes / 1024:,.1f} KiB")
    print(f"?{args.key}={answer}")
    if args.key not in facts:
        print(f"there is no line {args.key}=dddd in the text: this answer is a guess")
    else:
        print("right" if answer == facts[args.key] else f"wrong: the text says {facts[args.key]}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    rows, remarks = bench.run(args.name, args.device)
    print("\n".join([bench.table(rows), *remarks]))
    if args.json:
        bench.write_json(rows, args.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="k3lite", description="Kimi K3, small and exact.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    default = needle_job.Job(out=Path("out/needle"))

    needle = commands.add_parser("needle", help="train a small K3, then measure where it finds hidden facts")
    needle.add_argument(
        "--lengths", type=list_of(int), default=default.lengths, help="context lengths in bytes, like 256,1024"
    )
    needle.add_argument(
        "--depths", type=list_of(float), default=default.depths, help="depths of the needle in percent, like 0,50,100"
    )
    needle.add_argument("--needles", type=list_of(int), default=default.needles, help="needles in a document, like 1,4")
    needle.add_argument("--trials", type=int, default=default.trials, help="documents a cell (default %(default)s)")
    needle.add_argument("--steps", type=int, default=default.recipe.steps, help="training steps (default %(default)s)")
    needle.add_argument("--seed", type=int, default=default.recipe.seed)
    needle.add_argument(
        "--out", type=Path, default=default.out, help="folder of model and results (default %(default)s)"
    )
    needle.add_argument("--restart", action="store_true", help="forget a model or checkpoint in the folder")
    needle.set_defaults(run=_needle)
    threads(needle)

    actions = needle.add_subparsers(title="actions", metavar="[ask]")
    question = actions.add_parser("ask", help="ask a trained model for a fact in a text of your own")
    question.add_argument(
        "--model", type=Path, default=default.out / "model", help="folder of a finished model (default %(default)s)"
    )
    question.add_argument("--text", type=Path, required=True, help="any text file; lines like abc=4071 are facts")
    question.add_argument("--key", required=True, help="the three letters to ask for")
    question.add_argument("--hide", metavar="abc=4071", help="put this fact into the text first")
    question.add_argument("--depth", type=float, default=50, help="where to hide it, in percent (default %(default)s)")
    question.set_defaults(run=_ask)
    threads(question)

    cli_train.add(commands)
    cli_verify.add(commands)
    cli_paper.add(commands)
    cli_generate.add(commands)

    speed = commands.add_parser("bench", help="measure speed as a ratio within one run")
    speed.add_argument("name", choices=sorted(bench.BENCHES))
    speed.add_argument("--device", default="cpu", help="cpu, or cuda where there is one (default %(default)s)")
    speed.add_argument("--json", type=Path, help="also write the rows to this file")
    speed.set_defaults(run=_bench)
    threads(speed)
    return parser


if __name__ == "__main__":
    sys.exit(main())
