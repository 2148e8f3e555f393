"""Who may run when: the order of the lanes, one thread in user code, and nothing that makes a lane wait besides."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ramtorch_core.engine.pipeline.turnstile import Aborted, Order, Phase, Turnstile
from ramtorch_core.plan.schedule import Schedule

pytestmark = pytest.mark.timeout(20)
Say = Callable[..., None]


class Actor:
    """A thread that enters and leaves ops when it is told to, and notes where it is."""

    def __init__(self, turnstile: Turnstile, name: str) -> None:
        self.turnstile = turnstile
        self.inside: list[str] = []
        self.error: BaseException | None = None
        self._told: list[tuple[str, Any, dict[str, int]]] = []
        self._condition = threading.Condition()
        self._done = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def tell(self, verb: str, op: str = "", **options: int) -> None:
        with self._condition:
            self._told.append((verb, op, options))
            self._condition.notify_all()

    def until_idle(self) -> None:
        """Everything that it was told is done."""
        with self._condition:
            assert self._condition.wait_for(lambda: self._done == len(self._told), 10)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._done < len(self._told))
                verb, op, options = self._told[self._done]
            if verb == "end":
                return
            try:
                if verb == "rest":
                    self.turnstile.rest()
                else:
                    phase: Phase = op[1]  # type: ignore[assignment]
                    getattr(self.turnstile, verb)(phase, int(op[0]), int(op[2]), **options)
                    self.inside += [op] if verb == "enter" else []
            except Aborted as error:
                self.error = error
            with self._condition:
                self._done += 1
                self._condition.notify_all()


@pytest.fixture
def cast() -> Iterator[Callable[[Turnstile, int], list[Actor]]]:
    actors: list[Actor] = []

    def make(turnstile: Turnstile, count: int) -> list[Actor]:
        actors.extend(Actor(turnstile, f"actor-{i}") for i in range(count))
        return actors

    yield make
    for actor in actors:
        actor.tell("end")
        actor.turnstile.abort(RuntimeError("the test is over"))
        actor.thread.join(10)


def waits_for(turnstile: Turnstile, phase: Phase, stage: int, microbatch: int) -> None:
    """Until some thread is blocked before this op."""
    gate = turnstile._gates[phase, stage, microbatch]
    settled = threading.Event()
    for _ in range(10_000):
        with turnstile._mutex:
            if gate in turnstile._waiting:
                return
        settled.wait(0.001)
    raise AssertionError("nobody came")


TWO_LANES = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


@pytest.mark.parametrize("exclusive", [True, False])
def test_an_op_waits_for_the_one_before_it_in_its_lane(exclusive: bool, cast: Any) -> None:
    turnstile = Turnstile(Order(Schedule.parse(TWO_LANES), exclusive))
    first, second = cast(turnstile, 2)
    second.tell("enter", "0F1")
    waits_for(turnstile, "F", 0, 1)
    first.tell("enter", "0F0")
    first.until_idle()
    assert second.inside == []
    first.tell("leave", "0F0")
    first.tell("rest")
    second.until_idle()
    assert second.inside == ["0F1"]


@pytest.mark.parametrize("exclusive", [True, False])
def test_forwards_exclude_each_other_on_all_lanes(exclusive: bool, cast: Any) -> None:
    turnstile = Turnstile(Order(Schedule.parse(TWO_LANES), exclusive))
    first, second = cast(turnstile, 2)
    first.tell("enter", "0F0")
    first.until_idle()
    second.tell("enter", "1F0")
    waits_for(turnstile, "F", 1, 0)
    assert second.inside == []
    first.tell("leave", "0F0")
    first.tell("rest")
    second.until_idle()
    assert second.inside == ["1F0"]


def test_backwards_run_beside_forwards_where_devices_compute_on_their_own(cast: Any) -> None:
    turnstile = Turnstile(Order(Schedule.parse("0F0 0F1\n1B0 1B1\n2W0"), exclusive=False))
    first, second, third = cast(turnstile, 3)
    for actor, op in ((first, "0F0"), (second, "1B0"), (third, "2W0")):
        actor.tell("enter", op)
        actor.until_idle()
    assert [actor.inside for actor in (first, second, third)] == [["0F0"], ["1B0"], ["2W0"]]


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("sticky", [True, False])
def test_the_baton_stays_with_its_thread_or_goes_round(exclusive: bool, sticky: bool, cast: Any) -> None:
    turnstile = Turnstile(Order(Schedule.parse("0F0 0F1\n1F0 1F1"), exclusive), sticky)
    first, second = cast(turnstile, 2)
    first.tell("enter", "0F0")
    first.until_idle()
    second.tell("enter", "0F1")
    waits_for(turnstile, "F", 0, 1)
    first.tell("leave", "0F0")
    first.until_idle()
    if not sticky:
        second.until_idle()
    first.tell("enter", "1F0")
    if sticky:
        first.until_idle()
        assert (first.inside, second.inside) == (["0F0", "1F0"], [])
    else:
        waits_for(turnstile, "F", 1, 0)
        assert (first.inside, second.inside) == (["0F0"], ["0F1"])
        second.tell("leave", "0F1")
        first.until_idle()
        assert first.inside == ["0F0", "1F0"]


def test_a_thread_that_has_to_wait_hands_the_baton_over(cast: Any) -> None:
    turnstile = Turnstile(Order(Schedule.parse("0F0 0F1\n1F0 1F1 1B0"), exclusive=True))
    first, second = cast(turnstile, 2)
    first.tell("enter", "0F0")
    first.until_idle()
    second.tell("enter", "0F1")
    waits_for(turnstile, "F", 0, 1)
    first.tell("leave", "0F0")
    first.tell("enter", "1B0")
    second.until_idle()
    assert second.inside == ["0F1"]


def test_an_op_without_baton_admits_the_next_of_its_lane_at_once(cast: Any) -> None:
    turnstile = Turnstile(Order(Schedule.parse("0W0 0F0 0W1"), exclusive=False), sticky=False)
    first, second = cast(turnstile, 2)
    first.tell("enter", "0W0")
    first.until_idle()
    second.tell("enter", "0F0")
    waits_for(turnstile, "F", 0, 0)
    first.tell("leave", "0W0")
    second.until_idle()
    assert second.inside == ["0F0"]


@pytest.mark.parametrize("sticky", [True, False])
def test_entering_after_an_op_ends_that_op(sticky: bool, cast: Any) -> None:
    turnstile = Turnstile(Order(Schedule.parse(TWO_LANES)), sticky)
    first, second = cast(turnstile, 2)
    first.tell("enter", "0F0")
    first.until_idle()
    second.tell("enter", "0F1")
    waits_for(turnstile, "F", 0, 1)
    first.tell("enter", "1F0", after=0)
    if sticky:  # it kept the baton
        first.until_idle()
        assert second.inside == []
        first.tell("leave", "1F0")
        first.tell("rest")
    second.until_idle()
    assert second.inside == ["0F1"]


def test_giving_up_frees_those_who_wait_and_those_who_come_later_and_keeps_the_first_error(cast: Any) -> None:
    turnstile = Turnstile(Order(Schedule.parse(TWO_LANES)))
    first, second = cast(turnstile, 2)
    first.tell("enter", "0F1")
    waits_for(turnstile, "F", 0, 1)
    error = ValueError("first")
    turnstile.abort(error)
    turnstile.abort(ValueError("second"))
    first.until_idle()
    second.tell("enter", "0F0")
    second.until_idle()
    assert isinstance(first.error, Aborted)
    assert isinstance(second.error, Aborted)
    assert turnstile.error is error
