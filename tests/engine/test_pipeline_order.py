"""Stages follow the order in which modules run, as the first step shows it."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Block, Chain, accumulate, assert_same_gradients, batches
from torch import Tensor, nn

from ramtorch_core.engine.pipeline.balance import balanced_entries
from ramtorch_core.engine.pipeline.loans import Loans
from ramtorch_core.engine.pipeline.runner import PipelineRunner
from ramtorch_core.engine.pipeline.running_order import AS_REGISTERED, RunningOrder, optimizers_follow
from ramtorch_core.errors import ConfigurationError


class Towers(nn.Module):
    """The tower that is registered second runs first, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.text = nn.Sequential(*(Block() for _ in range(4)))
        self.vision = nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        seen = self.vision(x)
        return F.cross_entropy(self.text(x + seen) * self.scale, y)


class Horseshoe(nn.Module):
    """The part in the middle is registered last, as in UNets."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(Block() for _ in range(3)), nn.ModuleList(Block() for _ in range(3))
        self.middle = nn.Sequential(Block(), Block())

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        kept = []
        for block in self.down:
            kept.append(x)
            x = block(x)
        x = self.middle(x)
        for block in self.up:
            x = block(x + kept.pop())
        return F.cross_entropy(x, y)


class Interleaved(nn.Module):
    """Two lists whose members take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = x + torch.tanh(layer(x)) * gate(x).sigmoid()
        return F.cross_entropy(x, y)


@pytest.fixture
def borrowed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """`id`s of the parameters that were used away from home."""
    found: set[int] = set()
    borrow = Loans.borrow

    def noted(self: Loans, parameter: Tensor, stage: int) -> Tensor:
        found.add(id(parameter))
        return borrow(self, parameter, stage)

    monkeypatch.setattr(Loans, "borrow", noted)
    return found


def train(runner: PipelineRunner, model: Any, step: int = 0, **options: Any) -> Any:
    inputs = [tuple(tensor.to(runner.root_device) for tensor in item) for item in batches(2, seed=step)]
    return runner.train(model.training_step, inputs, lambda loss, m: (loss / 2, None), step=step, **options)


