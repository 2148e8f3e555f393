"""What overlapped updates refuse, how much memory they take, and several engines at once."""

import copy
import threading
from typing import Any

import pytest
import torch
from stream_cases import Stack, assert_same, data, descend, stack, state_of, streaming
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from updates_cases import backward, plain_steps, step, training, weights

from ramtorch_core import ConfigurationError, RamtorchError, attach
from ramtorch_core.memory import staging as staging_module
from ramtorch_core.memory.device import Device
from ramtorch_core.optim import ahead


def two_backwards(model: nn.Module) -> None:
    for index in range(2):
        model(data(index)).square().mean().backward()


def test_two_backwards_in_one_overlap_raise() -> None:
    with training() as (engine, optimizer):
        with (
            pytest.raises(RamtorchError, match="used again after its gradients were taken"),
            engine.updates.overlap(optimizer),
        ):
            two_backwards(engine.root)
        optimizer.zero_grad()
        step(engine, optimizer)


def test_a_gradient_from_outside_that_comes_after_the_update_raises() -> None:
    with training() as (engine, optimizer):
        penalty = engine.root.blocks[3].up.weight.sum()
        loss = engine.root(data()).square().mean() + penalty
        with pytest.raises(RamtorchError, match="got a gradient from outside"), engine.updates.overlap(optimizer):
            loss.backward()
        optimizer.zero_grad()
        step(engine, optimizer)


def test_clipping_what_was_not_held_raises() -> None:
    with training() as (engine, optimizer):
        backward(engine, optimizer)
        with pytest.raises(RamtorchError, match="hold=True"):
            engine.updates.clip(engine.root.parameters(), 1.0)
        optimizer.step()
        descend(engine.root, optimizer, 1)
        engine.updates.clip(engine.root.parameters(), 1.0)


def test_clipping_a_part_of_what_is_held_raises() -> None:
    with training() as (engine, optimizer):
        backward(engine, optimizer, hold=True)
        with pytest.raises(RamtorchError, match="clip all parameters"):
            engine.updates.clip(engine.root.blocks[0].parameters(), 1.0)
        engine.updates.clip(engine.root.parameters(), 1.0)
        with pytest.raises(RamtorchError, match="clip once"):
            engine.updates.clip(engine.root.parameters(), 1.0)


def test_a_published_step_after_an_overlapped_one_forgets_its_norms_and_is_seen() -> None:
    """Fused kernels do not count versions, so what was taken the step before must not count as written by updates."""
    torch.manual_seed(0)
    with training(lambda p: torch.optim.SGD(p, lr=0.1, fused=True), stream_dtype=torch.float32) as (engine, optimizer):
        model = copy.deepcopy(engine.root)
        other = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        for index in range(4):
            for net, chosen in ((engine.root, optimizer), (model, other)):
                chosen.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = net(data(index)).float().square().mean()
                if net is engine.root and index % 2 == 0:
                    with engine.updates.overlap(chosen, hold=True):
                        loss.backward()
                else:
                    loss.backward()
                if net is engine.root:
                    engine.updates.clip(net.parameters(), 0.05)
                else:
                    nn.utils.clip_grad_norm_(net.parameters(), 0.05)
                chosen.step()
            engine.updates.wait()
            assert_same(weights(engine.root), weights(model))


@pytest.mark.parametrize("change", ["hook", "pre-hook of all", "step", "kind"])
def test_an_optimizer_that_cannot_be_divided_is_refused_with_the_reason(change: str) -> None:
    with training() as (engine, optimizer):
        handle: Any = None
        if change == "hook":
            optimizer.register_step_post_hook(lambda *_: None)
        elif change == "pre-hook of all":
            handle = register_optimizer_step_pre_hook(lambda *_: None)
        elif change == "step":
            optimizer.step = lambda closure=None: None
        else:
            optimizer = torch.optim.LBFGS(engine.root.parameters())
        try:
            with pytest.raises(ConfigurationError, match="updates cannot overlap"), engine.updates.overlap(optimizer):
                pass
        finally:
            if handle is not None:
                handle.remove()


