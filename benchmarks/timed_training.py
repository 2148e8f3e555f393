"""The reference stack in a plain loop: steps that are timed, with their parts and their peak."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from reference import loss_function, tokens
from torch import nn

from ramtorch_core import Streamer, attach
from ramtorch_core.parts import Part, measured_parts

BEFORE = 3
"""Steps before those that are timed."""
DTYPE = torch.bfloat16


def synchronize() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Seconds of the steps of one plan."""

    median: float
    least: float
    most: float


def timed(step: Callable[[], object], steps: int) -> Spread:
    """Seconds per step, of `steps` that follow others, and each other, without waiting in between."""
    for _ in range(BEFORE):
        step()
    moments = [time.perf_counter()]
    for _ in range(steps):
        step()
        moments.append(time.perf_counter())
    laps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return Spread(statistics.median(laps), min(laps), max(laps))


class Training:
    """A streamed model and the loop around it, which is that of a Trainer."""

    def __init__(self, model: nn.Module, options: argparse.Namespace, **knobs: Any) -> None:
        self.model, self.options = model, options
        self.streamer: Streamer = attach(
            model,
            device=options.device,
            chunks="*",
            overlapped=True,
            resident_below=options.resident_below,
            host_memory=options.host_memory,
            **knobs,
        )
        self.streamer.conservative, self.streamer.updates.run_on = False, True
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.x, self.y = tokens(options.batch, options.seq, options.device, options.vocabulary)
        self.between: list[float] = []  # seconds of the host in the optimizer's own step

    def step(self, microbatches: int = 1) -> None:
        for number in range(microbatches):
            with torch.autocast(torch.device(self.options.device).type, DTYPE), self.streamer.scope():
                loss = loss_function(self.model(self.x), self.y) / microbatches
            if number == 0:
                self.optimizer.zero_grad()
            last = number == microbatches - 1
            with self.streamer.updates.overlap(self.optimizer) if last else contextlib.nullcontext():
                loss.backward()
        begun = time.perf_counter()
        self.optimizer.step()
        self.between.append(time.perf_counter() - begun)

    def measure(self, microbatches: int) -> tuple[Spread, int | None, dict[Part, float]]:
        """Seconds per step, bytes at the peak, and seconds of a step by part."""
        on_gpu = self.streamer.device.asynchronous
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        once = partial(self.step, microbatches)
        spread = timed(once, max(4, self.options.steps // microbatches))
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        return spread, peak, measured_parts(self.streamer, once)

    def close(self) -> None:
        self.streamer.close()
        for parameter in self.model.parameters():
            parameter.grad = None
        del self.optimizer
        gc.collect()


def between_steps(model: nn.Module, options: argparse.Namespace) -> float:
    """Seconds of the host in which a loop like this issues nothing, which a calibration cannot know."""
    training = Training(model, options, window=2)
    try:
        for _ in range(BEFORE + 4):
            training.step()
        return statistics.median(training.between[BEFORE:])
    finally:
        training.close()
