"""Updates on a GPU, state streamed through it: the bits of torch's fused AdamW there, applied to copies.

Slots of weights and of pieces are poisoned, a long kernel runs in front of each chunk, and in turn the copies in, the
updates, the copies back and the thread are late, so that every order comes up in which they may meet.
"""

import copy
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.nn.functional as F
from stream_cases import assert_same
from stream_gpu_cases import MODELS, Net
from torch import Tensor, nn

from ramtorch_core import MicrobatchRunner, Streamer, attach
from ramtorch_core.optim import device_updates, pieces

DEVICE = "cuda"
CYCLES = 1_000_000  # about half a millisecond
PIECE_BYTES = 1 << 18
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


class Late(pieces.Route):
    """A slot holds NaN until it is loaded, and what `late` names takes long."""

    late = ""

    def _load(self, slot: Any, piece: Any) -> None:
        if self.late == "thread":
            time.sleep(0.001)
        self.device.wait(slot.free, self.inward)
        with self.device.on(self.inward):
            slot.buffer.fill_(255)
            self._sleep("in")
        super()._load(slot, piece)

    def _update(self, slot: Any, piece: Any, options: Any, decoupled: bool) -> None:
        self._sleep("update")
        super()._update(slot, piece, options, decoupled)

    def _store(self, slot: Any, piece: Any) -> None:
        with self.device.on(self.outward):
            self._sleep("out")
        super()._store(slot, piece)

    def _sleep(self, what: str) -> None:
        if self.late == what and self.device.asynchronous:
            torch.cuda._sleep(CYCLES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_updates, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(device_updates, "Route", Late)


@pytest.fixture(params=["", "thread", "in", "update", "out"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Late, "late", request.param)


class Reference:
    """Steps copies on the GPU of what the engine updates there, and everything else on the host."""

    def __init__(self, engine: Streamer, there: set[nn.Parameter]) -> None:
        trained = [p for p in engine.root.parameters() if p.requires_grad]
        self.there = [p for p in trained if p in there]
        self.copies = [nn.Parameter(p.detach().to(DEVICE)) for p in self.there]
        here = [p for p in trained if p not in there]
        self.optimizers = [torch.optim.AdamW(some, **OPTIONS) for some in (self.copies, here) if some]
        self.trained = trained

    def step(self) -> None:
        for master, twin in zip(self.there, self.copies, strict=True):
            twin.grad = None if master.grad is None else master.grad.to(DEVICE)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for master, twin in zip(self.there, self.copies, strict=True):
                master.copy_(twin)
        for parameter in self.trained:
            parameter.grad = None

    def state(self) -> dict[int, Any]:
        rows: dict[Any, Any] = {}
        for optimizer in self.optimizers:
            rows |= optimizer.state
        twins = dict(zip(self.there, self.copies, strict=True))
        found = (rows.get(twins.get(p, p)) for p in self.trained)
        return {i: {key: value.cpu() for key, value in row.items()} for i, row in enumerate(found) if row}


def batch(step: int, index: int) -> Tensor:
    return torch.randint(512, (4, 32), generator=torch.Generator().manual_seed(100 * step + index)).to(DEVICE)


def forward(net: nn.Module, ids: Tensor, amp: torch.dtype | None, batches: int) -> Tensor:
    with torch.autocast(DEVICE, dtype=amp, enabled=amp is not None):
        logits = net(ids)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()) / batches


def attached(net: Net, **options: Any) -> Streamer:
    defaults = {"device": DEVICE, "poison": True, "resident_below": 1024, "host_memory": 1 << 40}
    return attach(net, **{**defaults, **options})


def train(
    net: Net,
    updates: Any,
    *,
    overlap: bool,
    amp: torch.dtype | None = None,
    batches: int = 1,
    run_on: bool = True,
    steps: int = 4,
    together: bool = False,
    after: Callable[[Any, int], None] = lambda optimizer, step: None,
    **options: Any,
) -> dict[str, Any]:
    """Losses, weights and state after some steps; overlapped, or over published gradients by the reference."""
    engine = attached(net, updates=updates, **options)
    engine.updates.run_on = run_on
    engine.conservative = not overlap
    there = {weight.parameter for group in engine.updates._places.device for weight in group.weights}
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], **OPTIONS)
    reference = None if overlap else Reference(engine, there)
    runner = MicrobatchRunner(engine, lambda: engine.updates.begin(optimizer), engine.updates.end)
    losses: list[Tensor] = []
    try:
        for step in range(steps):
            torch.manual_seed(step)
            inputs = [batch(step, index) for index in range(batches)]
            if together and overlap:
                result = runner.train(
                    lambda ids: forward(net, ids, amp, batches), inputs, lambda loss, _: (loss, None), step=step
                )
                losses += result.outputs
                for parameter, gradient in result.gradients.items():
                    parameter.grad = gradient
            else:
                for index, ids in enumerate(inputs):
                    loss = forward(net, ids, amp, batches)
                    if overlap and index == batches - 1:
                        with engine.updates.overlap(optimizer):
                            loss.backward()
                    else:
                        loss.backward()
                    losses.append(loss.detach())
            if reference is None:
                optimizer.step()
                optimizer.zero_grad()
                engine.refresh()
                after(optimizer, step)
            else:
                reference.step()
        engine.updates.wait()
        if reference is None:
            trained = [g for g in engine.updates._places.device if any(w.parameter.requires_grad for w in g.weights)]
            assert engine.updates.on_device.updated == steps * len(trained)
            slots = device_updates.PIECES * 4 * PIECE_BYTES
            assert engine.updates.on_device.device_bytes() == (slots if trained else 0)
            for parameter in there:
                state = optimizer.state.get(parameter, {})
                assert all(state[key].is_pinned() for key in state if key != "step" and DEVICE == "cuda")
        state = copy.deepcopy(optimizer.state_dict()["state"]) if reference is None else reference.state()
    finally:
        runner.close()
        engine.close()
    return {"losses": losses, "weights": {n: p.detach().clone() for n, p in net.named_parameters()}, "state": state}


