"""`k3lite params MODEL` and `k3lite budget MODEL`: a model on paper, from its config alone. No weights are needed.

MODEL is a preset's name or the path of a config.json. Every figure is `budget`'s; times are `devices`' bounds from below.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from k3lite import budget
from k3lite.config import ConfigError, K3Config, presets
from k3lite.devices import Device, Step, find_device, read_devices, sent_bytes
from k3lite.spell import format_bytes, format_seconds, format_si

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}  # bytes of a number
PRECISIONS = ("mxfp4", "bf16")
MXFP4 = {"format": "mxfp4-pack-quantized"}


def add(commands: argparse._SubParsersAction) -> None:
    """Put `params` and `budget` among the commands."""
    params = commands.add_parser("params", help="parameters by part, active ones, and bytes, from a config alone")
    params.set_defaults(run=_params, threads=None)
    paper = commands.add_parser(
        "budget", help="bytes kept, bytes read and FLOPs of a pass, and what a GPU makes of them"
    )
    paper.set_defaults(run=_budget, threads=None)
    for parser in (params, paper):
        parser.add_argument("model", help=f"path of a config.json, or one of: {', '.join(presets())}")
    paper.add_argument("--context", type=int, help="tokens read before (default: the model's longest)")
    paper.add_argument("--batch", type=int, default=1, help="sequences (default %(default)s)")
    paper.add_argument("--new", type=int, default=1, help="tokens that a decode step adds (default %(default)s)")
    paper.add_argument("--gpu", default="H200", help=f"one of: {', '.join(read_devices())} (default %(default)s)")
    paper.add_argument("--gpus", type=int, help="how many (default: the fewest that hold weights and cache)")
    paper.add_argument(
        "--precision", choices=PRECISIONS, help="of the routed experts; the rest is bf16 (default: as in the config)"
    )


def read_config(model: str) -> K3Config:
    """A preset's name, else a path. Raises ConfigError that names both ways."""
    if model in presets():
        return K3Config.preset(model)
    if not Path(model).exists():
        raise ConfigError(f"model: got {model!r}, wanted one of {', '.join(presets())}, or the path of a config.json")
    return K3Config.from_json(model)


def with_precision(c: K3Config, precision: str | None) -> K3Config:
    """The same model with its routed experts in MXFP4 or not, everything else in bf16; None: as it is."""
    if precision is None:
        return c
    if precision == "mxfp4" and not c.num_experts:
        raise ValueError("precision: got 'mxfp4' for a model without routed experts, which are all that is packed")
    kept = c.quantization_config if c.packs_mxfp4 else MXFP4
    return dataclasses.replace(c, quantization_config=kept if precision == "mxfp4" else None, dtype="bfloat16")


# ---- params


def _params(args: argparse.Namespace) -> int:
    print(params_text(args.model, read_config(args.model)))
    return 0


def params_text(name: str, c: K3Config) -> str:
    """What `k3lite params` prints."""
    width = WIDTHS[c.dtype]
    stored, plain = budget.checkpoint_bytes(c, width), budget.checkpoint_bytes(with_precision(c, "bf16"))
    parts = budget.parameters(c)
    met = parts | {"routed_experts": _met(c, parts["routed_experts"])}
    total, active = sum(parts.values()), budget.active_parameters(c)
    lines = [
        f"{name}: {c.num_hidden_layers} layers, {c.num_kda_layers} KDA and {c.num_mla_layers} MLA, "
        f"{c.num_moe_layers} with experts",
        "",
        f"{'part':<16}{'parameters':>22}{'a token meets':>20}",
        *(f"{part:<16}{n:>22,}{met[part]:>20,}" for part, n in parts.items()),
        f"{'total':<16}{total:>22,}{sum(met.values()):>20,}",
        "",
        "active parameters, in the three ways of counting",
        f"  all that a token meets                       {budget.active_parameters(c, input_embedding=True):>19,}",
        f"  without the input embedding, as published    {active:>19,}",
        f"  without embedding and head                   {active - parts['lm_head']:>19,}",
        "",
        "bytes",
        *_bytes_lines(c, stored, plain, total),
    ]
    return "\n".join([*lines, *_padding_lines(c, stored, total)])


