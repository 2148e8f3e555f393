"""Training on a device with emulated streams: no order that the events allow changes a result.

The first tests take events and waits away one by one, and see that the emulation finds each of them missing.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

import emulated_streams
import pytest
import torch
from emulated_device import Emulated, emulation, machine
from emulated_streams import Stream
from fuzz_cases import Case, draw
from fuzz_training import Training, compare, data, slow_down
from stream_cases import assert_same
from torch import nn

from ramtorch_core import OffloadAdamW
from ramtorch_core.memory import bounce
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.window import Window
from ramtorch_core.optim import device_updates, offload_adamw, pieces, updater
from ramtorch_core.optim.device_updates import DeviceUpdater

FIRST = int(os.environ.get("RAMTORCH_FUZZ_FIRST", "0"))
CASES = int(os.environ.get("RAMTORCH_FUZZ_CASES", "6"))

Patch = Callable[[pytest.MonkeyPatch], None]
KINDS = ["Residual", "Frozen", "Reused", "Residual"]


def run(case: Case, way: str, monkeypatch: pytest.MonkeyPatch, *patches: Patch, seed: int = 0) -> dict[str, Any]:
    """What a case leaves, and under "races" what the emulation says."""
    with monkeypatch.context() as patch, emulation(patch, seed, late=0.001 * (seed % 2)):
        for apply in patches:
            apply(patch)
        found = Training(case, way, Emulated()).run()
        return {**found, "races": list(machine.races)}


def without_wait(kind: type, name: str, which: int) -> Patch:
    """`device.wait` number `which` inside of a method does nothing; -1 for all of them."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        method = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            device: Any = getattr(self, "device", None) or self._device
            wait, calls, thread = device.wait, iter(range(100)), threading.get_ident()

            def skip(*given: Any) -> None:
                if threading.get_ident() != thread or which not in (-1, next(calls)):
                    wait(*given)

            device.wait = skip
            try:
                return method(self, *args, **kwargs)
            finally:
                del device.wait

        patch.setattr(kind, name, call)

    return apply


def no_slot_is_awaited(patch: pytest.MonkeyPatch) -> None:
    """Neither by the thread nor by the stream of the copies."""
    without_wait(pieces.Route, "_load", -1)(patch)
    patch.setattr(pieces.Route, "wait_for_slot", lambda _route: None)


def without_synchronize(kind: type, name: str) -> Patch:
    """The host waits for no event inside of a method."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        method = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr(emulated_streams.Event, "synchronize", lambda _event: None)
                return method(self, *args, **kwargs)

        patch.setattr(kind, name, call)

    return apply


MISSING: dict[str, tuple[Patch, str, Any]] = {
    "a copy waits for what reads the slot": (without_wait(Window, "load", 0), "overlapped", "host"),
    "compute waits for the copy": (without_wait(Window, "acquire", 0), "overlapped", "host"),
    "staging waits for the gradients": (without_wait(Gradients, "stage", 0), "overlapped", "host"),
    "publishing waits for the gradients": (without_wait(Gradients, "receive", 2), "published", "host"),
    "compute waits before memory is reused": (without_wait(Gradients, "_keep", -1), "published", "host"),
    "the end of backward waits for copies": (without_synchronize(Gradients, "finish"), "published", "host"),
    "an update waits for the gradients": (without_synchronize(updater.Updater, "_take_on"), "overlapped", "host"),
    "a piece waits for its slot": (no_slot_is_awaited, "overlapped", 1.0),
    "a piece's update waits for its copy": (without_wait(pieces.Route, "_update", -1), "overlapped", 1.0),
    "a piece's copy back waits for its update": (without_wait(pieces.Route, "_store", -1), "overlapped", 1.0),
    "an update there waits for gradients": (without_wait(DeviceUpdater, "_take_on", 1), "overlapped", 1.0),
    "an update there is over when it is back": (without_synchronize(DeviceUpdater, "_collect"), "overlapped", 1.0),
}


@pytest.mark.parametrize("name", MISSING)
def test_every_wait_that_is_missing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, way, updates = MISSING[name]
    monkeypatch.setattr(device_updates, "PIECE_BYTES", 256)
    case = Case(0, kinds=KINDS, resident_below=80, optimizer="fused AdamW", updates=updates, window=1)
    assert not run(case, way, monkeypatch)["races"]
    assert run(case, way, monkeypatch, patch)["races"]


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("updates", ["host", 1.0])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_in_a_steady_step_the_host_waits_for_the_device_at_the_ends_of_forward_and_backward_only(
    amp: bool, updates: Any, activations: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until masters may be written, and until small gradients are there; and once for all norms."""
    case = Case(2, kinds=["Residual"] * 4, amp=amp, updates=updates, activations=activations, clip=clip)
    case.optimizer, case.resident_below, case.steps = "fused AdamW", 80, 4
    step, waits = Training.step, []

    def counted(self: Training, index: int) -> None:
        machine.waits.clear()
        step(self, index)
        waits.append([wait.partition(" at ")[2].partition(" ")[0] for wait in machine.waits])

    monkeypatch.setattr(Training, "step", counted)
    assert run(case, "overlapped", monkeypatch)["races"] == []
    inside = [place for place in waits[-1] if place]  # the others are the test's own, for its input
    assert [place for place in inside if place != "let_host_write"] == ["finish"] + ["_on_host"] * (clip is not None)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_random_cases_have_no_race_and_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(seed, emulated=True)
    slow_down(monkeypatch, seed)
    found = {way: run(case, way, monkeypatch, seed=seed) for way in ("published", "overlapped")}
    races = {way: one.pop("races")[:3] for way, one in found.items()}
    assert not any(races.values()), f"{case}: {races}"
    if "Dropping" not in case.kinds:
        found["plain"] = Training(case, "plain").run()
    compare(case, found)