def same(kind: str = "plain", updates: Any = 1.0, **options: Any) -> None:
    torch.manual_seed(0)
    net = Net(MODELS[kind])
    twin = copy.deepcopy(net)
    found = train(net, updates, overlap=True, **options)
    for own in ("after", "together"):
        options.pop(own, None)
    assert_same(found, train(twin, updates, overlap=False, **options))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_results_are_those_of_the_fused_optimizer_on_the_gpu(
    window: int, activations: str, amp: torch.dtype | None
) -> None:
    same(window=window, activations=activations, amp=amp)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "frozen"])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_every_model_is_updated_the_same(kind: str, activations: str) -> None:
    same(kind, activations=activations, amp=torch.bfloat16)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("updates", [0.3, 0.6, ["blocks.1", "blocks.4"]], ids=str)
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_host_and_gpu_update_side_by_side(amp: torch.dtype | None, updates: Any) -> None:
    same(updates=updates, amp=amp)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("run_on", [True, False])
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_accumulated_gradients_are_updated_the_same(amp: torch.dtype | None, run_on: bool) -> None:
    same(batches=3, amp=amp, run_on=run_on)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2])
def test_microbatches_through_each_chunk_together_are_updated_the_same(window: int, amp: torch.dtype | None) -> None:
    same(batches=3, together=True, amp=amp, window=window)


def test_state_that_was_loaded_is_used() -> None:
    def load(optimizer: Any, step: int) -> None:
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    same(after=load, run_on=False, amp=torch.bfloat16)


def test_memory_on_the_gpu_is_that_of_the_pieces_and_of_the_gradients_that_wait() -> None:
    """Beside the same steps over published gradients, where up to two chunks' gradients wait for their copies.

    A number for the step of each piece comes on top, and what the allocator rounds up.
    """
    peaks = []
    for updates, overlap in ((1.0, True), ("host", False)):
        torch.manual_seed(0)
        net = Net(MODELS["plain"])
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(net, updates, overlap=overlap, amp=torch.bfloat16, steps=2)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    largest = max(sum(p.numel() for p in block.parameters()) for block in net.blocks)
    waiting = device_updates.MOST_WAITING * 4 * largest
    assert peaks[0] <= peaks[1] + waiting + device_updates.PIECES * 4 * PIECE_BYTES + (1 << 20)


def test_an_error_in_backward_is_survived() -> None:
    net = Net(MODELS["plain"])
    engine = attached(net, updates=1.0)
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)

    def fail(_grad: Tensor) -> None:
        raise KeyError("from a hook")

    hook = net.blocks[2].register_forward_hook(lambda _module, _args, out: out.register_hook(fail) and None)
    loss = forward(net, batch(0, 0), None, 1)
    with pytest.raises(KeyError, match="from a hook"), engine.updates.overlap(optimizer):
        loss.backward()
    hook.remove()
    optimizer.zero_grad()
    loss = forward(net, batch(1, 0), None, 1)
    with engine.updates.overlap(optimizer):
        loss.backward()
    optimizer.step()
    engine.updates.wait()
    assert not any(map(engine.updates.is_pending, engine.groups))
    engine.close()
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())
