"""Updates that run ahead of the factor by which gradients are scaled: their bits, their memory, and who sees them."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_updates_cases import LIMIT, Occasion
from stream_cases import assert_same, data, stack, streaming
from torch import Tensor, nn
from updater_cases import Ahead, Work, work
from updates_cases import Gate, backward, compare, slow_down, weights

import ramtorch_core
from ramtorch_core import RamtorchError
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.optim import updater as module
from ramtorch_core.optim.ahead import Ahead as Rooms
from ramtorch_core.optim.ahead import Room, Undo, room_for
from ramtorch_core.optim.compiled import adam_kernel
from ramtorch_core.optim.steps import Recipe, WeightUpdate, update

__all__ = ["work"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "own AdamW": lambda p: ramtorch_core.AdamW(p, lr=0.01, moments=torch.bfloat16),
}


class Updated:
    """Some weights, one of them in columns, and updates of all with given gradients."""

    def __init__(self, optimize: Callable[[Any], torch.optim.Optimizer], shadow: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        sizes = [(), (7,), (3, 5), (64, 9)]
        self.parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
        self.parameters.append(nn.Parameter(torch.randn(5, 8, generator=generator).t()))
        self.group = WeightGroup(0, "chunk", [Weight(str(i), p, ()) for i, p in enumerate(self.parameters)])
        self.group.build([shadow] * len(self.parameters), Device("cpu"))
        self.optimizer = optimize(self.parameters)

    def updates(self, index: int) -> list[WeightUpdate]:
        recipe, generator = Recipe(self.optimizer), torch.Generator().manual_seed(index)
        grads = [torch.randn(weight.parameter.numel(), generator=generator) for weight in self.group.weights]
        return [WeightUpdate(weight, grad, recipe) for weight, grad in zip(self.group.weights, grads, strict=True)]

    def step(self, index: int, scale: float = 1.0) -> None:
        update(self.updates(index), scale=scale, kernel=adam_kernel(), threads=1)

    def step_ahead(self, index: int, compiled: bool = True) -> Undo:
        updates, room = self.updates(index), Room(1 << 16)
        assert room.fits(updates)
        undo = Undo(updates, room)
        update(updates, scale=1.0, kernel=adam_kernel() if compiled else None, threads=1, undo=undo)
        return undo

    def seen(self) -> Any:
        shadows = [weight.shadow.clone() for weight in self.group.weights]
        return copy.deepcopy((weights(nn.ParameterList(self.parameters)), self.optimizer.state_dict(), shadows))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shadow", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("optimize", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_update_is_undone_bit_for_bit_and_can_be_made_anew(
    optimize: Callable[[Any], torch.optim.Optimizer], before: int, shadow: torch.dtype, compiled: bool
) -> None:
    found, expected = Updated(optimize, shadow), Updated(optimize, shadow)
    for index in range(before):
        found.step(index)
        expected.step(index)
    seen = found.seen()
    tensors = {id(value) for row in found.optimizer.state.values() for value in row.values()}
    undo = found.step_ahead(before, compiled)
    with pytest.raises(AssertionError):
        assert_same(found.seen(), seen)
    undo.restore()
    assert_same(found.seen(), seen)
    assert {id(value) for row in found.optimizer.state.values() for value in row.values()} >= tensors
    found.step(before, scale=0.25)
    expected.step(before, scale=0.25)
    assert_same(found.seen(), expected.seen())


def test_what_was_not_updated_when_an_update_failed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Updated(OPTIMIZERS["AdamW"], torch.bfloat16)
    other = torch.optim.SGD([made.parameters.pop(1)], lr=0.1)  # not for the kernel, which comes last
    made.optimizer = OPTIMIZERS["AdamW"](made.parameters)
    recipes = {parameter: Recipe(made.optimizer) for parameter in made.parameters}
    weights = made.group.weights
    updates = [
        WeightUpdate(each, torch.ones(each.parameter.numel()), recipes.get(each.parameter) or Recipe(other))
        for each in weights
    ]
    seen = made.seen(), other.param_groups[0]["params"][0].detach().clone()
    undo = Undo(updates, Room(1 << 16))

    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("here")

    with pytest.raises(ArithmeticError):
        update(updates, scale=1.0, kernel=fail, threads=1, undo=undo)  # type: ignore[arg-type]
    assert not torch.equal(other.param_groups[0]["params"][0].detach(), seen[1])
    undo.restore()
    assert_same(made.seen(), seen[0])
    assert_same(other.param_groups[0]["params"][0].detach(), seen[1])
    assert made.optimizer.state == {}


def test_moments_whose_dtype_the_update_changes_come_back_in_their_own() -> None:
    made = Updated(OPTIMIZERS["own AdamW"], torch.float32)
    made.step(0)
    seen = made.seen()
    made.optimizer.param_groups[0]["moments"] = torch.float32
    undo = made.step_ahead(1)
    assert {row["exp_avg"].dtype for row in made.optimizer.state.values()} == {torch.float32}
    undo.restore()
    made.optimizer.param_groups[0]["moments"] = torch.bfloat16
    assert_same(made.seen(), seen)


@pytest.mark.parametrize("optimize", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_that_was_looked_up_before_it_was_made_is_empty_again(
    optimize: Callable[[Any], torch.optim.Optimizer],
) -> None:
    made = Updated(optimize, torch.float32)
    rows = [made.optimizer.state[parameter] for parameter in made.parameters]  # as a defaultdict, it makes them
    undo = made.step_ahead(0)
    assert all(rows)
    undo.restore()
    assert rows == [{}] * len(rows)
    assert all(made.optimizer.state[parameter] is row for parameter, row in zip(made.parameters, rows, strict=True))


def test_room_is_for_what_an_update_overwrites_and_used_again() -> None:
    made = Updated(OPTIMIZERS["AdamW"], torch.float32)
    made.step(0)
    updates = made.updates(1)
    needed = sum(3 * -(-4 * p.numel() // 256) * 256 for p in made.parameters) - 512  # numbers are kept elsewhere
    assert not Room(needed - 1).fits(updates)
    room = Room(needed)
    assert room.host_bytes() == 0
    for _ in range(2):
        room.clear()
        assert room.fits(updates)
        Undo(updates, room)
        assert not room.fits(updates)
    assert room.host_bytes() == needed


def test_room_takes_three_bytes_per_trained_parameter_and_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Updated(OPTIMIZERS["AdamW"], torch.float32)
    made.parameters[3].requires_grad_(False)
    monkeypatch.setattr("ramtorch_core.optim.ahead.available_bytes", lambda: 1 << 40)
    assert room_for([made.group], None).nbytes == 3 * (1 + 7 + 15 + 40)
    assert room_for([made.group], 17).nbytes == 17
    monkeypatch.setattr("ramtorch_core.optim.ahead.available_bytes", lambda: 100)
    assert room_for([made.group], None).nbytes == 25


def test_steps_after_one_that_was_not_scaled_find_room_until_the_groups_are_others() -> None:
    made, rooms = Updated(OPTIMIZERS["AdamW"], torch.float32), Rooms()
    assert rooms.room([made.group], 17) is None  # nothing is known of a step before the first
    rooms.released(1.0)
    room = rooms.room([made.group], 17)
    assert room is rooms.room([made.group], 17) is not None
    assert rooms.nbytes == 17
    rooms.released(0.5)
    assert rooms.room([made.group], 17) is None
    assert rooms.nbytes == 0
    rooms.released(1.0)
    assert rooms.nbytes == 17
    rooms.forget()
    assert rooms.nbytes == rooms.host_bytes() == 0


def run_ahead(work: Work, *indices: int, room: int = 1 << 16) -> None:
    """Hold these, and wait until they have run ahead."""
    work.updater.begin(None, Room(room))
    for index in indices:
        work.submit(index, held=True)
    with work.updater._changed:
        done = work.updater._changed.wait_for(lambda: len(work.updater._ahead) == len(indices), LIMIT)
    assert done


def test_what_ran_ahead_is_finished_when_nothing_is_scaled(work: Work) -> None:
    run_ahead(work, 1, 0)
    assert work.updater.is_pending(work.groups[0])
    assert work.finished == []
    work.updater.release()
    assert work.finished == [1, 0]
    work.updater.wait()
    assert work.values() == [0, 0, 1, 1, 1]
    assert (work.updater.updated, work.updater.undone) == (2, 0)


def test_what_ran_ahead_is_made_anew_when_gradients_are_scaled(work: Work) -> None:
    run_ahead(work, 1, 0)
    work.updater.release(0.5)
    work.updater.wait()
    assert work.values() == [0.5, 0.5, 1, 1, 1]
    assert sorted(work.finished) == [0, 1]
    assert (work.updater.updated, work.updater.undone) == (2, 2)
    assert work.updater.order == [1, 0, 1, 0]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_factor_may_come_while_an_update_runs_ahead(
    work: Work, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    work.updater.begin(None, Room(1 << 16))
    work.submit(2, held=True)
    assert gate.entered.wait(LIMIT)
    work.updater.release(scale)
    gate.open()
    work.updater.wait()
    assert work.values() == [1, 1, 1 - scale, 1, 1]
    assert work.finished == [2]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_factor_may_come_before_the_gradients_of_the_first(work: Work, scale: float) -> None:
    first = Occasion()
    work.updater.begin(None, Room(1 << 16))
    work.submit(2, held=True, arrived=first)
    assert first.awaited.wait(LIMIT)
    work.updater.release(scale)
    first.happen()
    work.updater.wait()
    assert work.values() == [1, 1, 1 - scale, 1, 1]
    assert work.updater.undone == 0


def test_what_finds_no_room_waits(work: Work) -> None:
    work.updater.begin(None, Room(300))
    for index in (3, 2):
        work.submit(index, held=True)
    with work.updater._changed:
        assert work.updater._changed.wait_for(lambda: work.updater._ahead, LIMIT)
        assert work.updater._changed.wait_for(lambda: work.updater._room is None, LIMIT)
    assert work.updater.is_pending(work.groups[2])
    work.updater.release()
    work.updater.wait()
    assert work.values() == [1, 1, 0, 0, 1]
    assert work.updater.order == [3, 2, 2]


@pytest.mark.parametrize("which", [None, 0])
def test_whoever_waits_sees_what_was_before_and_it_stays_so(work: Work, which: int | None) -> None:
    run_ahead(work, 1, 0)
    work.updater.wait(work.groups[3])
    assert work.updater.undone == 0
    work.updater.wait(None if which is None else work.groups[which])
    assert work.values() == [1, 1, 1, 1, 1]
    work.submit(2, held=True)
    work.updater.wait()
    assert work.values() == [1, 1, 1, 1, 1]
    with pytest.raises(RamtorchError, match="are held"):
        work.updater.begin(None)
    work.updater.release()
    work.updater.wait()
    assert work.values() == [0, 0, 0, 1, 1]


def test_whoever_waits_while_an_update_runs_ahead_sees_what_was_before(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    work.updater.begin(None, Room(1 << 16))
    work.submit(2, held=True)
    assert gate.entered.wait(LIMIT)
    threading.Timer(0.0, gate.open).start()
    work.updater.wait()
    assert work.values() == [1, 1, 1, 1, 1]


def test_whoever_waits_before_gradients_have_arrived_keeps_their_update_from_running_ahead(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, stay_behind = Occasion(), work.updater._stay_behind

    def arrive(group: WeightGroup | None) -> None:
        first.happen()  # what the thread does then has to wait for the lock, which is held here
        stay_behind(group)

    monkeypatch.setattr(work.updater, "_stay_behind", arrive)
    work.updater.begin(None, Room(1 << 16))
    work.submit(2, held=True, arrived=first)
    assert first.awaited.wait(LIMIT)
    work.updater.wait()
    assert work.values() == [1, 1, 1, 1, 1]
    assert work.updater.undone == 0
    work.updater.release(0.5)
    work.updater.wait()
    assert work.values() == [1, 1, 0.5, 1, 1]


@pytest.mark.parametrize("end", ["drop", "close"])
@pytest.mark.parametrize("running", [False, True])
def test_what_ran_ahead_is_undone_in_the_end_and_its_buffers_are_given_back(
    work: Work, end: str, running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ahead(work, 1, 0)
    if running:
        gate = Gate(monkeypatch)
        work.submit(2, held=True)
        assert gate.entered.wait(LIMIT)
        threading.Timer(0.0, gate.open).start()
    getattr(work.updater, end)()
    assert work.values() == [1, 1, 1, 1, 1]
    assert sorted(work.finished) == [0, 1, 2][: 2 + running]
    assert not any(map(work.updater.is_pending, work.groups))


def test_an_error_ahead_of_the_factor_leaves_everything_as_it_was(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ahead(work, 1)
    done = module.update

    def fail(*args: Any, **kwargs: Any) -> None:
        done(*args, **kwargs)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(module, "update", fail)
        work.submit(0, held=True)
        with work.updater._changed:
            assert work.updater._changed.wait_for(lambda: work.updater._error is not None, LIMIT)
        with pytest.raises(ZeroDivisionError):
            work.updater.wait()
    assert work.values() == [1, 1, 1, 1, 1]
    assert sorted(work.finished) == [0, 1]


def test_the_thread_that_runs_ahead_may_itself_drop_it(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    update = module.update

    def drop(*args: Any, **kwargs: Any) -> None:
        work.updater.drop()
        update(*args, **kwargs)

    monkeypatch.setattr(module, "update", drop)
    work.updater.begin(None, Room(1 << 16))
    work.submit(0, held=True)
    with work.updater._changed:
        assert work.updater._changed.wait_for(lambda: not work.updater.is_pending(work.groups[0]), LIMIT)
    assert work.values() == [1, 1, 1, 1, 1]
    assert work.finished == [0]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("optimize", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("amp", [False, True])
def test_steps_that_are_clipped_and_steps_that_are_not_are_those_of_torch(
    optimize: Any, amp: bool, prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third norm is above the limit: after each of those a step waits, and the next one runs ahead."""
    monkeypatch.setattr("ramtorch_core.optim.ahead.BYTES", 30)
    ahead = Ahead(monkeypatch)
    if prompt:
        ahead.wait_for(monkeypatch)
    else:
        slow_down(monkeypatch)

    def loss(model: nn.Module, index: int) -> Tensor:
        return model(data(index)).square().mean() * (1e3 if index % 3 == 2 else 1e-3)

    compare(lambda: stack(5), optimize, loss=loss, clip=0.5, steps=8, amp=amp)
    assert not prompt or (ahead.made, ahead.undone) == (25, 10)  # of five chunks, in steps 1, 2, 4, 5, 7


