"""Snapshots of buffers for a recompute, and checkpoints that find every tensor wherever it hides."""

import pytest
import torch
from stream_cases import WIDTH
from torch import Tensor, nn

from ramtorch_core.engine.activations import ALWAYS_KEPT_BYTES, BufferSnapshot, checkpoint_call
from ramtorch_core.engine.arguments import Arguments, Copies


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("big", torch.zeros(ALWAYS_KEPT_BYTES))
        self.register_buffer("none", None)
        self.norm = nn.BatchNorm1d(WIDTH)


@pytest.mark.parametrize("write", ["in place", "replace", "batch norm"])
def test_a_recompute_sees_the_former_buffers_and_leaves_the_present_ones(write):
    module = Buffers()
    snapshot = BufferSnapshot(module)
    if write == "in place":
        module.count += 1
        module.big.add_(1)
    elif write == "replace":
        module.count = module.count + 1
        module.big = module.big + 1
    else:
        module.norm(torch.randn(4, WIDTH))
    snapshot.keep_changed()
    after = {name: buffer.clone() for name, buffer in module.named_buffers()}
    fresh = dict(Buffers().named_buffers())
    with snapshot.restored():
        assert all(torch.equal(buffer, fresh[name]) for name, buffer in module.named_buffers())
        if write == "in place":
            module.count += 5
        module.norm(torch.randn(4, WIDTH))
    assert all(torch.equal(buffer, after[name]) for name, buffer in module.named_buffers())
    with snapshot.restored():
        assert all(torch.equal(buffer, fresh[name]) for name, buffer in module.named_buffers())


def test_large_buffers_that_were_not_written_are_not_kept():
    module = Buffers()
    snapshot = BufferSnapshot(module)
    snapshot.keep_changed()
    assert "big" not in [name for _, name, _ in snapshot._changed]


def test_tensors_are_found_in_nested_arguments_given_by_keyword():
    x = torch.randn(3, requires_grad=True)
    calls = []

    def function(*, batch: dict[str, list[Tensor]], scale: float) -> dict[str, Tensor]:
        calls.append(1)
        return {"y": (batch["x"][0] * scale).exp()}

    arguments = Arguments("function", (), {"batch": {"x": [x]}, "scale": 2.0}, copies=Copies.NONE)
    checkpoint_call(function, arguments)["y"].sum().backward()
    assert torch.equal(x.grad, (x * 2).exp().detach() * 2)
    assert len(calls) == 2
