"""Groups of one weight each, given to an updater directly; and what ran ahead in engines."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device_updates_cases import LIMIT
from torch import nn

from ramtorch_core.engine.updates import Updates
from ramtorch_core.memory.device import COMPLETE, Device
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.optim.ahead import Undo
from ramtorch_core.optim.steps import Recipe, WeightUpdate
from ramtorch_core.optim.updater import GroupUpdate, Updater


class Work:
    """Groups of one weight each, and the updates of them that have been given back."""

    def __init__(self, updater: Updater, count: int) -> None:
        self.updater = updater
        self.parameters = [nn.Parameter(torch.ones(2)) for _ in range(count)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        self.groups = [WeightGroup(i, str(i), [Weight(str(i), p, ())]) for i, p in enumerate(self.parameters)]
        for group in self.groups:
            group.build([torch.float32], Device("cpu"))
        self.finished: list[int] = []

    def submit(self, index: int, *, arrived: Any = COMPLETE, held: bool = False, size: int = 2) -> None:
        group = self.groups[index]
        grads = [WeightUpdate(weight, torch.ones(size), Recipe(self.optimizer)) for weight in group.weights]
        self.updater.submit(GroupUpdate(group, grads, arrived, lambda: self.finished.append(index), held))

    def values(self) -> list[float]:
        return [float(p[0].detach()) for p in self.parameters]


@pytest.fixture
def work() -> Iterator[Work]:
    device = Device("cpu")
    updater = Updates(device, Gradients(device)).updater
    updater.begin(None)
    yield Work(updater, 5)
    updater.close()


class Ahead:
    """Counts updates of engines that ran ahead, and how many of them were undone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.undone = 0
        init, restore = Undo.__init__, Undo.restore

        def made(undo: Undo, *args: Any) -> None:
            self.made += 1
            init(undo, *args)

        def undone(undo: Undo) -> None:
            self.undone += 1
            restore(undo)

        monkeypatch.setattr(Undo, "__init__", made)
        monkeypatch.setattr(Undo, "restore", undone)
        monkeypatch.setattr("ramtorch_core.optim.ahead.available_bytes", lambda: None)

    def wait_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on clip when all that may run ahead has."""
        clip = Updates.clip

        def late(updates: Updates, *args: Any) -> Any:
            updater = updates.updater
            with updater._changed:
                over = lambda: updater._room is None or not (updater._queue or updater._running)
                assert updater._changed.wait_for(over, LIMIT)
            return clip(updates, *args)

        monkeypatch.setattr(Updates, "clip", late)
