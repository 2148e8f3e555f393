"""What this machine can move and update per second, measured a few times and kept in a file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ramtorch_core.errors import HostMemoryError
from ramtorch_core.memory.device import Device, Stream
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.host import Arena, available_bytes, last_cache_bytes
from ramtorch_core.memory.ranges import Mark
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.optim.compiled import adam_kernel
from ramtorch_core.optim.steps import Recipe, WeightUpdate, update
from ramtorch_core.optim.updater import processors

REPEATS = 5
WARM_SECONDS = 0.3
COPIES = 4
LOADED_COPIES = 16
COPY_BYTES = 256 << 20
PARAMETERS = 1 << 26
CACHES = 12
"""Sizes of the last caches that the weights take which are updated in turn: none is found there again."""
MOST_WEIGHTS = 16
RAM_SHARE = 8
"""Part of the available host memory, as a divisor, that these weights may take."""
FACTOR = 4096
VERSION = 6
"""Of what is measured, and how: rates that were written by another one are not used."""
MEASUREMENTS = 3
"""Of which the best counts."""
APART = 3600.0
"""Seconds between them, at least: what keeps a machine busy lasts."""
UPDATE_BYTES = 28
"""Host memory traffic per parameter of AdamW besides the shadow: four values are read, three of them written."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does with one device.

    Attributes:
        h2d, d2h: bytes per second from page-locked host memory to the device and back, one way at a time.
        both_ways: bytes per second when both are busy, added up.
        host_memory: bytes per second that the host's memory reads and writes, all together: the least that updates and
            copies, in, out or both ways, move while they go on at once, or an update alone if that is more.
        host_update: seconds per parameter of AdamW on the host, in the engine's kernel, with a bfloat16 shadow.
        device_update: the same on the device, by torch's fused AdamW.
        device_bytes: memory of the device; None for the CPU.
        accumulated: bytes per second of a float32 sum in host memory to which gradients are added, piece by piece on
            the device; None if that is not known.
        beyond_caches: updates were measured on as many weights as no cache holds. Where memory was short they were not,
            and `host_update` and `host_memory` may look better than they are.
    """

    h2d: float
    d2h: float
    both_ways: float
    host_memory: float
    host_update: float
    device_update: float
    device_bytes: int | None
    accumulated: float | None = None
    beyond_caches: bool = True


def measure_rates(device: Device, *, copy_bytes: int = COPY_BYTES, parameters: int = PARAMETERS) -> Rates:
    """Measure now.

    Takes some seconds, more of them the more host memory it writes for the first time: `2 * copy_bytes` bytes, and
    `16 * parameters` for each of at most `MOST_WEIGHTS` weights, together as many as `CACHES` times the last caches
    have, if an eighth of what is available suffices for that. There is always one weight.

    Raises:
        HostMemoryError, RuntimeError: the host has no memory for that one.
        OutOfMemoryError: the device has no memory for copies, or a weight.
    """
    copies, probe = _Copies(device, copy_bytes), _Probe(device, parameters)
    h2d, d2h, both_ways = copies.rates()
    host_update = _median_seconds(probe.update, Device("cpu")) / parameters
    loaded = probe.loaded_memory(copies, copy_bytes) if device.asynchronous else _host_memory(copy_bytes)
    return Rates(
        h2d=h2d,
        d2h=d2h,
        both_ways=both_ways,
        host_memory=max(loaded, UPDATE_BYTES / host_update),
        host_update=host_update,
        device_update=_device_update(device, parameters),
        device_bytes=device.total_bytes(),
        accumulated=probe.accumulated(),
        beyond_caches=probe.beyond_caches,
    )


def known_rates(device: Device, *, file: Path | None = None, clock: Callable[[], float] = time.time) -> Rates:
    """The rates of this machine from `file`, measured and written there if they are not known.

    What runs beside a measurement makes rates look worse than they are, never better. So they are measured again when
    they are asked for an hour or more later, until there are `MEASUREMENTS`; of each rate the best is kept, of updates
    the best beyond the caches.

    Args:
        file: by default `machines.json` in the user's cache folder. Entries are told apart by the names of the device
            and the host, the number of processors, torch's version, and `VERSION`.
        clock: seconds.
    """
    file = file or cache_file()
    names = [device.name(), platform.node(), f"{processors()} processors", f"torch {torch.__version__}"]
    key = " | ".join([*names, f"rates {VERSION}"])
    known, times = _entry(_read(file).get(key))
    if known is not None and (len(times) >= MEASUREMENTS or clock() < times[-1] + APART):
        return known
    try:
        rates = measure_rates(device)
    except (torch.OutOfMemoryError, HostMemoryError):
        if known is None:
            raise
        return known  # the model that is here already leaves no room
    rates = rates if known is None else _best(known, rates)
    _write(file, {**_read(file), key: {"rates": dataclasses.asdict(rates), "measured": [*times, clock()]}})
    return rates


def _entry(content: Any) -> tuple[Rates | None, list[float]]:
    """Of the file: the rates, and when they were measured."""
    try:
        rates, times = Rates(**content["rates"]), [float(each) for each in content["measured"]]
    except (KeyError, TypeError, ValueError):
        return None, []  # not known, or written by a version that measured something else
    return (rates, times) if times else (None, [])


def _best(one: Rates, other: Rates) -> Rates:
    """Of each rate the better one."""
    found = dataclasses.asdict(other)
    for name, value in dataclasses.asdict(one).items():
        if value is not None and found[name] is not None and name != "device_bytes":
            found[name] = (min if name in ("host_update", "device_update") else max)(value, found[name])
    if one.beyond_caches != other.beyond_caches:
        truer = one if one.beyond_caches else other
        found |= {"host_update": truer.host_update, "host_memory": truer.host_memory}
    return Rates(**found)


def cache_file() -> Path:
    """Where rates are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ramtorch_core" / "machines.json"


