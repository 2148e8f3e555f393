"""What OffloadMonitor costs: measured directly, and by seconds per step with it and without it, in turns.

    python benchmarks/monitor_overhead.py [--layers 6 --width 2048 --batch 4 --seq 2048]     # two minutes on an H200

Figures of the reference stack are logged every 50 steps, which is Lightning's default, or every so many (`--every`). A
round is a plain run and a watched one, in turns the one or the other first, so that a machine that slows down favours
neither. `overhead` is the median over rounds of the part by which the median step is longer; `spread` are the least and
the most of them; `noise` is by how much the medians of plain runs differ among themselves.

Steps are seldom as equal as that needs, so one more run adds up, per step, the host's seconds inside of the monitor's
hooks (`hooks`) and inside of the calls that begin and end ranges while it listens (`ranges`), of all threads and with
the clock's own cost. `share` is both as a part of the median plain step. It is the most that the host can lose; where
it is ahead of the device it loses less.

Prints both verdicts, and one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from reference import tokens
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from workload import Stack, make_trainer

from ramtorch_core.traces import Range, Ranges
from ramtorch_lightning import OffloadMonitor, OffloadStrategy

WARM_UP = 4


class Laps(OffloadStrategy):
    """Takes the time when each batch begins; a callback that does so would be taken for one that reads weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.begun: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.begun.append(time.perf_counter())


class Nowhere(Logger):
    """Takes figures and keeps none."""

    name = version = "nowhere"

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, *_: Any, **__: Any) -> None: ...


class Spent:
    """Seconds inside of functions, and when they were left, whichever thread calls them."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                now = time.perf_counter()
                self.calls.append((now - begun, now))

        return call

    def per_step(self, begun: Sequence[float]) -> tuple[float, float]:
        """Seconds and calls, the means of steps that began then; the last one only ends the one before."""
        found = [seconds for seconds, left in self.calls if begun[0] <= left < begun[-1]]
        return sum(found) / (len(begun) - 1), len(found) / (len(begun) - 1)


def run(module: L.LightningModule, callbacks: list[L.Callback], options: argparse.Namespace) -> list[float]:
    """When each step after the warm-up began."""
    strategy = Laps(host_memory=options.host_memory)
    data = TensorDataset(*tokens(options.batch, options.seq))
    loader: DataLoader[Any] = DataLoader(ConcatDataset([data] * (WARM_UP + options.steps)), batch_size=options.batch)
    trainer = make_trainer(options.device, strategy, max_epochs=1, callbacks=callbacks)
    trainer.loggers = [Nowhere()]
    trainer.fit(module, loader)
    return strategy.begun[WARM_UP:]


def laps(module: L.LightningModule, callbacks: list[L.Callback], options: argparse.Namespace) -> list[float]:
    """Seconds of each step after the warm-up."""
    return [later - earlier for earlier, later in itertools.pairwise(run(module, callbacks, options))]


def direct(module: L.LightningModule, options: argparse.Namespace) -> dict[str, float]:
    """The host's seconds per step in the monitor's hooks and in ranges, and how many ranges there are."""
    monitor, hooks, begins, ends = OffloadMonitor(every_n_steps=options.every), Spent(), Spent(), Spent()
    for name in dir(L.Callback):
        if name.startswith("on_") and getattr(OffloadMonitor, name) is not getattr(L.Callback, name):
            setattr(monitor, name, hooks.timed(getattr(monitor, name)))
    with (
        mock.patch.object(Ranges, "begin", begins.timed(Ranges.begin)),
        mock.patch.object(Range, "finish", ends.timed(Range.finish)),
    ):
        begun = run(module, [monitor], options)
    (beginning, _), (ending, count) = begins.per_step(begun), ends.per_step(begun)
    return {"hooks": hooks.per_step(begun)[0], "ranges": beginning + ending, "ranges_per_step": count}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    module = Stack(options.layers, options.width, checkpointed=False)
    found: dict[str, list[list[float]]] = {"plain": [], "watched": []}
    for number in range(options.rounds):
        for name in ("plain", "watched") if number % 2 == 0 else ("watched", "plain"):
            callbacks: list[L.Callback] = [OffloadMonitor(every_n_steps=options.every)] if name == "watched" else []
            found[name].append(laps(module, callbacks, options))
    compared, spent = compare(found["plain"], found["watched"]), direct(module, options)
    share = (spent["hooks"] + spent["ranges"]) / compared["median_seconds"]["plain"]
    report = {"arguments": vars(options), **compared, "direct": spent | {"share": share}, "seconds": found}
    print(report["verdict"])
    print(
        f"directly: {spent['hooks'] * 1e6:.0f} us of the host per step in its hooks, {spent['ranges'] * 1e6:.0f} us in "
        f"{spent['ranges_per_step']:.0f} ranges: {share:.3%} of a plain step"
    )
    print(json.dumps(report))
    return report


def compare(plain: Sequence[Sequence[float]], watched: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Medians of runs, and what follows from them."""
    ours, theirs = ([statistics.median(run) for run in runs] for runs in (watched, plain))
    overheads = [mine / other - 1 for mine, other in zip(ours, theirs, strict=True)]
    overhead, spread = statistics.median(overheads), (min(overheads), max(overheads))
    noise = max(theirs) / min(theirs) - 1
    if spread[0] > 0 and overhead > noise:
        judged = "it costs time"
    elif overhead <= noise:
        judged = "no cost can be told from noise"
    else:
        judged = "rounds contradict each other: repeat with more of them"
    return {
        "median_seconds": {"plain": statistics.median(theirs), "watched": statistics.median(ours)},
        "overhead": overhead,
        "spread": spread,
        "noise": noise,
        "verdict": f"OffloadMonitor: {overhead:+.2%} per step ({spread[0]:+.2%} to {spread[1]:+.2%} over "
        f"{len(overheads)} rounds; plain runs differ by {noise:.2%}): {judged}",
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags = {"layers": 6, "width": 2048, "batch": 4, "seq": 2048, "steps": 50, "rounds": 4, "every": 50}
    for flag, default in flags.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--host-memory", type=int, default=None, help="bytes of RAM that may be used")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
