"""The command line: `k3lite needle`, `k3lite needle ask`, `k3lite train mqar`, `k3lite train recall`,
`k3lite train balance`, `k3lite train depth`, `k3lite train ep`, `k3lite bench`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError

from k3lite import bench, parallel
from k3lite.checkpoint import load_model
from k3lite.tasks import balance_job, depth_job, ep_job, mqar_job, needle_job, recall_job, recall_report
from k3lite.tasks.balance_task import Method
from k3lite.tasks.depth import parse_size
from k3lite.tasks.needle_ask import ask, prepare_document
from k3lite.tasks.needle_report import text_table
from k3lite.tasks.siblings import VARIANTS
from k3lite.tasks.trained import CARD, forget
from k3lite.train import STATE, Stopped

T = TypeVar("T")
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
        return _fail(f"{e.filename or 'files'}: {e.strerror or e}")
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


def _train_mqar(args: argparse.Namespace) -> int:
    job = mqar_job.Job(
        out=args.out,
        recipe=dataclasses.replace(mqar_job.RECIPE, steps=args.steps),
        widths=args.widths,
        seeds=args.seeds,
        pairs=args.pairs,
        rows=args.rows,
    )
    _begin(job, args.restart)
    print(mqar_job.text_table(mqar_job.run(job)))
    print(f"\nwritten: {args.out / mqar_job.RESULT}, and the models beside it")
    return 0


def _train_recall(args: argparse.Namespace) -> int:
    job = recall_job.Job(
        out=args.out,
        recipe=dataclasses.replace(recall_job.RECIPE, steps=args.steps),
        variants=args.variants,
        widths=args.widths,
        layers=args.layers,
        seeds=args.seeds,
        lengths=args.lengths,
        facts=args.facts,
        questions=args.questions,
    )
    _begin(job, args.restart)
    print(recall_report.text_table(recall_job.run(job)))
    print(f"\nwritten: {args.out / recall_job.RESULT}, and the models beside it")
    return 0


def _train_balance(args: argparse.Namespace) -> int:
    job = balance_job.Job(args.out, args.methods, args.data, args.seeds, args.steps)
    job.check()
    if args.restart:
        job.restart()
    print(
        f"{len(job.runs())} runs of {job.steps} steps on {torch.get_num_threads()} CPU thread(s); finished ones are kept"
    )
    result = balance_job.run(job)
    for data in job.data:
        print(f"\n{balance_job.text_table(result, data)}")
    print(f"\nwritten: {args.out / balance_job.RESULT}")
    return 0


def _train_depth(args: argparse.Namespace) -> int:
    job = depth_job.Job(
        out=args.out,
        recipe=dataclasses.replace(depth_job.RECIPE, steps=args.steps),
        sizes=args.sizes,
        seeds=args.seeds,
    )
    _begin(job, args.restart)
    print(depth_job.text_table(depth_job.run(job)))
    print(f"\nwritten: {args.out / depth_job.RESULT}, and the models beside it")
    return 0


def _train_ep(args: argparse.Namespace) -> int:
    job = ep_job.Job(
        out=args.out,
        recipe=dataclasses.replace(ep_job.RECIPE, steps=args.steps),
        batch=args.batch,
        length=args.length,
        dtype=args.dtype,
    )
    job.check()
    with parallel.start(args.ranks, device=args.device, timeout=args.timeout) as ranks:
        if ranks.first:
            if args.restart:
                job.restart()
            print(f"training on {ranks.size} rank(s), then on one, {args.steps} steps of the same batches", flush=True)
        shared = ep_job.run_on_ranks(job, ranks)
    if not ranks.first:
        return 0
    result = ep_job.compare(job, shared)
    print(ep_job.text_table(result))
    print(f"\nwritten: {args.out / ep_job.RESULT}, and the whole model in {args.out / 'model'}")
    return 0 if result["equal"] else 1


def _begin(job: mqar_job.Job | recall_job.Job | depth_job.Job, restart: bool) -> None:
    """Check a job of several models and say what is done already."""
    job.check()
    if restart:
        job.restart()
    folders = [folder for *_, folder in job.models()]
    trained = sum((folder / "model" / CARD).exists() for folder in folders)
    started = sum((folder / STATE).exists() for folder in folders)
    print(
        f"{len(folders)} models of {job.recipe.steps} steps on {torch.get_num_threads()} CPU thread(s): {trained} trained "
        f"already, {started} to go on with, {len(folders) - trained - started} to begin (--restart trains all anew)"
    )


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
        "--lengths", type=_list(int), default=default.lengths, help="context lengths in bytes, like 256,1024"
    )
    needle.add_argument(
        "--depths", type=_list(float), default=default.depths, help="depths of the needle in percent, like 0,50,100"
    )
    needle.add_argument("--needles", type=_list(int), default=default.needles, help="needles in a document, like 1,4")
    needle.add_argument("--trials", type=int, default=default.trials, help="documents a cell (default %(default)s)")
    needle.add_argument("--steps", type=int, default=default.recipe.steps, help="training steps (default %(default)s)")
    needle.add_argument("--seed", type=int, default=default.recipe.seed)
    needle.add_argument(
        "--out", type=Path, default=default.out, help="folder of model and results (default %(default)s)"
    )
    needle.add_argument("--restart", action="store_true", help="forget a model or checkpoint in the folder")
    needle.set_defaults(run=_needle)
    _threads(needle)

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
    _threads(question)

    tasks = commands.add_parser("train", help="train small models on a task and measure them")
    tasks = tasks.add_subparsers(title="tasks", required=True, metavar="TASK")
    _mqar_options(tasks.add_parser("mqar", help="associative recall: how many pairs does a state of each width hold?"))
    _recall_options(
        tasks.add_parser("recall", help="gist and verbatim: what siblings with states, slots or both recall")
    )

    _balance_options(tasks.add_parser("balance", help="balance of experts: what each rule does to loads and loss"))
    _depth_options(tasks.add_parser("depth", help="attention over depth: plain sum, Full AttnRes, blocks"))
    _ep_options(tasks.add_parser("ep", help="experts on several ranks, started by torchrun: as on one?"))

    speed = commands.add_parser("bench", help="measure speed as a ratio within one run")
    speed.add_argument("name", choices=sorted(bench.BENCHES))
    speed.add_argument("--device", default="cpu", help="cpu, or cuda where there is one (default %(default)s)")
    speed.add_argument("--json", type=Path, help="also write the rows to this file")
    speed.set_defaults(run=_bench)
    _threads(speed)
    return parser


def _mqar_options(mqar: argparse.ArgumentParser) -> None:
    default = mqar_job.Job(out=Path("out/mqar"))
    mqar.add_argument("--widths", type=_list(int), default=default.widths, help="channels of a state, like 8,16,32,64")
    mqar.add_argument("--seeds", type=_list(int), default=default.seeds, help="one model of each width a seed")
    mqar.add_argument("--pairs", type=_list(int), default=default.pairs, help="pairs in a row when measuring")
    mqar.add_argument("--rows", type=int, default=default.rows, help="held-out rows a cell (default %(default)s)")
    mqar.add_argument("--steps", type=int, default=default.recipe.steps, help="training steps (default %(default)s)")
    mqar.add_argument(
        "--out", type=Path, default=default.out, help="folder of models and results (default %(default)s)"
    )
    mqar.add_argument("--restart", action="store_true", help="forget these models, and checkpoints, in the folder")
    mqar.set_defaults(run=_train_mqar)
    _threads(mqar)


def _recall_options(recall: argparse.ArgumentParser) -> None:
    default = recall_job.Job(out=Path("out/recall"))
    variants = ", ".join(VARIANTS)
    recall.add_argument("--variants", type=_list(str), default=default.variants, help=f"siblings, of: {variants}")
    recall.add_argument("--widths", type=_list(int), default=default.widths, help="channels of a KDA state, like 16,32")
    recall.add_argument("--layers", type=int, default=default.layers, help="of each sibling (default %(default)s)")
    recall.add_argument("--seeds", type=_list(int), default=default.seeds, help="one model of each sibling a seed")
    recall.add_argument("--lengths", type=_list(int), default=default.lengths, help="document lengths when measuring")
    recall.add_argument("--facts", type=_list(int), default=default.facts, help="facts in a document when measuring")
    recall.add_argument(
        "--questions",
        type=int,
        default=default.questions,
        help="questions a cell, fewer where costly (default %(default)s)",
    )
    recall.add_argument("--steps", type=int, default=default.recipe.steps, help="training steps (default %(default)s)")
    recall.add_argument(
        "--out", type=Path, default=default.out, help="folder of models and results (default %(default)s)"
    )
    recall.add_argument("--restart", action="store_true", help="forget these models, and checkpoints, in the folder")
    recall.set_defaults(run=_train_recall)
    _threads(recall)


def _balance_options(balance: argparse.ArgumentParser) -> None:
    default = balance_job.Job(out=Path("out/balance"))
    balance.add_argument(
        "--methods", type=_each(Method.parse), default=default.methods, help="like none,auxiliary:0.1,quantile"
    )
    balance.add_argument("--data", type=_list(str), default=default.data, help=f"of: {', '.join(default.data)}")
    balance.add_argument("--seeds", type=_list(int), default=default.seeds, help="a run of each method a seed")
    balance.add_argument("--steps", type=int, default=default.steps, help="training steps (default %(default)s)")
    balance.add_argument("--out", type=Path, default=default.out, help="folder of the result (default %(default)s)")
    balance.add_argument("--restart", action="store_true", help="forget what is in the folder")
    balance.set_defaults(run=_train_balance)
    _threads(balance)


def _each(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """`_list`, with the reason of a ValueError, which argparse would drop."""

    def read(text: str) -> tuple[T, ...]:
        try:
            return _list(parse)(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from e

    return read


def _depth_options(depth: argparse.ArgumentParser) -> None:
    default = depth_job.Job(out=Path("out/depth"))
    depth.add_argument(
        "--sizes",
        type=_each(parse_size),
        default=default.sizes,
        help="plain, full, or layers a block, like plain,full,1,4",
    )
    depth.add_argument("--seeds", type=_list(int), default=default.seeds, help="one model of each size a seed")
    depth.add_argument("--steps", type=int, default=default.recipe.steps, help="training steps (default %(default)s)")
    depth.add_argument(
        "--out", type=Path, default=default.out, help="folder of models and results (default %(default)s)"
    )
    depth.add_argument("--restart", action="store_true", help="forget these models, and checkpoints, in the folder")
    depth.set_defaults(run=_train_depth)
    _threads(depth)


def _ep_options(ep: argparse.ArgumentParser) -> None:
    default = ep_job.Job(out=Path("out/ep"))
    ep.add_argument("--ranks", type=int, help="how many torchrun must have started (default: any number)")
    ep.add_argument("--steps", type=int, default=default.recipe.steps, help="training steps (default %(default)s)")
    ep.add_argument("--batch", type=int, default=default.batch, help="rows of all ranks together (default %(default)s)")
    ep.add_argument("--length", type=int, default=default.length, help="bytes in a row (default %(default)s)")
    ep.add_argument("--dtype", default=default.dtype, help="float64 or float32 (default %(default)s)")
    ep.add_argument("--device", default="cpu", help="cpu (gloo), or cuda (NCCL, one GPU a rank; default %(default)s)")
    ep.add_argument(
        "--timeout", type=float, default=parallel.TIMEOUT, help="seconds to wait for other ranks (default %(default)g)"
    )
    ep.add_argument(
        "--out", type=Path, default=default.out, help="folder of model, checkpoints and results (default %(default)s)"
    )
    ep.add_argument("--restart", action="store_true", help="forget the checkpoints in the folder")
    ep.set_defaults(run=_train_ep)
    _threads(ep)


def _threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: what torch chooses)")


def _list(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse(text: str) -> tuple[T, ...]:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = f"comma-separated list of {kind.__name__}"  # argparse shows it in its error
    return parse


if __name__ == "__main__":
    sys.exit(main())
