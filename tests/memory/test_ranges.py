"""Ranges: what is timed and shown, and that nothing is when nobody wants to know."""

from typing import Any

import torch
from torch import nn
from torch.profiler import profile, record_function

from ramtorch_core.engine.pipeline.links import Links, Parcel
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.gradients import MAXIMUM_IN_FLIGHT, Gradients
from ramtorch_core.memory.ranges import FOR_STAGE, FOR_TRANSFER, FOR_UPDATE, Kind, Ranges, finish
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.memory.window import Window
from ramtorch_core.plan.itinerary import Direction, Visit


def test_a_range_is_nothing_unless_somebody_listens_or_a_profiler_runs() -> None:
    ranges = Device("cpu").ranges
    assert ranges.begin(Kind.TRANSFER, 3) is None
    finish(None)
    listener = ranges.listen()
    assert ranges.begin(Kind.TRANSFER, 3) is not None
    listener.close()
    assert ranges.begin(Kind.TRANSFER, 3) is None


def test_every_listener_gets_each_range_once_in_the_order_of_their_ends() -> None:
    ranges = Device("cpu").ranges
    one, other = ranges.listen(), ranges.listen()
    with ranges.span(Kind.VISIT, "F0"), ranges.span(Kind.STALL, FOR_UPDATE, host=True):
        pass
    for listener in (one, other):
        inner, outer = listener.collect()
        assert (inner.what, outer.what) == (FOR_UPDATE, "F0")
        assert outer.begun < inner.begun < inner.ended < outer.ended
        assert outer.seconds >= inner.seconds >= 0
        assert listener.collect() == []
    one.close()
    with ranges.span(Kind.UPDATE, 1):
        pass
    assert one.collect() == []
    assert [each.what for each in other.collect()] == [1]


def test_a_listener_gets_the_kinds_it_wants_of_ranges_that_begin_while_it_listens() -> None:
    ranges = Device("cpu").ranges
    all_of_them, one = ranges.listen(), ranges.listen([Kind.STALL])
    all_of_them.close()
    assert ranges.begin(Kind.VISIT, "F0") is None  # nobody wants it
    before = ranges.begin(Kind.STALL, "before")
    other = ranges.listen([Kind.STALL, Kind.OP])
    one.close()
    with ranges.span(Kind.STALL, "later"), ranges.span(Kind.OP, "0F0"):
        finish(before)
        other.close()
    assert [each.what for each in one.collect()] == ["before"]
    assert [each.what for each in other.collect()] == ["0F0", "later"]
    assert all_of_them.collect() == []


def test_a_listener_leaves_what_has_not_ended_on_the_device_for_later() -> None:
    class Pending:
        come = False

        def query(self) -> bool:
            return Pending.come

        def seconds_since(self, earlier: object) -> float:
            return 1.0

    ranges = Device("cpu").ranges
    ranges._mark = Pending
    listener = ranges.listen()
    with ranges.span(Kind.TRANSFER, 0):
        pass
    with ranges.span(Kind.UPDATE, 0, host=True):
        pass
    assert [each.kind for each in listener.collect()] == [Kind.UPDATE]
    Pending.come = True
    assert [each.kind for each in listener.collect()] == [Kind.TRANSFER]


def test_a_closed_listener_keeps_what_it_got_and_listens_again() -> None:
    ranges = Device("cpu").ranges
    listener = ranges.listen()
    for what in range(3):
        with ranges.span(Kind.TRANSFER, what):
            pass
        if what == 0:
            listener.close()
            listener.close()
        else:
            listener.reopen()
    assert [each.what for each in listener.collect()] == [0, 2]


class Recording(Device):
    """A CPU that says that it has streams, and notes what would be launched there."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.launched: list[str] = []
        self.ranges = Ranges(self.mark, self.touch)

    def touch(self) -> None:
        self.launched.append("touch")
        with record_function("touch"):
            pass

    def wait(self, event: Any, stream: Any = None) -> None:
        self.launched.append("wait")
        with record_function("wait"):
            pass


def marks(profiler: Any) -> list[str]:
    """Ranges in the order in which they began, but those of operations."""
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if not event.name.startswith("aten::")]


def test_a_wait_of_a_stream_begins_and_ends_with_a_kernel_only_while_a_profiler_runs() -> None:
    """A profiler draws a range on the device only where a kernel ran in it."""
    device = Recording()
    listener = device.ranges.listen()
    with device.ranges.waiting(FOR_TRANSFER):
        device.wait(None)
    assert device.launched == ["wait"]
    device.launched.clear()
    with profile() as profiler, device.ranges.waiting(FOR_TRANSFER):
        device.wait(None)
    assert marks(profiler) == ["stall for a transfer", "touch", "wait", "touch"]
    assert [(each.kind, each.what) for each in listener.collect()] == [(Kind.STALL, FOR_TRANSFER)] * 2
    assert device.launched == ["touch", "wait", "touch"]


def test_waits_for_transfers_gradients_and_stages_are_shown_on_devices_with_streams() -> None:
    device = Recording()
    group = WeightGroup(0, "chunk", [Weight("w", nn.Parameter(torch.ones(64)), ())])
    group.build([torch.float32], device)
    window, gradients = Window(device, 1, group.nbytes), Gradients(device)
    window.load(group, window.slots[0])
    with profile() as profiler:
        window.acquire(window.slots[0], 0)
        Links([device]).receive(Parcel(torch.ones(1), device.mark()))  # type: ignore[arg-type]
        device.asynchronous = True
        device.current_stream = lambda: None  # type: ignore[method-assign]
        for _ in range(MAXIMUM_IN_FLIGHT + 1):
            gradients._keep(None, [])  # type: ignore[arg-type]
    stalls = [name for name in marks(profiler) if name.startswith("stall")]
    assert stalls == ["stall for a transfer", "stall for another stage", "stall for gradients to leave"]


def test_without_streams_nothing_waits_on_the_device_and_nothing_is_shown() -> None:
    device = Device("cpu")
    with profile() as profiler, device.ranges.waiting(FOR_STAGE):
        torch.ones(1)
    assert marks(profiler) == []


def test_labels_are_those_of_the_simulator() -> None:
    ranges = Device("cpu").ranges
    with profile() as profiler:
        for kind, what in [
            (Kind.VISIT, Visit(Direction.BACKWARD, 3)), (Kind.TRANSFER, 3), (Kind.GRADIENT, 3), (Kind.GRADIENT, -1),
            (Kind.UPDATE, 3), (Kind.STALL, FOR_UPDATE),
        ]:  # fmt: skip
            with ranges.span(kind, what):
                torch.ones(1)
        with ranges.span(Kind.TRANSFER, 7, shown=False):
            torch.ones(1)
    shown = [event.name for event in profiler.events() if not event.name.startswith("aten::")]
    assert shown == ["B3", "t3", "g3", "gradient of what is in no chunk", "u3", "stall for an update"]
