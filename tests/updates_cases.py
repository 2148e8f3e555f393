"""Training with overlapped updates on the CPU: the comparison with the plain run, and what tests of failures share."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stream_cases import assert_same, data, descend, stack, stream, streaming
from torch import Tensor, nn

from ramtorch_core import Streamer
from ramtorch_core.optim import updater

Build = Callable[[], nn.Module]
Optimize = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.fixture(params=["prompt", "late"])
def delays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates begin at once, or each one after a random while."""
    if request.param == "late":
        slow_down(monkeypatch)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    update, times = updater.update, random.Random(3)

    def late(*args: Any, **kwargs: Any) -> None:
        time.sleep(times.random() * 0.004)
        update(*args, **kwargs)

    monkeypatch.setattr(updater, "update", late)


def loss_of(model: nn.Module, index: int) -> Tensor:
    return model(data(index)).square().mean()


def train(
    build: Build = stack,
    optimize: Optimize = adamw,
    *,
    overlap: bool,
    steps: int = 4,
    loss: Callable[[nn.Module, int], Tensor] = loss_of,
    batches: int = 1,
    clip: float | None = None,
    amp: bool = False,
    run_on: bool = True,
    before_step: Callable[[torch.optim.Optimizer, int, nn.Module], None] | None = None,
    after_step: Callable[[torch.optim.Optimizer, int, nn.Module], None] | None = None,
    taken: int | None = -1,
    set_to_none: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Losses, weights and optimizer state after some steps; streamed with overlapped updates, or plain.

    Args:
        taken: how many chunks' updates overlap in all; by default every chunk's in every step; None for any number.
    """
    torch.manual_seed(0)
    model = build()
    engine = stream(model, kernel="torch", **options) if overlap else None
    optimizer = optimize(model.parameters())
    losses = []
    try:
        if engine is not None:
            engine.conservative, engine.updates.run_on = False, run_on
        for step in range(steps):
            torch.manual_seed(100 + step)
            if before_step is not None:
                before_step(optimizer, step, model)
            optimizer.zero_grad(set_to_none=set_to_none)
            for batch in range(batches):
                scope = engine.scope() if engine is not None else contextlib.nullcontext()
                with scope, torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                    value = loss(model, step * batches + batch) / batches
                last = batch == batches - 1
                with (
                    engine.updates.overlap(optimizer, hold=clip is not None)
                    if engine is not None and last
                    else contextlib.nullcontext()
                ):
                    value.backward()
                losses.append(value.detach().clone())
            if clip is not None:
                if engine is not None:
                    losses.append(engine.updates.clip(model.parameters(), clip))
                else:
                    losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            if engine is not None:
                engine.refresh()
            if after_step is not None:
                after_step(optimizer, step, model)
        if engine is not None:
            engine.updates.wait()
            expected = steps * len(engine.groups) if taken == -1 else taken
            assert expected is None or engine.updates.updated == expected
    finally:
        if engine is not None:
            engine.close()
    return {
        "losses": losses,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "optimizer": optimizer.state_dict(),
    }


def compare(build: Build = stack, optimize: Optimize = adamw, **options: Any) -> None:
    """Overlapped equals the resident run."""
    own = {"taken", "run_on", "window", "activations", "resident_below", "chunks", "stream_dtype", "updates"}
    expected = train(build, optimize, overlap=False, **{k: v for k, v in options.items() if k not in own})
    assert_same(train(build, optimize, overlap=True, **options), expected)


class Custom(torch.optim.SGD):
    """Fails when it is told to."""

    update_granularity = "element"
    fail_at: int | None = None

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if self.fail_at == p.numel():
                        raise ZeroDivisionError("from the optimizer")
                    p.detach().add_(p.grad, alpha=-group["lr"])


class Gate:
    """Lets no update begin until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        update = updater.update

        def wait(*args: Any, **kwargs: Any) -> None:
            self.entered.set()
            assert self._open.wait(20)
            update(*args, **kwargs)

        monkeypatch.setattr(updater, "update", wait)

    def open(self) -> None:
        self._open.set()


def backward(engine: Streamer, optimizer: torch.optim.Optimizer, index: int = 0, *, hold: bool = False) -> None:
    optimizer.zero_grad()
    loss = engine.root(data(index)).square().mean()
    with engine.updates.overlap(optimizer, hold=hold):
        loss.backward()


def step(engine: Streamer, optimizer: torch.optim.Optimizer, index: int = 0) -> None:
    backward(engine, optimizer, index)
    optimizer.step()
    engine.updates.wait()


def train_on(engine: Streamer, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for index in range(steps):
        backward(engine, optimizer, index)
        optimizer.step()


def plain_steps(optimizer: Callable[[Any], torch.optim.Optimizer], *indices: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = stack()
    chosen = optimizer(model.parameters())
    for index in indices:
        descend(model, chosen, index)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@contextlib.contextmanager
def training(
    optimizer: Callable[[Any], Any] = lambda p: torch.optim.AdamW(p, lr=0.01), **options: Any
) -> Iterator[tuple[Streamer, Any]]:
    torch.manual_seed(0)
    with streaming(stack(), kernel="torch", **options) as engine:
        engine.conservative = False
        yield engine, optimizer(engine.root.parameters())
