"""Chunks that are updated on the device, in training: the bits of the host and of the plain run, in every situation."""

import copy
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from device_updates_cases import LIMIT, fused, small_pieces
from stream_cases import MODES, Stack, assert_same, data, descend, stack, stream, streaming
from torch import Tensor, nn
from updates_cases import Custom, backward, compare, loss_of, plain_steps, step, train, train_on, training, weights

from ramtorch_core import MicrobatchRunner, RamtorchError
from ramtorch_core.memory import staging
from ramtorch_core.optim import updater as host_updater
from ramtorch_core.optim.pieces import Route

__all__ = ["small_pieces"]


def only_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be updated on the host, or be staged there."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("on the host")

    monkeypatch.setattr(host_updater, "update", refuse)
    monkeypatch.setattr(staging, "Staging", refuse)


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_with_every_window_and_policy_results_are_those_of_the_plain_run(
    mode: dict[str, Any], amp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_device(monkeypatch)
    compare(lambda: stack(4, dropout=0.2), fused, updates=1.0, amp=amp, **mode)


OPTIONS: list[dict[str, Any]] = [
    {"batches": 3},
    {"batches": 3, "amp": True, "window": 1},
    {"run_on": False},
    {"resident_below": 80, "batches": 2, "amp": True},
    {"set_to_none": False},
    {"stream_dtype": torch.float32, "amp": True},
]


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_accumulated_gradients_and_other_options_change_nothing(options: dict[str, Any], share: float) -> None:
    compare(lambda: stack(4), fused, updates=share, **options)


@pytest.mark.parametrize("names", [["blocks.0"], ["blocks.1", "blocks.3"], ["blocks.*"]], ids=str)
def test_host_and_device_update_side_by_side(names: list[str]) -> None:
    compare(lambda: stack(4), fused, updates=names, amp=True)


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_microbatches_through_each_chunk_together_are_updated_the_same(share: float, amp: bool) -> None:
    def run(updates: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        with streaming(stack(4), updates=updates, kernel="torch") as engine:
            engine.conservative, engine.updates.run_on = False, True
            optimizer = fused(engine.root.parameters())
            runner = MicrobatchRunner(engine, lambda: engine.updates.begin(optimizer), engine.updates.end)

            def forward(x: Tensor) -> Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                    return engine.root(x).float().square().mean() / 3

            losses: list[Any] = []
            for index in range(3):
                inputs = [data(10 * index + batch) for batch in range(3)]
                losses += runner.train(forward, inputs, lambda loss, _: (loss, None), step=index).outputs
                optimizer.step()
                engine.refresh()
            engine.updates.wait()
            assert (engine.updates.on_device.updated > 0) == (updates != "host")
            runner.close()
        return losses, weights(engine.root), optimizer.state_dict()

    assert_same(run(share), run("host"))


def test_gradients_that_are_held_are_updated_on_the_host() -> None:
    compare(lambda: stack(4), fused, updates=1.0, clip=0.01)
    with training(fused, updates=1.0) as (engine, optimizer):
        backward(engine, optimizer, hold=True)
        optimizer.step()
        engine.updates.wait()
        assert (engine.updates.updater.updated, engine.updates.on_device.updated) == (4, 0)
        step(engine, optimizer, 1)
        assert (engine.updates.updater.updated, engine.updates.on_device.updated) == (4, 4)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "amsgrad", "two"])
def test_what_the_device_cannot_update_the_host_does(name: str) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        if name == "two":  # a part of every chunk in one that cannot
            kept = [p for p in parameters if p.dim() == 1]
            return torch.optim.AdamW(
                [{"params": kept, "amsgrad": True}, {"params": [p for p in parameters if p.dim() > 1]}], fused=True
            )
        if name == "amsgrad":
            return torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, fused=True)
        kind: Any = getattr(torch.optim, name)
        return kind(parameters, lr=0.1)  # type: ignore[no-any-return]

    compare(lambda: stack(4), optimizer, updates=1.0)


