"""Sums in host memory that pass through an emulated device: in the right order, also after an error."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_device import TWIN, Emulated, emulation, machine
from torch import nn

from ramtorch_core.memory import bounce
from ramtorch_core.memory.bounce import Bounce
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.weights import Weight, WeightGroup


def sums() -> tuple[Gradients, Any, Callable[[], Any]]:
    """Where those of a parameter add up, and what lets it receive another one."""
    device, weight = Emulated(), Weight("weight", nn.Parameter(torch.zeros(40)), ())
    group, gradients = WeightGroup(0, "chunk", [weight]), Gradients(device)
    group.build([torch.float32], device)
    return gradients, weight.parameter, lambda: gradients.receive(group, [torch.ones(40, device=TWIN) * 1])


@pytest.mark.parametrize("missing", ["", "begin 0", "begin 1", "_issue 0", "_issue 1", "_issue 2"])
def test_every_wait_of_sums_that_is_missing_is_found(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is on the host, for the gradients, for a buffer, for what comes in, and for the sum."""
    wait = Emulated.wait

    def skip(self: Emulated, event: Any, stream: Any = None) -> None:
        caller = sys._getframe(1)
        buffers = caller.f_locals["self"]
        if isinstance(buffers, Bounce):
            streams = [buffers._inward, buffers._between, buffers._outward]
            if missing == f"{caller.f_code.co_name} {streams.index(stream)}":
                return
        wait(self, event, stream)

    monkeypatch.setattr(Emulated, "wait", skip)
    with emulation(monkeypatch, 0):
        gradients, parameter, receive = sums()
        monkeypatch.setattr(bounce, "BOUNCE_BYTES", 480 if missing == "begin 0" else 96)  # one piece, or several
        for _ in range(3):
            receive()
        gradients.finish()
        assert bool(machine.races) is (missing != "")
    assert missing or torch.equal(parameter.grad, torch.full((40,), 3.0))


@pytest.mark.parametrize("failing", range(6))
def test_sums_after_one_that_failed_have_no_race(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load, the sum or the copy to the host of a piece fails, while the device works on those before."""
    issue, issued = Bounce._issue, iter(range(6))

    def fail(*args: Any) -> Any:
        if gradients.waiting() and next(issued, None) == failing:
            raise ZeroDivisionError
        return issue(*args)

    monkeypatch.setattr(Bounce, "_issue", fail)
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", 96)
    with emulation(monkeypatch, 0):
        gradients, parameter, receive = sums()
        receive()
        try:
            receive()
        except ZeroDivisionError:
            gradients.drop()
        receive()
        gradients.finish()
        assert machine.races == []
    assert torch.equal(parameter.grad, torch.ones(40))