def test_after_a_step_that_was_scaled_updates_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = Ahead(monkeypatch)
    monkeypatch.setattr("ramtorch_core.optim.ahead.BYTES", 30)
    compare(clip=1e-6, steps=4)
    assert ahead.made == 0


def test_without_room_updates_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = Ahead(monkeypatch)
    monkeypatch.setattr("ramtorch_core.optim.ahead.BYTES", 0)
    compare(clip=1e6, steps=4)
    assert ahead.made == 0


def test_what_reads_weights_before_they_are_clipped_sees_those_of_before() -> None:
    torch.manual_seed(0)
    with streaming(stack(4), kernel="torch") as engine:
        optimizer, updater = torch.optim.AdamW(engine.root.parameters()), engine.updates.updater
        engine.updates.ahead_bytes = 1 << 20
        for index in range(3):
            before = copy.deepcopy((weights(engine.root), optimizer.state_dict()))
            backward(engine, optimizer, index, hold=True)
            if index > 0:
                with updater._changed:
                    assert updater._changed.wait_for(lambda: len(updater._ahead) == len(engine.groups), LIMIT)
            engine.updates.wait()
            assert_same((weights(engine.root), optimizer.state_dict()), before)
            engine.updates.clip(engine.root.parameters(), 1e6)
            optimizer.step()
            engine.updates.wait()
        assert updater.undone == 2 * len(engine.groups)
