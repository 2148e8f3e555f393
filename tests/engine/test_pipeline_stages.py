"""Where stages begin, which stage owns what, and the refusals."""

from typing import Any

import pytest
import torch
from pipeline_cases import Block, Chain
from torch import nn

from ramtorch_core.engine.pipeline.balance import balanced_entries, memory_cost
from ramtorch_core.engine.pipeline.runner import PipelineRunner, plan_schedule, resolve_devices
from ramtorch_core.engine.pipeline.stages import place, resolve_entries
from ramtorch_core.errors import ConfigurationError, PlanError
from ramtorch_core.plan.schedule import Schedule, gpipe


class Gpt(nn.Module):
    """Embedding, equal blocks that hold a Sequential, and a head larger than a block."""

    def __init__(self, depth: int = 12, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(depth)
        )
        self.head = nn.Linear(16, 201, bias=False)
        if tied:
            self.head = nn.Linear(16, 64, bias=False)
            self.head.weight = self.embedding.weight


def names(model: nn.Module, stages: int, **options: Any) -> list[str]:
    return [name for name, _ in balanced_entries(model, stages, **options).entries]


def test_equal_blocks_with_a_big_head_are_cut_between_blocks() -> None:
    """Top-level children alone would leave all blocks on one stage."""
    assert names(Gpt(), 2) == ["body.blocks.7"]
    assert names(Gpt(), 4) == ["body.blocks.3", "body.blocks.7", "body.blocks.11"]


def test_a_single_large_layer_is_not_opened_when_that_does_not_help() -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(64, 64)), nn.Linear(4, 4)), 2) == ["1"]


def test_a_block_is_opened_where_nothing_else_gives_enough_stages() -> None:
    assert names(nn.Sequential(nn.Sequential(Block(), Block())), 2) == ["0.1"]
    assert len(names(Block(), 3)) == 2


@pytest.mark.parametrize("how", ["method", "function"])
def test_compiled_blocks_are_not_opened_while_others_give_enough_stages(how: str) -> None:
    model = nn.Sequential(*(nn.Sequential(Block(), Block(), Block()) for _ in range(3)))
    assert names(model, 2) == ["1.1.down"]
    for i, block in enumerate(model):
        if how == "method":
            block.compile(backend="eager")
        else:
            model[i] = torch.compile(block, backend="eager")
    assert names(model, 2) == ["1"]
    assert names(nn.Sequential(model[0]), 2)[0].startswith("0.")


def test_device_weights_and_frozen_memory_move_the_cut() -> None:
    assert names(Chain(8), 2, weights=[3.0, 1.0]) > names(Chain(8), 2)
    model = Chain(16)
    model.blocks[:8].requires_grad_(False)
    assert names(model, 2, cost=memory_cost) == ["blocks.11"]
    assert names(model, 2) == ["blocks.8"]


def test_a_shared_weight_counts_once_and_is_at_home_where_it_comes_first() -> None:
    model = Gpt(depth=2, tied=True)
    stages = resolve_entries(model, ["body.blocks.1"], 2)
    assert stages.homes[id(model.head.weight)] == 0
    rows = stages.rows(["a", "b"])
    assert [row.parameters for row in rows] == [64 * 16 + 1072, 1072]
    assert rows[1].bytes == 4 * rows[1].parameters
    assert sum(row.share for row in rows) == pytest.approx(1)


def test_modules_after_a_cut_belong_to_its_stage_in_order_of_registration() -> None:
    model = Chain()
    stages = resolve_entries(model, ["blocks.1", model.blocks[3]], 3)
    owner = {name: stages.homes[id(p)] for name, p in model.named_parameters()}
    assert owner["blocks.0.up.weight"] == 0
    assert owner["blocks.2.up.weight"] == 1
    assert owner["blocks.3.norm.bias"] == owner["head.weight"] == 2


@pytest.mark.gpu(2)
def test_placing_keeps_every_parameter_the_same_object_and_moves_gradients_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = list(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    place(resolve_entries(model, ["1"], 2), [first, second], lambda module: False)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert model[0].weight.device == model[0].weight.grad.device == first
    assert model[1].weight.grad.device == model[1].running_mean.device == second
    place(resolve_entries(model, ["1"], 2), [first, first], lambda m: isinstance(m, nn.BatchNorm1d))
    assert model[1].running_mean.device == second


@pytest.mark.parametrize(
    ("cuts", "stages", "message"),
    [
        (["blocks.1"], 3, "1 cuts make 2 stages, but 3 are needed"),
        (["blocks.9"], 2, "cut 'blocks.9' is no module of Chain; did you mean 'blocks.[0-3]'"),
        (["block.2"], 2, "did you mean 'blocks.2'"),
        (["2"], 2, "did you mean 'blocks.2'$"),
        (["1.down"], 2, "did you mean 'blocks.1.down'$"),
        (["transformer"], 2, "there are 'blocks', 'blocks.0', 'blocks.0.norm'"),
        ([""], 2, "the whole module cannot be a cut"),
        (["blocks"], 2, "'blocks' is a ModuleList, which is never called: name .*blocks.0"),
        (["blocks.1", "blocks.1"], 3, "'blocks.1' is named twice"),
        ([nn.Linear(1, 1)], 2, "cut Linear is no submodule of Chain"),
    ],
)
def test_a_cut_that_cannot_begin_a_stage_is_refused(cuts: list[Any], stages: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_entries(Chain(), cuts, stages)


def test_more_stages_than_modules_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Linear has 0 modules .* too few for 2 stages"):
        balanced_entries(nn.Linear(2, 2), 2)
    with pytest.raises(ConfigurationError, match=r"Sequential has 2 modules .* too few for 3 stages"):
        balanced_entries(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 3)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ReLU()], ids=["a layer", "no parameters"])
def test_whatever_there_is_makes_one_stage(model: nn.Module) -> None:
    assert names(model, 1) == []


@pytest.mark.parametrize(
    ("devices", "message"),
    [([], "at least one device"), (["cuda:7"], "does not exist"), (["mps"], "not supported")],
)
def test_devices_that_cannot_work_are_refused(devices: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_devices(devices)


def test_a_gpu_given_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigurationError, match="cuda:1 is given 2 times"):
        resolve_devices(["cuda:1", "cpu", 1])


def test_a_schedule_for_other_devices_and_one_that_deadlocks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="is for 3 devices, but 2 are given"):
        plan_schedule(gpipe(3, 2), 2, 2)
    with pytest.raises(PlanError, match=r"(?s)deadlocks.*>1B0<"):
        plan_schedule(Schedule.parse("0F0 0B0\n1B0 1F0"), 2, 1)


def test_a_fixed_schedule_serves_its_number_of_microbatches_and_others_run_in_turn(caplog: Any) -> None:
    runner = PipelineRunner(Chain(), ["cpu", "cpu"], schedule=gpipe(2, 3))
    try:
        assert runner.plan(3) == gpipe(2, 3)
        assert runner.plan(2).name == runner.plan(4).name == "sequential"
        assert caplog.text.count("is for 3 microbatches") == 1
    finally:
        runner.close()


def test_too_few_device_weights_and_an_unknown_balance_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 device_weights for 2 devices"):
        PipelineRunner(Chain(), ["cpu", "cpu"], device_weights=[1.0])
    with pytest.raises(ConfigurationError, match="balance='speed'"):
        PipelineRunner(Chain(), ["cpu", "cpu"], balance="speed")  # type: ignore[arg-type]
