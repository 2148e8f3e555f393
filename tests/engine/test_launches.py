"""What the host needs to launch chunks whose weights stay on the device."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from virtual_device import VirtualDevice, running_on
from virtual_world_cases import Times, spend

from ramtorch_core.engine.calibration import Calibration, calibrate_chunks
from ramtorch_core.engine.launches import Launches
from ramtorch_core.engine.rates import Rates

RATES = Rates(1e9, 1e9, 2e9, 1e10, 1e-9, 1e-12, 1 << 40, 1e9)
FORWARD, BACKWARD = 3e-3, 5e-3
SEEN = Launches(pytest.approx(FORWARD), pytest.approx(BACKWARD))


class Block(nn.Module):
    """A linear layer of which the host takes a known time to launch forward and backward."""

    def __init__(self, device: VirtualDevice, *, in_place: bool = False) -> None:
        super().__init__()
        self.linear, self.device, self.relu = nn.Linear(4, 4), device, nn.ReLU(inplace=in_place)

    def forward(self, x: Tensor) -> Tensor:
        return spend(self.linear(self.relu(x)), self.device, Times(1e-3, 2e-3, FORWARD, BACKWARD))


def calibrated(build: Callable[[VirtualDevice], nn.Module], loss: Callable[[nn.Module, Tensor], Tensor]) -> Calibration:
    device = VirtualDevice(RATES)
    with running_on(device), device.memory:
        model, x = build(device), torch.randn(3, 4)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = calibrate_chunks(model, lambda: loss(model, x), device, RATES, chunks="*", resident_below=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


@pytest.mark.parametrize("in_place", [True, False])
def test_the_hosts_time_is_told_apart_by_chunk_and_direction(in_place: bool) -> None:
    found = calibrated(
        lambda device: nn.Sequential(Block(device), nn.Linear(4, 4), Block(device, in_place=in_place)),
        lambda model, x: model(x).sum(),
    )
    assert [chunk.launches for chunk in found.chunks] == [SEEN, Launches(), SEEN]


def test_frozen_chunks_behind_which_nothing_is_trained_have_no_backward() -> None:
    def build(device: VirtualDevice) -> nn.Module:
        model = nn.Sequential(Block(device), Block(device))
        model[0].requires_grad_(False)
        return model

    found = calibrated(build, lambda model, x: model(x).sum())
    assert [chunk.launches for chunk in found.chunks] == [Launches(pytest.approx(FORWARD)), SEEN]


def test_a_model_that_differentiates_in_its_forward_is_calibrated_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy: Any = model(x).sum()
        (force,) = torch.autograd.grad(energy, x, retain_graph=True)  # through all chunks
        return energy + force.detach().sum()

    found = calibrated(lambda device: nn.Sequential(Block(device), Block(device)), loss)
    assert [chunk.launches for chunk in found.chunks] == [None, None]
    assert any("launches are not timed" in message for message in caplog.messages)
    assert all(chunk.forward > 0 for chunk in found.chunks)
