"""What to change when a device runs out of memory: added to torch's own error, whose type and text stay."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial

import torch

from ramtorch_core.engine.out_of_memory import add_advice, advise_streaming
from ramtorch_core.engine.pipeline.runner import PipelineRunner, plan_schedule
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.plan.check import peak_activations

__all__ = ["advise", "advise_pipeline", "advising_pipeline"]

_GPU = re.compile(r"GPU (\d+)")
THRIFTY = "staggered_1b1f"
"""The schedule that holds the fewest microbatches."""


def advise(error: BaseException, streamer: Streamer) -> None:
    """Name the knobs of a streamed step, if `error` is that of a device out of memory. Idempotent."""
    add_advice(error, partial(advise_streaming, streamer))


def advise_pipeline(error: BaseException, runner: PipelineRunner, microbatches: int) -> None:
    """The same for a step of a pipeline with so many microbatches."""
    add_advice(error, lambda wanted: _pipelined(runner, microbatches, wanted, str(error)))


@contextlib.contextmanager
def advising_pipeline(runner: PipelineRunner, microbatches: int) -> Iterator[None]:
    """Around a step: errors that pass through get the advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        advise_pipeline(error, runner, microbatches)
        raise


def _pipelined(runner: PipelineRunner, microbatches: int, wanted: int, message: str) -> str:
    if runner.streamed is not None:
        return "; ".join(advise_streaming(streamer, wanted) for streamer in runner.streamed.streamers)
    found = _GPU.search(message)
    names = [str(device.torch) for device in runner.devices]
    device = f"cuda:{found[1]}" if found is not None else ""
    rows = [row for row in runner.stage_table() if row.device == device] or runner.stage_table()
    row = max(rows, key=lambda each: each.bytes)
    at = names.index(row.device)
    plan = runner.plan(microbatches)
    held, least = (peak_activations(each)[at] for each in (plan, plan_schedule(THRIFTY, len(names), microbatches)))
    ways = []
    if least < held:
        ways.append(f"schedule='{THRIFTY}' instead of '{plan.name}' holds {least} microbatches there instead of {held}")
    ways.append(
        f"n_microbatches={2 * microbatches} instead of {microbatches} halves what each of the {min(held, least)} keeps"
    )
    wish = f" by at least {wanted / 1e9:.2f} GB" if wanted else ""
    ways.append(
        f"a smaller stage {row.stage}{wish}: its weights take {row.bytes / 1e9:.2f} GB, {row.share:.0%} of all; cut "
        f"earlier or later (stages=), lower its device's weight (device_weights=), or pass balance='memory'"
    )
    ways.append("window=2 streams the weights of all stages from RAM")
    return f"stage {row.stage} on {row.device}. To lower what is needed, in this order: {'; '.join(ways)}"
