"""What every way to use several GPUs is given, and how it is timed; see `pipeline.py`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # bits: cuBLAS must not choose by chance

import torch
from reference import VOCABULARY, build, tokens
from torch import Tensor, nn

WARM_UP = 3
ROWS = 2
"""Sequences in a microbatch, unless `--batch` says otherwise."""


@dataclass(frozen=True)
class Work:
    """One stack, its data, and the devices that share it. `batch` counts the sequences of all microbatches."""

    devices: int
    device: str
    layers: int
    width: int
    vocabulary: int
    batch: int
    seq: int
    microbatches: int
    steps: int
    window: int
    learn: bool

    @classmethod
    def read(cls, text: str) -> Work:
        """The work that `str` wrote."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def names(self) -> list[str]:
        """The devices, in the order of the stages."""
        return [f"cuda:{i}" for i in range(self.devices)] if self.device == "cuda" else ["cpu"] * self.devices

    @property
    def autocast(self) -> dict[str, Any]:
        """Arguments of `torch.autocast`."""
        return {"device_type": self.device, "dtype": torch.bfloat16}

    def modules(self) -> list[nn.Module]:
        """The stack, on the host."""
        return build(self.layers, self.width, vocabulary=self.vocabulary)

    def tokens(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step."""
        return tokens(self.batch, self.seq, device, self.vocabulary)

    def parts(self, stages: int) -> list[list[int]]:
        """The modules of each stage, cut where the work before is that of as many stages; the embedding costs none."""
        head = self.vocabulary / (12 * self.width)  # in blocks, by the parameters that multiply
        middles = [0.0, *(block + 0.5 for block in range(self.layers)), self.layers + head / 2]
        places = [int(middle * stages / (self.layers + head)) for middle in middles]
        found = [[module for module, place in enumerate(places) if place == stage] for stage in range(stages)]
        if not all(found):
            raise ValueError(f"{self.layers} layers are too few for {stages} stages of equal work: use more --layers")
        return found

    def adamw(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer of all systems."""
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those that describe the work."""
    parser.add_argument("--devices", type=int, default=2, help="how many")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=int, help="default: 12; on more than two devices as many as balance")
    parser.add_argument("--vocabulary", type=int, help="default: 32000; on more than two devices a head like a block")
    parser.add_argument("--batch", type=int, help=f"sequences per step; default: {ROWS} for each microbatch")
    parser.add_argument("--microbatches", type=counts, default=[8], help="8, or 8,16 for one run of each")
    for flag, default in {"width": 4096, "seq": 2048, "steps": 8, "window": 2}.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--learn", action=argparse.BooleanOptionalAction, default=True, help="step the optimizer")


def counts(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def works(options: argparse.Namespace) -> list[Work]:
    """One for each number of microbatches.

    On more than two devices the head has as many weights as a block, and there are four modules per device that
    compute: stages are equal, with one per device and with two.
    """
    even = options.devices > 2
    layers = options.layers or (4 * options.devices - 1 if even else 12)
    vocabulary = options.vocabulary or (12 * options.width if even else VOCABULARY)
    same = {"width": options.width, "seq": options.seq, "steps": options.steps, "window": options.window}
    where = {"devices": options.devices, "device": options.device, "learn": options.learn}
    return [
        Work(layers=layers, vocabulary=vocabulary, microbatches=m, batch=options.batch or ROWS * m, **same, **where)
        for m in options.microbatches
    ]


def synchronize() -> None:
    """Wait for all GPUs."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def forget_peaks() -> None:
    """Begin to measure memory."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)


def report(name: str, work: Work, step: Callable[[], Tensor], quiet: bool = False) -> dict[str, Any]:
    """Take the steps, and print what they took."""
    forget_peaks()
    laps, losses = [], []
    for _ in range(work.steps):
        synchronize()
        start = time.perf_counter()
        loss = step()
        synchronize()
        laps.append(time.perf_counter() - start)
        losses.append(round(float(loss), 4))
    return summarize(name, work, laps, losses, quiet)


def summarize(name: str, work: Work, laps: list[float], losses: list[float], quiet: bool = False) -> dict[str, Any]:
    """Print what the steps took as one JSON object."""
    result = {
        "system": name,
        "microbatches": work.microbatches,
        "seconds": round(statistics.median(laps[WARM_UP:] or laps), 4),
        "laps": [round(lap, 4) for lap in laps],
        "peak_gb": [round(torch.cuda.max_memory_allocated(d) / 1e9, 2) for d in range(torch.cuda.device_count())],
        "losses": losses,
    }
    if not quiet:
        print(json.dumps(result), flush=True)
    return result
