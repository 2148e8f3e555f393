"""What OffloadMonitor costs: seconds per step of the reference stack with it and without it, in turns.

    python benchmarks/monitor_overhead.py [--layers 6 --width 2048 --batch 4 --seq 2048]     # about a minute on an H200

Every step is watched, and every one is logged. Prints one JSON object; `overhead` is the part by which the median step
of all watched runs is longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from reference import tokens
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from workload import Stack, make_trainer

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


def laps(module: L.LightningModule, callbacks: list[L.Callback], options: argparse.Namespace) -> list[float]:
    """Seconds of each step after the warm-up."""
    strategy = Laps(host_memory=options.host_memory)
    data = TensorDataset(*tokens(options.batch, options.seq))
    loader: DataLoader[Any] = DataLoader(ConcatDataset([data] * (WARM_UP + options.steps)), batch_size=options.batch)
    make_trainer(options.device, strategy, max_epochs=1, callbacks=callbacks).fit(module, loader)
    times = strategy.begun[WARM_UP:]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    module = Stack(options.layers, options.width, checkpointed=False)
    found: dict[str, list[float]] = {"plain": [], "watched": []}
    for _ in range(options.rounds):
        found["plain"] += laps(module, [], options)
        found["watched"] += laps(module, [OffloadMonitor(every_n_steps=1)], options)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    report = {
        "arguments": vars(options),
        "median_seconds": medians,
        "overhead": medians["watched"] / medians["plain"] - 1,
        "seconds": found,
    }
    print(json.dumps(report))
    return report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags = {"layers": 6, "width": 2048, "batch": 4, "seq": 2048, "steps": 20, "rounds": 3}
    for flag, default in flags.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--host-memory", type=int, default=None, help="bytes of RAM that may be used")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