def test_it_is_said_once_that_the_host_updates_what_the_device_cannot(caplog: pytest.LogCaptureFixture) -> None:
    with training(lambda p: torch.optim.SGD(p, lr=0.1), updates=0.5) as (engine, optimizer):
        for index in range(2):
            step(engine, optimizer, index)
    messages = [record.message for record in caplog.records if "on the host" in record.message]
    assert messages == [
        "chunk 'blocks.1' is updated on the host: updates on the device are for Adam and AdamW of torch, in float32"
    ]


def test_masters_in_half_precision_are_updated_on_the_host() -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        return model(data(index).bfloat16()).square().mean()

    compare(lambda: stack(4).bfloat16(), fused, loss=loss, updates=1.0)


def test_a_run_goes_on_from_saved_state_wherever_it_was_made() -> None:
    def run(before: Any, after: Any) -> Any:
        torch.manual_seed(0)
        with streaming(stack(4), updates=before, kernel="torch") as engine:
            optimizer = fused(engine.root.parameters())
            for index in range(2):
                step(engine, optimizer, index)
            saved = copy.deepcopy((engine.root.state_dict(), optimizer.state_dict()))
        model = stack(4)
        with streaming(model, updates=after, kernel="torch") as engine:
            optimizer = fused(model.parameters())
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            for index in range(2, 4):
                step(engine, optimizer, index)
        return weights(model), optimizer.state_dict()["state"]

    expected = run("host", "host")
    for before, after in [(1.0, 1.0), ("host", 0.5), (0.5, "host")]:
        assert_same(run(before, after), expected)


def test_state_that_is_loaded_in_between_is_what_later_updates_use() -> None:
    saved: list[Any] = []

    def after_step(optimizer: torch.optim.Optimizer, index: int, model: nn.Module) -> None:
        if index == 1:
            saved[:] = [copy.deepcopy(optimizer.state_dict())]
        if index == 2:
            optimizer.load_state_dict(saved[0])

    compare(lambda: stack(4), fused, after_step=after_step, run_on=False, updates=1.0)


def test_schedulers_that_step_while_updates_run_change_the_next_step_only() -> None:
    schedulers: dict[int, Any] = {}

    def after_step(optimizer: torch.optim.Optimizer, index: int, _model: nn.Module) -> None:
        if index == 0:
            schedulers[0] = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
        else:
            schedulers[0].step()

    compare(lambda: stack(4), fused, after_step=after_step, updates=1.0)


@pytest.mark.parametrize("read", ["norm", "state"])
def test_weights_that_are_read_between_visits_are_whole(read: str) -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        if index not in (1, 3):
            return loss_of(model, index)
        block: Any = model.get_submodule("blocks.2")
        tensors = [block.up.weight.detach()] if read == "norm" else list(model.state_dict().values())
        return loss_of(model, index) * (1 + 0.01 * sum(tensor.norm() for tensor in tensors))

    compare(lambda: stack(4), fused, loss=loss, taken=None, updates=1.0)


def test_weights_that_are_pointed_at_other_memory_before_backward_keep_their_update() -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        value = loss_of(model, index)
        weight = model.get_parameter("blocks.1.up.weight")
        weight.data = weight.data.clone()
        return value

    compare(lambda: stack(4), fused, loss=loss, updates=1.0)
    compare(lambda: stack(4), fused, loss=loss, updates=1.0, amp=True)


def test_frozen_and_tied_weights_are_left_alone() -> None:
    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__(*stack(4).blocks)
            self.get_submodule("blocks.2.up").weight = self.get_parameter("blocks.0.up.weight")
            self.get_submodule("blocks.1").requires_grad_(False)

    compare(Tied, lambda p: fused([q for q in p if q.requires_grad]), updates=1.0, taken=None)


def test_an_error_in_the_middle_of_an_update_reaches_the_caller_and_the_next_step_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update, calls = Route._update, iter(range(10_000))

    def fail(self: Any, slot: Any, piece: Sequence[Any], *options: Any) -> None:
        if next(calls) == 9:
            raise ZeroDivisionError("from the device")
        update(self, slot, piece, *options)

    for run_on in (True, False):
        with training(fused, updates=1.0) as (engine, optimizer):
            engine.updates.run_on = run_on
            with monkeypatch.context() as patch:
                patch.setattr(Route, "_update", fail)
                with pytest.raises(ZeroDivisionError, match="from the device"):
                    train_on(engine, optimizer, 3)
            engine.updates.wait()
            before = weights(engine.root)
            step(engine, optimizer)
            assert all(not torch.equal(before[name], p) for name, p in engine.root.named_parameters())
        calls = iter(range(10_000))


