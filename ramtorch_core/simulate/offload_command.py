"""The command line of the streaming simulator."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.simulate import options
from ramtorch_core.simulate.choose import Choice, choose, describe
from ramtorch_core.simulate.chunk_flags import MAX_CHUNKS, SWEPT, add_chunk_flags, chunks_of, machine_of
from ramtorch_core.simulate.costs import Machine, StepCost
from ramtorch_core.simulate.knobs import Accumulate, Optimizer, Order, StreamingPlan
from ramtorch_core.simulate.options import Row, count, listed, number, one_of
from ramtorch_core.simulate.streaming import StreamingResult, simulate_streaming

PROGRAM = "offload_simulator"
KNOBS = (
    "window",
    "pin",
    "activations",
    "microbatches",
    "batches",
    "order",
    "optimizer",
    "accumulate",
    "staging",
    "ahead",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate a streamed model as the arguments say. Returns the exit code: 0, or 2 for input that cannot work."""
    return options.main(_run, PROGRAM, argv)


def _pin(text: str) -> int | tuple[int, ...]:
    if not text.startswith("first"):
        return count(text)
    first = count(text[5:])
    if not 0 <= first <= MAX_CHUNKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not first0 to first{MAX_CHUNKS}")
    return tuple(range(first))


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(PROGRAM, "Simulates weights that stream through a window: step time, stalls and memory.")
    add_chunk_flags(parser)
    knobs = parser.add_argument_group("knobs")
    add = knobs.add_argument
    add("--window", type=listed(count), default=(1, 2, 3, 4), help="slots (default: 1,2,3,4)")
    add("--pin", type=listed(_pin), default=(0,), help="resident chunks: N spread evenly, or firstN (default: 0)")
    policies = listed(one_of("keep", "checkpoint"))
    add("--activations", type=policies, default=("checkpoint",), help="keep, checkpoint (default: checkpoint)")
    add("--microbatches", type=listed(count), default=(1,), help="per batch (default: 1)")
    add("--batches", type=listed(count), default=(1,), help="accumulated per step of the optimizer (default: 1)")
    orders = [order.value for order in Order]
    add("--order", type=listed(one_of(*orders)), default=("microbatch",), help=f"what comes first: {', '.join(orders)}")
    optimizers = [optimizer.value for optimizer in Optimizer]
    add("--optimizer", type=listed(one_of(*optimizers)), default=("none",), help=", ".join(optimizers))
    places = [place.value for place in Accumulate]
    add("--accumulate", type=listed(one_of(*places)), default=("host",), help=f"gradients: {', '.join(places)}")
    waiting = "chunks whose gradients may wait on the host for an overlapped update (default: 4)"
    add("--staging", type=listed(count), default=(4,), help=waiting)
    add("--clip", action="store_true", help="updates wait for the norm of all gradients")
    ahead = "part of what updates overwrite that is copied, so that they run ahead of that norm (default: 0)"
    add("--ahead", type=listed(number), default=(0.0,), help=ahead)
    add("--forward-only", action="store_true", help="prediction: no backward, no optimizer")
    add("--steps", type=count, default=3, help="simulated; the last is reported. 1: a single cold step (default: 3)")
    add("--extra-bytes", type=number, default=0.0, help="GPU memory outside of chunks: inputs, loss, work space")
    add("--choose", action="store_true", help="choose window, pin and activations for --gpu-memory")
    return parser


def _run(argv: Sequence[str]) -> None:
    arguments = options.parse(_parser(), argv)
    options.refuse_beside("choose", ("window", "pin", "activations", "steps"), arguments)
    machine = machine_of(arguments)
    if not 0 <= arguments.extra_bytes < float("inf"):
        raise ConfigurationError(f"extra_bytes={arguments.extra_bytes}: it must be finite and not negative")
    if any(arguments.ahead) and not arguments.clip:
        raise ConfigurationError("--ahead is about updates that would wait for the norm of all gradients: add --clip")
    beside = StepCost(base_bytes=arguments.extra_bytes)
    if arguments.choose:
        _choose(arguments, machine, beside)
        return
    swept = [name for name in SWEPT if len(getattr(arguments, name)) > 1]
    rows = []
    for knobs in options.combinations(arguments, (*SWEPT, *KNOBS)):
        plan = _plan(knobs, arguments)
        chunks = chunks_of(arguments, machine, knobs)
        result = simulate_streaming(chunks, plan, machine, beside, steps=arguments.steps)
        rows.append(_row(knobs, swept, arguments, result))
    options.mark_what_fits(rows, machine.gpu_bytes)
    options.present(rows, arguments)


def _plan(knobs: Mapping[str, Any], arguments: argparse.Namespace) -> StreamingPlan:
    return StreamingPlan(
        window=knobs["window"],
        pin=knobs["pin"],
        checkpoint=knobs["activations"] == "checkpoint",
        microbatches=knobs["microbatches"],
        batches=knobs["batches"],
        order=Order(knobs["order"]),
        optimizer=Optimizer(knobs["optimizer"]),
        accumulate=Accumulate(knobs["accumulate"]),
        staging=knobs["staging"],
        train=not arguments.forward_only,
        clip=arguments.clip,
        ahead=knobs["ahead"],
    )


def _row(knobs: Mapping[str, Any], swept: Sequence[str], arguments: argparse.Namespace, result: StreamingResult) -> Row:
    shown = {name: knobs[name] for name in ("window", "pin", "activations")}
    if isinstance(shown["pin"], tuple):
        shown["pin"] = f"first{len(shown['pin'])}"
    shown |= {name: knobs[name] for name in KNOBS[3:] if len(getattr(arguments, name)) > 1}
    for name in swept:
        value = knobs[name]
        shown[name] = ":".join(f"{part:g}" for part in value) if isinstance(value, tuple) else value
    figures = {
        "seconds": result.seconds,
        "GPU": result.compute,
        "stall": result.stall / result.seconds if result.seconds else 0.0,
        "H2D": result.h2d,
        "D2H": result.d2h,
        "host": result.host,
        **result.shared,
        "transfers": result.transfers,
        "chunks": result.peak_chunks,
        "weight bytes": result.weight_bytes,
        "peak bytes": result.peak_bytes,
    }
    return Row(shown, figures, result.timeline)


def _choose(arguments: argparse.Namespace, machine: Machine, beside: StepCost) -> None:
    wide = [name for name in (*SWEPT, *KNOBS[3:]) if len(getattr(arguments, name)) > 1]
    if wide:
        raise ConfigurationError(f"--choose needs one value of --{wide[0].replace('_', '-')}, not a list")
    knobs = next(options.combinations(arguments, (*SWEPT, *KNOBS)))
    chunks = chunks_of(arguments, machine, knobs)
    base = _plan(knobs, arguments)
    choice = choose(chunks, machine, base=base, beside=beside)
    plan = choice.plan
    knobs |= {"window": plan.window, "pin": plan.pin, "activations": "checkpoint" if plan.checkpoint else "keep"}
    row = _row(knobs, (), arguments, choice.result)
    options.present([row], arguments, head=str(choice), choice=_as_data(choice))


def _as_data(choice: Choice) -> dict[str, object]:
    plan = {"window": choice.plan.window, "pin": choice.plan.pin, "checkpoint": choice.plan.checkpoint}
    offers = [{**asdict(offer), "plan": describe(offer.plan)} for offer in choice.offers]
    return {
        **plan,
        "seconds": choice.seconds,
        "peak_bytes": choice.peak_bytes,
        "binding": choice.binding,
        "bounds": choice.bounds,
        "offers": offers,
    }