@pytest.mark.parametrize("kind", [Towers, Horseshoe, Interleaved])
def test_after_the_first_step_every_weight_is_where_it_is_used_and_steps_stay_exact(
    kind: Any, borrowed: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = kind()
    reference = copy.deepcopy(model)
    runner = PipelineRunner(model, ["cpu", "cpu"])
    away = []
    try:
        for step in range(3):
            borrowed.clear()
            reference.zero_grad()
            accumulate(reference, reference.training_step, batches(2, seed=step))
            assert_same_gradients(model, reference, result := train(runner, model, step))
            away.append(sum(p.numel() for p in model.parameters() if id(p) in borrowed and p.dim() > 0))
            with torch.no_grad():
                for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                    p -= 0.1 * result.gradients[p]
                    q -= 0.1 * q.grad
        assert away[0] > 0
        assert away[1:] == [0, 0]
        assert max(row.share for row in runner.stage_table()) < 0.6
    finally:
        runner.close()
    assert caplog.text.count("modules run in another order than they are registered in") == 1


def test_gradients_that_continue_an_earlier_step_survive_the_new_cut() -> None:
    torch.manual_seed(0)
    model = Towers()
    reference = copy.deepcopy(model)
    runner = PipelineRunner(model, ["cpu", "cpu"])
    try:
        for step in range(2):
            accumulate(reference, reference.training_step, batches(2, seed=step))
            result = train(runner, model, step, accumulate=True)
            assert bool(result.gradients) is (step == 0)  # where there is a gradient it is added to, otherwise not yet
            for p, gradient in result.gradients.items():
                assert p.grad is None
                p.grad = gradient
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    finally:
        runner.close()


def test_cuts_of_the_user_stay_and_what_runs_between_them_is_placed(borrowed: set[int]) -> None:
    torch.manual_seed(0)
    model = Towers()
    runner = PipelineRunner(model, ["cpu", "cpu"], stages=["text"])
    try:
        assert runner.stage_table()[1].share > 0.9  # what is registered after the cut, as far as can be known
        train(runner, model)
        assert [row.first_module for row in runner.stage_table()] == ["(start)", "text"]
        borrowed.clear()
        train(runner, model, 1)
        assert borrowed <= {id(model.scale)}
    finally:
        runner.close()


def test_modules_that_run_as_they_are_registered_keep_their_stages(caplog: pytest.LogCaptureFixture) -> None:
    model = Chain()
    runner = PipelineRunner(model, ["cpu", "cpu"])
    try:
        stages = runner.stages
        train(runner, model)
        assert runner.stages is stages
    finally:
        runner.close()
    assert not caplog.messages


class Unused(Chain):
    """Its largest part, in the middle, is never called."""

    def __init__(self) -> None:
        super().__init__(5)
        self.blocks.extend([nn.Linear(6 * WIDTH, 6 * WIDTH), *(Block() for _ in range(4))])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks[:5], *self.blocks[6:]):
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("stages", [None, ["blocks.5"]])
def test_a_stage_that_never_begins_is_cut_elsewhere_or_named(stages: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its device would have had nothing to do, and nobody would have known."""
    torch.manual_seed(0)
    model = Unused()
    reference = copy.deepcopy(model)
    runner = PipelineRunner(model, ["cpu", "cpu"], stages=stages)
    try:
        assert runner.stage_table()[1].first_module == "blocks.5"
        for step in range(2):
            reference.zero_grad()
            accumulate(reference, reference.training_step, batches(2, seed=step))
            assert_same_gradients(model, reference, train(runner, model, step))
        assert (runner.stage_table()[1].first_module == "blocks.5") == (stages is not None)
    finally:
        runner.close()
    assert ("did not call 'blocks.5', where a stage begins" in caplog.text) == (stages is not None)


def test_a_first_step_that_fails_is_watched_again_and_no_hook_is_left(borrowed: set[int]) -> None:
    model = Towers()
    runner = PipelineRunner(model, ["cpu", "cpu"])
    try:
        with pytest.raises(ValueError, match="no"):
            runner.train(lambda _: (_ for _ in ()).throw(ValueError("no")), [1], lambda loss, m: (loss, None))
        train(runner, model)
        borrowed.clear()
        train(runner, model)
        assert borrowed <= {id(model.scale)}
    finally:
        runner.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_compiled_modules_stay_in_order_of_registration() -> None:
    """A hook inside of compiled code would be compiled, and compiled again without it."""
    model = Towers()
    model.vision.compile(backend="eager")
    runner = PipelineRunner(model, ["cpu", "cpu"])
    try:
        train(runner, model)
        assert runner.stages.order is AS_REGISTERED
    finally:
        runner.close()


def test_modules_that_are_never_called_follow_their_parents() -> None:
    """Attention uses the weights of its `out_proj` itself."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 1)
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(*[self.first(x)] * 3)[0]

    model = Late()
    attention = model.attention
    assert AS_REGISTERED.modules(model) == [model, attention, attention.out_proj, model.first]
    order = RunningOrder([[id(module) for module in (model, model.first, attention)]])
    assert order.modules(model) == [model, model.first, attention, attention.out_proj]


def test_stages_are_cut_anew_only_at_modules_that_are_called_and_called_once() -> None:
    """Elsewhere a stage would never begin, or begin twice."""
    model = nn.Module()
    model.once = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model.twice, model.never = nn.Linear(WIDTH, 9 * WIDTH), nn.Linear(WIDTH, 9 * WIDTH)
    model.partly = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    called = [model.twice, *model.partly, model.once, *model.once, model.twice]
    order = RunningOrder([[id(module) for module in called]])
    for stages in (2, 3, 4):
        found = [name for name, _ in balanced_entries(model, stages, order=order).entries]
        assert len(found) == stages - 1
        assert not {"twice", "never", "partly"} & set(found), found
    with pytest.raises(ConfigurationError, match="too few"):
        balanced_entries(model, 8, order=order)


def test_the_state_of_an_optimizer_follows_its_parameters() -> None:
    """After a resume there are moments before the first step."""
    parameter, other = nn.Parameter(torch.ones(2, device="meta")), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter, other], lr=0.1, momentum=0.9)
    for p in (parameter, other):
        optimizer.state[p]["momentum_buffer"] = torch.ones(2)
    hook = optimizers_follow({parameter: torch.device("cpu")})
    optimizer.step()
    hook.remove()
    devices = [optimizer.state[p]["momentum_buffer"].device.type for p in (parameter, other)]
    assert devices == ["meta", "cpu"]


