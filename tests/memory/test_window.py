"""Slots: what they hold, which one is given up, and that a copy overwrites all of it."""

import pytest
import torch
from torch import nn

from ramtorch_core.errors import WindowError
from ramtorch_core.memory.device import COMPLETE, Device, Event, Stream
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.memory.window import Window

CPU = Device("cpu")


def group(index: int, count: int = 64) -> WeightGroup:
    result = WeightGroup(index, f"chunk{index}", [Weight("w", nn.Parameter(torch.full((count,), float(index))), ())])
    result.build([torch.float32], CPU)
    return result


def test_a_loaded_slot_holds_the_groups_values_and_poison_around_them():
    window = Window(CPU, 2, 1024, poison=True)
    small = group(3)
    window.load(small, window.slots[1])
    assert window.find(small) is window.slots[1]
    (view,) = window.slots[1].views(small)
    assert (view == 3).all()
    assert window.slots[1].buffer[256:].view(torch.float32).isnan().all()
    assert window.copied_bytes == 256


def test_views_are_made_once_and_again_when_the_group_is_laid_out_anew():
    window, small = Window(CPU, 1, 1024), group(0)
    slot = window.slots[0]
    window.load(small, slot)
    first = slot.views(small)
    assert slot.views(small) is first
    small.build([torch.bfloat16], CPU)
    assert slot.views(small)[0].dtype == torch.bfloat16


def test_loading_bumps_the_version_that_lent_views_share():
    window, small = Window(CPU, 1, 1024), group(0)
    (view,) = window.slots[0].views(small)
    before = view.detach()._version
    window.load(small, window.slots[0])
    assert view.detach()._version > before


def test_an_empty_slot_is_taken_first_then_the_one_used_longest_ago_and_none_in_use():
    window = Window(CPU, 3, 1024)
    groups = [group(index) for index in range(3)]
    for clock, slot in enumerate(window.slots[:2]):
        window.load(groups[clock], slot)
        window.acquire(slot, clock)
    assert window.victim() is window.slots[2]
    window.load(groups[2], window.slots[2])
    assert window.victim() is window.slots[2]
    window.acquire(window.slots[2], 2)
    with pytest.raises(WindowError, match=r"all 3 slots are in use, by 'chunk0', 'chunk1', 'chunk2'.*Raise window="):
        window.victim()
    window.release(window.slots[1])
    window.release(window.slots[0])
    assert window.victim() is window.slots[0]


def test_a_slot_with_two_users_is_free_when_both_are_gone():
    window = Window(CPU, 1, 1024)
    (slot,) = window.slots
    window.acquire(slot, 0)
    window.acquire(slot, 1)
    window.release(slot)
    assert slot.in_use
    window.release(slot)
    window.release(slot)
    assert not slot.in_use
    window.acquire(slot, 2)
    assert slot.in_use


def test_what_is_forgotten_is_not_found():
    window, first, second = Window(CPU, 2, 1024), group(0), group(1)
    window.load(first, window.slots[0])
    window.load(second, window.slots[1])
    window.forget(first)
    assert window.find(first) is None
    assert window.find(second) is window.slots[1]
    window.forget()
    assert window.find(second) is None


def test_the_first_copy_into_a_slot_waits_for_what_used_its_memory_before():
    class Recording(Device):
        def __init__(self) -> None:
            super().__init__("cpu")
            self.waited: list[Event] = []

        def record(self, stream: Stream | None = None, *, blocking: bool = False) -> Event:
            return type(COMPLETE)()

        def wait(self, event: Event, stream: Stream | None = None) -> None:
            self.waited.append(event)

    device = Recording()
    window = Window(device, 2, 1024)
    created = [slot.free for slot in window.slots]
    for index, slot in enumerate(window.slots):
        window.load(group(index), slot)
    assert device.waited == created
    assert len(set(map(id, created))) == 2
