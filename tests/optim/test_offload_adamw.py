"""AdamW through a device: the bits of torch's fused AdamW there, in pieces, with state that is torch's own."""

import copy
import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_cases import Classifier, Watched, fit
from stream_cases import assert_same, data
from torch import Tensor, nn

from ramtorch_core import OffloadAdamW, why_whole
from ramtorch_core.memory.device import Device
from ramtorch_core.optim.offload_adamw import SLOTS
from ramtorch_core.optim.pieces import Row, Slice, cut

SIZES = [(1,), (7,), (64,), (65,), (3, 50), (1000,), (2, 3, 4, 5), (0,)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def ours(params: Any, *, piece_bytes: int = 512, **options: Any) -> OffloadAdamW:
    return OffloadAdamW(params, lr=1e-2, betas=(0.8, 0.9), device="cpu", piece_bytes=piece_bytes, **options)


def theirs(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.9), fused=True, **options)


def train(optimizer: torch.optim.Optimizer, steps: range = range(4), skip: bool = False) -> None:
    """Gradients depend on the number of the step; with `skip`, every third parameter has none at first."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            grad = torch.randn(p.size(), generator=generator).to(p.dtype)
            p.grad = None if skip and step == 0 and index % 3 == 0 else grad
        optimizer.step()


def record(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy({"weights": weights, "state": optimizer.state_dict()["state"]})


@pytest.mark.parametrize("piece_bytes", [256, 512, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.0}], ids=str)
def test_it_gives_the_bits_of_the_fused_adamw(piece_bytes: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    expected, found = theirs(parameters(dtype), **options), ours(parameters(dtype), piece_bytes=piece_bytes, **options)
    for optimizer in (expected, found):
        train(optimizer, skip=True)
    assert_same(record(found), record(expected))
    assert found.device_bytes() == SLOTS * piece_bytes * (5 if "amsgrad" in options else 4)


def test_groups_keep_their_options_and_dtypes_mix() -> None:
    def groups() -> list[dict[str, Any]]:
        first, second = parameters(), parameters(torch.bfloat16)
        return [{"params": first[:3] + second[:3], "lr": 1e-3}, {"params": first[3:], "amsgrad": True}]

    expected, found = theirs(groups()), ours(groups())
    for optimizer in (expected, found):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        train(optimizer, range(2))
        scheduler.step()
        train(optimizer, range(2, 4))
    assert_same(record(found), record(expected))


def test_parameters_in_any_memory_order_are_updated() -> None:
    """Also one with gaps, whose memory afterwards is its own, and gradients in another order.

    (torch's fused kernel takes it that orders agree, so it is given contiguous ones. 24 elements are whole vectors.)
    """
    tensors = [data(0, 6, 4).T, data(1, 4, 12)[:, ::2], data(2, 4, 6)]
    expected = theirs([nn.Parameter(tensor.contiguous().clone()) for tensor in tensors])
    found = ours([nn.Parameter(tensor) for tensor in tensors])
    for step, optimizer in itertools.product(range(3), (expected, found)):
        for index, p in enumerate(optimizer.param_groups[0]["params"]):
            grad = data(10 * step + index, 4, 6)
            p.grad = grad.T.contiguous().T if optimizer is found and step == 0 else grad
        optimizer.step()
    assert_same(record(found)["weights"], record(expected)["weights"])


@pytest.mark.parametrize("makers", list(itertools.product([ours, theirs], repeat=2)))
def test_state_goes_over_to_the_plain_adamw_and_back(makers: tuple[Any, Any]) -> None:
    first = makers[0](parameters())
    train(first, range(2))
    weights = [p.detach().clone() for p in first.param_groups[0]["params"]]
    second = makers[1]([nn.Parameter(weight) for weight in weights])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, range(2, 4))
    expected = theirs(parameters())
    train(expected)
    assert_same(record(second), record(expected))


def test_weights_and_state_may_be_replaced_between_steps() -> None:
    expected, found = theirs(parameters()), ours(parameters())
    for optimizer in (expected, found):
        train(optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        for p in optimizer.param_groups[0]["params"]:
            p.data = p.data.clone() * 2
        train(optimizer, range(2, 3))
        optimizer.load_state_dict(saved)
        train(optimizer, range(3, 4))
    assert_same(record(found), record(expected))
    twin = copy.deepcopy(found)
    train(twin, range(4, 5))
    train(expected, range(4, 5))
    assert_same(record(twin), record(expected))


def test_memory_stays_where_it_is_after_the_first_step_and_identity_is_kept() -> None:
    optimizer = ours(params := parameters())
    identities = [id(p) for p in params]
    train(optimizer, range(1))

    def addresses() -> list[int]:
        state = [optimizer.state[p][name].data_ptr() for p in params[:-1] for name in ("exp_avg", "exp_avg_sq")]
        return [*(p.data_ptr() for p in params), *state]

    before = addresses()
    train(optimizer, range(1, 3))
    assert addresses() == before
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == identities
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in params[:-1])


def test_an_update_is_seen_by_version_counters() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = ours([p])
    train(optimizer, range(1))
    loss = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_closure_is_evaluated_with_gradients() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = ours([p])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert p.sum().item() < 3.0


@given(st.lists(st.integers(1, 1000), max_size=8), st.integers(1, 8), st.sampled_from([torch.float32, torch.bfloat16]))
def test_pieces_cover_every_element_once_and_do_not_exceed_their_size(
    counts: list[int], blocks: int, dtype: torch.dtype
) -> None:
    rows = [Row((torch.empty(count, dtype=dtype),), 1.0) for count in counts]
    pieces = list(cut(rows, blocks * 256))
    assert [covered(pieces, row) for row in rows] == [list(range(count)) for count in counts]
    for piece in pieces:
        end = 0
        for each in piece:
            assert each.offset >= end
            assert each.offset % 256 == 0
            assert each.start * dtype.itemsize % 256 == 0
            end = each.offset + (each.stop - each.start) * dtype.itemsize
        assert 0 < end <= blocks * 256


def covered(pieces: list[list[Slice]], row: Any) -> list[int]:
    return [i for piece in pieces for each in piece if each.row is row for i in range(each.start, each.stop)]


class Recorder(Device):
    """Writes down which stream waits for what; an event is its stream and how many were recorded there before."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.log: list[tuple[Any, ...]] = []
        self.streams: list[str] = []
        self.counts: dict[str, int] = {}

    def stream(self) -> Any:
        self.streams.append(("in", "out")[len(self.streams)])
        return self.streams[-1]

    def on(self, stream: Any) -> AbstractContextManager[object]:
        self.log.append(("copy", stream))
        return nullcontext()

    def record(self, stream: Any = None, *, blocking: bool = False) -> Any:
        stream = stream or "compute"
        self.counts[stream] = self.counts.get(stream, 0) + 1
        return Recorded(self, f"{stream} {self.counts[stream]}")

    def wait(self, event: Any, stream: Any = None) -> None:
        self.log.append((stream or "compute", "waits for", event.name))


class Recorded:
    def __init__(self, device: Recorder, name: str) -> None:
        self.device, self.name = device, name

    def synchronize(self) -> None:
        self.device.log.append(("host", "waits for", self.name))

    def query(self) -> bool:
        return True


def test_a_slot_is_written_only_when_its_last_piece_is_back_and_the_step_ends_when_all_are() -> None:
    """Three pieces through two slots. The slots' memory itself may come from earlier work: compute 1 and 2."""
    optimizer = OffloadAdamW([nn.Parameter(torch.zeros(192))], device="cpu", piece_bytes=256)
    device = optimizer._device = Recorder()
    train(optimizer, range(1))
    assert device.log == [
        ("in", "waits for", "compute 2"), ("copy", "in"),
        ("compute", "waits for", "in 1"), ("out", "waits for", "compute 3"), ("copy", "out"),
        ("in", "waits for", "compute 1"), ("copy", "in"),
        ("compute", "waits for", "in 2"), ("out", "waits for", "compute 4"), ("copy", "out"),
        ("host", "waits for", "in 1"),  # before gradients are written to the staging of the first slot again
        ("in", "waits for", "out 1"), ("copy", "in"),
        ("compute", "waits for", "in 3"), ("out", "waits for", "compute 5"), ("copy", "out"),
        ("host", "waits for", "out 2"), ("host", "waits for", "out 3"),
    ]  # fmt: skip


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_it_steps_on_the_published_gradients_of_streamed_weights(precision: Any) -> None:
    def classifier(make: Any) -> Any:
        class Module(Classifier):
            def configure_optimizers(self) -> Any:
                return make(self.parameters())

        return Module

    expected = fit(classifier(theirs), precision=precision)
    found = fit(classifier(ours), Watched(), precision=precision)
    assert found.strategy.copied_bytes > 0
    assert_same(found.record["weights"], expected.record["weights"])
    assert_same(found.record["seen"], expected.record["seen"])
    assert_same(found.record["optimizers"][0]["state"], expected.record["optimizers"][0]["state"])
    assert why_whole(found.trainer.optimizers[0]) is not None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="piece_bytes=100: it must be a multiple of 256"):
        ours(parameters(), piece_bytes=100)
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match="SparseAdam"):
        ours([p]).step()
