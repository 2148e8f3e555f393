"""Where gradients accumulate, and how they become `.grad`."""

import pytest
import torch
from torch import Tensor, nn

from ramtorch_core.memory import bounce
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.weights import Weight, WeightGroup

CPU = Device("cpu")


def group(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> WeightGroup:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    result = WeightGroup(0, "chunk", [Weight(f"w{i}", p, ()) for i, p in enumerate(parameters)])
    result.build([dtype] * len(parameters), CPU)
    return result


def grads(made: WeightGroup) -> list[Tensor | None]:
    return [weight.parameter.grad for weight in made.weights]


def receive(store: Gradients, made: WeightGroup, *values: float | None, dtype: torch.dtype | None = None) -> None:
    given = [
        None if value is None else torch.full(w.size, value, dtype=dtype or w.parameter.dtype)
        for w, value in zip(made.weights, values, strict=True)
    ]
    store.receive(made, given)


def test_gradients_are_published_when_the_backward_ends_and_added_to():
    store, made = Gradients(CPU), group((3, 5), (7,))
    receive(store, made, 1.0, 2.0)
    assert grads(made) == [None, None]
    store.finish()
    receive(store, made, 10.0, None)
    store.finish()
    assert [grad.flatten()[0].item() for grad in grads(made)] == [11.0, 2.0]


def test_a_weight_without_a_gradient_keeps_none():
    store, made = Gradients(CPU), group((3,), (4,))
    receive(store, made, None, 1.0)
    store.finish()
    assert grads(made)[0] is None


def test_held_gradients_add_up_until_they_are_published_scaled():
    store, made = Gradients(CPU), group((3,))
    store.hold = True
    for value in (1.0, 2.0):
        receive(store, made, value)
        store.finish()
    assert grads(made) == [None]
    store.publish(0.5)
    assert (grads(made)[0] == 1.5).all()
    receive(store, made, 4.0)
    store.publish(0.5)
    assert (grads(made)[0] == 3.5).all()


def test_dropped_gradients_leave_what_was_published_before_unless_it_was_being_added_to():
    store, made = Gradients(CPU), group((3,), (4,))
    receive(store, made, 1.0, 1.0)
    store.finish()
    receive(store, made, 2.0, None)
    store.drop()
    store.finish()
    assert grads(made)[0] is None
    assert (grads(made)[1] == 1.0).all()


def test_what_the_host_adds_during_a_backward_is_not_lost():
    store, made = Gradients(CPU), group((3,))
    receive(store, made, 1.0)
    store.finish()
    region = grads(made)[0]
    receive(store, made, 2.0)
    made.weights[0].parameter.grad = torch.full((3,), 10.0)  # as autograd does, finding no `.grad`
    store.finish()
    assert grads(made)[0] is region
    assert (region == 13.0).all()


def test_memory_is_reused_when_nobody_holds_it_and_not_otherwise():
    store, made = Gradients(CPU), group((3,))
    receive(store, made, 1.0)
    store.finish()
    address = grads(made)[0].data_ptr()
    made.weights[0].parameter.grad = None
    receive(store, made, 2.0)
    store.finish()
    assert grads(made)[0].data_ptr() == address
    kept = grads(made)[0][1:]
    made.weights[0].parameter.grad = None
    receive(store, made, 3.0)
    store.finish()
    assert grads(made)[0].data_ptr() != address
    assert (kept == 2.0).all()


def test_gradients_of_weights_that_are_thawed_later_find_room():
    store, made = Gradients(CPU), group((300,), (400,))
    made.weights[1].parameter.requires_grad_(False)
    receive(store, made, 1.0, None)
    store.finish()
    assert store.host_bytes() == 4 * 300
    made.weights[1].parameter.requires_grad_(True)
    for _ in range(2):
        receive(store, made, 1.0, 5.0)
        store.finish()
    assert (grads(made)[0] == 3.0).all()
    assert (grads(made)[1] == 10.0).all()
    for weight in made.weights:
        weight.parameter.grad = None
    receive(store, made, 1.0, 5.0)
    store.finish()
    assert store.host_bytes() == 4 * 700


def test_gradients_in_another_dtype_than_the_masters_are_converted():
    store, made = Gradients(CPU), group((5,), (6,))
    for _ in range(2):
        receive(store, made, 1.5, 0.1, dtype=torch.bfloat16)
        store.finish()
    assert grads(made)[1].dtype == torch.float32
    assert (grads(made)[1] == 2 * torch.tensor(0.1).bfloat16().float()).all()


def test_half_precision_masters_add_in_float32_and_round_once_per_backward():
    store, made = Gradients(CPU), group((4,), dtype=torch.bfloat16)
    values = [1.0, 0.001, 0.001, 0.001, 0.001]
    total = torch.zeros(())
    for value in values:
        receive(store, made, value)
        store.finish()
        total += torch.tensor(value).bfloat16().float()
        assert (grads(made)[0] == total.bfloat16()).all()
    assert total.bfloat16() != 1.0


def test_sums_in_float32_count_among_the_bytes_that_leave_and_so_do_rounded_ones() -> None:
    store, made = Gradients(CPU), group((3, 5), dtype=torch.bfloat16)
    copied = []
    for _ in range(3):
        receive(store, made, 1.0)
        store.finish()
        copied.append(store.copied_bytes)
    assert copied == [2 * 15, (2 + 6) * 15, (2 + 6 + 6) * 15]


def test_a_half_precision_gradient_that_the_user_wrote_is_the_new_beginning():
    store, made = Gradients(CPU), group((4,), dtype=torch.bfloat16)
    for value in (1.0, 0.001):
        receive(store, made, value)
        store.finish()
    grads(made)[0].fill_(8.0)
    receive(store, made, 1.0)
    store.finish()
    assert (grads(made)[0] == 9.0).all()


@pytest.mark.parametrize("add", [False, True])
def test_gradients_larger_than_the_bounce_buffer_move_in_pieces(monkeypatch, add):
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", 96)
    store, made = Gradients(CPU), group((50,), (3, 30))
    expected = [torch.randn(w.size) for w in made.weights]
    if add:
        receive(store, made, 1.0, 1.0)
    store.receive(made, [tensor.double() for tensor in expected])
    store.finish()
    for grad, tensor in zip(grads(made), expected, strict=True):
        assert torch.equal(grad, tensor + 1.0 if add else tensor)


def test_gradients_with_other_strides_are_brought_into_the_masters_order():
    parameter = nn.Parameter(torch.zeros(4, 6).t())
    made = WeightGroup(0, "chunk", [Weight("w", parameter, ())])
    made.build([torch.float32], CPU)
    store, grad = Gradients(CPU), torch.randn(6, 4)
    store.receive(made, [grad])
    store.finish()
    assert parameter.grad.stride() == parameter.stride() == (1, 6)
    assert torch.equal(parameter.grad, grad)


def test_what_is_held_survives_that_its_group_is_forgotten():
    store, made = Gradients(CPU), group((3,))
    store.hold = True
    receive(store, made, 1.0)
    store.finish()
    store.forget(made)
    store.publish()
    assert (grads(made)[0] == 1.0).all()
    store.forget(made)
    assert store.host_bytes() == 0


def test_memory_that_somebody_holds_is_not_reused_while_gradients_lie_in_two_arenas():
    store, made = Gradients(CPU), group((300,), (400,))
    held = []
    for value in (1.0, 2.0, 4.0):  # the second weight accumulates in the first arena
        receive(store, made, value, value)
        store.finish()
        held.append(grads(made)[0])
        made.weights[0].parameter.grad = None
    assert [tensor[0].item() for tensor in held] == [1.0, 2.0, 4.0]
    assert (grads(made)[1] == 7.0).all()


def test_what_the_host_adds_to_a_half_precision_gradient_is_not_lost_later():
    store, made = Gradients(CPU), group((3,), dtype=torch.bfloat16)
    receive(store, made, 1.0)
    store.finish()
    receive(store, made, 2.0)
    made.weights[0].parameter.grad = torch.full((3,), 10.0, dtype=torch.bfloat16)  # as autograd does
    store.finish()
    receive(store, made, 1.0)
    store.finish()
    assert (grads(made)[0] == 14.0).all()


def test_a_scaled_half_precision_gradient_is_rounded_once():
    store, made = Gradients(CPU), group((4,), dtype=torch.bfloat16)
    store.hold = True
    for value in (1.0, 0.003):
        receive(store, made, value)
        store.finish()
    total = 1.0 + torch.tensor(0.003).bfloat16().float()
    store.publish(0.7)
    assert (grads(made)[0] == (total * (0.7)).bfloat16()).all()
    assert (total.bfloat16() * (0.7)).bfloat16() != (total * (0.7)).bfloat16()


@pytest.mark.parametrize("rounds", ["added on the way", "taken back"])
def test_a_sum_that_is_wider_than_its_half_precision_master_is_added_to_before_it_is_rounded(rounds: str) -> None:
    store, made = Gradients(CPU), group((4,), dtype=torch.bfloat16)
    (weight,) = made.weights
    total = torch.zeros(4)
    for value in (1.003, 0.003, 0.003, 0.003):
        known = store.recall(made, weight) if rounds == "taken back" else None
        assert known is None or known.dtype == torch.float32
        receive(store, made, value + (0.0 if known is None else float(known[0])), dtype=torch.float32)
        store.finish()
        total += value
        assert (grads(made)[0] == total.bfloat16()).all()
    assert total.bfloat16()[0] != 1.0


def test_what_user_code_did_to_a_half_precision_gradient_is_what_is_taken_back() -> None:
    store, made = Gradients(CPU), group((4,), dtype=torch.bfloat16)
    receive(store, made, 1.003, dtype=torch.float32)
    store.finish()
    made.weights[0].parameter.grad.mul_(0.5)
    known = store.recall(made, made.weights[0])
    assert known is not None
    assert (known == 0.5).all()
