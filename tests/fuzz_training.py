"""Runs random cases: overlapped, published and resident training leave the same bits."""

import contextlib
import copy
import random
import time
from typing import Any

import pytest
import torch
from fuzz_cases import OPTIMIZERS, Case
from fuzz_models import WIDTH, Model
from stream_cases import assert_same
from torch import Tensor

from ramtorch_core import MicrobatchRunner, Streamer
from ramtorch_core.engine.chunks import choose_resident, find_chunks
from ramtorch_core.engine.dtypes import StreamDtypes
from ramtorch_core.engine.rearrange import Knobs, rearrange
from ramtorch_core.engine.visits import Activations
from ramtorch_core.memory.device import Device
from ramtorch_core.optim import device_updates, updater
from ramtorch_core.optim.norms import Norms


def data(case: Case, step: int, batch: int, device: torch.device) -> Tensor:
    """The input of one microbatch."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * step + batch)
    return torch.randn(4, WIDTH, generator=generator).to(device)


class Training:
    """Runs a case in one way.

    Args:
        way: "plain", "published" or "overlapped".
        device: of the engine; the plain run is on the CPU.
    """

    def __init__(self, case: Case, way: str, device: Device | None = None) -> None:
        self.case, self.way = case, way
        torch.manual_seed(case.seed)
        self.model = Model(case.kinds, case.tied)
        self.device = Device("cpu") if device is None or way == "plain" else device
        self.engine = None if way == "plain" else self._engine()
        self.optimizers = self._optimizers()
        self.losses: list[Any] = []
        schedule = torch.optim.lr_scheduler.StepLR
        self.schedulers = [schedule(each, 1, gamma=0.7) for each in self.optimizers if case.scheduled]
        if case.hooked:
            self.model.head.weight.register_hook(lambda grad: grad * 1.5)
            for parameter in (p for p in list(self.model.blocks.parameters())[:3] if p.requires_grad):
                parameter.register_hook(lambda grad: grad * 0.5)
        self.runner = MicrobatchRunner(self.engine, self._begin, self._end) if self.engine and case.together else None

    def _engine(self) -> Streamer:
        case = self.case
        chunks = find_chunks(self.model, case.chunks, resident_below=case.resident_below)
        engine = Streamer(
            self.model,
            chunks,
            device=self.device,
            window=case.window,
            resident=choose_resident(case.pin, [name for name, _ in chunks]),
            activations=Activations(case.activations),
            dtypes=StreamDtypes("auto"),
            resident_below=case.resident_below,
            host_memory=1 << 40,
            kernel="torch",
            updates=case.updates,
            poison=True,
        )
        engine.conservative, engine.updates.run_on = case.conservative, case.run_on
        return engine

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        case = self.case
        trained = [p for p in self.model.parameters() if p.requires_grad]
        trained = [p for i, p in enumerate(trained) if not case.left_out or i % 7 != 2]
        half = len(trained) // 2 if case.two else len(trained)
        made = []
        for some in (trained[:half], trained[half:]):
            groups = [{"params": some[i :: case.groups], "lr": 0.01 / (i + 1)} for i in range(case.groups)]
            filled = [group for group in groups if group["params"]]
            made += [OPTIMIZERS[case.optimizer](filled)] if filled else []
        return made

    def _begin(self) -> None:
        if self.way == "overlapped" and self.engine is not None:
            self.engine.updates.begin(*self.optimizers)

    def _end(self) -> None:
        if self.engine is not None:
            self.engine.updates.end()

    def loss(self, x: Tensor) -> Tensor:
        """Of one microbatch."""
        with self._autocast(), self.engine.scope() if self.engine else contextlib.nullcontext():
            value: Tensor = self.model(x).float().square().mean() / self.case.batches
            if self.case.penalty is not None:
                weight = next(self.model.blocks[self.case.penalty].parameters())
                value = value + 0.01 * weight.square().sum().to(value)
        return value

    def _autocast(self) -> Any:
        if not self.case.amp:
            return contextlib.nullcontext()
        return torch.autocast(self.device.torch.type, torch.bfloat16, cache_enabled=self.case.remembers)

    def step(self, step: int) -> None:
        """Forward, backward and update of one step, and what else happens between it and the next."""
        case, model = self.case, self.model
        torch.manual_seed(7 * case.seed + step)
        model.calls = [i for i in range(len(case.kinds)) if case.skipped.get(step) != i]
        model.calls += [case.again] if case.again is not None else []
        if case.frozen is not None and case.frozen[0] == step:
            model.blocks[case.frozen[1]].requires_grad_(False)
        if case.fails == step:
            self._fail(step)
        if case.idle == step:
            self.losses.append(self.loss(data(case, step, 7, self.device.torch)).detach())
        inputs = [data(case, step, batch, self.device.torch) for batch in range(case.batches)]
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=case.set_to_none)
        if self.runner is not None:
            with self._autocast():
                result = self.runner.train(self.loss, inputs, lambda loss, _: (loss, None), step=step)
            self.losses += result.outputs
            for parameter, gradient in result.gradients.items():
                parameter.grad = gradient
        else:
            for batch, x in enumerate(inputs):
                self._backward(self.loss(x), last=batch == case.batches - 1)
        self._clip()
        for each in (*self.optimizers, *self.schedulers):
            each.step()
        if self.engine is not None:
            self.engine.refresh()
        self._between(step)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        overlap: Any = contextlib.nullcontext()
        if self.way == "overlapped" and self.engine is not None and last:
            overlap = self.engine.updates.overlap(*self.optimizers, hold=self.case.clip is not None)
        with overlap:
            loss.backward()
        self.losses.append(loss.detach())

    def _clip(self) -> None:
        if self.case.clip is not None:
            norms = Norms() if self.engine is None else self.engine.updates
            found = norms.clip(self.model.parameters(), self.case.clip)
            self.losses.append(found[0] if isinstance(found, tuple) else found)

    def _fail(self, step: int) -> None:
        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with self.model.head.register_forward_pre_hook(fail), pytest.raises(ZeroDivisionError):
            self.loss(data(self.case, step, 9, self.device.torch))
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        torch.manual_seed(7 * self.case.seed + step)

    def _between(self, step: int) -> None:
        case = self.case
        if step in case.evaluated:
            self.model.eval()
            with torch.no_grad():
                self.losses.append(self.loss(data(case, step, 8, self.device.torch)))
            self.model.train()
        touched = step in case.written or case.reloaded == step
        if self.engine is not None and touched:
            self.engine.updates.wait()
        if case.written.get(step) == "in place":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.99)
        elif case.written.get(step) == "data":
            for parameter in self.model.parameters():
                parameter.data.mul_(0.99)
            if self.engine is not None:
                self.engine.invalidate()
        if self.engine is not None and step in case.rearranged:
            window, activations, resident = case.rearranged[step]
            if self.runner is not None:
                self.runner.cut_anew()
            rearrange(self.engine, Knobs(window, resident, Activations(activations)), self.optimizers)
        if case.reloaded == step:
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
            for optimizer in self.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def run(self) -> dict[str, Any]:
        """All steps; returns everything that they leave."""
        try:
            for step in range(self.case.steps):
                self.step(step)
            if self.engine is not None:
                self.engine.updates.wait()
        finally:
            if self.runner is not None:
                self.runner.close()
            if self.engine is not None:
                self.engine.close()
        owned = {p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        return {
            "losses": [loss.detach().cpu() for loss in self.losses],
            "weights": {name: p.detach().clone() for name, p in self.model.named_parameters()},
            "grads": {name: p.grad for name, p in self.model.named_parameters() if p not in owned},
            "buffers": {name: b.clone() for name, b in self.model.named_buffers()},
            "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers],
        }


def compare(case: Case, found: dict[str, dict[str, Any]]) -> None:
    """All ways lead to the same bits."""
    assert_same(found["overlapped"], found["published"], "overlapped/published")
    if "plain" in found and case.like_plain:
        assert_same(found["published"], found["plain"], "published/plain")


def slow_down(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Updates begin after a random while, and pieces are so small that weights are cut."""
    update, dice = updater.update, random.Random(seed)
    longest = dice.choice((0.0, 0.0, 0.003))

    def late(*args: Any, **kwargs: Any) -> None:
        time.sleep(dice.random() * longest)
        update(*args, **kwargs)

    monkeypatch.setattr(updater, "update", late)
    monkeypatch.setattr(device_updates, "PIECE_BYTES", dice.choice((256, 512, 1 << 20)))
