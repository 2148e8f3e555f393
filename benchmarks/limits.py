"""What the machine can move: copies between host and device, and the host's memory under AdamW.

    python benchmarks/limits.py [--device cpu] [--elements 134217728]

Prints one JSON object, bytes per second. `h2d` and `d2h` are page-locked copies of 256 MiB, alone, `duplex` is each
direction while both run. `host` is torch's fused AdamW over float32 with all threads, 28 bytes per element: weight,
gradient and two moments read, all but the gradient written. Each is the fastest of several repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COPY_BYTES = 256 << 20
REPEATS = 5
ADAMW_BYTES = 28


def needed_bytes(streamed: int, crossings: int, moment: int = 4) -> dict[str, int]:
    """Bytes of one optimizer step that `streamed` parameters in RAM cannot do without, whatever a system moves in fact.

    Float32 masters, half-precision copies, activations recomputed or kept, AdamW on the host; `crossings` is how many
    times the model is gone through per step (batches accumulated). To the device: 2 bytes for the forward and 2 for the
    backward of each crossing. To the host: the gradient once, 2 bytes, or 4 when it was summed over several crossings.
    Host memory: 28 bytes of AdamW, 20 if a `moment` has 2 bytes instead of 4, and every byte that crosses the bus.
    """
    to_device = 4 * crossings * streamed
    to_host = (2 if crossings == 1 else 4) * streamed
    update = ADAMW_BYTES - 2 * 2 * (4 - moment)  # two moments, read and written
    return {"h2d": to_device, "d2h": to_host, "host": update * streamed + to_device + to_host}


def fastest(work: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Seconds of the fastest of REPEATS runs, after one to warm up."""
    laps = []
    for _ in range(REPEATS + 1):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        laps.append(time.perf_counter() - start)
    return min(laps[1:])


def copies() -> dict[str, float]:
    """Bytes per second over the bus."""
    host_in, host_out = (torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
    device_in, device_out = (torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    inward, outward = torch.cuda.Stream(), torch.cuda.Stream()
    times = 8

    def to_device() -> None:
        with torch.cuda.stream(inward):
            for _ in range(times):
                device_in.copy_(host_in, non_blocking=True)

    def to_host() -> None:
        with torch.cuda.stream(outward):
            for _ in range(times):
                host_out.copy_(device_out, non_blocking=True)

    def both() -> None:
        to_device()
        to_host()

    moved = times * COPY_BYTES
    return {
        name: moved / fastest(work, torch.cuda.synchronize)
        for name, work in (("h2d", to_device), ("d2h", to_host), ("duplex", both))
    }


def host_memory(elements: int) -> float:
    """Bytes per second of AdamW on the host."""
    weight, gradient, first, second = (torch.full((elements,), 0.1) for _ in range(4))
    step = torch.ones(())

    def update() -> None:
        adamw(weight, gradient, first, second, step)

    return ADAMW_BYTES * elements / fastest(update, lambda: None)


def adamw(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor) -> None:
    torch._fused_adamw_(
        [weight], [gradient], [first], [second], [], [step], lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=1e-2,
        eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def machine(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "device_bytes": torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--elements", type=int, default=1 << 27, help="parameters that AdamW updates")
    arguments = parser.parse_args()
    limits: dict[str, float | None] = {"h2d": None, "d2h": None, "duplex": None}
    if arguments.device == "cuda":
        limits.update(copies())
    limits["host"] = host_memory(arguments.elements)
    print(json.dumps({"machine": machine(arguments.device), "limits": limits}))


if __name__ == "__main__":
    main()
