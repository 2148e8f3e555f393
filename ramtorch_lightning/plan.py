"""Will a LightningModule fit, with which knobs, and how fast: `python -m ramtorch_lightning.plan --help`.

The model is built without memory for its values, so a laptop can plan for any machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ramtorch_core import ConfigurationError
from ramtorch_core.errors import RamtorchError, sized
from ramtorch_core.planning import (
    DoesNotFit,
    Estimate,
    Subject,
    describe_machine,
    described,
    estimate,
    given,
    host_bytes,
    timed,
)
from ramtorch_core.prediction import Optimizer, Order, Rates, StreamingPlan, machine, predict, rates_of, recommend
from ramtorch_core.wishes import PLANNED, bytes_of, usable_of
from ramtorch_lightning.chunks import chunk_spec
from ramtorch_lightning.plan_config import Configuration, from_config, from_name

_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_TRUE = {"32-true": None, "bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
_KNOBS = ("window", "pin", "activations")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; returns 0 if the model fits, 1 if it does not, 2 if that cannot be told."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if (options.config is None) == (options.model is None):
            raise ConfigurationError("name the model, as module:Class, or pass --config, not both")
        chosen = from_config(options.config) if options.model is None else from_name(options.model, options.init)
        rates, source = _machine(options)
        found = _estimate(chosen, rates, options)
        lines, fits = _report(chosen, found, rates, source, options)
    except (ConfigurationError, RamtorchError) as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fits else 1


def _machine(options: argparse.Namespace) -> tuple[Rates, str]:
    """The machine that the flags describe, or this one."""
    if options.gpu is None and options.pcie is None and torch.accelerator.is_available():
        rates = rates_of("cuda")
        return rates, "this machine, as measured"
    if options.gpu is None:
        missing = "no GPU is here" if options.pcie is None else "--pcie is of a GPU that --gpu describes"
        raise ConfigurationError(f"{missing}: describe one, for example --gpu 24GB --pcie 25 --tflops 150")
    rates = describe_machine(
        device_bytes=options.gpu, pcie=1e9 * (options.pcie or 25.0), host_memory=1e9 * options.ram_speed
    )
    return rates, "as described"


def _estimate(chosen: Configuration, rates: Rates, options: argparse.Namespace) -> Estimate:
    precision = _precision(chosen, options)
    if precision not in (*_MIXED, *_TRUE):
        raise ConfigurationError(
            f"precision '{precision}' is not planned for; use one of {', '.join((*_MIXED, *_TRUE))}"
        )
    dtype = _TRUE.get(precision)

    def build() -> Subject:
        module = chosen.build()
        if dtype is not None:
            _cast(module, dtype)
        spec = chunk_spec(module, chosen.strategy.get("chunks"))
        example = getattr(module, "example_input_array", None)
        if options.tokens or example is None:
            if not options.tokens:
                raise ConfigurationError(
                    f"{type(module).__name__} has no example_input_array, from which activations and arithmetic would "
                    f"follow: set it, or pass --tokens, the number of tokens of one microbatch"
                )
            return Subject(module, None, spec)
        inputs = _resized(example, options.batch, dtype)

        def forward() -> Any:
            try:
                if isinstance(inputs, Mapping):
                    return module(**inputs)
                return module(*inputs) if isinstance(inputs, tuple) else module(inputs)
            except (ConfigurationError, RamtorchError):
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"the forward of {type(module).__name__} cannot run on shapes alone ({error}): pass --tokens"
                ) from error

        return Subject(module, forward, spec)

    return estimate(
        build,
        rates,
        1e12 * options.tflops,
        tokens=options.tokens or 0,
        resident_below=chosen.resident_below,
        autocast=_MIXED.get(precision),
    )


def _precision(chosen: Configuration, options: argparse.Namespace) -> str:
    precision = str(options.precision or chosen.precision)
    return _SHORT.get(precision, precision)


def _report(
    chosen: Configuration, found: Estimate, rates: Rates, source: str, options: argparse.Namespace
) -> tuple[list[str], bool]:
    chunks, base = found.calibration.chunks, described(found, _base(chosen, options), options.ram)
    whole = float(rates.device_bytes or 0)
    limit = usable_of(whole)
    if chosen.strategy.get("gpu_memory") is not None:
        wished = bytes_of(chosen.strategy["gpu_memory"])
        if PLANNED * wished < limit:
            whole, limit = wished, PLANNED * wished
    here = replace(machine(rates, limit), gpu_whole=whole)
    largest = max(chunks, key=lambda chunk: chunk.weight_bytes)
    lines = [
        f"model    {chosen.name}: {found.parameters:,} parameters, {found.trained:,} of them trained; "
        f"{len(chunks)} chunks stream, the largest is {largest.name} with {largest.weight_bytes / 1e6:,.1f} MB",
        f"machine  {source}: {sized(rates.device_bytes or 0, 1)} on the GPU, of which a plan may take "
        f"{sized(limit, 1)}, {rates.h2d / 1e9:.1f} GB/s over PCIe, {rates.host_memory / 1e9:.0f} GB/s of host memory, "
        f"{options.tflops:g} TFLOP/s",
    ]
    if options.tokens:
        lines.append("         activations and the loss are not counted: --tokens is given")
    fits, planned = True, None
    knobs = {name: chosen.strategy[name] for name in _KNOBS if chosen.strategy.get(name, "auto") != "auto"}
    try:
        fixed = given(found, base, **knobs)
    except TypeError as error:
        raise ConfigurationError(str(error)) from error
    if len(knobs) == len(_KNOBS):
        planned = fixed
        prediction = predict(found.calibration, planned, here)
        fits = prediction.peak_bytes <= limit
        lines.append(
            f"given    {', '.join(f'{name}={value}' for name, value in knobs.items())}: "
            f"{timed(prediction.seconds, planned)}, {sized(prediction.peak_bytes)} on the GPU: "
            f"{'fits' if fits else 'does not fit'}"
        )
        knobs = {}
    try:
        choice = recommend(
            found.calibration,
            here,
            base,
            windows=(fixed.window,) if "window" in knobs else None,
            resident=(fixed.pin,) if "pin" in knobs else None,
            checkpoint=(fixed.checkpoint,) if "activations" in knobs else (False, True),
        )
    except DoesNotFit as error:
        return [*lines, f"GPU      does not fit: {error}"], False
    lines.append("GPU      fits; the fastest plan, and what more would buy:")
    lines += [f"         {line}" for line in str(choice).splitlines()]
    training, ahead = host_bytes(found, planned or choice.plan), ", copies to undo updates" * bool(base.ahead)
    needed, what = training, f"masters, shadows, AdamW's moments, gradients{ahead}"
    if found.bytes > training:
        needed, what = found.bytes, "the model as it is built; training takes less, with chunks on the GPU"
    verdict = "" if planned is None else ", as given"
    if options.ram is not None:
        verdict += f" of {sized(options.ram, 1)}: {'fits' if needed <= options.ram else 'does not fit'}"
        fits &= needed <= options.ram
    lines.append(f"RAM      {sized(needed, 1)}{verdict} ({what})")
    return lines, fits


def _base(chosen: Configuration, options: argparse.Namespace) -> StreamingPlan:
    """What is not chosen, as the Trainer would make it."""
    microbatches, batches = options.microbatches or chosen.microbatches, options.accumulate or chosen.accumulate
    scales = _precision(chosen, options) == "16-mixed"
    published = scales or (chosen.clips and chosen.by_value) or chosen.strategy.get("gradients") == "published"
    return StreamingPlan(
        microbatches=microbatches,
        batches=batches,
        order=Order.of(microbatches, batches),
        optimizer=Optimizer.PUBLISHED if published else Optimizer.OVERLAPPED,
        clip=chosen.clips,
    )


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """`module.to(dtype)`, which exchanges tensors where they are: those without values may refuse that."""
    made: dict[Tensor, Tensor] = {}
    for each in module.modules():
        for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if tensor is None or not tensor.is_floating_point():
                continue
            if tensor not in made:
                cast = tensor.detach().to(dtype)
                trained = tensor.requires_grad
                made[tensor] = nn.Parameter(cast, trained) if isinstance(tensor, nn.Parameter) else cast
            setattr(each, name, made[tensor])


def _resized(example: Any, batch: int | None, dtype: torch.dtype | None) -> Any:
    """The example without values, with another first dimension, or another dtype of what is no integer, if given."""
    if isinstance(example, Tensor):
        size = example.shape if batch is None or not example.dim() else (batch, *example.shape[1:])
        return torch.zeros(size, dtype=dtype if example.is_floating_point() and dtype else example.dtype)
    if isinstance(example, Mapping):
        return {key: _resized(value, batch, dtype) for key, value in example.items()}
    if isinstance(example, list | tuple):
        return tuple(_resized(value, batch, dtype) for value in example)
    return example


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: it must be positive and finite")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: it must be 1 or more")
    return value


def _size(text: str) -> float:
    """Bytes, from for example `24GB` or `64GiB`."""
    try:
        return bytes_of(text, "size")
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ramtorch_lightning.plan",
        description="Will it fit, with which knobs, and how fast? Nothing is allocated and no GPU is needed.",
    )
    parser.add_argument("model", nargs="?", help="a LightningModule, as module:Class")
    init = "arguments of the class"
    parser.add_argument("--init", nargs="*", action="extend", default=[], metavar="NAME=VALUE", help=init)
    parser.add_argument("--config", help="a configuration file of LightningCLI, instead of the model's name")
    parser.add_argument("--gpu", type=_size, help="memory of the GPU, as in 24GB; without it, this machine is measured")
    parser.add_argument("--ram", type=_size, help="memory of the host, as in 64GB")
    parser.add_argument("--pcie", type=_rate, help="GB/s in one direction (25, if a GPU is described)")
    parser.add_argument(
        "--ram-speed", type=_rate, default=60.0, help="GB/s of the host's memory, if a GPU is described"
    )
    parser.add_argument("--tflops", type=_rate, default=150.0, help="what the GPU sustains in this precision (150)")
    parser.add_argument("--batch", type=_count, help="samples per microbatch, instead of those of example_input_array")
    parser.add_argument("--tokens", type=_count, help="tokens per microbatch, where there is no example_input_array")
    parser.add_argument("--microbatches", type=_count, help="of a batch, instead of the configuration's n_microbatches")
    accumulate = "batches per step of the optimizer, instead of the configuration's accumulate_grad_batches"
    parser.add_argument("--accumulate", type=_count, help=accumulate)
    parser.add_argument("--precision", help="of the Trainer, instead of the configuration's")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