def test_an_error_in_backward_drops_what_had_not_begun_and_the_next_step_works() -> None:
    with training(fused, updates=1.0) as (engine, optimizer):
        step(engine, optimizer)
        for _ in range(6):
            x = data(1).requires_grad_()
            x.register_hook(fail_in_backward)
            loss = engine.root(x).square().mean()
            with pytest.raises(KeyError), engine.updates.overlap(optimizer):
                loss.backward()
        engine.updates.wait()
        assert not any(map(engine.updates.is_pending, engine.groups))
        step(engine, optimizer)


def fail_in_backward(_grad: Tensor) -> None:
    raise KeyError


def test_a_gradient_from_outside_that_comes_after_the_update_raises() -> None:
    with training(fused, updates=1.0) as (engine, optimizer):
        penalty = engine.root.blocks[3].up.weight.sum()
        loss = engine.root(data()).square().mean() + penalty
        with pytest.raises(RamtorchError, match="got a gradient from outside"), engine.updates.overlap(optimizer):
            loss.backward()
        optimizer.zero_grad()
        step(engine, optimizer)


def test_close_finishes_updates_that_are_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, opened = threading.Event(), threading.Event()
    send = Route.send

    def wait(self: Any, *args: Any, **options: Any) -> None:
        entered.set()
        assert opened.wait(LIMIT)
        send(self, *args, **options)

    monkeypatch.setattr(Route, "send", wait)
    with training(fused, updates=1.0) as (engine, optimizer):
        engine.updates.run_on = True
        backward(engine, optimizer)
        optimizer.step()
        assert entered.wait(LIMIT)
        assert all(map(engine.updates.is_pending, engine.groups))
        opener = threading.Thread(target=opened.set, name="opens the gate")
        opener.start()
    opener.join()
    assert_same(weights(engine.root), plain_steps(fused, 0))
    state = optimizer.state_dict()["state"]
    assert all(bool(row["exp_avg"].isfinite().all()) for row in state.values())


def test_an_engine_that_is_dropped_without_close_ends_its_threads() -> None:
    model = stack()
    engine = stream(model, kernel="torch", updates=0.5)
    optimizer = fused(model.parameters())
    step(engine, optimizer)
    threads, alive = [each._thread for each in engine.updates._both], weakref.ref(engine)
    del engine, model, optimizer
    gc.collect()
    assert alive() is None
    for thread in threads:
        assert thread is not None
        thread.join(10)
        assert not thread.is_alive()


def test_the_state_is_an_ordinary_one_that_outlives_the_engine() -> None:
    with training(fused, updates=1.0) as (engine, optimizer):
        step(engine, optimizer)
        state = optimizer.state_dict()["state"]
        model = engine.root
    assert all(row[key].untyped_storage().nbytes() == row[key].nbytes for row in state.values() for key in row)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    torch.manual_seed(0)
    plain = stack()
    other = fused(plain.parameters())
    descend(plain, other, 0)
    for one, chosen in ((model, optimizer), (plain, other)):
        descend(one, chosen, 1)
    assert_same(weights(model), weights(plain))


def test_an_optimizer_that_fails_on_the_host_leaves_the_device_with_what_is_finished() -> None:
    with training(lambda p: Custom(p, lr=0.1), updates=1.0) as (engine, optimizer):
        optimizer.fail_at = 8 * 16
        with pytest.raises(ZeroDivisionError, match="from the optimizer"):
            step(engine, optimizer)
        optimizer.fail_at = None
        step(engine, optimizer)


def test_the_same_run_twice_gives_the_same_bits() -> None:
    assert_same(
        train(stack, fused, overlap=True, updates=0.5, amp=True),
        train(stack, fused, overlap=True, updates=0.5, amp=True),
    )
