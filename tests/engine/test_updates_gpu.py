"""Overlapped updates on a GPU: against the resident run with the same optimizer on the host, bit for bit.

Slots are poisoned and a long kernel runs in front of each chunk; the updating thread is slowed down in turn, so that
both orders of "gradients arrive" and "the weights are needed again" come up.
"""

import copy
import os
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.nn.functional as F
from stream_gpu_cases import MODELS, Net

from ramtorch_core import MicrobatchRunner, attach
from ramtorch_core.optim import updater
from ramtorch_core.optim.ahead import Undo

DEVICE = "cuda"

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.fixture(params=[0.0, 0.01], ids=["fast", "slow"])
def update_seconds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group's update begins this much later."""
    update = updater.update

    def delayed(*args: object, **kwargs: object) -> None:
        time.sleep(request.param)
        update(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(updater, "update", delayed)


def train(
    net: Net,
    *,
    overlap: bool,
    amp: torch.dtype | None,
    batches: int = 1,
    clip: float | Sequence[float] | None = None,
    run_on: bool = True,
    steps: int = 5,
    ahead_bytes: int | None = None,
    **options: object,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, object]]:
    """Losses, norms where gradients are clipped, weights and optimizer state after some steps of streamed training."""
    engine = attach(net, device=DEVICE, poison=True, resident_below=1024, host_memory=1 << 40, **options)  # type: ignore[arg-type]
    engine.conservative, engine.updates.run_on = False, run_on
    engine.updates.ahead_bytes = ahead_bytes
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3, fused=True)
    losses = []
    try:
        for step in range(steps):
            optimizer.zero_grad()
            for batch in range(batches):
                generator = torch.Generator().manual_seed(100 * step + batch)
                ids = torch.randint(512, (4, 32), generator=generator).to(DEVICE)
                torch.manual_seed(step)
                with torch.autocast("cuda", dtype=amp, enabled=amp is not None):
                    logits = net(ids)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()) / batches
                if overlap and batch == batches - 1:
                    with engine.updates.overlap(optimizer, hold=clip is not None):
                        loss.backward()
                else:
                    loss.backward()
                losses.append(loss.detach())
            if clip is not None:
                limit = clip if isinstance(clip, float) else clip[step]
                losses.append(engine.updates.clip(net.parameters(), limit))
            optimizer.step()
            engine.refresh()
        engine.updates.wait()
        if overlap:
            trained = [group for group in engine.groups if any(w.parameter.requires_grad for w in group.weights)]
            assert engine.updates.updated == steps * len(trained)
        state = copy.deepcopy(optimizer.state_dict())
    finally:
        engine.close()
    return losses, {name: p.detach().clone() for name, p in net.named_parameters()}, state


def assert_equal(ours: object, theirs: object) -> None:
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()  # type: ignore[attr-defined]
        for key, value in ours.items():
            assert_equal(value, theirs[key])  # type: ignore[index]
    elif isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):  # type: ignore[call-overload]
            assert_equal(one, other)
    else:
        assert ours == theirs


def same(kind: str = "plain", **options: object) -> None:
    """Overlapped and published training give the same bits."""
    torch.manual_seed(0)
    net = Net(MODELS[kind])
    published, overlapped = copy.deepcopy(net), copy.deepcopy(net)
    assert_equal(
        train(overlapped, overlap=True, **options),  # type: ignore[arg-type]
        train(published, overlap=False, **options),  # type: ignore[arg-type]
    )


@pytest.mark.usefixtures("update_seconds")
@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_updates_while_backward_runs_give_the_same_bits(
    window: int, activations: str, amp: torch.dtype | None, kernel: str
) -> None:
    same(window=window, activations=activations, amp=amp, kernel=kernel)


@pytest.mark.gpu(2)
@pytest.mark.usefixtures("update_seconds")
def test_updates_beside_a_device_that_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", "cuda:1")
    assert torch.cuda.current_device() == 0
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    same(amp=torch.bfloat16)
    assert torch.cuda.max_memory_allocated(0) == before


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_every_model_is_updated_the_same(kind: str, activations: str) -> None:
    same(kind, activations=activations, amp=torch.bfloat16)


@pytest.mark.usefixtures("update_seconds")
@pytest.mark.parametrize("run_on", [True, False])
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_accumulated_gradients_are_updated_the_same(amp: torch.dtype | None, run_on: bool) -> None:
    same(batches=3, amp=amp, run_on=run_on)


