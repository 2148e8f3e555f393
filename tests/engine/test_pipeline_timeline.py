"""A step takes as long as its schedule says: the table orders the ops, and nothing else makes a device wait."""

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pipeline_cases import WIDTH, At, pipeline
from torch import Tensor, nn

from ramtorch_core.engine.pipeline.executor import Executor
from ramtorch_core.engine.pipeline.links import Links
from ramtorch_core.engine.pipeline.stages import resolve_entries
from ramtorch_core.engine.pipeline.step import current_step
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import Kind, Ranges
from ramtorch_core.plan.check import dependencies
from ramtorch_core.plan.schedule import Op, Schedule, build
from ramtorch_core.simulate import ChunkCost, PipelinePlan, simulate_pipeline

SCHEDULES = ["sequential", "gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1", "interleaved", "zbv"]
Watch = Callable[[str, int, int], None]
"""Is called inside of an op: with "F", "B" or "W", the stage and the microbatch."""


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: Watch, stage: int, microbatch: int) -> Tensor:
        ctx.watch = lambda: watch("B", stage, microbatch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.watch()
        return gradient, None, None, None


class Stage(nn.Module):
    """A layer that tells of its forward, of the backward, and of the weight's gradient."""

    def __init__(self, stage: int, watch: Watch) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.stage, self.watch = stage, watch
        numbers = itertools.count()
        self.layer.weight.register_hook(lambda _: watch("W", stage, next(numbers)))

    def forward(self, x: Tensor) -> Tensor:
        current = current_step()
        assert current is not None
        self.watch("F", self.stage, current[1].index)
        return _Backward.apply(self.layer(x), self.watch, self.stage, current[1].index)


class Stages(nn.Module):
    def __init__(self, count: int, watch: Watch, skips: bool = True) -> None:
        super().__init__()
        self.skips = skips
        self.stages = nn.Sequential(*(Stage(stage, watch) for stage in range(count)))

    def training_step(self, x: Tensor) -> Tensor:
        x = self.stages[0](x)
        kept = x * 2 if self.skips else None  # past the other stages, into the last
        x = self.stages[1:](x)
        return x.sum() if kept is None else (x + kept).sum()


class Warden:
    """Keeps every backward and weight gradient until it is let go, and knows which have begun."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.split = schedule.split_backward
        self.condition = threading.Condition()
        self.held: set[Op] = set()
        self.released: set[Op] = set()
        self.ended: set[Op] = set()
        self.order: list[Op] = []

    def watch(self, kind: str, stage: int, microbatch: int) -> None:
        """Holds the thread that runs the op."""
        if kind == "F" or (kind == "W" and not self.split):
            return
        op = Op("I" if kind == "B" and self.split else kind, stage, microbatch)  # type: ignore[arg-type]
        with self.condition:
            self.held.add(op)
            self.condition.notify_all()
            assert self.condition.wait_for(lambda: op in self.released, 20), f"{op} was never let go"
            self.held.discard(op)

    def recorded(self, op: Op, _begin: float, _end: float) -> None:
        """The op has ended."""
        with self.condition:
            self.ended.add(op)
            self.order.append(op)
            self.condition.notify_all()

    def due(self) -> set[Op]:
        """The ops that table and dependencies let run now, apart from forwards, which nobody holds."""
        done, found = set(self.ended), set[Op]()
        moved = True
        while moved:
            moved = False
            for lane in self.schedule.lanes:
                op = next((op for op in lane if op not in done), None)
                if op is None or op in found:
                    continue
                named = {need if self.split or need.kind != "I" else Op("B", need.stage, need.microbatch)
                         for need in dependencies(op, self.schedule.stages)}  # fmt: skip
                if named <= done:
                    moved = True
                    (done if op.kind == "F" else found).add(op)
        return found

    def let_all_go(self, choose: random.Random) -> int:
        """One op after the other; before each, all that may run have to be under way. The most at once."""
        most, total = 0, sum(op.kind != "F" for lane in self.schedule.lanes for op in lane)
        for _ in range(total):
            with self.condition:
                assert self.condition.wait_for(lambda: self.held == self.due(), 20), (
                    f"{sorted(map(str, self.held))} run, {sorted(map(str, self.due()))} may"
                )
                most = max(most, len(self.held))
                op = choose.choice(sorted(self.held, key=str))
                self.released.add(op)
                self.condition.notify_all()
                assert self.condition.wait_for(lambda: op in self.ended, 20), f"{op} did not end"  # noqa: B023
        return most


@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 4, 6])
def test_every_op_that_the_table_lets_run_is_under_way_and_no_other(schedule: str, microbatches: int) -> None:
    """Ops end in a random order, and each time all others that may run do so: no lane waits for another's op."""
    devices = 2 if schedule in ("interleaved", "zbv") else 4
    plan = build(schedule, devices, microbatches)
    warden = Warden(plan)
    model = Stages(plan.stages, warden.watch)
    with pipeline(model, [f"stages.{i}" for i in range(1, plan.stages)]) as executor:
        executor._exclusive = False  # as on devices that compute on their own
        items = [torch.ones(2, WIDTH) for _ in range(microbatches)]
        errors: list[BaseException] = []

        def step() -> None:
            try:
                executor.run(model.training_step, items, plan, lambda out, m: (out, None), recorder=warden.recorded)
            except BaseException as error:
                errors.append(error)

        caller = threading.Thread(target=step, name="caller")
        caller.start()
        try:
            most = warden.let_all_go(random.Random(microbatches))
        finally:
            with warden.condition:
                warden.released.update(op for lane in plan.lanes for op in lane)
                warden.condition.notify_all()
            caller.join(30)
    assert not errors
    for lane in plan.lanes:
        assert [op for op in warden.order if op in lane] == list(lane)
    if microbatches >= 4 and schedule != "sequential":
        assert most > 1


class Clock:
    """A stream: what was issued on it ends at `seconds`."""

    def __init__(self) -> None:
        self.seconds = 0.0


class Virtual(Device):
    """The CPU, or `meta`, with streams in virtual time; work on them takes what `spend` says."""

    def __init__(self, kind: str) -> None:
        self.torch = torch.device(kind)
        self.fake, self.asynchronous = True, False
        self.ranges = Ranges(self.mark)
        self.compute: Any = Clock()
        self.local = threading.local()

    def stream(self) -> Any:
        return Clock()

    def current_stream(self) -> Any:
        return getattr(self.local, "stream", self.compute)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.local.stream = self.current_stream(), stream
        yield
        self.local.stream = before

    def record(self, stream: Any = None, *, blocking: bool = False) -> Any:
        return At((stream or self.current_stream()).seconds)

    def mark(self) -> Any:
        return self.record()

    def wait(self, event: Any, stream: Any = None) -> None:
        clock = stream or self.current_stream()
        clock.seconds = max(clock.seconds, event.seconds)


FORWARD, BACKWARD = (2.0, 3.0, 1.0, 4.0), (4.0, 10.0, 6.0, 2.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("send", [0.0, 1.0])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("kinds", [("cpu", "meta"), ("meta", "cpu")])
@pytest.mark.parametrize("host", ["computes", "launches", "launches one op at a time"])
def test_on_a_virtual_clock_every_op_ends_when_the_simulator_says(
    schedule: str,
    send: float,
    microbatches: int,
    kinds: tuple[str, str],
    host: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait too many would make a step longer than its plan, a wait too few shorter. Host work takes no time here."""
    plan = build(schedule, 2, microbatches)
    if plan.stages > 2 and send:
        pytest.skip("simulated links share a wire where activations and gradients go the same way")
    devices = [Virtual(kind) for kind in kinds]
    stage_devices = [devices[device] for device in plan.placement]

    def copy(tensor: Tensor, source: Virtual, target: Virtual) -> Tensor:
        leaving, entering = source.current_stream(), target.current_stream()
        leaving.seconds += send
        entering.seconds = max(entering.seconds, leaving.seconds)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=target.torch)

    monkeypatch.setattr(Links, "_copy", staticmethod(copy))
    monkeypatch.setattr(Links, "_hold", staticmethod(lambda tensor, stream: None))

    def spend(kind: str, stage: int, _microbatch: int) -> None:
        seconds = FORWARD[stage] if kind == "F" else BACKWARD[stage] / 2
        stage_devices[stage].current_stream().seconds += seconds

    model = Stages(plan.stages, spend, skips=send == 0)
    for stage, module in enumerate(model.stages):
        weight = module.layer.weight
        if stage_devices[stage].torch.type == "meta":
            module.layer.weight = nn.Parameter(weight.detach().to("meta"))
            numbers = itertools.count()
            module.layer.weight.register_hook(lambda _, s=stage, n=numbers: spend("W", s, next(n)))
    stages = resolve_entries(model, [f"stages.{i}" for i in range(1, plan.stages)], plan.stages)
    executor = Executor(stages, stage_devices)
    executor._exclusive = host == "computes"
    listeners = [device.ranges.listen() for device in devices]
    try:
        items = [torch.ones(2, WIDTH, device=devices[plan.placement[0]].torch) for _ in range(microbatches)]
        apart = host == "launches one op at a time"
        executor.run(model.training_step, items, plan, lambda out, m: (out, None), exclusive=apart)
    finally:
        executor.close()
    costs = [[ChunkCost(forward=f, backward=b)] for f, b in zip(FORWARD, BACKWARD, strict=True)]
    simulated = simulate_pipeline(plan, costs[: plan.stages], PipelinePlan(send=send)).timeline
    expected = {span.label: span.end for span in simulated.spans if span.resource.startswith("GPU")}
    found = {
        str(range_.what): range_.end.seconds
        for listener in listeners
        for range_ in listener.collect()
        if range_.kind is Kind.OP
    }
    assert found == expected
