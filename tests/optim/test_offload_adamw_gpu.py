"""AdamW through a GPU: the bits of torch's fused AdamW there, with every copy late and every slot poisoned."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from ramtorch_core import OffloadAdamW
from ramtorch_core.memory.device import Device
from ramtorch_core.optim import offload_adamw
from ramtorch_core.optim.pieces import Route

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = [(1,), (7,), (1000, 33), (64,), (3, 50), (1 << 18,), (12345,)]
CYCLES = 2_000_000  # about a millisecond


class Slow(Device):
    """Every copy begins late: those to the device, those back, or both."""

    late: tuple[int, ...] = (0, 1)

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.made: list[Any] = []

    def stream(self) -> Any:
        self.made.append(super().stream())
        return self.made[-1]

    def on(self, stream: Any) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            stack.enter_context(super().on(stream))
            if any(stream is self.made[index] for index in self.late):
                torch.cuda._sleep(CYCLES)
            return stack.pop_all()


class Poisoned(Route):
    """A slot holds NaN until it is loaded, and again as soon as the next load may begin."""

    def _load(self, slot: Any, piece: Sequence[Any]) -> None:
        slot.loaded.synchronize()
        if slot.staging is not None:
            slot.staging.flat.fill_(255)
        self.device.wait(slot.free, self.inward)
        with self.device.on(self.inward):
            slot.buffer.fill_(255)
        super()._load(slot, piece)

    def _update(self, slot: Any, piece: Sequence[Any], options: Any, decoupled: bool) -> None:
        torch.cuda._sleep(CYCLES)
        super()._update(slot, piece, options, decoupled)


@pytest.fixture(params=[(0,), (1,), (0, 1)], ids=["late in", "late out", "late both"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "late", request.param)
    monkeypatch.setattr(offload_adamw, "Device", Slow)
    monkeypatch.setattr(offload_adamw, "Route", Poisoned)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def train(optimizer: torch.optim.Optimizer, pinned: bool, steps: int = 4) -> dict[str, Any]:
    """Every third parameter has no gradient in the first step."""
    chosen = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for index, p in enumerate(chosen):
            grad = torch.randn(p.size(), generator=generator).to(p.dtype)
            grad = grad.to(p.device) if p.device.type == DEVICE or not pinned else grad.pin_memory()
            p.grad = None if step == 0 and index % 3 == 0 else grad
        optimizer.step()
        # Nothing waits here: what is on the host must be there.
        seen = [p.detach().cpu().clone() for p in chosen]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return {"weights": seen, "state": {i: {k: v.cpu() for k, v in row.items()} for i, row in state.items()}}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for index, row in expected["state"].items():
        for name, tensor in row.items():
            assert torch.equal(found["state"][index][name], tensor), (index, name)
    for ours, theirs in zip(found["weights"], expected["weights"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "page-locked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}], ids=str)
def test_it_gives_the_bits_of_the_fused_adamw_on_the_gpu(
    pinned: bool, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    on_gpu = [nn.Parameter(p.detach().to(DEVICE)) for p in parameters(dtype)]
    expected = train(torch.optim.AdamW(on_gpu, lr=1e-2, fused=True, **options), pinned)
    optimizer = OffloadAdamW(parameters(dtype), lr=1e-2, device=DEVICE, piece_bytes=1 << 16, **options)
    assert_same(train(optimizer, pinned), expected)
    for p in optimizer.param_groups[0]["params"]:
        assert p.is_pinned()
        assert all(optimizer.state[p][name].is_pinned() for name in ("exp_avg", "exp_avg_sq"))


def test_parameters_on_the_gpu_are_updated_there_beside_those_that_stream() -> None:
    on_gpu = [nn.Parameter(p.detach().to(DEVICE)) for p in parameters(torch.float32)]
    expected = train(torch.optim.AdamW(on_gpu, lr=1e-2, fused=True), pinned=False)
    mixed = [nn.Parameter(p.detach().to(DEVICE)) if i % 2 else p for i, p in enumerate(parameters(torch.float32))]
    assert_same(train(OffloadAdamW(mixed, lr=1e-2, device=DEVICE), pinned=False), expected)
    assert [p.device.type for p in mixed] == ["cpu" if i % 2 == 0 else DEVICE for i in range(len(mixed))]


def test_memory_on_the_gpu_is_that_of_two_pieces() -> None:
    """Two slots of four tensors of 1 MiB, and a number per step, whatever the size of the parameters."""
    p = nn.Parameter(torch.zeros(1 << 24))
    optimizer = OffloadAdamW([p], device=DEVICE, piece_bytes=1 << 20)
    p.grad = torch.ones_like(p)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert optimizer.device_bytes() == 2 * 4 << 20
    assert torch.cuda.max_memory_allocated() - before <= optimizer.device_bytes() + (1 << 16)
