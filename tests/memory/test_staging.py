"""Staging buffers: bounded, waited for, and handed back."""

import threading

import pytest

from ramtorch_core.memory.device import Device
from ramtorch_core.memory.staging import Staging


def staging(count: int) -> Staging:
    return Staging(Device("cpu"), 64, count)


def test_buffers_are_allocated_when_they_are_needed_and_used_again() -> None:
    buffers = staging(3)
    assert buffers.host_bytes() == 0
    first = buffers.take()
    assert first.nbytes == 64
    assert buffers.host_bytes() == 64
    buffers.give(first)
    assert buffers.take() is first
    assert buffers.take() is not first
    assert buffers.host_bytes() == 128


def test_who_wants_more_than_there_may_be_waits_for_the_next_that_is_given_back() -> None:
    buffers = staging(2)
    first, _second = buffers.take(), buffers.take()
    found, wants = [], threading.Event()

    def take() -> None:
        wants.set()
        found.append(buffers.take())

    thread = threading.Thread(target=take, name="takes a buffer")
    thread.start()
    assert wants.wait(10)
    assert found == []
    buffers.give(first)
    thread.join(10)
    assert found == [first]
    assert buffers.allocated == 2


@pytest.mark.parametrize("takers", [2, 5])
def test_many_threads_share_few_buffers_and_none_is_used_by_two_at_once(takers: int) -> None:
    buffers, used, errors = staging(2), set[int](), list[str]()

    def work() -> None:
        for _ in range(50):
            buffer = buffers.take()
            if id(buffer) in used:
                errors.append("a buffer that is in use was handed out")
            used.add(id(buffer))
            used.discard(id(buffer))
            buffers.give(buffer)

    threads = [threading.Thread(target=work, name=f"taker {index}") for index in range(takers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert buffers.allocated <= 2
