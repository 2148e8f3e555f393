"""OffloadModel: a chain of chunks with `step` and `flush_grads`, against a plain nn.Sequential."""

import pytest
import torch
import torch.nn.functional as F
from stream_cases import WIDTH, Block, assert_same, data
from torch import Tensor, nn

from ramtorch_core import ConfigurationError, OffloadModel, RamtorchError


class Sum(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.lin(x)), y + x.mean().to(y.dtype)


def chain(dropout: float = 0.0) -> list[nn.Module]:
    return [Block(dropout=dropout) for _ in range(4)]


def offloaded(chunks: list[nn.Module], **options) -> OffloadModel:
    return OffloadModel(chunks, "cpu", **{"resident_below": 0, "poison": True, **options})


def pair(dropout: float = 0.0, **options) -> tuple[nn.Sequential, OffloadModel]:
    plain = nn.Sequential(*chain(dropout))
    chunks = chain(dropout)
    nn.Sequential(*chunks).load_state_dict(plain.state_dict())
    return plain, offloaded(chunks, **options)


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


ways = pytest.mark.parametrize("keep_activations", [True, False, "checkpoint"])
pins = pytest.mark.parametrize("options", [{}, {"pin": 2}, {"pin_layers": [1, 3]}, {"window": 1}, {"window": 3}])


@ways
@pins
def test_steps_accumulate_out_of_sight_until_flush_grads(keep_activations, options):
    plain, model = pair(dropout=0.3, keep_activations=keep_activations, **options)
    total: dict[str, Tensor] = {}
    with model:
        for _ in range(2):
            plain.zero_grad()
            for index in range(3):
                torch.manual_seed(index)
                expected = F.mse_loss(plain(data(index)), data(index + 9))
                expected.backward()
                torch.manual_seed(index)
                before = grads(model)
                result = model.step(data(index), data(index + 9), loss_fn=F.mse_loss)
                assert_same(grads(model), before)
                assert torch.equal(result.loss, expected)
                assert not result.loss.requires_grad
                assert not result.output.requires_grad
            model.flush_grads()
            total = {name: total[name] + grad if total else grad for name, grad in grads(plain).items()}
            assert_same(grads(model), total)


@pins
def test_flush_grads_scales(options):
    plain, model = pair(**options)
    with model:
        plain(data()).sum().backward()
        model.step(data(), loss_fn=torch.sum)
        model.flush_grads(0.25)
        assert_same(grads(model), {name: grad * 0.25 for name, grad in grads(plain).items()})
        model.flush_grads(0.25)
        assert_same(grads(model), {name: grad * 0.25 for name, grad in grads(plain).items()})


@pins
def test_flush_grads_adds_to_what_a_former_flush_published(options):
    plain, model = pair(**options)
    with model:
        for index in range(2):
            plain(data(index)).sum().backward()
            model.step(data(index), loss_fn=torch.sum)
            model.flush_grads()
        assert_same(grads(model), grads(plain))


def test_a_step_whose_gradients_are_held_survives_a_change_of_layout():
    plain, model = pair()
    with model:
        for each in (model, plain):
            if each is plain:
                plain(data(0)).sum().backward()
            else:
                model.step(data(0), loss_fn=torch.sum)
            each.get_submodule("2").up.bias = None
        plain(data(1)).sum().backward()
        model.step(data(1), loss_fn=torch.sum)
        model.flush_grads()
    assert_same(grads(model), grads(plain))


@ways
def test_the_model_is_differentiable_as_usual(keep_activations):
    plain, model = pair(keep_activations=keep_activations)
    results = []
    with model:
        for each in (plain, model):
            x = data().requires_grad_()
            optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
            results.append([x.grad, each.state_dict()])
        assert_same(results[1], results[0])