@pytest.mark.parametrize("hold", [True, False])
def test_two_engines_step_side_by_side(hold: bool) -> None:
    with training() as (one, first), training() as (other, second):
        for index in range(3):
            backward(one, first, index, hold=hold)
            backward(other, second, index, hold=hold)
            first.step()
            second.step()
        one.updates.wait()
        assert one.updates.updater.updated == other.updates.updater.updated == 12
    expected = plain_steps(lambda p: torch.optim.AdamW(p, lr=0.01), 0, 1, 2)
    assert_same(weights(one.root), expected)
    assert_same(weights(other.root), expected)


def test_the_step_of_another_optimizer_does_not_release_what_is_held() -> None:
    with training() as (engine, optimizer):
        before = weights(engine.root)
        backward(engine, optimizer, hold=True)
        stranger = nn.Parameter(torch.ones(1))
        stranger.grad = torch.ones(1)
        torch.optim.SGD([stranger], lr=0.1).step()
        engine.updates.wait()
        assert_same(weights(engine.root), before)
        optimizer.step()
    assert_same(weights(engine.root), plain_steps(lambda p: torch.optim.AdamW(p, lr=0.01), 0))


def test_staging_is_bounded_and_every_buffer_comes_back() -> None:
    torch.manual_seed(0)
    with streaming(stack(9), kernel="torch") as engine:
        optimizer = torch.optim.AdamW(engine.root.parameters())
        for index in range(3):
            step(engine, optimizer, index)
            largest = max(group.nbytes for group in engine.groups)
            (staging,) = engine.updates._staging.values()
            assert len(staging._free) == staging.allocated <= staging_module.STAGING_BUFFERS
            assert engine.updates.host_bytes() <= staging_module.STAGING_BUFFERS * largest


@pytest.mark.parametrize("batches", [1, 2])
def test_the_updating_thread_sleeps_while_it_waits_for_gradients(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = []

    class Noted:
        def __init__(self, blocking: bool) -> None:
            self.blocking = blocking

        def synchronize(self) -> None:
            if threading.current_thread().name == "ramtorch-updater":
                sleeps.append(self.blocking)

        def query(self) -> bool:
            return True

    monkeypatch.setattr(Device, "record", lambda self, stream=None, *, blocking=False: Noted(blocking))
    torch.manual_seed(0)
    with streaming(stack(3), kernel="torch") as engine:
        optimizer = torch.optim.AdamW(engine.root.parameters())
        for index in range(batches - 1):
            engine.root(data(index)).square().mean().backward()
        step(engine, optimizer, batches)
    assert sleeps == [True] * 6  # for the gradients of each chunk, and for the last copy of its weights


def test_held_updates_take_as_much_memory_as_their_gradients_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "available_bytes", lambda: None)

    class Uneven(Stack):
        pass

    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8))
    with streaming(Uneven(wide, *(nn.Linear(8, 8) for _ in range(6))), kernel="torch") as engine:
        optimizer = torch.optim.AdamW(engine.root.parameters())
        parameters = sum(parameter.numel() for parameter in engine.root.parameters())
        for index in range(3):
            backward(engine, optimizer, index, hold=True)
            copies = ahead.BYTES * parameters if index == 2 else 0  # in the step before, the factor was 1
            assert 0 < engine.updates.host_bytes() - copies <= sum(group.nbytes for group in engine.groups)
            engine.updates.clip(engine.root.parameters(), 1e-3 if index == 0 else 1e3)
            optimizer.step()


@pytest.mark.parametrize("what", ["model", "state"])
def test_a_model_whose_updates_run_can_be_copied_once_they_are_awaited(what: str) -> None:
    with training() as (engine, optimizer):
        engine.updates.run_on = True
        backward(engine, optimizer)
        optimizer.step()
        engine.updates.wait()
        copied = copy.deepcopy(engine.root if what == "model" else optimizer.state_dict())
        if what == "model":
            assert_same(state_of(copied), state_of(engine.root))
        step(engine, optimizer, 1)


def test_compiled_blocks_wait_for_their_updates() -> None:
    torch.manual_seed(0)
    model = stack(3)
    for block in model.blocks:
        block.compile(backend="eager")
    engine = attach(model, device="cpu", resident_below=0, chunks="blocks.*", kernel="torch")
    engine.updates.run_on = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index in range(3):
        backward(engine, optimizer, index)
        optimizer.step()
    engine.close()
    torch.manual_seed(0)
    plain = stack(3)
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for index in range(3):
        descend(plain, other, index)
    assert_same(weights(model), weights(plain))
