"""Whatever a training step does, its pipelined gradients equal those of sequential accumulation bit for bit."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import (
    WIDTH,
    Block,
    Chain,
    accumulate,
    assert_exact,
    assert_same_gradients,
    batch,
    batches,
    pipeline,
    run,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ramtorch_core.plan.schedule import build

SCHEDULES = ["sequential", "gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1", "interleaved", "zbv"]
CUTS = {1: [], 2: ["blocks.2"], 4: ["blocks.1", "blocks.2", "blocks.3"]}


def steps(microbatches: int = 3, count: int = 2) -> list[list[Any]]:
    return [batches(microbatches, seed=s) for s in range(count)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_every_schedule_with_fewer_and_more_microbatches_than_stages(
    schedule: str, stages: int, microbatches: int
) -> None:
    assert_exact(Chain(), CUTS[stages], steps(microbatches), schedule)


def test_a_single_stage_is_plain_accumulation() -> None:
    assert_exact(Chain(), CUTS[1], steps())


class Skips(Chain):
    """A U-Net's long skips, deep supervision of an early stage, and a regulariser over all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        x = x + kept[0] * 0.5 + torch.cat([kept[1], kept[2]], -1).view(len(x), 2, -1).mean(1)
        loss = F.cross_entropy(self.head(x) * self.temperature, y)
        return loss + 1e-2 * kept[0].pow(2).mean() + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skips_deep_supervision_and_a_regulariser_over_all_stages(schedule: str) -> None:
    assert_exact(Skips(), CUTS[4], steps(4, 3), schedule)


class InPlace(Chain):
    """Modifies a stage's argument, and an earlier stage's tensor, in place."""

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        first = self.blocks[0](x)
        x = first * 1.0
        x = self.blocks[1](x)
        x = self.blocks[2](x)
        x.mul_(1.5)
        x = nn.functional.relu(x, inplace=True)
        early = first.view(-1, WIDTH)
        x = self.blocks[3](x + early)
        first_again = first * 2
        return F.cross_entropy(self.head(x + first_again), y)


class InPlaceBlock(Block):
    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        x += 0.5
        x[:, 0] = 0.25
        x = F.relu(x, inplace=True)
        return super().forward(x, mask=mask)


def test_changes_in_place_after_a_boundary() -> None:
    assert_exact(InPlace(), CUTS[4], steps(4))


def test_a_stage_that_begins_by_changing_its_argument_in_place() -> None:
    model = Chain()
    model.blocks[2] = InPlaceBlock()
    assert_exact(model, CUTS[2], steps(4))


class Attributes(Chain):
    """Meets a tensor of an earlier stage first as an attribute or in a conversion."""

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        first = self.blocks[1](self.blocks[0](x))
        x = self.blocks[3](self.blocks[2](first))
        x = x + first.T.T + first.mT.mT + first.to(torch.float64).float() + first.double().to(x) + first.cpu().real
        out = torch.empty_like(first)
        out.copy_(first)
        return F.cross_entropy(self.head(x + out), y)


def test_attributes_and_conversions_of_an_earlier_stages_tensor() -> None:
    assert_exact(Attributes(), CUTS[4], steps(4))