def _met(c: K3Config, routed: int) -> int:
    return routed * c.num_experts_per_token // c.num_experts if c.num_experts else 0


def _bytes_lines(c: K3Config, stored: budget.CheckpointBytes, plain: budget.CheckpointBytes, total: int) -> list[str]:
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}[c.dtype]
    rows = []
    if c.packs_mxfp4:
        rows += [("routed experts, MXFP4 codes", stored.experts), ("  their scales", stored.scales)]
    elif c.num_experts:
        rows += [(f"routed experts, {dtype}", stored.routed)]
    rows += [
        (f"everything else, {dtype} (few fp32)", stored.rest),
        ("all of it", stored.total),
        ("in bf16 throughout (few fp32)", plain.total),
    ]
    if c.num_experts:
        rows.append(("one routed expert", budget.expert_bytes(c, WIDTHS[c.dtype])))
    share = f"  {8 * stored.total / total:.2f} bits a parameter, {stored.total / plain.total:.2%} of bf16 throughout"
    return [*(f"  {what:<36}{n:>28,}{format_bytes(n):>12}" for what, n in rows), share]


def _padding_lines(c: K3Config, stored: budget.CheckpointBytes, total: int) -> list[str]:
    """K3's files, known by their bounded decay, pad `A_log` to a multiple of 128 numbers in fp32 (k3-architecture §4)."""
    a = c.linear_attn_config
    padding = c.num_kda_layers * (-a.num_heads % 128) if a.gate_lower_bound is not None else 0
    if not padding:
        return []
    return [
        f"  the released layout pads A_log by {padding:,} numbers: {total + padding:,} stored, everything else "
        f"{stored.rest + 4 * padding:,} bytes, all of it {stored.total + 4 * padding:,}"
    ]


# ---- budget