def _read(file: Path) -> dict[str, object]:
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
    """Of at least REPEATS runs, after some to warm up: clocks rise, and memory comes to where it is used."""
    laps: list[float] = []
    begun = time.perf_counter()
    while len(laps) <= 2 * REPEATS and (len(laps) <= REPEATS or time.perf_counter() - begun < WARM_SECONDS):
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        laps.append(time.perf_counter() - start)
    return max(statistics.median(laps[-REPEATS:]), 1e-9)


class _Copies:
    """Page-locked copies, each way on a stream of its own."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._hosts = [Arena(nbytes, device) for _ in range(2)]
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device.torch) for _ in range(2)]
        self.streams = [device.stream() for _ in range(2)]

    def inward(self, count: int = COPIES) -> tuple[Mark, Mark]:
        """Begin some to the device. Returns the moments when they begin and end."""
        return self._issue(self.streams[0], self._buffers[0], self._hosts[0].flat, count)

    def outward(self, count: int = COPIES) -> tuple[Mark, Mark]:
        """The same to the host."""
        return self._issue(self.streams[1], self._hosts[1].flat, self._buffers[1], count)

    def both(self) -> None:
        """Begin some each way."""
        self.inward()
        self.outward()

    def rates(self) -> tuple[float, float, float]:
        """Bytes per second in, out, and both ways at once, added up."""
        moved = COPIES * self._nbytes
        one_way = [moved / _median_seconds(work, self._device) for work in (self.inward, self.outward)]
        return one_way[0], one_way[1], 2 * moved / _median_seconds(self.both, self._device)

    def _issue(self, stream: Stream | None, target: Tensor, source: Tensor, count: int) -> tuple[Mark, Mark]:
        with self._device.on(stream):
            begun = self._device.mark()
            for _ in range(count):
                target.copy_(source, non_blocking=True)
            return begun, self._device.mark()


class _Probe:
    """Weights in the engine's own code: masters with their shadows in arenas, and gradients as they arrive.

    Attributes:
        beyond_caches: there are as many as no cache holds.
    """

    def __init__(self, device: Device, parameters: int) -> None:
        self._device, self._parameters = device, parameters
        self._kernel, self._threads = adam_kernel(), max(1, processors() - 1)
        found: list[tuple[WeightGroup, WeightUpdate]] = []
        for _ in range(_weights_with_room(16 * parameters)):
            try:
                found.append(self._weight())
            except (HostMemoryError, RuntimeError):  # the latter of torch's allocator
                if not found:
                    raise
                del found[1:]  # room for what is measured else
                break
        self.beyond_caches = len(found) >= _weights_beyond_caches(16 * parameters)
        self._groups, self._in_turn = [group for group, _ in found], itertools.cycle([each for _, each in found])

    def update(self) -> None:
        """One step of the next one on the host."""
        self._update(next(self._in_turn))

    def _weight(self) -> tuple[WeightGroup, WeightUpdate]:
        """One that has been updated once, which made its state."""
        module = nn.Module()
        module.weight = nn.Parameter(torch.full((self._parameters,), 0.1))
        weight = Weight("weight", module.weight, ((module, "weight"),))
        group = WeightGroup(0, "probe", [weight], sampled=False)
        group.build([torch.bfloat16], self._device)
        gradient = Arena(2 * self._parameters, self._device).flat.view(torch.bfloat16).fill_(0.1)
        each = WeightUpdate(weight, gradient, Recipe(torch.optim.AdamW(module.parameters(), lr=1e-3)))
        self._update(each)
        return group, each

    def _update(self, each: WeightUpdate) -> None:
        update([each], scale=1.0, kernel=self._kernel, threads=self._threads)

    def loaded_memory(self, copies: _Copies, nbytes: int) -> float:
        """Bytes per second of host memory while updates and copies, of `nbytes` each, go on at once.

        The least of copies in, out, and both ways: a byte written by a device costs memory more than one that it reads.
        """
        ways = ([copies.inward], [copies.outward], [copies.inward, copies.outward])
        return min(filter(None, (self._loaded(each, nbytes) for each in ways)), default=0.0)

    def _loaded(self, begin: Sequence[Callable[[int], tuple[Mark, Mark]]], nbytes: int) -> float:
        self._device.synchronize()
        ways = [issue(LOADED_COPIES) for issue in begin]
        laps = []
        while not all(end.query() for _, end in ways):
            start = time.perf_counter()
            self.update()
            laps.append(time.perf_counter() - start)
        moved = sum(LOADED_COPIES * nbytes / end.seconds_since(begun) for begun, end in ways)
        return moved + UPDATE_BYTES * self._parameters / statistics.median(laps) if laps else 0.0

    def accumulated(self) -> float:
        """Bytes per second of a sum in the master's dtype to which gradients are added, while the device computes."""
        device = self._device
        gradients, grad = Gradients(device), torch.full((self._parameters,), 0.1, dtype=torch.bfloat16).to(device.torch)
        factor = torch.ones(FACTOR, FACTOR, dtype=torch.bfloat16, device=device.torch)
        product = torch.empty_like(factor)
        laps = []
        for _ in range(REPEATS + 2):  # the first one finds nothing to add to
            with device.on(gradients.stream):
                begun = device.mark()
            gradients.receive(self._groups[0], [grad])
            with device.on(gradients.stream):
                end = device.mark()
            while device.asynchronous and not end.query():
                torch.mm(factor, factor, out=product)
                torch.mm(factor, factor, out=product)
                device.record().synchronize()
            gradients.finish()
            laps.append(end.seconds_since(begun))
        gradients.release()
        return 4 * self._parameters / max(statistics.median(laps[2:]), 1e-9)


def _weights_beyond_caches(nbytes: int) -> int:
    """How many weights, with their state of so many bytes each, should be updated in turn.

    In a step each update finds its weight in memory. Alone, over and over, the update of a weight even of several
    caches' size finds a part of it in them, and is faster.
    """
    return max(1, min(MOST_WEIGHTS, math.ceil(CACHES * last_cache_bytes() / nbytes)))


def _weights_with_room(nbytes: int) -> int:
    """How many of them are, as memory allows; at least one."""
    wanted, available = _weights_beyond_caches(nbytes), available_bytes()
    return wanted if available is None else max(1, min(wanted, available // RAM_SHARE // nbytes))


def _host_memory(nbytes: int) -> float:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return 2 * nbytes / _median_seconds(lambda: target.copy_(source), Device("cpu"))


def _device_update(device: Device, parameters: int) -> float:
    weight = nn.Parameter(torch.full((parameters,), 0.1, device=device.torch))
    weight.grad = torch.full_like(weight, 0.1)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    return _median_seconds(optimizer.step, device) / parameters