@pytest.mark.parametrize("form", ["tensor", "callable"])
def test_grad_outputs_stand_in_for_a_loss_which_there_is_then_not(form):
    plain, model = pair()
    seed = data(3)
    with model:
        plain(data()).backward(seed)
        result = model.step(
            data(), grad_outputs=seed if form == "tensor" else lambda output: seed + 0 * output.detach()
        )
        model.flush_grads()
        assert_same(grads(model), grads(plain))
        assert torch.equal(result.output, plain(data()))
        with pytest.raises(RamtorchError, match="no loss"):
            _ = result.loss


def test_a_tuple_is_passed_on_as_arguments_and_other_tensors_pass_through():
    chunks = [Sum(), Sum()]
    x, y = data(), torch.arange(3)
    first, second = chunks[1](*chunks[0](x, y))
    (first.sum() + 0).backward()
    expected = [chunk.lin.weight.grad.clone() for chunk in chunks]
    for chunk in chunks:
        chunk.zero_grad()
    with offloaded(chunks) as model:
        result = model.step((x, y), grad_outputs=(torch.ones_like(first),))
        model.flush_grads()
        assert torch.equal(result.output[0], first)
        assert torch.equal(result.output[1], second)
        assert result.output[1].dtype == torch.long
        assert_same([chunk.lin.weight.grad for chunk in chunks], expected)


def test_the_ambient_autocast_is_used():
    plain, model = pair()
    with model, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for index in range(3):
            expected = plain(data(index)).float().sum()
            expected.backward()
            assert torch.equal(model.step(data(index), loss_fn=lambda y: y.float().sum()).loss, expected)
        model.flush_grads()
        assert_same(grads(model), grads(plain))


def test_parameters_and_state_are_those_of_a_sequential():
    plain, model = pair(pin=1)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.close()
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    model.close()
    assert torch.equal(model(data()), plain(data()))


def test_one_module_may_be_two_chunks():
    shared = Block()
    plain = nn.Sequential(shared, Block(), shared)
    plain(data()).sum().backward()
    expected = grads(plain)
    plain.zero_grad()
    with offloaded(list(plain)) as model:
        model.step(data(), loss_fn=torch.sum)
        model.flush_grads()
        assert_same(grads(plain), expected)


def test_chunks_without_weights_are_passed_through():
    plain = nn.Sequential(Block(), nn.ReLU(), Block(), nn.Dropout(0.5))
    torch.manual_seed(1)
    expected = plain(data())
    with offloaded(list(plain), pin_layers=[1, 2]) as model:
        assert [chunk.resident for chunk in model.engine.census.chunks] == [False, True]
        torch.manual_seed(1)
        assert torch.equal(model(data()), expected)


def test_an_error_in_the_loss_drops_the_step_and_keeps_the_held_gradients():
    plain, model = pair()
    with model:
        model.step(data(0), loss_fn=torch.sum)
        with pytest.raises(ZeroDivisionError):
            model.step(data(1), loss_fn=lambda _: 1 / 0)
        model.step(data(2), loss_fn=torch.sum)
        model.flush_grads()
    for index in (0, 2):
        plain(data(index)).sum().backward()
    assert_same(grads(model), grads(plain))


@pytest.mark.parametrize("arguments", [{}, {"loss_fn": torch.sum, "grad_outputs": torch.ones(3, WIDTH)}])
def test_a_loss_and_grad_outputs_exclude_each_other(arguments):
    _, model = pair()
    with model, pytest.raises(ConfigurationError, match=r"either loss_fn= .*or grad_outputs="):
        model.step(data(), **arguments)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigurationError, match="chunks is empty"):
        offloaded([])
    with pytest.raises(ConfigurationError, match="keep_activations='all'"):
        offloaded(chain(), keep_activations="all")
    with pytest.raises(ConfigurationError, match="window=0"):
        offloaded(chain(), window=0)
    for layer in (4, -1):
        with pytest.raises(ConfigurationError, match=f"pin_layers: {layer} is out of range for 4 chunks"):
            offloaded(chain(), pin_layers=[layer])
    _, model = pair()
    with model, pytest.raises(ConfigurationError, match="2 grad_outputs for 1 outputs"):
        model.step(data(), grad_outputs=(data(), data()))