def accumulated(training: Training, batches: int, *, steps: int = 2, **options: Any) -> dict[str, Any]:
    """Weights, and gradients of several microbatches, which are added up on the device and never reset."""
    engine, case = training.engine, training.case
    try:
        for step in range(steps):
            inputs = [data(case, step, batch, training.device.torch) for batch in range(batches)]
            if engine is None:
                for x in inputs:
                    training.loss(x).backward()
            else:
                with engine.together(**options):
                    for x in inputs:
                        training.loss(x).backward()
            for optimizer in training.optimizers:
                optimizer.step()
            if engine is not None:
                engine.refresh()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in training.model.named_parameters()}
    finally:
        if engine is not None:
            engine.close()
    return {"weights": {name: p.detach().clone() for name, p in training.model.named_parameters()}, "grads": grads}


@pytest.mark.parametrize("options", [{"spill": True}, {"backwards": 3}, {}], ids=str)
@pytest.mark.parametrize("window", [1, 2])
def test_sums_that_spill_and_come_back_have_no_race(
    options: dict[str, Any], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(3, kinds=["Residual", "Transposed", "Frozen", "Double"], window=window, resident_below=40)
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", 96)
    with emulation(monkeypatch, 0):
        found = accumulated(Training(case, "published", Emulated()), 3, **options)
        assert machine.races == []
    assert_same(found, accumulated(Training(case, "plain"), 3))


def test_half_precision_sums_that_spill_have_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, kinds=["Half", "Plain", "Half"])
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", 96)
    with emulation(monkeypatch, 0):
        found = accumulated(Training(case, "published", Emulated()), 3, spill=True)
        assert machine.races == []
    expected = accumulated(Training(case, "plain"), 3)
    assert_same(found, expected, tolerance=0.1)  # the sum is rounded once instead of three times


@pytest.mark.parametrize("updates", ["host", 1.0])
@pytest.mark.parametrize("way", ["published", "overlapped"])
def test_steps_on_streams_of_the_users_in_turn_have_no_race(
    way: str, updates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step computes on another stream, and nothing but the engine orders them."""
    case = Case(5, kinds=["Residual", "Normed", "Plain"], optimizer="fused AdamW", updates=updates, resident_below=40)
    case.kinds = ["Residual", "Raw", "Plain"]
    step = Training.step

    def elsewhere(self: Training, index: int) -> None:
        with machine.on(streams[index % 2]):
            step(self, index)

    monkeypatch.setattr(Training, "step", elsewhere)
    with emulation(monkeypatch, 0):
        streams = [Stream(), Stream()]
        machine.streams += streams
        Training(case, way, Emulated()).run()
        assert machine.races == []


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_hooks_that_step_while_backward_runs_have_no_race(
    window: int, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in the host's thread, and the device's goes on."""
    case = Case(4, kinds=["Residual", "Transposed", "Plain", "Residual"], window=window, activations=activations)

    def train(training: Training) -> list[torch.Tensor]:
        for parameter in training.model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

            def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for index in range(4):
            training.loss(data(case, index, 0, training.device.torch)).backward()
        if training.engine is not None:
            training.engine.close()
        return [parameter.detach().clone() for parameter in training.model.parameters()]

    with emulation(monkeypatch, 0):
        found = train(Training(case, "published", Emulated()))
        assert machine.races == []
    assert_same(found, train(Training(case, "plain")))


@pytest.mark.parametrize("updates", ["host", 0.5, 1.0])
@pytest.mark.parametrize("way", ["published", "overlapped"])
@pytest.mark.parametrize("together", [False, True])
def test_a_backward_that_fails_leaves_nothing_that_races(
    way: str, updates: Any, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(9, kinds=KINDS, optimizer="fused AdamW", updates=updates, resident_below=40, window=1, steps=5)
    case.batches, case.together = 2, together
    slow_down(monkeypatch, 1)

    def fail(self: Training, index: int) -> None:
        if index % 2 == 0:
            return step(self, index)

        def refuse(_: Any) -> None:
            raise ZeroDivisionError

        hook = self.model.blocks[2].lin.weight.register_hook(refuse)  # called in the host's thread
        with pytest.raises(ZeroDivisionError):
            step(self, index)
        hook.remove()
        return None

    step = Training.step
    monkeypatch.setattr(Training, "step", fail)
    found = run(case, way, monkeypatch, seed=1)
    assert found["races"] == []
    assert all(weight.isfinite().all() for weight in found["weights"].values())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_optimizer_that_streams_parameters_itself_has_no_race(
    amsgrad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(kind: Any, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(size)) for size in ((300,), (7, 11), (1,))]
        optimizer = kind(parameters, lr=0.1, amsgrad=amsgrad, **options)
        for index in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p) if index != 1 or p.dim() == 1 else None
            optimizer.step()
        return [p.detach().clone() for p in parameters]

    expected = train(torch.optim.AdamW, fused=True)
    with emulation(monkeypatch, 0):
        monkeypatch.setattr(offload_adamw, "Device", lambda _name: Emulated())
        found = train(OffloadAdamW, piece_bytes=256)
        assert machine.races == []
    assert_same(found, expected)
