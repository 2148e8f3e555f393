"""The split backward: weight gradients are ops of their own, and exact."""

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Block, Chain, accumulate, assert_exact, assert_same_gradients, batches, pipeline, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ramtorch_core.errors import RamtorchError
from ramtorch_core.plan.schedule import Op

CUTS = ["blocks.1", "blocks.2", "blocks.3"]
pytestmark = pytest.mark.parametrize("schedule", ["zb_h1", "zbv"])


def test_linear_weights_get_their_gradient_in_w_and_norms_in_i(schedule: str) -> None:
    model = Chain()
    times: dict[Op, tuple[float, float]] = {}
    seen: list[tuple[str, list[str]]] = []

    def running(name: str) -> None:
        """Which ops are under way: begun, and not ended yet, so not recorded."""
        seen.append((name, [str(op) for op in list(times)]))

    model.blocks[3].up.weight.register_post_accumulate_grad_hook(lambda p: running("weight"))
    model.blocks[3].norm.weight.register_post_accumulate_grad_hook(lambda p: running("norm"))
    with pipeline(model, CUTS) as executor:
        run(executor, model.training_step, batches(3), schedule, recorder=lambda op, a, b: times.update({op: (a, b)}))
    assert [name for name, _ in seen].count("weight") == [name for name, _ in seen].count("norm") == 3
    for name in ("weight", "norm"):
        for m, done in enumerate(done for found, done in seen if found == name):
            assert (f"3I{m}" in done) == (name == "weight")
            assert f"3W{m}" not in done


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([
            nn.Conv1d(2, 4, 3, padding=1),
            nn.Sequential(nn.ReLU(), nn.Conv1d(4, 4, 3, padding=1, groups=2, bias=False)),
            nn.Sequential(nn.ReLU(), nn.ConvTranspose1d(4, 4, 3, padding=1)),
            nn.Sequential(nn.Conv1d(4, 3, 1), nn.Flatten(), nn.Linear(3 * 4, 3)),
        ])  # fmt: skip

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        x = x.view(len(x), 2, 4)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x, y)


def test_convolutions(schedule: str) -> None:
    assert_exact(Convolutions(), CUTS, [batches(4, seed=s) for s in range(2)], schedule)


