"""Every tensor is on the device of its stage: forwards over several fake devices, which refuse each other's tensors.

Fake tensors are not made for several threads, so no two ops run at the same time here; and autograd aborts for a device
without kernels, so there is no backward. `test_pipeline_devices.py` has it, on two devices that are real, in a way.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import Chain, batch, batches
from pipeline_programs import Program, Sharing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ramtorch_core.engine.pipeline import runner as runners
from ramtorch_core.engine.pipeline.executor import Executor
from ramtorch_core.engine.pipeline.runner import PipelineRunner
from ramtorch_core.engine.pipeline.stages import StageMap
from ramtorch_core.engine.pipeline.streamed import StreamOptions
from ramtorch_core.plan.schedule import forward_only

DEVICES = ["twin:0", "twin:1", "twin:2"]


def place(stages: StageMap, devices: list[torch.device], aside: Any) -> None:
    """Like `stages.place`, for devices between which a parameter cannot change in place."""
    placed: dict[int, nn.Parameter] = {}
    skipped: set[int] = set()
    for stage, module in stages.walk():
        if id(module) in skipped or aside(module):
            skipped.update(id(m) for m in module.modules())
            continue
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) not in placed:
                placed[id(p)] = nn.Parameter(p.detach().to(devices[stage]), requires_grad=p.requires_grad)
                stages.homes[id(placed[id(p)])] = stage
            module._parameters[name] = placed[id(p)]
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=devices[stage])
            stages.homes[id(module._buffers[name])] = stage


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch._C._get_privateuse1_backend_name() != "twin":
        backends = pytest.importorskip("torch.utils.backend_registration")
        if not hasattr(backends, "_setup_privateuseone_for_python_backend"):
            pytest.skip("this torch has no backends in Python")
        backends._setup_privateuseone_for_python_backend("twin")
    monkeypatch.setattr(runners, "place", place)
    begin = Executor.__init__

    def exclusive(self: Executor, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._exclusive = True

    monkeypatch.setattr(Executor, "__init__", exclusive)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def assert_forward_works(
    model: Any, devices: list[str], items: list[Any], grad: bool, strict: bool = True, steps: int = 1, **options: Any
) -> None:
    runner = PipelineRunner(model, devices, **options)
    try:
        last = runner.root_device
        items = [tuple(tensor.to(last) for tensor in item) for item in items]  # as Lightning puts them
        plan = forward_only(runner.plan(len(items)))
        for _ in range(steps):
            streaming = contextlib.nullcontext() if runner.streamed is None else runner.streamed.scopes()
            with torch.set_grad_enabled(grad), streaming:
                result = runner._executor.run(model.training_step, items, plan, strict=strict)
            assert {output.device for output in result.outputs} == {last}
    finally:
        runner.close()


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("resident_below", [0, 100, 1 << 20])
def test_streamed_stages_with_shared_weights(schedule: str, checkpoint: bool, grad: bool, resident_below: int) -> None:
    stream = StreamOptions(checkpoint=checkpoint, chunks=["blocks.*", "head"], resident_below=resident_below)
    assert_forward_works(Sharing(), DEVICES[:2], batches(3), grad, schedule=schedule, stream=stream)


class Around(Chain):
    """Uses weights of its first and last block outside of their forwards, by a call or not, `before` or after all."""

    def __init__(self, before: bool, called: bool) -> None:
        super().__init__()
        self.before, self.called = before, called

    def forward(self, x: Tensor) -> Tensor:
        x = self.use(x) if self.before else x
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.before else self.use(x))

    def use(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[3]):
            up, down = block.up, block.down
            x = x + (down(up(x)) if self.called else F.linear(F.linear(x, up.weight), down.weight))
        return x


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("resident_below", [0, 1 << 20])
def test_weights_of_streamed_chunks_that_are_used_outside_of_them(
    before: bool, called: bool, grad: bool, resident_below: int
) -> None:
    """Also in the stage of another device, at first and after they were seen there."""
    stream = StreamOptions(chunks=["blocks.*", "head"], resident_below=resident_below)
    assert_forward_works(Around(before, called), DEVICES[:2], batches(3), grad, steps=3, stream=stream)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("cuts", [["blocks.0", "blocks.2"], ["blocks.1.up", "blocks.1"], ["blocks.2", "blocks.1.down"]])
def test_stages_that_are_entered_out_of_turn(cuts: list[str], grad: bool) -> None:
    class Backwards(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in reversed(self.blocks):
                x = block(x)
            return self.head(x)

    assert_forward_works(Backwards(), DEVICES, batches(3), grad, strict=False, stages=cuts)


@pytest.mark.parametrize("number", range(30))
def test_random_programs(number: int) -> None:
    torch.manual_seed(number)
    model = Program(number)
    model.remembers = True  # takes no way that depends on data, which fake tensors do not have
    cuts = [f"cells.{i}" for i in range(1, model.depth, model.depth // 3)][:2]
    assert_forward_works(model, DEVICES, [batch(3, m) for m in range(3)], number % 2 == 0, stages=cuts)
