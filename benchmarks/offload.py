"""Systems on the reference work through the Trainer: time per phase, peak memory, losses.

    python benchmarks/offload.py resident streamed [--batch 8 --seq 2048 --steps 5 --activations checkpoint ...]

`resident` is the ordinary Trainer with user-side checkpointing, `streamed` is OffloadStrategy on the same module. Each
prints one JSON object, and in the end how much longer the phases of the last one take than those of the first. Forward
and backward are timed apart from the optimizer, with the device synchronised in between, which takes away what
overlaps; `peers.py` times whole steps, and compares.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import time
from typing import Any

import lightning as L
import torch
from reference import tokens
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from workload import Stack, make_trainer

from ramtorch_lightning import OffloadStrategy

WARM_UP = 2


class Clock(L.Callback):
    """Seconds of forward and backward, of the optimizer, and of prediction, per batch."""

    def __init__(self) -> None:
        self.phases: dict[str, list[float]] = {"forward_backward": [], "optimizer": [], "predict": []}
        self.losses: list[float] = []
        self.start = 0.0

    def _lap(self, phase: str | None) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        if phase is not None:
            self.phases[phase].append(now - self.start)
        self.start = now

    def on_train_batch_start(self, *_: Any) -> None:
        self._lap(None)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._lap("forward_backward")

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        self._lap("optimizer")
        self.losses.append(float(outputs["loss"]))

    def on_predict_batch_start(self, *_: Any) -> None:
        self._lap(None)

    def on_predict_batch_end(self, *_: Any) -> None:
        self._lap("predict")


class Quiet(OffloadStrategy):
    """The clock above neither reads nor writes weights, so it costs no extra casts."""

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        self.streamer.conservative = False


def main() -> None:
    arguments = parse()
    found = [measure(system, arguments) for system in arguments.systems]
    first, last = found[0]["median_seconds"], found[-1]["median_seconds"]
    print({phase: round(last[phase] / first[phase], 3) for phase in first.keys() & last.keys()})


def measure(system: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One system, from a cold start."""
    gc.collect()
    torch.cuda.empty_cache()
    streamed = system == "streamed"
    module = Stack(
        arguments.layers, arguments.width, not streamed and arguments.activations == "checkpoint", arguments.learn
    )
    parameters = sum(parameter.numel() for parameter in module.parameters())
    strategy: Any = "auto"
    if streamed:
        strategy = Quiet(
            window=arguments.window,
            pin=arguments.pin,
            activations=arguments.activations,
            host_memory=arguments.host_memory,
        )
    clock = Clock()
    trainer = make_trainer("cuda", strategy, max_epochs=1, callbacks=[clock])
    data = TensorDataset(*tokens(arguments.batch, arguments.seq))
    loader: DataLoader[Any] = DataLoader(ConcatDataset([data] * arguments.steps), batch_size=arguments.batch)
    torch.cuda.reset_peak_memory_stats()
    trainer.fit(module, loader)
    peak = torch.cuda.max_memory_allocated()
    trainer.predict(module, loader)
    medians = {name: statistics.median(laps[WARM_UP:]) for name, laps in clock.phases.items() if len(laps) > WARM_UP}
    report = {
        "system": system,
        "arguments": vars(arguments),
        "parameters": parameters,
        "median_seconds": medians,
        "seconds": clock.phases,
        "losses": clock.losses,
        "peak_device_gb": peak / 1e9,
        "peak_host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "lightning": L.__version__},
    }
    print(json.dumps(report), flush=True)
    return report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", choices=["resident", "streamed"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--pin", type=int, default=0)
    parser.add_argument("--activations", choices=["checkpoint", "keep"], default="checkpoint")
    parser.add_argument("--host-memory", type=int, default=110 << 30, help="bytes of RAM that may be used")
    parser.add_argument("--learn", action=argparse.BooleanOptionalAction, default=True, help="AdamW, or a rate of 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