class Looking(Chain):
    """Hooks on an early stage's tensors, registered by a later stage's code."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        first = self.blocks[1](self.blocks[0](x))
        x = self.blocks[3](self.blocks[2](first) + first)
        first.register_hook(lambda gradient: self.norms.append(gradient.norm()))
        first.register_hook(lambda gradient: gradient * 0.5)
        first.retain_grad()
        self.kept.append(first)
        return F.cross_entropy(self.head(x + first), y)


def test_a_hook_that_a_later_stage_registers_sees_and_changes_the_whole_gradient() -> None:
    """It used to get what came from its own stage and those after it."""
    model = Looking()
    reference = copy.deepcopy(model)
    items = batches(4)
    accumulate(reference, reference.training_step, items)
    with pipeline(model, CUTS[4]) as executor:
        assert_same_gradients(model, reference, run(executor, model.training_step, items, "sequential"))
    assert all(torch.equal(a, b) for a, b in zip(model.norms, reference.norms, strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.kept, reference.kept, strict=True))


class DataDependent(Chain):
    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        for i, block in enumerate(self.blocks):
            if i == 2 and float(x.detach().sum()) > 0:
                x = x * 2
            x = block(x)
        return F.cross_entropy(self.head(x), y)


def test_python_that_depends_on_data() -> None:
    assert_exact(DataDependent(), CUTS[4], steps(6))


class EarlyExit(Chain):
    """Some microbatches leave after stage 1, some skip stage 2, some give a loss of an early stage alone."""

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.blocks[1](self.blocks[0](x))
        early = x.pow(2).mean()
        if float(x.detach().sum()) > 0:
            return early
        x = self.blocks[3](x)
        return F.cross_entropy(self.head(x), y) if float(x.detach().sum()) > 0 else early * 3


def test_early_exit_and_skipped_stages() -> None:
    assert_exact(EarlyExit(), CUTS[4], steps(6, 4))


def test_backward_from_losses_of_several_stages_with_numbers_for_their_gradients() -> None:
    model, items = Chain(), batches(3)
    reference = copy.deepcopy(model)

    def losses(chain: Chain, item: Any) -> tuple[Tensor, Tensor]:
        x, y = item
        x = chain.blocks[0](x)
        early = x.pow(2).mean()
        for block in chain.blocks[1:]:
            x = block(x)
        return early, F.cross_entropy(chain.head(x), y)

    for item in items:
        torch.autograd.backward(losses(reference, item), [torch.tensor(0.25), torch.tensor(1 / 3)])
    with pipeline(model, CUTS[4]) as executor:
        plan = build("staggered_1b1f", 4, 3)
        result = executor.run(
            lambda item: losses(model, item), items, plan, lambda both, m: [(both[0], 0.25), (both[1], 1 / 3)]
        )
    assert_same_gradients(model, reference, result)


class Structured(Chain):
    """Stages that take and return dicts, tuples, None, strings, masks and constants."""

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, state: dict[str, Any], extra: tuple[Any, ...], *, name: str, scale: float = 1.0) -> Any:
            floats, nothing, flags = extra
            assert nothing is None
            assert name == "middle"
            x = self.block(state["x"], mask=floats) * scale
            return {"x": torch.where(flags, x, state["unused"].detach() + x), "unused": state["unused"]}, None

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[1], self.blocks[2] = self.Middle(), self.Middle()

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        state = {"x": self.blocks[0](x), "unused": self.blocks[0](x * 2)}
        flags = torch.arange(WIDTH) % 2 == 0
        state, _ = self.blocks[1](state, (torch.full((WIDTH,), 0.5), None, flags), name="middle")
        state, _ = self.blocks[2](state, (torch.full((WIDTH,), 0.25), None, flags), name="middle", scale=2.0)
        return F.cross_entropy(self.head(self.blocks[3](state["x"])), y)


def test_structured_arguments_masks_and_tensors_without_gradient() -> None:
    assert_exact(Structured(), CUTS[4], steps(4))


class PartlyUsed(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.block, self.index = Block(), index

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.block((a, b)[self.index]), b


def test_an_argument_that_a_stage_does_not_use_has_no_gradient() -> None:
    class Model(Chain):
        def __init__(self) -> None:
            super().__init__(2)
            self.blocks.extend([PartlyUsed(0), PartlyUsed(0)])

        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            a, _b = self.blocks[3](*self.blocks[2](self.blocks[0](x), self.blocks[1](x)))
            return F.cross_entropy(self.head(a), y)

    model = Model()
    assert_exact(model, ["blocks.2", "blocks.3"], steps(4))
    assert all(p.grad is None for p in model.blocks[1].parameters())


@pytest.mark.parametrize("frozen", [["blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3", "head"], ["blocks.0.up"]])
def test_frozen_parameters_and_whole_stages(frozen: list[str]) -> None:
    model = Chain()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    before = {name: copy.deepcopy(model.get_submodule(name).state_dict()) for name in frozen}
    assert_exact(model, CUTS[4], steps(4))
    for name, state in before.items():
        after = model.get_submodule(name).state_dict()
        assert all(torch.equal(state[key], after[key]) for key in state)
        assert all(p.grad is None for p in model.get_submodule(name).parameters())


def test_a_loss_that_depends_on_nothing_trainable_leaves_no_gradient() -> None:
    model = Chain()

    def training_step(item: Any) -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(item[0]), item[1])

    with pipeline(model, CUTS[2]) as executor:
        assert run(executor, training_step, batches(3)).gradients == {}


def test_batch_norm_statistics_and_counters() -> None:
    model = Chain()
    model.blocks[1] = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    model.blocks[3] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    assert_exact(model, CUTS[4], [[batch(5, s * 10 + i) for i in range(4)] for s in range(2)])


class Checkpointed(Chain):
    """Checkpoints inside a stage, or around a region that spans stages."""

    def __init__(self, reentrant: bool, across: bool) -> None:
        super().__init__()
        self.reentrant, self.across = reentrant, across

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.blocks[0](x)
        kept = x.detach() if self.reentrant else x  # reentrant checkpoints run a backward of their own

        def region(x: Tensor) -> Tensor:
            x = self.blocks[2](x)
            return self.blocks[3](x + kept) if self.across else x + kept.tanh()

        x = checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)
        x = checkpoint(region, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x if self.across else self.blocks[3](x)), y)


@pytest.mark.parametrize("across", [False, True])
def test_checkpointing_inside_a_stage_and_across_stages(across: bool) -> None:
    assert_exact(Checkpointed(reentrant=False, across=across), CUTS[4], steps(4))


def test_reentrant_checkpointing_inside_a_stage_that_uses_a_tensor_of_another() -> None:
    assert_exact(Checkpointed(reentrant=True, across=False), CUTS[4], steps(4))


def test_a_module_used_twice_within_a_stage() -> None:
    class Twice(Chain):
        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            x = self.blocks[1](self.blocks[0](x))
            x = self.blocks[3](self.blocks[3](self.blocks[2](x)))
            return F.cross_entropy(self.head(x), y)

    assert_exact(Twice(), ["blocks.1", "blocks.2"], steps(4))


def test_expanded_and_transposed_gradients_keep_their_layout() -> None:
    class Layouts(Chain):
        def training_step(self, batch: Any) -> Tensor:
            x, _ = batch
            x = self.blocks[1](self.blocks[0](x)).t()
            x = self.blocks[2](x.t()).t()
            return self.blocks[3](x.t()).sum()

    assert_exact(Layouts(), CUTS[4], steps(4))
