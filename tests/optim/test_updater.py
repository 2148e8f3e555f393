"""The updating thread: order, waiting, errors and the end."""

import threading
from typing import Any

import pytest
import torch
from device_updates_cases import LIMIT, Occasion
from updater_cases import Work, work

from ramtorch_core import RamtorchError
from ramtorch_core.optim import updater as module

__all__ = ["work"]


def test_no_thread_exists_before_the_first_update_and_none_after_close(work: Work) -> None:
    assert not [thread for thread in threading.enumerate() if thread.name == "ramtorch-updater"]
    work.submit(0)
    work.updater.wait()
    work.updater.close()
    work.updater.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ramtorch-updater"]


def test_while_backward_runs_groups_are_updated_in_order_of_arrival_and_then_the_lowest_first(work: Work) -> None:
    first = Occasion()
    work.submit(4, arrived=first)
    assert first.awaited.wait(LIMIT)
    for index in (1, 3, 0, 2):
        work.submit(index)
    work.updater.backward_over()
    first.happen()
    work.updater.wait()
    assert work.updater.order == [4, 0, 1, 2, 3]
    work.updater.begin(None)
    first = Occasion()
    work.submit(4, arrived=first)
    assert first.awaited.wait(LIMIT)
    for index in (1, 3, 0):
        work.submit(index)
    first.happen()
    work.updater.wait()
    assert work.updater.order == [4, 1, 3, 0]
    assert work.updater.updated == 9


def test_nothing_is_updated_before_its_gradients_have_arrived_and_waiting_is_for_one_group(work: Work) -> None:
    late = Occasion()
    work.submit(0)
    work.updater.wait(work.groups[0])
    work.submit(1, arrived=late)
    work.updater.wait(work.groups[0])
    assert work.updater.is_pending(work.groups[1])
    assert work.values() == [0, 1, 1, 1, 1]
    late.happen()
    work.updater.wait(work.groups[1])
    assert work.values() == [0, 0, 1, 1, 1]


def test_what_is_held_begins_with_its_release_scaled_and_nobody_waits_for_it_before(work: Work) -> None:
    work.submit(0, held=True)
    work.submit(1, held=True)
    work.updater.wait()
    work.updater.wait(work.groups[0])
    assert work.updater.is_pending(work.groups[0])
    assert work.values() == [1, 1, 1, 1, 1]
    with pytest.raises(RamtorchError, match="are held"):
        work.updater.begin(None)
    work.updater.release(0.5)
    work.updater.wait()
    assert work.values() == [0.5, 0.5, 1, 1, 1]


@pytest.mark.parametrize("end", ["drop", "close"])
def test_what_is_held_is_forgotten_in_the_end_and_its_buffers_are_given_back(work: Work, end: str) -> None:
    work.submit(0, held=True)
    work.submit(1)
    work.updater.wait()
    getattr(work.updater, end)()
    assert sorted(work.finished) == [0, 1]
    assert work.values() == [1, 0, 1, 1, 1]
    assert not work.updater.is_pending(work.groups[0])


def test_close_finishes_what_was_submitted(work: Work) -> None:
    for index in range(5):
        work.submit(index)
    work.updater.close()
    assert work.values() == [0.0] * 5


def test_an_error_is_raised_once_and_drops_what_had_not_begun(work: Work) -> None:
    first = Occasion()
    work.submit(0, arrived=first, size=3)
    work.submit(1)
    first.happen()
    with pytest.raises(RuntimeError) as caught:
        work.updater.wait()
    assert any(entry.name == "_take_on" for entry in caught.traceback)
    work.updater.wait()
    assert sorted(work.finished) == [0, 1]
    assert work.values() == [1.0] * 5
    work.submit(2)
    work.updater.wait()
    assert work.values() == [1, 1, 0, 1, 1]


def test_an_error_met_by_the_next_submission_gives_its_buffer_back(work: Work) -> None:
    work.submit(0, size=3)
    with work.updater._changed:
        assert work.updater._changed.wait_for(lambda: not work.updater.is_pending(work.groups[0]), LIMIT)
    with pytest.raises(RuntimeError):
        work.submit(1)
    assert sorted(work.finished) == [0, 1]
    work.submit(1)
    work.updater.wait()
    assert work.values() == [1, 0, 1, 1, 1]


def test_drop_waits_for_the_update_under_way_and_forgets_an_error(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, may_end = threading.Event(), threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        entered.set()
        assert may_end.wait(LIMIT)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(module, "update", fail)
        work.submit(0)
        work.submit(1)
        assert entered.wait(LIMIT)
        threading.Timer(0.0, may_end.set).start()
        work.updater.drop()
    assert sorted(work.finished) == [0, 1]
    work.updater.wait()
    work.submit(2)
    work.updater.wait()
    assert work.values() == [1, 1, 0, 1, 1]


def test_an_update_does_not_wait_for_itself(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = threading.Event()

    def wait(*_: Any, **__: Any) -> None:
        work.updater.wait()
        waited.set()

    monkeypatch.setattr(module, "update", wait)
    work.submit(0)
    work.updater.wait()
    assert waited.is_set()


def test_a_master_that_was_pointed_at_other_memory_counts_as_written(work: Work) -> None:
    moved, others = work.groups[0], work.groups[1]
    work.parameters[0].data = work.parameters[0].data.clone()
    work.submit(0)
    work.submit(1)
    work.updater.wait()
    assert [weight.name for weight in moved.refresh()] == ["0"]
    assert others.refresh() == []
    assert torch.equal(moved.weights[0].shadow, torch.zeros(2))


def test_the_updating_thread_itself_may_drop_what_waits(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it runs the garbage collector, and that finds the remains of a step that failed."""
    first, update = Occasion(), module.update

    def drop(*args: Any, **kwargs: Any) -> None:
        work.updater.drop()
        update(*args, **kwargs)

    monkeypatch.setattr(module, "update", drop)
    work.submit(0, arrived=first)
    assert first.awaited.wait(LIMIT)
    work.submit(1)
    first.happen()
    work.updater.wait()
    assert sorted(work.finished) == [0, 1]
    assert work.values() == [0.0, 1.0, 1.0, 1.0, 1.0]


class Broken:
    """The event of a device on which a kernel has failed: from then on every call raises."""

    def synchronize(self) -> None:
        raise RuntimeError("device-side assert triggered")

    def query(self) -> bool:
        raise RuntimeError("device-side assert triggered")


def test_where_the_device_has_failed_nobody_waits_for_ever(work: Work) -> None:
    """The thread that updates is the first to hear of a kernel that failed, and finds every other event broken too."""
    first = Occasion()
    work.submit(0, arrived=first)
    assert first.awaited.wait(LIMIT)
    for index in (1, 2, 3):
        work.submit(index, arrived=Broken())
    first.happen()
    with pytest.raises(RuntimeError, match="device-side assert"):
        work.updater.wait()
    work.updater.drop()
    assert sorted(work.finished) == [0, 1, 2, 3]
    assert not any(map(work.updater.is_pending, work.groups))
    work.submit(4)
    work.updater.wait()
    assert work.values() == [0.0, 1.0, 1.0, 1.0, 0.0]
