"""The thread that updates on the device: bits, order, waiting, memory, errors and the end."""

import copy
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from device_updates_cases import LIMIT, Late, Occasion, small_pieces
from stream_cases import assert_same
from torch import nn

from ramtorch_core.memory.device import COMPLETE, Device
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.optim import device_updates
from ramtorch_core.optim.device_updates import DeviceUpdater, updates_on_device
from ramtorch_core.optim.pieces import Route
from ramtorch_core.optim.steps import Recipe, WeightUpdate
from ramtorch_core.optim.updater import GroupUpdate, Updater

__all__ = ["small_pieces"]

SIZES = [(1,), (7,), (64,), (65,), (3, 50), (1000,), (2, 3, 4, 5), (0,)]
BLOCKS = sum(-(-math.prod(size) // 64) for size in SIZES)  # which are the pieces of a group here


class Work:
    """Groups of weights of all sizes, their optimizer, and the plain optimizer's twins of them."""

    def __init__(self, device: Device, count: int = 2, shadow: torch.dtype = torch.float32, **options: Any) -> None:
        self.device, self.transfer = device, None
        self.updater = DeviceUpdater(device, lambda: self.transfer)
        self.groups: list[WeightGroup] = []
        for index in range(count):
            parameters = [nn.Parameter(torch.randn(size)) for size in SIZES]
            group = WeightGroup(index, str(index), [Weight(f"{index}.{i}", p, ()) for i, p in enumerate(parameters)])
            group.build([shadow] * len(SIZES), device)
            self.groups.append(group)
        self.parameters = [weight.parameter for group in self.groups for weight in group.weights]
        self.plain = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        options = {"lr": 0.01, "fused": True, **options}
        kind = options.pop("kind", torch.optim.AdamW)
        self.optimizer, self.other = kind(self.parameters, **options), kind(self.plain, **options)
        self.finished: list[int] = []

    def begin(self) -> None:
        self.updater.begin(None)
        self.recipe = Recipe(self.optimizer)

    def submit(
        self, index: int, *, dtype: torch.dtype = torch.float32, earlier: bool = False, arrived: Any = COMPLETE
    ) -> None:
        """Update this group, and its twin, with random gradients."""
        group, updates = self.groups[index], []
        twins = dict(zip(self.parameters, self.plain, strict=True))
        for weight in group.weights:
            grad = torch.randn(weight.parameter.numel()).to(dtype)
            before = torch.randn(weight.parameter.numel()) if earlier else None
            updates.append(WeightUpdate(weight, grad, self.recipe, before))
            total = grad.float() if before is None else before + grad
            twins[weight.parameter].grad = total.view(weight.size).clone()
        self.updater.submit(GroupUpdate(group, updates, arrived, lambda: self.finished.append(index)))

    def compare(self) -> None:
        self.updater.wait()
        self.other.step()
        self.other.zero_grad()
        assert_same([p.detach() for p in self.parameters], [p.detach() for p in self.plain])
        assert_same(self.optimizer.state_dict(), self.other.state_dict())
        for group in self.groups:
            for weight in group.weights:
                assert torch.equal(weight.shadow, weight.parameter.detach().to(weight.dtype))
                assert not weight.written(look=True)


def opened(**options: Any) -> Iterator[Work]:
    torch.manual_seed(1)
    made = Work(**{"device": Device("cpu"), **options})
    yield made
    made.updater.close()


@pytest.fixture
def work() -> Iterator[Work]:
    yield from opened()


@pytest.fixture
def late() -> Iterator[Work]:
    """Nothing is back before a test lets it be."""
    yield from opened(device=Late(), count=6)


OPTIMIZERS: list[dict[str, Any]] = [
    {"kind": torch.optim.AdamW, "weight_decay": 0.1},
    {"kind": torch.optim.Adam, "weight_decay": 0.1},
    {"kind": torch.optim.Adam, "weight_decay": 0.1, "decoupled_weight_decay": True},
    {"kind": torch.optim.AdamW, "lr": torch.tensor(0.02), "betas": (0.8, 0.9)},
]


@pytest.mark.parametrize("options", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("shadow", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("piece_bytes", [256, 1024, 1 << 20])
def test_results_are_those_of_the_fused_optimizer(
    options: dict[str, Any], shadow: torch.dtype, piece_bytes: int
) -> None:
    for work in opened(shadow=shadow, **options):
        work.updater.piece_bytes = piece_bytes
        for index in range(3):
            work.begin()
            work.submit(1, dtype=(torch.float32, torch.bfloat16)[index % 2])
            work.submit(0, dtype=torch.bfloat16, earlier=index > 0)
            work.compare()
        assert work.updater.updated == 6
        assert work.updater.device_bytes() == device_updates.PIECES * 4 * piece_bytes


def test_groups_of_parameters_keep_their_options(work: Work) -> None:
    for optimizer, parameters in ((work.optimizer, work.parameters), (work.other, work.plain)):
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": parameters[::2], "lr": 0.1})
        optimizer.add_param_group({"params": parameters[1::2], "weight_decay": 0.5})
    work.begin()
    work.submit(0)
    work.submit(1)
    work.compare()


def test_weights_and_state_that_were_replaced_are_moved_by_value(work: Work) -> None:
    for index in range(4):
        if index == 1:
            saved = copy.deepcopy(work.optimizer.state_dict()), copy.deepcopy(work.other.state_dict())
        if index == 3:
            work.optimizer.load_state_dict(saved[0])
            work.other.load_state_dict(saved[1])
        work.begin()
        work.submit(0)
        work.submit(1)
        work.compare()
        for parameter in work.parameters:
            for name in ("exp_avg", "exp_avg_sq"):
                moment = work.optimizer.state[parameter][name]
                assert moment.untyped_storage().nbytes() == moment.nbytes


def test_state_that_somebody_keeps_is_not_written_again_when_other_state_was_loaded(work: Work) -> None:
    work.begin()
    work.submit(0)
    work.compare()
    kept = {index: dict(state) for index, state in work.optimizer.state_dict()["state"].items()}
    values = copy.deepcopy(kept)
    work.optimizer.load_state_dict(copy.deepcopy(work.optimizer.state_dict()))
    work.begin()
    work.submit(0)
    work.compare()
    assert_same(kept, values)


def test_a_master_that_was_pointed_at_other_memory_is_updated_there_and_counts_as_written(work: Work) -> None:
    moved = work.parameters[5]
    moved.data = moved.data.clone()
    work.begin()
    work.submit(0)
    work.updater.wait()
    assert [weight.parameter for weight in work.groups[0].refresh()] == [moved]
    work.compare()


def test_a_group_is_pending_until_everything_is_back(late: Work) -> None:
    late.begin()
    late.submit(0)
    made = late.device.made
    for index in range(BLOCKS):
        late.device.wait_for(min(index + device_updates.PIECES, BLOCKS))
        assert late.updater.is_pending(late.groups[0])
        if index < BLOCKS - 1:
            made[index].happen()
    assert made[-1].awaited.wait(LIMIT)
    assert not late.finished
    made[-1].happen()
    late.updater.wait()
    assert late.finished == [0]
    assert len(made) == BLOCKS


def test_no_more_pieces_than_slots_are_on_their_way(late: Work) -> None:
    late.begin()
    late.submit(0)
    made = late.device.made
    for index in range(10):
        assert len(made) <= index + device_updates.PIECES
        late.device.wait_for(index + device_updates.PIECES)
        assert made[index].awaited.wait(LIMIT)
        made[index].happen()
    release(late)


def test_a_backward_waits_when_too_many_groups_gradients_wait_on_the_device(late: Work) -> None:
    late.begin()
    for index in range(device_updates.MOST_WAITING):
        late.submit(index)
    submitted = threading.Event()
    one_more = threading.Thread(target=lambda: (late.submit(5), submitted.set()), name="submits")
    one_more.start()
    assert not submitted.wait(0.05)
    stop = release(late, wait=False)
    one_more.join(LIMIT)
    assert submitted.is_set()
    stop()
    late.updater.wait()


def test_after_backward_the_lowest_group_goes_first(late: Work) -> None:
    late.begin()
    late.submit(3)
    late.device.wait_for(1)
    late.submit(2)
    late.submit(1)
    late.updater.backward_over()
    release(late)
    assert late.updater.order == [3, 1, 2]


def test_what_is_dropped_between_looking_and_taking_keeps_nobody_waiting(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread sees a group in the queue, which is dropped then: what it has sent must still be finished."""
    take, dropping = Updater._next, threading.Thread(target=work.updater.drop, name="drops")

    def interrupted(self: Updater) -> Any:
        if work.updater._sent and self._queue:
            dropping.start()
            dropping.join(0.1)  # over at once, but for the group that was sent
        return take(self)

    monkeypatch.setattr(Updater, "_next", interrupted)
    with work.updater._changed:
        work.begin()
        work.submit(0)
        work.submit(1)
    deadline = threading.Event()
    while not dropping.ident and not deadline.wait(0.001):
        pass
    dropping.join(LIMIT)
    assert not dropping.is_alive()
    assert sorted(work.finished) == [0, 1]


def test_a_piece_waits_while_a_copy_of_weights_is_under_way(work: Work) -> None:
    work.transfer = Occasion()
    work.begin()
    work.submit(0)
    assert work.transfer.awaited.wait(LIMIT)
    assert work.updater._route is not None
    assert work.updater._route._turn == 0
    work.transfer.happen()
    work.compare()


@pytest.mark.parametrize("piece", [0, 4])
def test_an_error_is_raised_once_and_gradients_are_given_back(
    work: Work, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.begin()
    work.submit(1)
    work.compare()
    update, calls = Route._update, iter(range(100))

    def fail(self: Any, slot: Any, slices: Sequence[Any], *options: Any) -> None:
        if next(calls) == piece:
            raise ZeroDivisionError
        update(self, slot, slices, *options)

    with monkeypatch.context() as patch:
        patch.setattr(Route, "_update", fail)
        work.submit(0)
        with pytest.raises(ZeroDivisionError):
            work.updater.wait()
    work.updater.wait()
    assert work.finished == [1, 0]
    assert not work.updater.is_pending(work.groups[0])
    for parameter in work.groups[0].weights:
        work.optimizer.state.pop(parameter.parameter, None)
    with torch.no_grad():
        for one, other in zip(work.parameters, work.plain, strict=True):
            one.copy_(other)
    for group in work.groups:
        group.refresh(force=True)
    work.other.zero_grad()
    work.begin()
    work.submit(0)
    work.submit(1)
    work.compare()


def test_close_finishes_what_was_submitted_and_gives_memory_back(work: Work) -> None:
    work.begin()
    work.submit(0)
    work.submit(1)
    work.updater.close()
    work.updater.close()
    assert work.finished == [0, 1]
    assert work.updater.device_bytes() == 0
    work.compare()
    assert not [thread for thread in threading.enumerate() if thread.name == "ramtorch-device-updater"]


def test_what_the_fused_kernel_does_not_do_in_float32_is_left_to_the_host() -> None:
    def suits(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> bool:
        weight = Weight("w", nn.Parameter(torch.zeros(8, dtype=dtype)), ())
        WeightGroup(0, "g", [weight]).build([dtype], Device("cpu"))
        return updates_on_device(Recipe(kind([weight.parameter], lr=0.1, **options)), weight)

    class Own(torch.optim.AdamW):
        update_granularity = "element"

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Inherits(torch.optim.AdamW):
        pass

    assert suits(torch.optim.AdamW)
    assert suits(torch.optim.Adam)
    assert suits(Inherits)
    assert not suits(torch.optim.AdamW, torch.bfloat16)
    assert not suits(torch.optim.AdamW, amsgrad=True)
    assert not suits(torch.optim.AdamW, maximize=True)
    assert not suits(torch.optim.SGD)
    assert not suits(Own)


def release(work: Work, *, wait: bool = True) -> Any:
    """Let everything come back, now and from now on."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.001):
            for occasion in list(work.device.made):
                occasion.happen()

    thread = threading.Thread(target=run, name="lets copies happen")
    thread.start()

    def stop() -> None:
        work.updater.wait()
        ended.set()
        thread.join()

    if wait:
        stop()
    return stop


def test_gradients_in_another_memory_order_are_flattened_in_that_of_the_master() -> None:
    weight = Weight("w", nn.Parameter(torch.zeros(4, 6).T), ())
    grad = torch.arange(24.0).view(6, 4)
    flat = weight.flatten(grad)
    assert torch.equal(torch.as_strided(flat, (6, 4), weight.stride), grad)
    same = torch.arange(48.0).view(2, 4, 6)[1].T
    assert weight.flatten(same).data_ptr() == same.data_ptr()
