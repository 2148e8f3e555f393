"""Other knobs between two steps: results are those of a model that had them from there on."""

import copy
from typing import Any

import pytest
import torch
from stream_cases import assert_same, data, descend, stack, state_of
from torch import nn

from ramtorch_core import RamtorchError, Streamer, attach
from ramtorch_core.engine.rearrange import Knobs, follow, knobs_of, rearrange
from ramtorch_core.engine.visits import Activations

KEEP, CHECKPOINT = Activations.KEEP, Activations.CHECKPOINT


def streamed(model: nn.Module, **options: Any) -> Streamer:
    return attach(model, device="cpu", chunks="blocks.*", resident_below=0, poison=True, kernel="torch", **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, indices: range, streamer: Streamer | None) -> list[Any]:
    """Some steps, updated while backward goes on where `streamer` is given."""
    losses = []
    for index in indices:
        if streamer is None:
            losses.append(descend(model, optimizer, index))
            continue
        loss = model(data(index)).square().mean()
        with streamer.updates.overlap(optimizer):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(1, frozenset(), CHECKPOINT),
        Knobs(3, frozenset({0, 2}), KEEP),
        Knobs(2, frozenset({1}), CHECKPOINT),
        Knobs(1, frozenset(range(4)), KEEP),
    ],
    ids=str,
)
def test_steps_after_a_change_equal_those_of_a_model_that_is_attached_so(knobs: Knobs, overlapped: bool) -> None:
    def run(changed: bool) -> list[Any]:
        torch.manual_seed(0)
        model = stack(4, dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        streamer = streamed(model)
        losses = steps(model, optimizer, range(3), streamer if overlapped else None)
        if changed:
            rearrange(streamer, knobs, [optimizer])
            assert knobs_of(streamer) == knobs
        else:
            streamer.close()
            policy = knobs.activations.value
            streamer = streamed(model, window=knobs.window, pin=sorted(knobs.resident), activations=policy)
        losses += steps(model, optimizer, range(3, 7), streamer if overlapped else None)
        expected = min(knobs.window, 4 - len(knobs.resident))
        assert len(streamer.window.slots) == expected
        assert [row.placement == "resident" for row in streamer.chunk_table()] == [
            i in knobs.resident for i in range(4)
        ]
        streamer.close()
        return [losses, state_of(model), optimizer.state_dict()]

    assert_same(run(True), run(False))


def test_knobs_can_be_turned_back() -> None:
    model = stack(3)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    streamer = streamed(model)
    for index in range(6):
        rearrange(streamer, Knobs(1 + index % 3, frozenset(range(index % 4)), KEEP), optimizers[:1])
        assert_same(descend(model, optimizers[0], index), descend(plain, optimizers[1], index))
    streamer.close()
    assert_same(state_of(model), state_of(plain))


def test_gradients_published_before_a_change_are_added_to() -> None:
    model = stack(3)
    plain = copy.deepcopy(model)
    streamer = streamed(model)
    for each in (model, plain):
        each(data(0)).sum().backward()
    rearrange(streamer, Knobs(1, frozenset({1}), KEEP))
    for each in (model, plain):
        each(data(1)).sum().backward()
    streamer.close()
    assert_same(state_of(model), state_of(plain))


def test_a_change_inside_of_a_step_is_refused() -> None:
    model = stack(2)
    streamer = streamed(model)
    loss = model(data()).sum()
    with pytest.raises(RamtorchError, match="a graph that has not run backward is alive"):
        rearrange(streamer, Knobs(1, frozenset(), KEEP))
    loss.backward()
    with streamer.scope(), pytest.raises(RamtorchError, match="a step is under way"):
        rearrange(streamer, Knobs(1, frozenset(), KEEP))
    streamer.gradients.hold = True
    model(data()).sum().backward()
    with pytest.raises(RamtorchError, match="gradients wait"):
        rearrange(streamer, Knobs(1, frozenset(), KEEP))
    streamer.close()
    with pytest.raises(RamtorchError, match="nothing streams"):
        rearrange(streamer, Knobs(1, frozenset(), KEEP))


@pytest.mark.parametrize("fused", [False, True])
def test_state_follows_its_parameter_as_torch_would_put_it(fused: bool) -> None:
    moved, stays = (nn.Parameter(torch.ones(2, device=kind)) for kind in ("meta", "cpu"))
    optimizer = torch.optim.AdamW([moved, stays], fused=False)
    optimizer.param_groups[0]["fused"] = fused
    for parameter in (moved, stays):
        optimizer.state[parameter] = {"step": torch.ones(()), "exp_avg": torch.ones(2), "note": "kept"}
    follow([optimizer], {moved: torch.device("cpu")})
    state = optimizer.state[moved]
    assert state["step"].device.type == ("meta" if fused else "cpu")
    assert state["exp_avg"].device.type == "meta"
    assert state["note"] == "kept"
    assert all(value.device.type == "cpu" for name, value in optimizer.state[stays].items() if name != "note")
