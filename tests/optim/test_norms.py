"""The norm of gradients that are partly published and partly on their way, against torch's."""

import pytest
import torch
from torch import Tensor, nn

from ramtorch_core import RamtorchError
from ramtorch_core.memory.weights import Weight
from ramtorch_core.optim.norms import Norms


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def gradients(some: list[nn.Parameter]) -> list[Tensor]:
    return [torch.randn_like(p) * (index + 1) for index, p in enumerate(some)]


def clip(grads: list[Tensor], noted: set[int], max_norm: float) -> tuple[Tensor, float, list[Tensor]]:
    """The norm, the factor, and all gradients as they are used; those of `noted` are not published."""
    some = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    norms, scaled = Norms(), []
    for index, (p, grad) in enumerate(zip(some, grads, strict=True)):
        if index in noted:
            norms.note({Weight(str(index), p, ()): grad}, True)
        else:
            p.grad = grad.clone()
    total, scale = norms.clip(iter(some), max_norm)
    for p, grad in zip(some, grads, strict=True):
        scaled.append(grad * scale if p.grad is None else p.grad)
    return total, scale, scaled


@pytest.mark.parametrize("noted", [set(), {0}, {0, 2}, {0, 1, 2, 3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norm_and_gradients_are_those_of_torch(noted: set[int], dtype: torch.dtype, max_norm: float) -> None:
    grads = gradients(parameters(5, 300, 1, 64, dtype=dtype))
    plain = parameters(5, 300, 1, 64, dtype=dtype)
    for p, grad in zip(plain, grads, strict=True):
        p.grad = grad.clone()
    expected = nn.utils.clip_grad_norm_(plain, max_norm)
    total, scale, scaled = clip(grads, noted, max_norm)
    assert torch.equal(total, expected)
    assert (scale == 1.0) == (max_norm == 1e6)
    assert all(torch.equal(one, p.grad) for one, p in zip(scaled, plain, strict=True))  # type: ignore[arg-type]


def test_gradients_of_several_dtypes_have_one_norm() -> None:
    grads = [torch.randn(10), torch.randn(10).bfloat16(), torch.randn(10).double()]
    total = clip(grads, {1}, 1.0)[0]
    torch.testing.assert_close(total.double(), torch.cat([g.double() for g in grads]).norm(), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_norms_that_are_zero_or_not_finite_scale_as_in_torch(value: float) -> None:
    grads = gradients(parameters(4, 4)) if value else [torch.zeros(4), torch.zeros(4)]
    grads[1][2] = value
    plain = parameters(4, 4)
    for p, grad in zip(plain, grads, strict=True):
        p.grad = grad.clone()
    expected = nn.utils.clip_grad_norm_(plain, 1.0)
    total, _, scaled = clip(grads, {0}, 1.0)
    torch.testing.assert_close(total, expected, rtol=0.0, atol=0.0, equal_nan=True)
    for one, p in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, p.grad, rtol=0.0, atol=0.0, equal_nan=True)


def test_norms_of_one_device_come_to_the_host_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (copies.append(tensor), cpu(tensor))[1])
    given = parameters(*range(1, 9))
    norms = Norms()
    norms.note({Weight(str(i), p, ()): torch.full_like(p, 2.0) for i, p in enumerate(given[:5])}, True)
    for p in given[5:]:
        p.grad = torch.full_like(p, 2.0)
    total, _ = norms.clip(given, 1.0)
    assert total == 12.0
    assert len(copies) == 1


def test_without_gradients_the_norm_is_zero() -> None:
    assert Norms().clip(parameters(2, 3), 1.0) == (torch.tensor(0.0), 1.0)


def test_gradients_that_are_in_use_cannot_be_clipped() -> None:
    (p,) = parameters(3)
    norms = Norms()
    norms.note({Weight("p", p, ()): torch.ones(3)}, False)
    with pytest.raises(RamtorchError, match="they are being used already"):
        norms.clip([p], 1.0)
    norms.clear()
    norms.clip([p], 1.0)


def test_a_part_of_what_is_held_cannot_be_clipped() -> None:
    held, other = parameters(3, 3)
    norms = Norms()
    norms.note({Weight("p", held, ()): torch.ones(3)}, True)
    with pytest.raises(RamtorchError, match="held of 1 parameters besides the 1"):
        norms.clip([other], 1.0)
    norms.clip([held, other], 1.0)
