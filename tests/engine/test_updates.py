"""Updates that overlap backward, against the same optimizer over published gradients, bit for bit."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_cases import WIDTH, Block, Stack, data, stack, stream
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from updates_cases import Optimize, adamw, compare, delays, loss_of

from ramtorch_core.optim import steps

__all__ = ["delays"]

OPTIMIZERS: dict[str, Optimize] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
    "AdamW tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2, weight_decay=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, maximize=True),
    "SGD nesterov fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("optimize", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_of_torch_steps_in_blocks_as_it_does_whole(
    optimize: Optimize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "BLOCK", 32)
    compare(optimize=optimize)


MODES = [
    {"window": 1, "activations": "keep"},
    {"window": 2, "activations": "checkpoint"},
    {"window": 3, "activations": "keep", "amp": True},
    {"window": 2, "activations": "checkpoint", "amp": True},
    {"run_on": False},
    {"resident_below": 80, "batches": 3, "amp": True},
    {"batches": 3},
    {"set_to_none": False},
]


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("options", MODES, ids=str)
def test_losses_weights_and_state_are_those_of_the_plain_run(options: dict[str, Any]) -> None:
    compare(lambda: stack(4, dropout=0.2), **options)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize(("dtype", "batches"), [(torch.float64, 1), (torch.float64, 2), (torch.bfloat16, 1)])
def test_masters_of_another_dtype_are_updated_the_same(dtype: torch.dtype, batches: int) -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        return model(data(index).to(dtype)).square().mean()

    compare(lambda: stack().to(dtype), loss=loss, batches=batches, taken=None if batches == 2 else -1)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipped_updates_are_those_of_torch(dtype: torch.dtype, max_norm: float) -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        return model(data(index).to(dtype)).square().mean()

    compare(lambda: stack().to(dtype), loss=loss, clip=max_norm)


def test_clipped_accumulated_gradients_are_published_and_clipped_as_by_torch() -> None:
    compare(clip=0.01, batches=2, taken=0)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("schedule", ["OneCycleLR", "ExponentialLR"])
def test_schedulers_that_step_while_updates_run_change_the_next_step_only(schedule: str) -> None:
    schedulers: dict[int, Any] = {}

    def after_step(optimizer: torch.optim.Optimizer, step: int, _model: nn.Module) -> None:
        if step == 0:
            kind: Any = getattr(torch.optim.lr_scheduler, schedule)
            options = {"max_lr": 0.1, "total_steps": 9} if schedule == "OneCycleLR" else {"gamma": 0.5}
            schedulers[0] = kind(optimizer, **options)
        else:
            schedulers[0].step()

    compare(after_step=after_step)
    compare(optimize=OPTIMIZERS["AdamW tensor"], after_step=after_step)


def groups_of_two(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.AdamW(
        [{"params": parameters[::2], "weight_decay": 0.0}, {"params": parameters[1::2], "lr": 0.1}], lr=0.01
    )


@pytest.mark.usefixtures("delays")
def test_each_parameter_is_stepped_with_the_options_of_its_group() -> None:
    compare(optimize=groups_of_two)


def test_parameters_that_join_an_optimizer_later_are_updated_from_then_on() -> None:
    def head_only(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(parameters)[-2:], lr=0.01)

    def before_step(optimizer: torch.optim.Optimizer, step: int, model: nn.Module) -> None:
        if step == 2:
            optimizer.add_param_group({"params": [*model.blocks[0].parameters()], "lr": 0.1})

    compare(optimize=head_only, before_step=before_step, taken=4 + 2)


def test_parameters_that_are_frozen_and_thawed_in_between_are_updated_while_they_are_not() -> None:
    def before_step(_optimizer: torch.optim.Optimizer, step: int, model: nn.Module) -> None:
        model.blocks[1].requires_grad_(step % 2 == 0)
        model.blocks[2].up.requires_grad_(step % 2 == 1)

    compare(before_step=before_step, taken=None)


def test_state_that_is_loaded_in_between_is_what_later_updates_use() -> None:
    saved: list[Any] = []

    def after_step(optimizer: torch.optim.Optimizer, step: int, model: nn.Module) -> None:
        if step == 1:
            saved[:] = [copy.deepcopy(optimizer.state_dict())]
        if step == 2:
            optimizer.load_state_dict(saved[0])

    compare(after_step=after_step, run_on=False)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", [True, False])
def test_checkpoints_of_the_user_around_and_inside_chunks_change_nothing(
    activations: str, reentrant: bool, around: bool
) -> None:
    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    class Around(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                x = checkpoint(lambda x, a=first, b=second: b(a(x)), x, use_reentrant=reentrant)
            return x

    def loss(model: nn.Module, index: int) -> Tensor:
        return model(data(index).requires_grad_()).square().mean()

    def build() -> nn.Module:
        return Around(*(Block(dropout=0.1) for _ in range(4))) if around else Stack(*(Inside() for _ in range(4)))

    compare(build, loss=loss, activations=activations)


def test_a_chunk_that_is_used_twice_is_stepped_by_the_optimizer() -> None:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](super().forward(x))

    compare(lambda: Twice(*(Block() for _ in range(3))), taken=4 * 2)


def test_two_forwards_with_one_backward_are_stepped_by_the_optimizer() -> None:
    compare(loss=lambda model, index: loss_of(model, index) + loss_of(model, index + 50), taken=0)


def test_an_evaluation_between_forward_and_backward_changes_nothing() -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        value = loss_of(model, index)
        with torch.no_grad():
            model(data(7))
        return value

    compare(loss=loss, taken=None)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("first", [True, False])
def test_a_penalty_on_the_weights_is_added_before_their_step(first: bool) -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters()) if first else 0.0
        value = loss_of(model, index)
        penalty = penalty if first else sum(p.square().sum() for p in model.parameters())
        return value + 0.1 * penalty

    compare(loss=loss, taken=0)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("read", ["norm", "data", "state", "clamp", "list"])
def test_weights_that_are_read_now_and_then_between_visits_are_whole(read: str) -> None:
    reads: dict[str, Callable[[nn.Module], Tensor]] = {
        "norm": lambda model: model.blocks[2].up.weight.detach().norm(),
        "data": lambda model: model.blocks[3].up.weight.data.sum(),
        "state": lambda model: torch.stack([w.sum() for w in model.state_dict().values()]).sum(),
        "clamp": lambda model: model.blocks[3].up.weight.data.clamp_(-0.2, 0.2).sum(),
        "list": lambda model: torch.cat([p.flatten() for p in model.parameters()]).sum().detach(),
    }

    def loss(model: nn.Module, index: int) -> Tensor:
        factor = 1 + 0.01 * reads[read](model) if index in (1, 3) else 1.0
        return loss_of(model, index) * factor

    compare(loss=loss, taken=None)


def test_weights_that_are_pointed_at_other_memory_before_backward_keep_their_update() -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        value = loss_of(model, index)
        weight = model.blocks[1].up.weight
        weight.data = weight.data.clone()
        return value

    compare(loss=loss)


@pytest.mark.usefixtures("delays")
def test_a_frozen_base_stays_as_it_is_while_its_adapters_are_updated() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.base(x) + self.b(self.a(x))

    def only_trained(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)

    compare(lambda: Stack(*(Adapted() for _ in range(3))), only_trained)
    compare(lambda: Stack(*(Adapted() for _ in range(3))), only_trained, amp=True, batches=2)


def test_tied_weights_and_parameters_of_the_root_are_stepped_by_the_optimizer() -> None:
    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__(*(Block() for _ in range(3)))
            self.blocks[2].up.weight = self.blocks[0].up.weight
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    compare(Tied)


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_a_parameter_with_a_hook_is_stepped_by_the_optimizer(kind: str) -> None:
    def build() -> nn.Module:
        model = stack()
        weight = model.blocks[1].up.weight
        if kind == "tensor":
            weight.register_hook(lambda grad: grad * 0.5)
        else:
            weight.register_post_accumulate_grad_hook(halve)
        return model

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    compare(build)


def test_gradients_are_none_where_they_were_taken_and_published_elsewhere() -> None:
    model = stack()
    engine = stream(model, kernel="torch")
    optimizer = adamw(p for name, p in model.named_parameters() if "down" not in name)
    with engine.updates.overlap(optimizer):
        loss_of(model, 0).backward()
    optimizer.step()
    engine.close()
    published = {name for name, p in model.named_parameters() if p.grad is not None}
    assert published == {name for name, _ in model.named_parameters() if "down" in name}


def test_a_graph_from_before_the_update_raises_as_in_torch() -> None:
    for streamed in (False, True):
        model = stack(2)
        optimizer = adamw(model.parameters())
        engine = stream(model, kernel="torch", activations="keep") if streamed else None
        loss = loss_of(model, 0)
        with engine.updates.overlap(optimizer) if engine is not None else contextlib.nullcontext():
            loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        if engine is not None:
            engine.close()