class Awkward(Chain):
    """A layer used twice, an output cut into chunks, a regulariser on a deferred weight, and a 3-D input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.bias = None
        self.blocks[1].up.weight.requires_grad_(False)
        self.square = nn.Linear(WIDTH, WIDTH)
        self._modules["head"] = self._modules.pop("head")

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        x = self.square(self.square(x))
        a, b = self.square(x.view(1, *x.shape)).chunk(2, -1)
        x = (
            torch.cat([b, a], -1)[0]
            + F.linear(x, self.square.weight.t())
            + F.linear(input=x, weight=self.square.weight)
        )
        return F.cross_entropy(self.head(x), y) + self.head.weight.pow(2).sum()


def test_shared_weights_several_outputs_and_other_uses(schedule: str) -> None:
    """A deferred gradient used to count shared weights twice, and to break on several outputs."""
    assert_exact(Awkward(), CUTS, [batches(4, seed=s) for s in range(2)], schedule)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("order", ["lolco", "colol", "oolcc", "lcolo"])
def test_terms_of_one_weight_are_added_in_the_order_of_one_graph(
    schedule: str, order: str, dtype: torch.dtype | None
) -> None:
    """Layers, other uses and checkpointed ones used to be summed apart, or to enter `.grad` one by one.

    Under autocast a stand-in for a weight could get what had been cast for another one.
    """

    class Mixed(Chain):
        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            for block in self.blocks:
                x = torch.tanh(block(x))
                for use in order:
                    if use == "l":
                        x = x + F.linear(x, block.up.weight)[:, :WIDTH]
                    elif use == "c":
                        x = x + checkpoint(block.up, x, use_reentrant=False)[:, WIDTH:]
                    else:
                        x = torch.tanh(x * block.up.weight.sum(0) + torch.matmul(x, block.up.weight[:WIDTH]))
            return F.cross_entropy(self.head(x), y)

    with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
        assert_exact(Mixed(), CUTS, [batches(4, seed=s) for s in range(2)], schedule)


def test_a_weight_that_some_microbatches_use_in_a_later_stage_alone(schedule: str) -> None:
    """Their gradients used to enter `.grad` before those of earlier microbatches that waited for W."""

    class Sometimes(Chain):
        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            x = self.blocks[0](x)
            used = bool(x[0, 0] > 0)
            x = self.blocks[2](self.blocks[1](x) if used else x)
            return F.cross_entropy(self.head(self.blocks[3](x)), y) + self.blocks[1].up.weight.pow(2).sum()

    assert_exact(Sometimes(), CUTS, [batches(8, seed=s) for s in range(2)], schedule)


@pytest.mark.parametrize("island", [False, True])
def test_bf16(schedule: str, island: bool) -> None:
    class Islands(Awkward):
        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            if not island:
                return super().training_step(batch)
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[1](self.blocks[0](x))
            return F.cross_entropy(self.head(self.blocks[3](self.blocks[2](x))), y)

    model = Islands()
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), pipeline(model, CUTS) as executor:
        for step in range(2):
            items = batches(4, seed=step)
            for p in reference.parameters():
                p.grad = None
            accumulate(reference, reference.training_step, items)
            assert_same_gradients(model, reference, run(executor, model.training_step, items, schedule))


def test_gradients_that_user_code_computes_within_a_stage_are_its_own_affair(schedule: str) -> None:
    """They used to count as weight gradients, or to leave nothing for the backward."""

    class Probing(Chain):
        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            for block in self.blocks:
                x = block(x)
            probe = x.detach().requires_grad_()
            (outside,) = torch.autograd.grad(self.head(probe).pow(2).sum(), probe)
            inner = x * 1
            energy = self.head(inner).pow(2).sum()
            (inside,) = torch.autograd.grad(energy, inner, retain_graph=True)
            return F.cross_entropy(self.head(x), y) + (outside * x).mean() + inside.detach().mean() + 0.1 * energy

    assert_exact(Probing(), CUTS, [batches(4)], schedule)


def test_gradients_of_gradients_are_refused_instead_of_wrong(schedule: str) -> None:
    class Penalised(Chain):
        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            for block in self.blocks:
                x = block(x)
            probe = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.head(probe).pow(2).sum(), probe, create_graph=True)
            return F.cross_entropy(self.head(x), y) + slope.pow(2).mean()

    model = Penalised()
    with pipeline(model, CUTS) as executor, pytest.raises(RamtorchError, match="splits the backward: use another"):
        run(executor, model.training_step, batches(4), schedule)
    assert_exact(model, CUTS, [batches(4)], "staggered_1b1f")


def test_module_hooks_fire_as_in_accumulation(schedule: str) -> None:
    counts: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    model = Chain()
    layer = model.blocks[2].up
    layer.register_forward_hook(count("forward"))
    layer.register_full_backward_hook(count("backward"))
    layer.weight.register_hook(count("tensor"))
    layer.weight.register_post_accumulate_grad_hook(count("post"))
    with pipeline(model, CUTS) as executor:
        run(executor, model.training_step, batches(5), schedule)
    assert counts == {"forward": 5, "backward": 5, "tensor": 5, "post": 5}


def test_checkpointed_layers_are_exact_and_recomputed_once(schedule: str) -> None:
    """Their weight gradients stay in I: W would have to recompute them again."""

    class Recomputing(Chain):
        calls = 0

        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            for block in self.blocks:
                x = checkpoint(self.call, block, x, use_reentrant=False)
            return F.cross_entropy(self.head(x), y)

        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            self.calls += 1
            return block(x)

    model = Recomputing()
    reference = copy.deepcopy(model)
    accumulate(reference, reference.training_step, batches(4))
    with pipeline(model, CUTS) as executor:
        assert_same_gradients(model, reference, run(executor, model.training_step, batches(4), schedule))
    assert model.calls == reference.calls == 2 * 4 * 4


def test_what_waits_for_w_is_bounded_by_the_schedule(schedule: str) -> None:
    """Zero bubble used to run out of memory: inputs of deferred layers lived until the end of the step."""
    model = Chain()
    live: set[int] = set()
    peak = 0
    number = 0

    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal peak, number
        number += 1
        live.add(number)
        peak = max(peak, len(live))
        weakref.finalize(args[0].untyped_storage(), live.discard, number)

    model.blocks[0].down.register_forward_pre_hook(watch)
    with pipeline(model, CUTS) as executor:
        run(executor, model.training_step, batches(12), schedule)
    assert not live
    assert 2 <= peak <= 5  # as many as 1F1B has under way on the first stage, and the one that enters


def test_a_block_whose_stage_has_nothing_to_defer(schedule: str) -> None:
    model = Chain()
    model.blocks[1] = nn.LayerNorm(WIDTH)
    model.blocks[2] = nn.Tanh()
    model.blocks[3].requires_grad_(False)
    assert_exact(model, CUTS, [batches(4)], schedule)
    assert isinstance(model.blocks[0], Block)
