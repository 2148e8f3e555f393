"""What OffloadMonitor costs: seconds per step of the reference stack with it and without it, in turns.

    python benchmarks/monitor_overhead.py [--layers 6 --width 2048 --batch 4 --seq 2048]     # about a minute on an H200

Every step is watched, and every one is logged. A round is a plain run and a watched one, in turns the one or the other
first, so that a machine that slows down favours neither. `overhead` is the median over rounds of the part by which the
median step is longer; `spread` are the least and the most of them; `noise` is by how much the medians of plain runs
differ among themselves. Prints the verdict: whether the overhead is more than noise; and one JSON object.
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
    found: dict[str, list[list[float]]] = {"plain": [], "watched": []}
    for number in range(options.rounds):
        for name in ("plain", "watched") if number % 2 == 0 else ("watched", "plain"):
            callbacks: list[L.Callback] = [OffloadMonitor(every_n_steps=1)] if name == "watched" else []
            found[name].append(laps(module, callbacks, options))
    report = {"arguments": vars(options), **compare(found["plain"], found["watched"]), "seconds": found}
    print(report["verdict"])
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
    flags = {"layers": 6, "width": 2048, "batch": 4, "seq": 2048, "steps": 20, "rounds": 4}
    for flag, default in flags.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--host-memory", type=int, default=None, help="bytes of RAM that may be used")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