@pytest.mark.parametrize("option", ["fused", "capturable", None])
def test_numbers_that_an_optimizer_keeps_on_the_host_stay_and_containers_are_looked_into(option: str | None) -> None:
    """As when a weight that streamed goes to a device: its count of steps does not, unless it is needed there."""
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    state = optimizer.state[parameter]
    state |= {"step": torch.zeros(()), "moments": [torch.ones(2), {"second": torch.ones(2)}], "name": "sgd"}
    optimizer.param_groups[0] |= {} if option is None else {option: True}
    hook = optimizers_follow({parameter: torch.device("cpu")})
    optimizer.step()
    hook.remove()
    assert state["step"].device.type == ("cpu" if option is None else "meta")
    assert state["moments"][0].device.type == state["moments"][1]["second"].device.type == "meta"
    assert state["name"] == "sgd"


@pytest.mark.parametrize(
    ("calls", "merged", "steady"),
    [
        (["abcd"], "abcd", "abcd"),
        (["abcbd"], "abcd", "acd"),
        (["abd", "abcd", "xad"], "xabcd", "ad"),
        (["abcd", "acbd"], "abcd", {"abd", "acd"}),
        (["sabcd", "abscd"], "sabcd", "abcd"),
        (["abcdef", "defabc"], "abcdef", {"abc", "def"}),
    ],
)
def test_the_orders_of_microbatches_are_one_as_far_as_they_agree(
    calls: list[str], merged: str, steady: str | set[str]
) -> None:
    modules = {name: nn.Identity() for name in "abcdefsx"}
    order = RunningOrder([[id(modules[name]) for name in each] for each in calls])
    names = {id(module): name for name, module in modules.items()}
    assert "".join(names[key] for key in order.times) == merged
    found = "".join(sorted(name for name, module in modules.items() if order.may_begin(module)))
    assert found in ({steady} if isinstance(steady, str) else steady)


def test_containers_run_with_the_first_of_what_is_in_them_and_modules_when_they_are_called() -> None:
    model = nn.Module()
    model.late, model.holder = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Module()
    model.holder.inner = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    first, second = model.holder.inner
    order = RunningOrder([[id(module) for module in (model.late[1], second, first, model.late, model.late[0])]])
    holder = [model.holder, model.holder.inner]
    assert order.modules(model) == [model, model.late[1], *holder, second, first, model.late, model.late[0]]


@pytest.mark.gpu(2)
def test_weights_gradients_and_moments_move_between_gpus() -> None:
    torch.manual_seed(0)
    model = Towers()
    runner = PipelineRunner(model, [0, 1])
    try:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        before = {p: p.device for p in model.parameters()}
        for step in range(2):
            for p, gradient in train(runner, model, step).gradients.items():
                p.grad = gradient
            optimizer.step()
        assert any(p.device != device for p, device in before.items())
        assert all(optimizer.state[p]["exp_avg"].device == p.device for p in before)
    finally:
        runner.close()
