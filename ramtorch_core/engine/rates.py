"""What this machine can move and update per second, measured once and kept in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ramtorch_core.memory.device import Device
from ramtorch_core.memory.host import Arena
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.optim.compiled import adam_kernel
from ramtorch_core.optim.steps import Recipe, WeightUpdate, update
from ramtorch_core.optim.updater import processors

REPEATS = 5
COPIES = 4
COPY_BYTES = 256 << 20
PARAMETERS = 1 << 25
UPDATE_BYTES = 28
"""Host memory traffic per parameter of AdamW besides the shadow: four values are read, three of them written."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does with one device.

    Attributes:
        h2d, d2h: bytes per second from page-locked host memory to the device and back, one way at a time.
        both_ways: bytes per second when both are busy, added up.
        host_memory: bytes per second that the host's memory reads and writes, all together.
        host_update: seconds per parameter of AdamW on the host, in the engine's kernel, with a bfloat16 shadow.
        device_update: the same on the device, by torch's fused AdamW.
        device_bytes: memory of the device; None for the CPU.
    """

    h2d: float
    d2h: float
    both_ways: float
    host_memory: float
    host_update: float
    device_update: float
    device_bytes: int | None


def measure_rates(device: Device, *, copy_bytes: int = COPY_BYTES, parameters: int = PARAMETERS) -> Rates:
    """Measure now; takes a few seconds, and `24 * parameters` and `2 * copy_bytes` bytes of host memory."""
    h2d, d2h, both_ways = _copy_rates(device, copy_bytes)
    host_update = _host_update(device, parameters)
    return Rates(
        h2d=h2d,
        d2h=d2h,
        both_ways=both_ways,
        host_memory=max(_host_memory(copy_bytes), UPDATE_BYTES / host_update),
        host_update=host_update,
        device_update=_device_update(device, parameters),
        device_bytes=device.total_bytes(),
    )


def known_rates(device: Device, *, anew: bool = False, file: Path | None = None) -> Rates:
    """The rates of this machine from `file`, measured and written there if they are not known.

    Args:
        anew: measure in any case.
        file: by default `machines.json` in the user's cache folder. Entries are told apart by the names of the device
            and the host, the number of processors, and torch's version.
    """
    file = file or cache_file()
    key = " | ".join([device.name(), platform.node(), f"{processors()} processors", f"torch {torch.__version__}"])
    known = _read(file)
    if not anew and key in known:
        try:
            return Rates(**known[key])  # type: ignore[arg-type]  # what `_write` wrote
        except TypeError:
            pass  # written by a version that measured something else
    rates = measure_rates(device)
    _write(file, {**_read(file), key: dataclasses.asdict(rates)})
    return rates


def cache_file() -> Path:
    """Where rates are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ramtorch_core" / "machines.json"


def _read(file: Path) -> dict[str, dict[str, float]]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(file: Path, content: dict[str, object]) -> None:
    """Whole or not at all; a folder that cannot be written only costs measuring again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps(content, indent=2) + "\n")
        new.replace(file)
    except OSError:
        pass


def _median_seconds(work: Callable[[], object], device: Device) -> float:
    """Of REPEATS runs, after one to warm up."""
    laps = []
    for _ in range(REPEATS + 1):
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        laps.append(time.perf_counter() - start)
    return max(statistics.median(laps[1:]), 1e-9)


def _copy_rates(device: Device, nbytes: int) -> tuple[float, float, float]:
    hosts = [Arena(nbytes, device) for _ in range(2)]
    buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device.torch) for _ in range(2)]
    streams = [device.stream() for _ in range(2)]

    def inward() -> None:
        with device.on(streams[0]):
            for _ in range(COPIES):
                buffers[0].copy_(hosts[0].flat, non_blocking=True)

    def outward() -> None:
        with device.on(streams[1]):
            for _ in range(COPIES):
                hosts[1].flat.copy_(buffers[1], non_blocking=True)

    def both() -> None:
        inward()
        outward()

    one_way = [COPIES * nbytes / _median_seconds(work, device) for work in (inward, outward)]
    return one_way[0], one_way[1], 2 * COPIES * nbytes / _median_seconds(both, device)


def _host_memory(nbytes: int) -> float:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return 2 * nbytes / _median_seconds(lambda: target.copy_(source), Device("cpu"))


def _host_update(device: Device, parameters: int) -> float:
    """In the engine's own code: a master with its shadow in an arena, and a gradient as it arrives."""
    probe = nn.Module()
    probe.weight = nn.Parameter(torch.full((parameters,), 0.1))
    weight = Weight("weight", probe.weight, ((probe, "weight"),))
    group = WeightGroup(0, "probe", [weight], sampled=False)
    group.build([torch.bfloat16], device)
    gradient = Arena(2 * parameters, device).flat.view(torch.bfloat16).fill_(0.1)
    recipe = Recipe(torch.optim.AdamW(probe.parameters(), lr=1e-3))
    updates, kernel = [WeightUpdate(weight, gradient, recipe)], adam_kernel()
    threads = max(1, processors() - 1)
    seconds = _median_seconds(lambda: update(updates, scale=1.0, kernel=kernel, threads=threads), Device("cpu"))
    return seconds / parameters


def _device_update(device: Device, parameters: int) -> float:
    weight = nn.Parameter(torch.full((parameters,), 0.1, device=device.torch))
    weight.grad = torch.full_like(weight, 0.1)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    return _median_seconds(optimizer.step, device) / parameters
