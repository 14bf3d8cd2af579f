"""`k3lite train TASK`: small models trained on a task, and measured."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from k3lite import parallel
from k3lite.cli_options import each_of, list_of, threads
from k3lite.tasks import balance_job, depth_job, ep_job, lm, lm_job, mqar_job, qat_job, recall_job, recall_report
from k3lite.tasks.balance_task import Method
from k3lite.tasks.depth import parse_size
from k3lite.tasks.siblings import VARIANTS
from k3lite.tasks.trained import CARD
from k3lite.train import STATE


def add(commands: argparse._SubParsersAction) -> None:
    """Put `train` among the commands."""
    tasks = commands.add_parser("train", help="train small models on a task and measure them")
    tasks = tasks.add_subparsers(title="tasks", required=True, metavar="TASK")
    _mqar_options(tasks.add_parser("mqar", help="associative recall: how many pairs does a state of each width hold?"))
    _recall_options(
        tasks.add_parser("recall", help="gist and verbatim: what siblings with states, slots or both recall")
    )
    _balance_options(tasks.add_parser("balance", help="balance of experts: what each rule does to loads and loss"))
    _depth_options(tasks.add_parser("depth", help="attention over depth: plain sum, Full AttnRes, blocks"))
    _qat_options(tasks.add_parser("qat", help="rounding after training against training with rounding"))
    _lm_options(tasks.add_parser("lm", help="the whole small model: prose, then recall with rounding; ablations"))
    _ep_options(tasks.add_parser("ep", help="experts on several ranks, started by torchrun: as on one?"))


def _mqar_options(mqar: argparse.ArgumentParser) -> None:
    default = mqar_job.Job(out=Path("out/mqar"))
    mqar.add_argument(
        "--widths", type=list_of(int), default=default.widths, help="channels of a state, like 8,16,32,64"
    )
    mqar.add_argument("--seeds", type=list_of(int), default=default.seeds, help="one model of each width a seed")
    mqar.add_argument("--pairs", type=list_of(int), default=default.pairs, help="pairs in a row when measuring")
    mqar.add_argument("--rows", type=int, default=default.rows, help="held-out rows a cell (default %(default)s)")
    mqar.add_argument("--steps", type=int, default=default.recipe.steps, help="training steps (default %(default)s)")
    mqar.add_argument(
        "--out", type=Path, default=default.out, help="folder of models and results (default %(default)s)"
    )
    mqar.add_argument("--restart", action="store_true", help="forget these models, and checkpoints, in the folder")
    mqar.set_defaults(run=_train_mqar)
    threads(mqar)


def _recall_options(recall: argparse.ArgumentParser) -> None:
    default = recall_job.Job(out=Path("out/recall"))
    variants = ", ".join(VARIANTS)
    recall.add_argument("--variants", type=list_of(str), default=default.variants, help=f"siblings, of: {variants}")
    recall.add_argument(
        "--widths", type=list_of(int), default=default.widths, help="channels of a KDA state, like 16,32"
    )
    recall.add_argument("--layers", type=int, default=default.layers, help="of each sibling (default %(default)s)")
    recall.add_argument("--seeds", type=list_of(int), default=default.seeds, help="one model of each sibling a seed")
    recall.add_argument("--lengths", type=list_of(int), default=default.lengths, help="document lengths when measuring")
    recall.add_argument("--facts", type=list_of(int), default=default.facts, help="facts in a document when measuring")
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
    threads(recall)


def _balance_options(balance: argparse.ArgumentParser) -> None:
    default = balance_job.Job(out=Path("out/balance"))
    balance.add_argument(
        "--methods", type=each_of(Method.parse), default=default.methods, help="like none,auxiliary:0.1,quantile"
    )
    balance.add_argument("--data", type=list_of(str), default=default.data, help=f"of: {', '.join(default.data)}")
    balance.add_argument("--seeds", type=list_of(int), default=default.seeds, help="a run of each method a seed")
    balance.add_argument("--steps", type=int, default=default.steps, help="training steps (default %(default)s)")
    balance.add_argument("--out", type=Path, default=default.out, help="folder of the result (default %(default)s)")
    balance.add_argument("--restart", action="store_true", help="forget what is in the folder")
    balance.set_defaults(run=_train_balance)
    threads(balance)


def _depth_options(depth: argparse.ArgumentParser) -> None:
    default = depth_job.Job(out=Path("out/depth"))
    depth.add_argument(
        "--sizes",
        type=each_of(parse_size),
        default=default.sizes,
        help="plain, full, or layers a block, like plain,full,1,4",
    )
    depth.add_argument("--seeds", type=list_of(int), default=default.seeds, help="one model of each size a seed")
    depth.add_argument("--steps", type=int, default=default.recipe.steps, help="training steps (default %(default)s)")
    depth.add_argument(
        "--out", type=Path, default=default.out, help="folder of models and results (default %(default)s)"
    )
    depth.add_argument("--restart", action="store_true", help="forget these models, and checkpoints, in the folder")
    depth.set_defaults(run=_train_depth)
    threads(depth)


def _qat_options(qat: argparse.ArgumentParser) -> None:
    default = qat_job.Job(out=Path("out/qat"))
    qat.add_argument("--seeds", type=list_of(int), default=default.seeds, help="models of each kind, one a seed")
    qat.add_argument("--steps", type=int, default=default.recipe.steps, help="training steps (default %(default)s)")
    qat.add_argument("--out", type=Path, default=default.out, help="folder of models and results (default %(default)s)")
    qat.add_argument("--restart", action="store_true", help="forget these models, and checkpoints, in the folder")
    qat.set_defaults(run=_train_qat)
    threads(qat)


def _lm_options(parser: argparse.ArgumentParser) -> None:
    presets = ", ".join(f"{name}: {p.text} + {p.recall} steps" for name, p in lm.PRESETS.items())
    parser.add_argument("--preset", choices=lm.PRESETS, default="short", help=f"{presets} (default %(default)s)")
    parser.add_argument("--steps", type=list_of(int), help="steps of both stages instead of a preset's, like 60,60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ablate", choices=lm.ABLATIONS, help="change one thing of the model")
    parser.add_argument(
        "--table", type=list_of(int), metavar="SEEDS", help="train the whole model and all ablations alike, like 0,1"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of model and results (default: out/lm, out/lm-ABLATION or out/lm-table)"
    )
    parser.add_argument("--restart", action="store_true", help="forget the model, and checkpoints, in the folder")
    parser.set_defaults(run=_train_lm)
    threads(parser)


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
    threads(ep)


def _train_mqar(args: argparse.Namespace) -> int:
    job = mqar_job.Job(
        out=args.out,
        recipe=dataclasses.replace(mqar_job.RECIPE, steps=args.steps),
        widths=args.widths,
        seeds=args.seeds,
        pairs=args.pairs,
        rows=args.rows,
    )
    return _train_models(args, job, mqar_job, mqar_job.text_table)


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
    return _train_models(args, job, recall_job, recall_report.text_table)


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
    return _train_models(args, job, depth_job, depth_job.text_table)


def _train_qat(args: argparse.Namespace) -> int:
    job = qat_job.Job(args.out, dataclasses.replace(qat_job.RECIPE, steps=args.steps), seeds=args.seeds)
    return _train_models(args, job, qat_job, qat_job.text_table)


def _train_lm(args: argparse.Namespace) -> int:
    preset = lm.PRESETS[args.preset]
    if args.steps is not None:
        if len(args.steps) != 2:
            raise ValueError(f"steps: got {','.join(map(str, args.steps))}, wanted two numbers, like 60,60")
        preset = lm.Preset(*args.steps)
    if args.table is not None:
        return _train_lm_table(args, preset)
    out = args.out or Path(f"out/lm-{args.ablate}" if args.ablate else "out/lm")
    job = lm_job.Job(out, preset, args.seed, args.ablate)
    job.check()
    if args.restart:
        job.restart()
    finished = (job.model_folder / CARD).exists()
    print(
        f"{job.model_folder} is trained already (--restart trains anew)"
        if finished
        else f"training for {preset.text} + {preset.recall} steps on {torch.get_num_threads()} CPU thread(s)",
        flush=True,
    )
    print(lm_job.text_card(lm_job.run(job)))
    print(f"\nwritten: {job.model_folder}, and {out / lm_job.HISTORY}")
    return 0


def _train_lm_table(args: argparse.Namespace, preset: lm.Preset) -> int:
    out = args.out or Path("out/lm-table")
    preset = preset if args.steps is not None else lm_job.ABLATION_PRESET
    print(lm_job.text_table(lm_job.run_ablations(out, (None, *lm.ABLATIONS), args.table, preset)))
    print(f"\nwritten: {out / lm_job.TABLE}, and the models beside it")
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


def _train_models(args: argparse.Namespace, job, task: ModuleType, text_table: Callable[[dict], str]) -> int:
    """Run a job of several models, as `run` and RESULT of its module have it."""
    _begin(job, args.restart)
    print(text_table(task.run(job)))
    print(f"\nwritten: {args.out / task.RESULT}, and the models beside it")
    return 0


def _begin(job: mqar_job.Job | recall_job.Job | depth_job.Job | qat_job.Job, restart: bool) -> None:
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
