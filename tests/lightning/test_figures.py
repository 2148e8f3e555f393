"""What monitors make of ranges: computing, stalls and bubbles of a pipeline's devices, worked out by hand."""

import pytest

from ramtorch_core.memory.ranges import FOR_GRADIENTS, FOR_STAGE, FOR_TRANSFER, Kind, Range, Ranges
from ramtorch_lightning.figures import PipelineTimes


class At:
    """A moment of a clock that is set by hand."""

    now = 0.0

    def __init__(self) -> None:
        self.seconds = At.now

    def query(self) -> bool:
        return True

    def seconds_since(self, earlier: "At") -> float:
        return self.seconds - earlier.seconds


DEVICE = Ranges(At)


def lane(*rows: tuple[str, float, float]) -> list[Range]:
    """Ranges of a device: what, from and until; those within one before are listed after it."""
    under_way, listener = list[tuple[Range, float]](), DEVICE.listen()

    def end(before: float) -> None:
        while under_way and under_way[-1][1] <= before:
            ending, At.now = under_way.pop()
            ending.finish()

    for what, begin, until in rows:
        end(begin)
        At.now = begin
        kind = Kind.STALL if what.startswith("for") else Kind.TRANSFER if what.startswith("t") else Kind.OP
        made = DEVICE.begin(kind, what)
        assert made is not None
        under_way.append((made, until))
    end(float("inf"))
    listener.close()
    return listener.collect()


FIRST = lane(
    ("0F0", 0, 4), (FOR_TRANSFER, 0, 1), ("t1", 1, 3),
    ("0B0", 6, 10), (FOR_STAGE, 6, 7), (FOR_GRADIENTS, 8, 10),
    (FOR_TRANSFER, 11, 15),  # between two batches
    ("0F0", 20, 22), ("0B0", 22, 24),
)  # fmt: skip
SECOND = lane(("1F0", 4, 5), ("1B0", 5, 7), (FOR_TRANSFER, 5, 6), ("1F0", 22, 23), ("1B0", 23, 24))


def test_waits_of_ops_for_what_streams_are_stalls_and_all_else_that_is_not_computing_a_bubble() -> None:
    times, left = PipelineTimes.read([FIRST, SECOND])
    assert times == PipelineTimes(1, 10.0, [3.0 + 1.0, 1.0 + 1.0], [1.0 + 2.0, 1.0])
    figures = times.figures(streams=True)
    assert figures == pytest.approx(
        {
            "bubble_percent": 50, "stall_percent": 20, "device_0_busy_percent": 40, "device_1_busy_percent": 20,
            "pipeline_seconds": 10,
        }
    )  # fmt: skip
    assert [[each.what for each in ranges] for ranges in left] == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_the_last_batch_counts_when_the_next_one_has_begun() -> None:
    _, left = PipelineTimes.read([FIRST, SECOND])
    later = PipelineTimes.read([left[0] + lane(("0F0", 30, 31)), left[1] + lane(("1F0", 31, 32))])[0]
    assert (later.batches, later.seconds, later.busy, later.stalled) == (1, 4.0, [4.0, 2.0], [0.0, 0.0])


def test_without_chunks_that_stream_there_is_no_word_of_stalls_and_without_batches_none_at_all() -> None:
    times, _ = PipelineTimes.read([FIRST, SECOND])
    assert "stall_percent" not in times.figures(streams=False)
    nothing, left = PipelineTimes.read([[], []])
    assert nothing.figures(streams=True) == {}
    assert left == [[], []]
