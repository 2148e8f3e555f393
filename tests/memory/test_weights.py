"""Masters and shadows: laying out, noticing writes, bringing home, giving back."""

import pytest
import torch
from torch import nn

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.weights import Weight, WeightGroup, dense_stride, separate

CPU = Device("cpu")


def group(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> WeightGroup:
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    weights = [Weight(f"w{i}", parameter, ()) for i, parameter in enumerate(parameters)]
    result = WeightGroup(0, "chunk", weights)
    result.build([dtype] * len(weights), CPU)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_is_one_aligned_copy_and_keeps_every_value(dtype):
    made = group((3, 5), (7,), (), (0, 4), dtype=dtype)
    assert made.nbytes == 3 * 256
    assert all(weight.offset % 256 == 0 for weight in made.weights)
    slot = made.arena.flat.clone()
    for weight in made.weights:
        assert torch.equal(weight.view(slot), weight.parameter.detach().to(dtype))


def test_a_master_in_its_own_dtype_is_its_own_shadow():
    made = group((3, 5))
    (weight,) = made.weights
    with torch.no_grad():
        weight.parameter.fill_(7)
    assert (weight.shadow == 7).all()
    assert weight.parameter.data_ptr() == weight.shadow.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_refresh_returns_exactly_the_written_weights(dtype):
    made = group((3, 5), (7,), dtype=dtype)
    first, second = made.weights
    assert made.refresh() == []
    with torch.no_grad():
        first.parameter.mul_(2)
    assert made.refresh() == [first]
    second.parameter.data = torch.full((7,), 5.0)
    assert made.refresh() == [second]
    assert (second.shadow == 5).all()
    second.parameter.data.fill_(6)
    made.refresh(force=True)
    assert (second.shadow == 6).all()
    assert made.refresh() == []


def test_a_master_that_was_pointed_elsewhere_comes_home():
    made = group((3, 5))
    (weight,) = made.weights
    weight.parameter.data = torch.ones(5, 3).t()
    made.refresh()
    assert weight.parameter.data_ptr() == weight.shadow.data_ptr()
    assert (weight.parameter == 1).all()


def test_two_masters_that_were_exchanged_keep_their_values():
    one, two = group((4,)), group((4,))
    first, second = one.weights[0].parameter, two.weights[0].parameter
    values = [first.detach().clone(), second.detach().clone()]
    first.data, second.data = second.data, first.data
    separate([one, two])
    one.refresh()
    two.refresh()
    assert torch.equal(first, values[1])
    assert torch.equal(second, values[0])


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda t: t[:2].clone()])
def test_a_master_of_another_dtype_or_size_is_refused_by_name(change):
    made = group((3, 5))
    made.weights[0].parameter.data = change(made.weights[0].parameter.data)
    with pytest.raises(ConfigurationError, match="parameter 'w0' became"):
        made.refresh()


def test_a_change_of_dtypes_keeps_values_and_moves_masters_out_and_back():
    made = group((3, 5))
    (weight,) = made.weights
    value = weight.parameter.detach().clone()
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float32):
        made.build([dtype], CPU)
        assert torch.equal(weight.parameter, value)
        assert torch.equal(weight.shadow, value.to(dtype))
    made.release()
    assert made.arena is None
    assert torch.equal(weight.parameter, value)
    made.release()


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(3, 4), (4, 1)),
        (torch.empty(3, 4).t(), (1, 4)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(3, 8)[:, ::2], (4, 1)),
        (torch.empty(1, 4).expand(3, 4), (4, 1)),
        (torch.empty(3, 1, 4).transpose(0, 1), (4, 4, 1)),
        (torch.empty(()), ()),
    ],
)
def test_dense_strides_are_kept_and_gaps_are_closed(tensor, stride):
    assert dense_stride(tensor) == stride
    made = torch.empty_strided(tensor.size(), dense_stride(tensor))
    assert made.untyped_storage().nbytes() == 4 * tensor.numel()


def test_shadows_are_no_part_of_a_graph() -> None:
    made = group((3,), (4,))
    made.build([torch.bfloat16, torch.float32], CPU)
    assert not any(weight.shadow.requires_grad for weight in made.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_released_arena_is_only_kept_by_its_masters(dtype):
    made = group((3, 5), (7,), dtype=dtype)
    arena = made.arena
    made.release()
    for weight in made.weights:
        weight.parameter.data = weight.parameter.data.clone()
    assert arena.tensors_alive() == 0
