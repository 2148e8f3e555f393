"""Tensors of several devices: everything a stage touches is brought to its device, gradients go home.

The devices are the CPU and `meta`, which refuse each other's tensors as two GPUs do, on any machine.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Chain, batch, batches, run
from pipeline_programs import Program, runs
from torch import Tensor, nn

from ramtorch_core.engine.pipeline.executor import Executor
from ramtorch_core.engine.pipeline.links import Links, Parcel
from ramtorch_core.engine.pipeline.stages import StageMap, resolve_entries
from ramtorch_core.memory.device import COMPLETE, Device
from ramtorch_core.memory.ranges import Ranges
from ramtorch_core.plan.schedule import build, forward_only


class Meta(Device):
    """A device without a machine behind it."""

    def __init__(self) -> None:
        self.torch = torch.device("meta")
        self.fake = True
        self.asynchronous = False
        self.ranges = Ranges(self.mark)


@pytest.fixture(autouse=True)
def copies_from_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` has no data to copy: what leaves it for the CPU is zeros."""
    send = Links.send

    def patched(self: Links, tensor: Tensor, target: Device, *args: Any) -> Parcel:
        if tensor.device.type == "meta" and target.torch.type == "cpu":
            return Parcel(torch.zeros(tensor.shape, dtype=tensor.dtype), COMPLETE)
        return send(self, tensor, target, *args)

    monkeypatch.setattr(Links, "send", patched)


class Scattered(Chain):
    """Skips, masks, caches, tied weights, glue parameters and a regulariser, all across two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.register_buffer("cache", torch.ones(WIDTH))
        self._modules["blocks"] = self._modules.pop("blocks")
        self._modules["head"] = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.ones(()))
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.late(torch.ones(len(ids), WIDTH, device=ids.device))  # used before its home, all on that device
        kept = []
        for block in self.blocks:
            mask = (torch.arange(WIDTH, device=ids.device) > 2).float()  # on the labels' device
            x = block(x * self.cache, mask=mask)
            kept.append(x)
        table = torch.zeros_like(x)
        table[:, 0] = kept[0][:, 0]
        x = torch.cat([x, kept[0]]).view(2, -1, WIDTH).mean(0) + kept[1] + table
        return self.head(x) * self.temperature + F.linear(kept[0], self.embedding.weight)

    def training_step(self, ids: Tensor) -> Tensor:
        loss = F.cross_entropy(self(ids), ids)
        return loss + sum(p.pow(2).sum() for p in self.parameters())


def place(stages: StageMap, devices: list[Device]) -> StageMap:
    """Like `stages.place`, for devices between which a parameter cannot change in place."""
    done: dict[int, nn.Parameter] = {}
    for stage, module in stages.walk():
        device = devices[stage].torch
        for name, p in module.named_parameters(recurse=False):
            if id(p) not in done:
                done[id(p)] = nn.Parameter(p.detach().to(device), requires_grad=p.requires_grad)
            module._parameters[name] = done[id(p)]
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return StageMap(stages.root, stages.entries)


@pytest.fixture(params=[("cpu", "meta"), ("meta", "cpu")], ids=lambda p: "-".join(p))
def devices(request: pytest.FixtureRequest) -> list[Device]:
    return [Meta() if name == "meta" else Device(name) for name in request.param]


@pytest.fixture
def scattered(devices: list[Device]) -> Iterator[tuple[Scattered, Executor]]:
    model = Scattered()
    executor = Executor(place(resolve_entries(model, ["blocks.2"], 2), devices), devices)
    yield model, executor
    executor.close()


def ids(device: Device) -> list[Tensor]:
    return [torch.zeros(3, dtype=torch.long, device=device.torch) for _ in range(3)]


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "staggered_1b1f"])
def test_gradients_are_where_their_parameters_are(
    scattered: tuple[Scattered, Executor], devices: list[Device], schedule: str
) -> None:
    """Inputs and labels arrive on the last stage's device, as Lightning puts them."""
    model, executor = scattered
    result = run(executor, model.training_step, ids(devices[1]), schedule)
    for name, p in model.named_parameters():
        assert result.gradients[p].device == p.device, name
    assert all(output.device == devices[1].torch for output in result.outputs)
    assert {p.device.type for p in model.parameters()} == {"cpu", "meta"}


@pytest.mark.parametrize("schedule", ["staggered_1b1f", "zb_h1"])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 6, 7, 8, 9, 10])  # 4 copies from `meta` itself
def test_gradients_of_random_programs_are_where_their_parameters_are(
    number: int, schedule: str, devices: list[Device]
) -> None:
    torch.manual_seed(number)
    model = Program(number)
    model.remembers = True  # takes no way that depends on data, which `meta` does not have
    inputs = [batch(3, m) for m in range(3)]
    if not runs(model, [inputs]):
        pytest.skip("plain torch does not run it either")
    cut = f"cells.{model.depth // 2}"
    executor = Executor(place(resolve_entries(model, [cut], 2), devices), devices)
    try:
        placed = [tuple(tensor.to(devices[1].torch) for tensor in item) for item in inputs]
        result = run(executor, model.training_step, placed, schedule)
        assert result.gradients
        assert all(gradient.device == p.device for p, gradient in result.gradients.items())
    finally:
        executor.close()


def test_forward_alone(scattered: tuple[Scattered, Executor], devices: list[Device]) -> None:
    model, executor = scattered
    with torch.inference_mode():
        result = executor.run(model, ids(devices[1]), forward_only(build("gpipe", 2, 3)))
    assert all(output.device == devices[1].torch for output in result.outputs)


def test_a_buffer_changed_in_place_from_another_stage_stays_the_same_tensor() -> None:
    class Counting(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].register_buffer("seen", torch.zeros(WIDTH))

        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            out = self(x)
            self.blocks[0].seen += x.mean(0)
            self.blocks[0].seen.add_(torch.ones(WIDTH))
            return F.cross_entropy(out, y)

    model, devices = Counting(), [Meta(), Device("cpu")]
    executor = Executor(place(resolve_entries(model, ["blocks.2"], 2), devices), devices)
    seen = model.blocks[0].seen
    try:
        run(executor, model.training_step, batches(2))
        assert model.blocks[0].seen is seen
        assert seen.device.type == "meta"
    finally:
        executor.close()


@pytest.mark.parametrize("within", ["transparent", "nothing"])
def test_outside_a_step_the_whole_model_is_one_graph(devices: list[Device], within: str) -> None:
    """A model summary calls the module so. Forward only where gradients would have to come back from `meta`."""
    model = Chain()
    executor = Executor(place(resolve_entries(model, ["blocks.2"], 2), devices), devices)
    x = torch.zeros(2, WIDTH, device=devices[0].torch)
    try:
        if devices[0].torch.type == "cpu":
            with executor.transparent() if within == "transparent" else contextlib.nullcontext():
                out = model(x)
            with pytest.raises(RuntimeError, match="shape"):
                model(x[:, :3])
            assert torch.overrides._get_current_function_mode_stack() == []
            assert out.device == devices[1].torch
            assert out.grad_fn is not None
    finally:
        executor.close()


def test_a_tensor_of_a_device_outside_the_pipeline_is_left_alone() -> None:
    links = Links([Device("cpu")])
    assert links.owns(torch.device("cpu"))
    assert not links.owns(torch.device("meta"))
