"""Overlapped updates that fail, are interrupted or abandoned: errors arrive, nobody hangs, the next step works."""

import gc
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
import updates_cases
from stream_cases import assert_same, data, descend, stack, stream
from torch import Tensor, nn
from updates_cases import Custom, Gate, backward, plain_steps, slow_down, step, train_on, training, weights

from ramtorch_core import RamtorchError
from ramtorch_core.memory import staging as staging_module
from ramtorch_core.memory.device import Device


@pytest.mark.parametrize("run_on", [True, False])
def test_an_error_of_the_optimizer_reaches_the_caller_every_time_and_the_next_step_works(run_on: bool) -> None:
    with training(lambda p: Custom(p, lr=0.1)) as (engine, optimizer):
        engine.updates.run_on = run_on
        for _ in range(6):  # more often than there are staging buffers
            optimizer.fail_at = 8 * 16
            with pytest.raises(ZeroDivisionError, match="from the optimizer") as caught:
                step(engine, optimizer)
            assert caught.traceback[-1].frame.code.raw.co_filename == updates_cases.__file__
            del caught
        optimizer.fail_at = None
        engine.updates.wait()
        before = weights(engine.root)
        step(engine, optimizer)
        assert all(not torch.equal(before[name], p) for name, p in engine.root.named_parameters())


def test_an_error_of_the_optimizer_raised_in_a_forward_leaves_an_engine_that_works() -> None:
    with training(lambda p: Custom(p, lr=0.1)) as (engine, optimizer):
        engine.updates.run_on = True
        step(engine, optimizer)
        optimizer.fail_at = 8 * 16
        with pytest.raises(ZeroDivisionError):
            train_on(engine, optimizer, 3)
        optimizer.fail_at = None
        step(engine, optimizer)


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("where", ["hook", "function", "outside"])
def test_an_error_in_backward_drops_the_updates_that_had_not_begun(hold: bool, where: str) -> None:
    with training() as (engine, optimizer):
        step(engine, optimizer)
        before = weights(engine.root)

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                raise KeyError("from backward")

        def fail(_grad: Tensor) -> None:
            raise KeyError("from backward")

        def failing_step() -> None:
            x = data(1).requires_grad_()
            if where == "hook":
                x.register_hook(fail)
            y = engine.root(Fails.apply(x) if where == "function" else x)
            with engine.updates.overlap(optimizer, hold=hold):
                y.square().mean().backward()
                raise KeyError("from backward")

        kept = []  # tracebacks keep what the frames hold
        for _ in range(6):
            with pytest.raises(KeyError, match="from backward") as caught:
                failing_step()
            kept.append(caught)
        engine.updates.wait()
        if hold:
            assert_same(weights(engine.root), before)
        step(engine, optimizer)
        assert not any(map(engine.updates.is_pending, engine.groups))


def test_updates_that_are_held_keep_nobody_waiting() -> None:
    with training() as (engine, optimizer):
        step(engine, optimizer)
        before = weights(engine.root)
        backward(engine, optimizer, 1, hold=True)
        engine.updates.wait()
        with torch.no_grad():
            engine.root(data(2))
        assert_same(weights(engine.root), before)
        with pytest.raises(RamtorchError, match="updates of the last backward are held"):
            engine.updates.begin(optimizer)
        with pytest.raises(RamtorchError, match="step the optimizer first"):
            engine.root(data(2))
        engine.updates.drop()
        backward(engine, optimizer, 1, hold=True)
        optimizer.step()
        engine.updates.wait()
    assert_same(weights(engine.root), plain_steps(lambda p: torch.optim.AdamW(p, lr=0.01), 0, 1))


def test_close_forgets_updates_that_are_held_and_ends_the_thread() -> None:
    with training() as (engine, optimizer):
        before = weights(engine.root)
        backward(engine, optimizer, hold=True)
    assert_same(weights(engine.root), before)
    assert not any(map(engine.updates.is_pending, engine.groups))


def test_close_finishes_the_updates_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with training() as (engine, optimizer):
        engine.updates.run_on = True
        backward(engine, optimizer)
        optimizer.step()
        threading.Thread(target=lambda: gate.entered.wait(20) and gate.open(), name="opens the gate").start()
    assert_same(weights(engine.root), plain_steps(lambda p: torch.optim.AdamW(p, lr=0.01), 0))


def test_an_engine_that_is_dropped_without_close_ends_its_thread() -> None:
    torch.manual_seed(0)
    model = stack()
    engine = stream(model, kernel="torch")
    optimizer = torch.optim.AdamW(model.parameters())
    step(engine, optimizer)
    thread, alive = engine.updates.updater._thread, weakref.ref(engine)
    assert thread is not None
    assert thread.is_alive()
    del engine, model, optimizer
    gc.collect()
    assert alive() is None
    thread.join(10)
    assert not thread.is_alive()


def test_an_interrupt_while_backward_waits_for_a_buffer_leaves_an_engine_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging_module, "STAGING_BUFFERS", 1)
    with training() as (engine, optimizer):
        step(engine, optimizer)
        (staging,) = engine.updates._staging.values()
        with monkeypatch.context() as patch:
            gate = Gate(patch)

            def wait(_predicate: object) -> None:
                threading.Timer(0.05, gate.open).start()  # while the rest is dropped, or before
                signal.raise_signal(signal.SIGINT)

            patch.setattr(staging._changed, "wait_for", wait)
            with pytest.raises(KeyboardInterrupt):
                train_on(engine, optimizer, 1000)
        for index in range(3):
            step(engine, optimizer, index)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_that_is_forked_off_while_updates_run_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    with training() as (engine, optimizer):
        engine.updates.run_on = True
        backward(engine, optimizer)
        assert gate.entered.wait(20)
        with engine.updates.updater._changed:  # as if the updating thread had it
            child = os.fork()
            if child == 0:
                engine.updates.wait()
                engine.updates.updater.close()
                os._exit(7)
        gate.open()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        optimizer.step()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_that_is_forked_off_updates_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_steps(lambda p: torch.optim.AdamW(p, lr=0.01), 0, 1)
    with training() as (engine, optimizer):
        step(engine, optimizer)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                slow_down(monkeypatch)
                step(engine, optimizer, 1)
                code = 7 if all(torch.equal(p, expected[name]) for name, p in engine.root.named_parameters()) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class Inner(torch.optim.AdamW):
    """Calls its base class, as optimizers that add something do."""

    update_granularity = "element"

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("hold", [True, False])
def test_an_optimizer_whose_step_calls_that_of_its_base_class_does_not_wait_for_itself(hold: bool) -> None:
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from its first object on the class calls hooks
    with training(lambda p: Inner(p, lr=0.01)) as (engine, optimizer):
        for index in range(2):
            backward(engine, optimizer, index, hold=hold)
            optimizer.step()
        assert engine.updates.updater.updated == 8
    assert_same(weights(engine.root), plain_steps(lambda p: torch.optim.AdamW(p, lr=0.01), 0, 1))


def test_where_the_device_has_failed_close_tells_and_leaves_a_plain_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on every call to the device raises."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("device-side assert triggered")

    with training() as (engine, optimizer):
        step(engine, optimizer)
        with monkeypatch.context() as patch:
            for name in ("record", "synchronize", "wait"):
                patch.setattr(Device, name, fail)
            with pytest.raises(RuntimeError, match="device-side assert"):
                engine.close()
        assert engine.closed
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("ramtorch-")]
        assert not any("forward" in module.__dict__ for module in engine.root.modules())
        engine.close()
        descend(engine.root, optimizer, 1)