def _budget(args: argparse.Namespace) -> int:
    for name, least in (("context", 0), ("batch", 1), ("new", 1), ("gpus", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"{name}: got {value}, wanted {least} or more")
    c = with_precision(read_config(args.model), args.precision)
    context = c.max_position_embeddings if args.context is None else args.context
    device = find_device(args.gpu)
    held = budget.checkpoint_bytes(c, WIDTHS[c.dtype]).total
    held += budget.cache_bytes(c, context + args.new, args.batch, WIDTHS[c.dtype]).total
    gpus = args.gpus or device.to_hold(held)
    print(budget_text(args.model, c, context, args.batch, args.new, device.times(gpus)))
    return 0


def budget_text(name: str, c: K3Config, context: int, batch: int, new: int, machine: Device) -> str:
    """What `k3lite budget` prints."""
    width, rows = WIDTHS[c.dtype], f"{batch:,} sequence{'s' * (batch > 1)}"
    head = f"{name}, {'experts in MXFP4, ' * c.packs_mxfp4}{c.dtype}: {rows} of {context:,} tokens"
    if context > c.max_position_embeddings:
        head += f" (more than its {c.max_position_embeddings:,})"
    return "\n".join(
        [
            head,
            "",
            *_cache_lines(c, context, batch, width),
            "",
            *_weight_lines(c, batch, new, width),
            "",
            *_work_lines(c, context, batch, new, width, machine),
        ]
    )


def _cache_lines(c: K3Config, context: int, batch: int, width: int) -> list[str]:
    kept, twin = (budget.cache_bytes(m, context, batch, width) for m in (c, c.all_mla_twin()))
    token = budget.cache_bytes(c, 1, 1, width).latent
    rows = [
        (f"latents, {token:,} a token", kept.latent),
        ("KDA states, fp32", kept.state),
        ("convolution inputs", kept.conv),
        ("in all", kept.total),
        ("the all-MLA twin", twin.total),
    ]
    lines = ["cache, bytes", *(f"  {what:<36}{n:>28,}{format_bytes(n):>12}" for what, n in rows)]
    even = budget.break_even_tokens(c, width)
    if even is None:
        return lines
    if kept.total and twin.total:
        lines.append(f"  the twin keeps {twin.total / kept.total:,.2f} times as much")
    full = budget.break_even_tokens(c, width, conv=True)
    return [*lines, f"  break-even at {even:,} tokens, with the convolution inputs at {full:,}"]


def _weight_lines(c: K3Config, batch: int, new: int, width: int) -> list[str]:
    lines, whole = ["weights, bytes"], budget.checkpoint_bytes(c, width).total
    rows = [("stored", whole), ("read by the decode step", budget.weight_bytes(c, batch * new, width))]
    lines += [f"  {what:<36}{n:>28,}{format_bytes(n):>12}" for what, n in rows]
    if c.num_experts:
        one = c.num_moe_layers * c.num_experts_per_token * budget.expert_bytes(c, width)
        lines.append(
            f"  a layer's experts that the step meets, in the mean: {budget.experts_met(c, batch * new):,.1f} of "
            f"{c.num_experts}; one token reads {one:,} bytes of them"
        )
    return lines


def _work_lines(c: K3Config, context: int, batch: int, new: int, width: int, machine: Device) -> list[str]:
    """The two passes and their bounds on the machine; what one MLA and one KDA layer do over their memories."""
    passes = [("decode", budget.forward_work(c, new, context, batch, width), batch * new)]
    if context:
        passes.insert(0, ("prefill", budget.forward_work(c, context, 0, batch, width), batch * context))
    lines = [
        f"{'work':<10}{'of weights':>16}{'of memories':>16}{'weights read':>16}{'cache moved':>16}{'FLOP a byte':>14}",
        *(
            f"  {name:<8}{format_si(w.weight_flops, 'FLOP'):>16}{format_si(w.memory_flops, 'FLOP'):>16}"
            f"{format_bytes(w.weight_bytes):>16}{format_bytes(w.cache_bytes):>16}{w.intensity:>14,.1f}"
            for name, w, _ in passes
        ),
    ]
    if c.num_mla_layers:
        slots = format_si(budget.mla_attention_flops(c, new, context), "FLOP")
        lines.append(f"  of the decode step, one sequence: an MLA layer over its slots {slots}")
    if c.num_kda_layers:
        lines.append(
            f"  of the decode step, one sequence: a KDA layer over its state {format_si(_state_flops(c, new), 'FLOP')}"
        )
    lines += ["", _machine_line(machine)]
    lines += [
        _bound_line(c, name, machine, machine.step(w, sent_bytes(c, rows, machine.count))) for name, w, rows in passes
    ]
    held = budget.checkpoint_bytes(c, width).total + budget.cache_bytes(c, context + new, batch, width).total
    if held > machine.memory:
        lines.append(
            f"  does not fit: {format_bytes(held)} of weights and cache, {format_bytes(machine.memory)} of memory"
        )
    return [*lines, "  Bounds from below: dense bf16 rate, even work, no latency, no other exchange between devices."]


def _state_flops(c: K3Config, new: int) -> int:
    """One KDA layer, one sequence: what `forward_work` counts for it."""
    memory, slots = budget.forward_work(c, new).memory_flops, c.num_mla_layers * budget.mla_attention_flops(c, new, 0)
    return (memory - slots) // c.num_kda_layers


def _machine_line(m: Device) -> str:
    return (
        f"{m.count} x {m.name}: {format_bytes(m.memory)}, {format_si(m.memory_bandwidth, 'B/s')}, "
        f"{format_si(m.bf16, 'FLOP/s')}, {m.ridge:,.0f} FLOP a byte (data sheets: k3lite/devices.json)"
    )


def _bound_line(c: K3Config, name: str, machine: Device, step: Step) -> str:
    bound = "arithmetic" if step.arithmetic >= step.memory else "memory"
    both = f"memory {format_seconds(step.memory)}, arithmetic {format_seconds(step.arithmetic)}: {bound} is the limit"
    links = c.num_experts and machine.count > 1
    return f"  {name:<8}{both}" + f"; rows to experts and back {format_seconds(step.link)}" * bool(links)
