"""Ranges: what is timed and shown, and that nothing is when nobody wants to know."""

import torch
from torch.profiler import profile

from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import FOR_UPDATE, Kind, finish
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
