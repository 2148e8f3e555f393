"""`Pipeline` and `PipelineModel`: the engine without Lightning."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Block, Chain
from torch import Tensor, nn

from ramtorch_core import ConfigurationError, Pipeline, PipelineModel, RamtorchError
from ramtorch_core.plan.schedule import Schedule, gpipe

SCHEDULES = ["gpipe", "staggered_1b1f", "1f1b", "zb_h1"]


def stages() -> list[nn.Module]:
    return [nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(WIDTH, 3))]


def data(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randint(0, 3, (size,))


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """What a test opens and this fixture closes."""
    pipelines: list[Any] = []
    yield pipelines
    for pipeline in pipelines:
        pipeline.close()


def accumulate(parts: list[nn.Module], x: Tensor, y: Tensor, count: int) -> Tensor:
    model = nn.Sequential(*parts)
    losses = []
    for inputs, targets in zip(x.chunk(count), y.chunk(count), strict=True):
        loss = F.cross_entropy(model(inputs), targets)
        (loss / count).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def assert_same_gradients(a: list[nn.Module], b: list[nn.Module]) -> None:
    for p, q in zip(nn.ModuleList(a).parameters(), nn.ModuleList(b).parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_as_in_the_quick_start(schedule: str, opened: list[Any]) -> None:
    parts = stages()
    reference = copy.deepcopy(parts)
    pipe = Pipeline(stage_modules=parts, devices=["cpu", "cpu"])
    opened.append(pipe)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    other = torch.optim.Adam(nn.ModuleList(reference).parameters(), lr=1e-3)
    for _ in range(3):
        x, y = data()
        result = pipe.step(x, targets=y, schedule=schedule, n_microbatches=4, loss_fn=F.cross_entropy)
        assert all(p.grad is None for p in pipe.parameters())
        result.flush_grads()
        expected = accumulate(reference, x, y, 4)
        assert torch.equal(result.loss, expected)
        assert_same_gradients(parts, reference)
        for opt in (optimizer, other):
            opt.step()
            opt.zero_grad()


def test_steps_add_up_until_a_flush_and_flushes_add_to_grad(opened: list[Any]) -> None:
    """The second of two flushes used to lose the first."""
    parts = stages()
    reference = copy.deepcopy(parts)
    pipe = Pipeline(stage_modules=parts, devices=["cpu", "cpu"])
    opened.append(pipe)
    first, second = data(), data()
    for x, y in (first, second):
        pipe.step(x, y, loss_fn=F.cross_entropy)
        accumulate(reference, x, y, 4)
    pipe.flush_grads()
    assert_same_gradients(parts, reference)
    pipe.step(*first, loss_fn=F.cross_entropy)
    pipe.flush_grads()
    pipe.flush_grads()
    accumulate(reference, *first, 4)
    for p, q in zip(pipe.parameters(), nn.ModuleList(reference).parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_unequal_microbatches_are_weighted_by_their_size(opened: list[Any]) -> None:
    parts = stages()
    reference = copy.deepcopy(parts)
    pipe = Pipeline(stage_modules=parts, devices=["cpu", "cpu"])
    opened.append(pipe)
    x, y = data(10)
    result = pipe.step(x, y, n_microbatches=4, loss_fn=F.cross_entropy)
    result.flush_grads()
    loss = F.cross_entropy(nn.Sequential(*reference)(x), y)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    for p, q in zip(pipe.parameters(), nn.ModuleList(reference).parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


class First(nn.Module):
    """Returns a float, a mask, a float that is marked as forward-only, and nothing."""

    out_no_grad = (2,)

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Any, ...]:
        x = self.block(x) * scale
        return x, x > 0, x * 2, None


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor, extra: Tensor, nothing: None) -> Tensor:
        assert nothing is None
        return self.head(self.block(torch.where(mask, x, extra)))


def test_tuples_masks_and_outputs_without_gradient(opened: list[Any]) -> None:
    parts: list[nn.Module] = [First(), Second()]
    reference = copy.deepcopy(parts)
    pipe = Pipeline(stage_modules=parts, devices=["cpu", "cpu"])
    opened.append(pipe)
    x, y = data(4)
    scale = torch.rand(4, WIDTH)
    pipe.step((x, scale), y, n_microbatches=2, loss_fn=F.cross_entropy).flush_grads()
    for i in range(2):
        rows = slice(2 * i, 2 * i + 2)
        a, mask, extra, nothing = reference[0](x[rows], scale[rows])
        (F.cross_entropy(reference[1](a, mask, extra.detach(), nothing), y[rows]) / 2).backward()
    assert_same_gradients(parts, reference)


@pytest.mark.parametrize("given", ["tensor", "callable"])
def test_grad_outputs_replace_the_loss(given: str, opened: list[Any]) -> None:
    parts = stages()
    reference = copy.deepcopy(parts)
    pipe = Pipeline(stage_modules=parts, devices=["cpu", "cpu"])
    opened.append(pipe)
    x, _ = data(4)
    gradient = torch.randn(4, 3)
    result = pipe.step(
        x, n_microbatches=2, grad_outputs=gradient if given == "tensor" else lambda out: torch.ones_like(out)
    )
    result.flush_grads()
    expected = gradient if given == "tensor" else torch.ones(4, 3)
    for inputs, upstream in zip(x.chunk(2), expected.chunk(2), strict=True):
        nn.Sequential(*reference)(inputs).backward(upstream)
    assert_same_gradients(parts, reference)
    with pytest.raises(RuntimeError, match="grad_outputs has no loss"):
        _ = result.loss


def test_diced_microbatches_are_told_and_never_guessed(opened: list[Any]) -> None:
    """A tuple of two tensors used to be read as two microbatches."""
    parts: list[nn.Module] = [First(), Second()]
    pipe = Pipeline(stage_modules=parts, devices=["cpu", "cpu"])
    opened.append(pipe)
    x, y = data(4)
    pair = (x, torch.rand(4, WIDTH))
    whole = pipe.step(pair, y, n_microbatches=2, loss_fn=F.cross_entropy)
    diced = [(x[:2], pair[1][:2]), (x[2:], pair[1][2:])]
    assert torch.equal(pipe.step(diced, [y[:2], y[2:]], diced=True, loss_fn=F.cross_entropy).loss, whole.loss)
    with pytest.raises(ConfigurationError, match=r"different lengths: \[1, 2\]"):
        pipe.step(diced, [y], diced=True, loss_fn=F.cross_entropy)


@pytest.mark.parametrize("autocast", ["bf16", torch.bfloat16, None])
def test_autocast_is_that_of_the_argument_or_of_the_caller(autocast: Any, opened: list[Any]) -> None:
    parts = stages()
    reference = copy.deepcopy(parts)
    pipe = Pipeline(stage_modules=parts, devices=["cpu", "cpu"], autocast=autocast)
    opened.append(pipe)
    x, y = data()
    for i in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(nn.Sequential(*reference)(x.chunk(4)[i]), y.chunk(4)[i])
        (loss / 4).backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast is None):
        pipe.step(x, y, loss_fn=F.cross_entropy).flush_grads()
    assert_same_gradients(parts, reference)


def test_fp16_trains_only_with_a_scaler(opened: list[Any]) -> None:
    pipe = Pipeline(stage_modules=stages(), devices=["cpu", "cpu"], autocast="fp16")
    opened.append(pipe)
    x, y = data()
    assert pipe.infer(x).shape == (8, 3)
    with pytest.raises(ConfigurationError, match="scaler"):
        pipe.step(x, y, loss_fn=F.cross_entropy)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipe.step(x, y, loss_fn=F.cross_entropy, scaler=scaler).flush_grads()
    before = next(pipe.parameters()).grad.clone()
    scaler.unscale_(torch.optim.SGD(pipe.parameters(), lr=0.1))
    assert torch.equal(next(pipe.parameters()).grad, before / 4)


def test_a_model_is_cut_by_itself_and_called_like_a_module(opened: list[Any]) -> None:
    model = Chain(6)
    reference = copy.deepcopy(model)
    pipe = PipelineModel(model, torch.randn(2, WIDTH), devices=["cpu", "cpu"], device_weights=[2.0, 1.0])
    opened.append(pipe)
    assert pipe.stage_table()[1].first_module == "blocks.4"
    for size in (1, 2, 7, 16):
        x, _ = data(size)
        torch.testing.assert_close(pipe(x), reference(x).detach())
        assert not pipe(x).requires_grad
    x, y = data()
    schedulers = torch.optim.lr_scheduler.StepLR(torch.optim.Adam(pipe.parameters(), lr=1e-3), 1)
    pipe.step(x, y, loss_fn=F.cross_entropy).flush_grads()
    schedulers.optimizer.step()
    schedulers.step()
    accumulate([reference], x, y, 4)
    assert_same_gradients([model], [reference])


def test_explicit_cuts_and_an_example_that_does_not_pass_them_in_order() -> None:
    pipe = PipelineModel(Chain(), devices=["cpu", "cpu"], split_spec=["blocks.3"])
    assert pipe.stage_table()[1].first_module == "blocks.3"
    pipe.close()
    with pytest.raises(RamtorchError, match=r"'blocks\.3', which begins stage 1"):
        PipelineModel(Chain(), torch.randn(2, WIDTH), devices=["cpu"] * 4, split_spec=["blocks.3", "blocks.1", "head"])


def test_an_error_drops_the_gradients_of_the_step_and_keeps_those_published(opened: list[Any]) -> None:
    parts = stages()
    pipe = Pipeline(stage_modules=parts, devices=["cpu", "cpu"])
    opened.append(pipe)
    x, y = data()
    pipe.step(x, y, loss_fn=F.cross_entropy).flush_grads()
    before = [p.grad.clone() for p in pipe.parameters()]
    with pytest.raises(ArithmeticError):
        pipe.step(x, y, loss_fn=lambda out, target: 1 / 0)
    pipe.flush_grads()
    assert all(torch.equal(p.grad, q) for p, q in zip(pipe.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either loss_fn or grad_outputs"),
        ({"loss_fn": F.cross_entropy, "grad_outputs": torch.ones(8, 3)}, "and not both"),
        ({"loss_fn": F.cross_entropy, "n_microbatches": 0}, "n_microbatches=0"),
        ({"loss_fn": F.cross_entropy, "schedule": "zbv"}, "has 4 stages, but the model was cut into 2"),
        ({"loss_fn": F.cross_entropy, "schedule": "best"}, "no pipeline schedule is called 'best'"),
        ({"loss_fn": F.cross_entropy, "schedule": gpipe(2, 2)}, "'gpipe' is for 2 microbatches, but the batch makes 4"),
        ({"loss_fn": F.cross_entropy, "schedule": lambda d, _: gpipe(d, 2)}, "made 'gpipe' for 2 .* asked for 4"),
        ({"loss_fn": F.cross_entropy, "targets": torch.zeros(3)}, "cannot be cut into microbatches.*diced=True"),
    ],
)
def test_bad_arguments_of_a_step_are_refused(options: dict[str, Any], message: str, opened: list[Any]) -> None:
    pipe = Pipeline(stage_modules=stages(), devices=["cpu", "cpu"])
    opened.append(pipe)
    x, y = data()
    with pytest.raises(ConfigurationError, match=message):
        pipe.step(x, **({"targets": y} | options))


def test_other_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 stages for 3 devices"):
        Pipeline(stage_modules=stages(), devices=["cpu"] * 3)
    with pytest.raises(ConfigurationError, match="autocast='int8'"):
        Pipeline(stage_modules=stages(), devices=["cpu"] * 2, autocast="int8")  # type: ignore[arg-type]


def test_a_schedule_of_ones_own(opened: list[Any]) -> None:
    parts = stages()
    reference = copy.deepcopy(parts)
    pipe = Pipeline(stage_modules=parts, devices=["cpu", "cpu"])
    opened.append(pipe)
    x, y = data()
    own = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    pipe.step(x, y, n_microbatches=2, schedule=own, loss_fn=F.cross_entropy).flush_grads()
    accumulate(reference, x, y, 2)
    assert_same_gradients(parts, reference)
