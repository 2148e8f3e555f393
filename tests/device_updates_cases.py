"""Updates on the device, as tests run them on the CPU: pieces so small that weights are cut, and how late they come."""

import random
import threading
import time
from typing import Any

import pytest
import torch

from ramtorch_core.memory.device import Device, Event, Stream
from ramtorch_core.optim import device_updates, pieces

LIMIT = 20.0


@pytest.fixture(params=["prompt", "late"], autouse=True)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 parameters, in slots that hold NaN before; each begins at once, or after a random while."""
    monkeypatch.setattr(device_updates, "PIECE_BYTES", 256)
    load, times = pieces.Route._load, random.Random(5)

    def poisoned(self: Any, slot: Any, piece: Any) -> None:
        if request.param == "late":
            time.sleep(times.random() * 0.002)
        slot.buffer.fill_(255)
        load(self, slot, piece)

    monkeypatch.setattr(pieces.Route, "_load", poisoned)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """What the host and the device step with the same bits."""
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


class Occasion:
    """An event that a test lets happen."""

    def __init__(self) -> None:
        self._happened, self.awaited = threading.Event(), threading.Event()

    def happen(self) -> None:
        self._happened.set()

    def synchronize(self) -> None:
        self.awaited.set()
        assert self._happened.wait(LIMIT)

    def query(self) -> bool:
        return self._happened.is_set()


class Late(Device):
    """Copies back are made at once, but their events happen when the test lets them."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.made: list[Occasion] = []
        self._slots = device_updates.PIECES  # whose memory is free at first
        self.grown = threading.Condition()

    def record(self, stream: Stream | None = None, *, blocking: bool = False) -> Event:
        if not blocking or threading.current_thread().name != "ramtorch-device-updater":
            return super().record(stream)
        if self._slots:
            self._slots -= 1
            return super().record(stream)
        with self.grown:
            self.made.append(Occasion())
            self.grown.notify_all()
            return self.made[-1]

    def wait_for(self, count: int) -> None:
        """Until so many events were recorded."""
        with self.grown:
            assert self.grown.wait_for(lambda: len(self.made) >= count, LIMIT)
