"""A model on a virtual machine, which is calibrated, predicted, and trained by the real engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from virtual_device import VirtualDevice, running_on

from ramtorch_core.engine.calibration import Calibration, calibrate_chunks
from ramtorch_core.engine.microbatches import MicrobatchRunner
from ramtorch_core.engine.rates import Rates
from ramtorch_core.engine.rearrange import knobs_of
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.visits import Activations
from ramtorch_core.prediction import Optimizer, Order, StreamingPlan
from ramtorch_core.simulate.costs import resident_chunks
from ramtorch_core.tuning import Tuner, Wish, tune_lazily

WIDTH = 16


@dataclass(frozen=True)
class Times:
    """Seconds of compute, and of the host to issue it."""

    forward: float = 0.0
    backward: float = 0.0
    issue_forward: float = 0.0
    issue_backward: float = 0.0


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: VirtualDevice, times: Times) -> Tensor:
        ctx.device, ctx.times = device, times
        device.work(times.forward, times.issue_forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.device.work(ctx.times.backward, ctx.times.issue_backward)
        return grad, None, None


def spend(x: Tensor, device: VirtualDevice, times: Times) -> Tensor:
    """The identity, which takes its time."""
    result: Tensor = _Spend.apply(x, device, times)
    return result


class Layers(nn.Module):
    """A chunk: two layers with a kernel between them that takes `times`, and one behind them that takes `tail`.

    What is behind the last layer is not recomputed, since backward needs nothing of it.
    """

    def __init__(self, width: int, hidden: int, device: VirtualDevice, times: Times, tail: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.device, self.times, self.tail = device, times, Times(forward=tail)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(spend(self.up(x), self.device, self.times))
        return x + spend(self.down(inner), self.device, self.tail)


class Model(nn.Module):
    """Layers in a row, and a loss that takes its time, of logits that are so many times as wide as they."""

    def __init__(
        self, device: VirtualDevice, chunks: Sequence[tuple[int, Times]], loss: Times, tail: float, wide: int = 1
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layers(WIDTH, hidden, device, times, tail) for hidden, times in chunks)
        self.device, self.times, self.wide = device, loss, wide

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = x if self.wide == 1 else x.repeat(1, self.wide)
        return spend(x, self.device, self.times).float().logsumexp(1).mean()


@dataclass(frozen=True)
class World:
    """A model on a virtual machine.

    Attributes:
        chunks: hidden width of each, and its times.
        tail: seconds of each chunk's forward that are not recomputed.
        between: seconds of the host between two steps.
        slower: what updates on the host take, as a multiple of what the rates say.
        wide: the width of the logits, as a multiple of that of the layers.
        dtype: of masters and the input.
    """

    rates: Rates
    chunks: Sequence[tuple[int, Times]]
    loss: Times = field(default_factory=Times)
    tail: float = 0.0
    between: float = 0.0
    slower: float = 1.0
    tokens: int = 8
    autocast: bool = False
    wide: int = 1
    dtype: torch.dtype = torch.float32

    def build(self) -> tuple[VirtualDevice, Model, Tensor]:
        """A new device with the model, and an input, which stays on it."""
        device = VirtualDevice(self.rates)
        x = torch.randn(self.tokens, WIDTH, dtype=self.dtype)
        device.memory.stays = x.nbytes
        return device, Model(device, self.chunks, self.loss, self.tail, self.wide).to(self.dtype), x

    def calibrate(self) -> Calibration:
        """Calibrated by the engine."""
        device, model, x = self.build()
        with running_on(device), device.memory:
            dtype = torch.bfloat16 if self.autocast else None
            options = {"chunks": "blocks.*", "resident_below": 0, "autocast": dtype}
            return calibrate_chunks(model, lambda: model(x), device, self.rates, **options)

    def train(self, plan: StreamingPlan, steps: int = 5) -> tuple[float, int]:
        """Seconds of the last step that the engine makes under a plan, and bytes at its peak."""
        with self.loop(plan) as loop:
            for _ in range(steps):
                loop.step()
            return loop.seconds, loop.peak

    def tune(
        self, wish: Wish, plan: StreamingPlan | None = None, steps: int = 5, *, plain: bool = False
    ) -> tuple[Tuner, float, int]:
        """The same of steps after the one in which knobs were chosen, and who chose.

        Args:
            plain: nobody but the optimizer tells when a step is over.
        """
        plan = plan or StreamingPlan(optimizer=Optimizer.OVERLAPPED)
        with self.loop(plan) as loop:
            loop.plain = plain
            if plain:
                tune_lazily(loop.streamer, wish)
            else:
                loop.streamer.tuning = Tuner(loop.streamer, wish, self.rates, base=lambda: plan)
            tuner: Any = loop.streamer.tuning
            while not tuner.done:
                loop.step()
                if not plain:
                    tuner.between_steps([loop.optimizer])
            loop.place(frozenset(knobs_of(loop.streamer).resident), moved=True)
            for _ in range(steps):
                loop.step()
            return tuner, loop.seconds, loop.peak

    @contextlib.contextmanager
    def loop(self, plan: StreamingPlan) -> Iterator[Loop]:
        """Steps of the engine under a plan."""
        device, model, x = self.build()
        resident = resident_chunks(plan.pin, len(self.chunks))
        with running_on(device), device.memory:
            streamer = Streamer(
                model,
                [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)],
                device=device,
                window=plan.window,
                resident=resident,
                activations=Activations.CHECKPOINT if plan.checkpoint else Activations.KEEP,
                resident_below=0,
                overlapped=True,
            )
            streamer.conservative = False
            streamer.updates.run_on = plan.optimizer is Optimizer.OVERLAPPED
            streamed = sum(2 * WIDTH * hidden for i, (hidden, _) in enumerate(self.chunks) if i not in resident)
            if plan.ahead is not None:
                streamer.updates.ahead_bytes = round(plan.ahead * 12 * streamed)  # of masters and moments
            loop = Loop(self, streamer, plan, x)
            loop.place(resident, moved=plan.updates is Optimizer.PUBLISHED)
            try:
                yield loop
            finally:
                loop.close()


class Loop:
    """Steps as a Trainer makes them, or a `plain` loop; `seconds` and `peak` are of the last one."""

    def __init__(self, world: World, streamer: Streamer, plan: StreamingPlan, x: Tensor) -> None:
        self.world, self.streamer, self.plan, self.x = world, streamer, plan, x
        self.device: Any = streamer.device
        self.optimizer = torch.optim.AdamW(streamer.root.parameters(), fused=True)
        updates = streamer.updates
        self.last = True  # batch of a step, after which the optimizer steps
        self.runner = MicrobatchRunner(
            streamer, lambda: updates.begin(self.optimizer, hold=plan.clip) if self.last else None, updates.end
        )
        self.seconds, self.peak, self.plain = 0.0, 0, False

    def place(self, resident: frozenset[int], *, moved: bool = False) -> None:
        """These chunks are resident now, and nobody has counted their states if they have `moved`."""
        sizes = [2 * WIDTH * hidden for hidden, _ in self.world.chunks]
        seconds = [self.world.slower * self.world.rates.host_update * size for size in sizes]
        self.device.ranges.updates = dict(enumerate(each for i, each in enumerate(seconds) if i not in resident))
        tensors = self.world.dtype.itemsize * (1 + 2 * moved)  # masters and moments
        self.device.memory.stays = self.x.nbytes + sum(tensors * sizes[i] for i in resident)

    def loss(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.world.autocast), self.streamer.scope():
            return self.streamer.root(x)  # type: ignore[no-any-return]

    def step(self) -> None:
        plan, streamer, begun = self.plan, self.streamer, self.device.now
        self.device.forget_peak()
        if not plan.train:
            with torch.no_grad():
                self.loss(self.x)
            self.device.spend(self.world.between)
            self.seconds, self.peak = self.device.now - begun, self.device.peak_bytes()
            return
        if plan.order is Order.CHUNK:
            self.optimizer.zero_grad()
            for batch in range(plan.batches):
                self.last = batch == plan.batches - 1 and plan.optimizer is not Optimizer.PUBLISHED
                inputs = [self.x] * plan.microbatches
                result = self.runner.train(self.loss, inputs, lambda loss, _: (loss, None), accumulate=batch > 0)
                for parameter, gradient in result.gradients.items():
                    parameter.grad = gradient
        else:
            for m in range(plan.microbatches):
                loss = self.loss(self.x)
                if m == 0:
                    self.optimizer.zero_grad()
                if not self.plain:
                    streamer.begin_lending()
                last = m == plan.microbatches - 1 and plan.optimizer is not Optimizer.PUBLISHED
                with streamer.updates.overlap(self.optimizer, hold=plan.clip) if last else contextlib.nullcontext():
                    loss.backward()
                streamer.end_lending()
        published = plan.updates is Optimizer.PUBLISHED
        if plan.clip:
            self.device.synchronize()  # norms come from the device
            with _disable_current_modes():
                streamer.updates.clip(streamer.root.parameters(), 1e9)
        with _disable_current_modes() if published else contextlib.nullcontext():  # memory of the host is not counted
            self.optimizer.step()
        if published:
            self.device.spend(sum(self.device.ranges.updates.values()))
        self.device.spend(self.world.between)
        self.seconds, self.peak = self.device.now - begun, self.device.peak_bytes()

    def close(self) -> None:
        self.streamer.updates.wait()
        self.runner.close()
        self.streamer.close()