@pytest.mark.usefixtures("update_seconds")
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipped_updates_differ_by_rounding_of_the_norm_only(max_norm: float) -> None:
    """The norms of gradients that are not published are computed on the GPU."""
    torch.manual_seed(0)
    net = Net(MODELS["plain"])
    published, overlapped = copy.deepcopy(net), copy.deepcopy(net)
    ours = train(overlapped, overlap=True, amp=None, clip=max_norm, steps=2)[1]
    theirs = train(published, overlap=False, amp=None, clip=max_norm, steps=2)[1]
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("update_seconds")
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_updates_that_run_ahead_of_the_norm_have_the_bits_of_those_that_wait(
    amp: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 2 and 5 are clipped: what has run ahead by then is undone, and in the steps after them updates wait."""
    torch.manual_seed(0)
    net = Net(MODELS["plain"])
    restored: list[Undo] = []
    restore = Undo.restore
    monkeypatch.setattr(Undo, "restore", lambda undo: (restored.append(undo), restore(undo)))

    def run(ahead_bytes: int) -> object:
        limits = [1e9, 1e9, 1e-3] * 3
        return train(copy.deepcopy(net), overlap=True, amp=amp, clip=limits, steps=8, ahead_bytes=ahead_bytes)

    waiting = run(0)
    assert not restored
    for nbytes in (1 << 30, 6 * sum(p.numel() for p in net.parameters())):
        assert_equal(run(nbytes), waiting)
    assert restored


def train_microbatches(
    net: Net, *, overlap: bool, amp: torch.dtype | None, batches: int = 3, steps: int = 4, **options: object
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, object]]:
    """As `train`, the batches of a step being microbatches that go through the chunks together."""
    engine = attach(net, device=DEVICE, poison=True, resident_below=1024, host_memory=1 << 40, **options)  # type: ignore[arg-type]
    engine.conservative, engine.updates.run_on = False, True
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3, fused=True)
    begin = (lambda: engine.updates.begin(optimizer)) if overlap else (lambda: None)
    runner = MicrobatchRunner(engine, begin, engine.updates.end)
    losses: list[torch.Tensor] = []

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=amp, enabled=amp is not None):
            logits = net(ids)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()) / batches

    try:
        for step in range(steps):
            optimizer.zero_grad()
            generators = [torch.Generator().manual_seed(100 * step + batch) for batch in range(batches)]
            ids = [torch.randint(512, (4, 32), generator=generator).to(DEVICE) for generator in generators]
            result = runner.train(forward, ids, lambda loss, _microbatch: (loss, None), step=step)
            losses += result.outputs
            for parameter, gradient in result.gradients.items():
                parameter.grad = gradient
            optimizer.step()
            engine.refresh()
        engine.updates.wait()
        assert len(engine.follower.last[1]) < 2 * len(engine.groups), "weights crossed for every microbatch"
        state = copy.deepcopy(optimizer.state_dict())
    finally:
        runner.close()
        engine.close()
    return losses, {name: p.detach().clone() for name, p in net.named_parameters()}, state


@pytest.mark.usefixtures("update_seconds")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_microbatches_through_each_chunk_together_equal_accumulated_ones(
    activations: str, window: int, amp: torch.dtype | None, overlap: bool
) -> None:
    torch.manual_seed(0)
    net = Net(MODELS["plain"])
    accumulated, together = copy.deepcopy(net), copy.deepcopy(net)
    assert_equal(
        train_microbatches(together, overlap=overlap, amp=amp, window=window, activations=activations),
        train(accumulated, overlap=False, amp=amp, batches=3, steps=4, window=window, activations=activations),
    )


def test_an_error_in_backward_is_survived() -> None:
    net = Net(MODELS["plain"])
    engine = attach(net, device=DEVICE, poison=True, resident_below=1024, host_memory=1 << 40)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(512, (4, 32)).to(DEVICE)

    def fail(_grad: torch.Tensor) -> None:
        raise KeyError("from a hook")

    hook = net.blocks[2].register_forward_hook(lambda _module, _args, out: out.register_hook(fail) and None)
    with pytest.raises(KeyError, match="from a hook"), engine.updates.overlap(optimizer):
        net(ids).sum().backward()
    hook.remove()
    optimizer.zero_grad()
    with engine.updates.overlap(optimizer):
        net(ids).float().logsumexp(-1).mean().backward()
    optimizer.step()
    assert not any(map(engine.updates.is_pending, engine.groups))
    engine.close()
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())
