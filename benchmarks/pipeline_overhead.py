"""What a pipeline costs the host per op, in microseconds, on stages so small that nothing else counts.

    python benchmarks/pipeline_overhead.py                                  # ours, and the plain loop as the floor
    python benchmarks/pipeline_overhead.py --ramtorch PATH                  # beside an unpacked wheel of RamTorch

An op is the forward or the backward of one microbatch on one stage; the loss, the publishing of gradients and their
removal are shared out among the ops. All systems run on the CPU in one process, with one compute thread, and take turns
step by step, so that whatever else the machine does falls on all of them alike. Reported are medians and minima of the
time that passed, and of processor time, which depends less on what else runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ramtorch_core import Pipeline

SCHEDULES = ("gpipe", "staggered_1b1f")
"""Those that both have; RamTorch's `1f1b` is another order than ours, with longer waits."""


def stages(options: argparse.Namespace) -> list[nn.Module]:
    width = options.width
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(options.stages)]


def plain(options: argparse.Namespace) -> Callable[[], object]:
    """One microbatch after the other, without a pipeline."""
    model = nn.Sequential(*stages(options))
    x, y = torch.randn(2, options.batch, options.width)
    count = options.microbatches

    def step() -> None:
        for inputs, targets in zip(x.chunk(count), y.chunk(count), strict=True):
            (F.mse_loss(model(inputs), targets) / count).backward()
        model.zero_grad()

    return step


def pipelined(make: Any, schedule: str, options: argparse.Namespace) -> Callable[[], object]:
    """A step of `make`, ours or RamTorch's, which are called alike."""
    parts = stages(options)
    pipe = make(stage_modules=parts, devices=["cpu"] * options.stages)
    x, y = torch.randn(2, options.batch, options.width)

    def step() -> None:
        arguments = {"schedule": schedule, "n_microbatches": options.microbatches, "loss_fn": F.mse_loss}
        pipe.step(x, targets=y, **arguments).flush_grads()
        for part in parts:
            part.zero_grad()

    return step


def peer(path: Path | None) -> tuple[str, Any]:
    """The name of the peer and its `Pipeline`, or the reason why there is none."""
    if path is None:
        return "RamTorch is left out: pass --ramtorch PATH, an unpacked wheel", None
    if not (path / "ramtorch" / "__init__.py").is_file():
        return f"RamTorch is left out: there is no ramtorch in {path}", None
    sys.path.insert(0, str(path))
    import ramtorch

    versions = [metadata.name.split("-")[1] for metadata in path.glob("[Rr]am[Tt]orch-*.dist-info")]
    return f"ramtorch {versions[0].removesuffix('.dist') if versions else ''}".strip(), ramtorch.Pipeline


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ramtorch", type=Path, help="an unpacked wheel")
    for flag, default in {"stages": 4, "microbatches": 8, "width": 16, "batch": 16, "rounds": 60, "warm-up": 5}.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    name, other = peer(options.ramtorch)
    if other is None:
        print(name, file=sys.stderr)
    systems = {"plain": plain(options)}
    for schedule in SCHEDULES:
        systems[f"ours {schedule}"] = pipelined(Pipeline, schedule, options)
        if other is not None:
            systems[f"{name} {schedule}"] = pipelined(other, schedule, options)
    for schedule in ("sequential", "zb_h1"):
        systems[f"ours {schedule}"] = pipelined(Pipeline, schedule, options)
    laps: dict[str, list[tuple[float, float]]] = {system: [] for system in systems}
    for lap in range(options.warm_up + options.rounds):
        for system, step in systems.items():
            start = time.perf_counter(), time.process_time()
            step()
            if lap >= options.warm_up:
                laps[system].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    ops = 2 * options.stages * options.microbatches
    for system, measured in laps.items():
        row: dict[str, object] = {"system": system}
        for name, seconds in zip(("microseconds per op", "processor"), zip(*measured, strict=True), strict=True):
            figures = {"median": statistics.median(seconds), "minimum": min(seconds)}
            row[name] = {key: round(value / ops * 1e6, 1) for key, value in figures.items()}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
