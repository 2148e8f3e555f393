"""What the compiled AdamW takes on the host, and what keeping the values that it overwrites adds.

    python benchmarks/update_kernel.py [--elements 67108864] [--threads 15]

Float32 masters and moments, a bfloat16 gradient and shadow. `kept` copies masters and moments inside of the kernel, as
updates that run ahead of a norm do; `copied` copies them before it, with torch. Prints one JSON object: milliseconds,
medians of nine runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from limits import machine

from ramtorch_core.optim.compiled import AdamWeight, adam_kernel
from ramtorch_core.optim.updater import processors

RUNS = 9


def milliseconds(work: Callable[[], object]) -> float:
    laps = []
    for _ in range(RUNS + 1):
        begun = time.perf_counter()
        work()
        laps.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(laps[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, default=max(1, processors() - 1))
    options = parser.parse_args()
    kernel = adam_kernel()
    if kernel is None:
        raise SystemExit("there is no compiled kernel on this machine")
    torch.set_num_threads(options.threads)
    master, first, second = (torch.full((options.elements,), 0.1) for _ in range(3))
    places = torch.zeros_like(master), torch.zeros_like(master), torch.zeros_like(master)
    gradient, shadow = (torch.full((options.elements,), 0.1, dtype=torch.bfloat16) for _ in range(2))
    rates: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    row = AdamWeight(master, first, second, gradient, shadow, step=7, decoupled=True, **rates)
    keeping = replace(row, kept=places)

    def update(row: AdamWeight) -> None:
        kernel([row], options.threads)

    def copy_and_update() -> None:
        for place, tensor in zip(places, (master, first, second), strict=True):
            place.copy_(tensor)
        update(row)

    found = {
        "updated": milliseconds(lambda: update(row)),
        "kept": milliseconds(lambda: update(keeping)),
        "copied": milliseconds(copy_and_update),
    }
    print(json.dumps({"arguments": vars(options), "machine": machine("cpu"), "milliseconds": found}))


if __name__ == "__main__":
    main()
