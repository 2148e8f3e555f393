"""In which dtype each weight crosses, by observation and by the user's choice."""

import logging
from contextlib import nullcontext

import pytest
import torch
from autocast_cases import Adapted, Doubled, Functional, Island, Reused, UsedTwice, halves, training
from stream_cases import WIDTH, Stack, assert_equals_resident, data, every_policy, stack, streaming
from torch import nn

from ramtorch_core.errors import ConfigurationError


def dtypes_after(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, remember: bool = False, **options: object
) -> dict[str, torch.dtype]:
    """In which dtype each weight crosses after three observed steps."""
    with streaming(model, **options) as streamer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(3):
            training(dtype, remember=remember)(model, optimizer, index)
        weights = [weight for group in streamer.groups for weight in group.weights]
        return {weight.name: weight.dtype for weight in weights} | {w.name: w.dtype for w in streamer.census.copies}


@halves
def test_linear_weights_cross_in_half_precision_and_norms_do_not(dtype):
    found = dtypes_after(stack(1), dtype)
    assert found["blocks.0.up.weight"] == found["blocks.0.down.weight"] == dtype
    assert found["blocks.0.norm.weight"] == torch.float32


def test_raw_parameters_whose_only_use_is_a_product_are_promoted_after_they_were_seen():
    found = dtypes_after(Stack(Functional()))
    assert found == dict.fromkeys(["blocks.0.first", "blocks.0.second", "blocks.0.bias"], torch.bfloat16)


def test_a_weight_cast_twice_crosses_in_half_precision_where_autocast_remembers_its_casts():
    assert dtypes_after(Stack(UsedTwice(WIDTH, WIDTH)), remember=True)["blocks.0.weight"] == torch.bfloat16


@pytest.mark.parametrize("kind", [Doubled, Reused, UsedTwice, Island])
def test_weights_that_need_all_their_bits_cross_in_their_own_dtype(kind):
    assert dtypes_after(Stack(kind(WIDTH, WIDTH)))["blocks.0.weight"] == torch.float32


@every_policy
@halves
def test_code_that_rounds_to_the_dtype_of_a_weight_computes_as_without_streaming(dtype, mode):
    assert_equals_resident(lambda: Stack(*(Adapted() for _ in range(3))), training(dtype), **mode)


def test_weights_whose_dtype_is_read_cross_in_their_own_and_the_code_is_named_once(caplog):
    with caplog.at_level(logging.WARNING):
        found = dtypes_after(Stack(Adapted(), Adapted()))
    halved = {name for name, dtype in found.items() if dtype == torch.bfloat16}
    assert halved == {name for name in found if "down.weight" not in name}
    assert [message for message in caplog.messages if "dtype" in message] == [
        f"2 weights ({2 * 2 * WIDTH * 4 / 1e6:.1f} MB), such as 'blocks.0.down.weight', cross in torch.float32 under "
        f"autocast, because code in autocast_cases reads their dtype and may round something to it. Where that changes "
        f"no result, stream_dtype={{'blocks.0.down.weight': torch.bfloat16}} halves what crosses."
    ]


def test_a_weight_whose_dtype_the_user_chose_shows_that_dtype():
    assert set(dtypes_after(Stack(Adapted()), stream_dtype=torch.bfloat16).values()) == {torch.bfloat16}


def test_nothing_crosses_in_half_precision_without_autocast():
    model = stack(1)
    with streaming(model) as streamer:
        for index in range(3):
            model(data(index)).sum().backward()
        assert {weight.dtype for group in streamer.groups for weight in group.weights} == {torch.float32}


def test_half_precision_shadows_halve_the_slots():
    model = Stack(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    with streaming(model, window=2) as streamer:
        with torch.autocast("cpu", torch.bfloat16):
            model(data(0, 3, 64))
        assert streamer.device_weight_bytes() == 2 * 64 * 64 * 2


@every_policy
def test_stream_dtype_float32_is_exact_under_autocast(mode):
    assert_equals_resident(stack, training(torch.bfloat16), stream_dtype=torch.float32, **mode)
    assert set(dtypes_after(stack(1), stream_dtype=torch.float32).values()) == {torch.float32}


def test_stream_dtype_by_pattern_takes_the_first_match():
    override = {"*.up.weight": torch.float32, "*.up.*": torch.float16}
    found = dtypes_after(stack(1), torch.float16, stream_dtype=override)
    assert found["blocks.0.up.weight"] == torch.float32
    assert found["blocks.0.up.bias"] == found["blocks.0.down.weight"] == torch.float16


def test_stream_dtype_rounds_even_what_autocast_would_not():
    plain, model = Stack(Doubled(WIDTH, WIDTH)), Stack(Doubled(WIDTH, WIDTH))
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        plain.blocks[0].weight.copy_(plain.blocks[0].weight.bfloat16())
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
        streaming(model, stream_dtype={"*weight": torch.bfloat16}),
    ):
        assert torch.equal(model(data()), plain(data()))


@pytest.mark.parametrize("wrong", ["half", torch.int8, {"*": torch.int64}, {"*": "bf16"}, 16])
def test_an_unknown_stream_dtype_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="stream_dtype"):
        streaming(stack(1), stream_dtype=wrong).__enter__()


def test_visits_outside_of_autocast_after_half_precision_shadows_are_told_once(caplog):
    model = stack(2)
    with streaming(model), caplog.at_level(logging.WARNING):
        with torch.autocast("cpu", torch.bfloat16):
            model(data()).sum().backward()
        for _ in range(2):
            model(data()).sum().backward()
    assert sum("outside of autocast" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("island", [False, True])
def test_autocast_that_begins_inside_of_a_scope_decides_from_the_second_step_on(island):
    """Unless a chunk runs outside of it."""
    model = stack(2)
    if island:
        plain = model.blocks[1].forward
        model.blocks[1].forward = lambda x: plain(x.float())
    with streaming(model) as streamer:
        for index in range(3):
            with streamer.scope():
                with torch.autocast("cpu", torch.bfloat16):
                    y = model.blocks[0](data(index))
                with torch.autocast("cpu", torch.bfloat16, enabled=not island):
                    y = model.blocks[1](y.float())
            y.float().square().mean().backward()
            found = {w.name: w.dtype for w in streamer.groups[0].weights}
            assert found["blocks.0.up.weight"] == (torch.bfloat16 if index and not island else torch.float32)
            assert found["blocks.0.norm.weight"] == torch.float32


def test_autocast_inside_of_a_scope_changes_no_bit():
    def step(model, optimizer, index):
        optimizer.zero_grad()
        streamer = next(iter(engines), None)
        with streamer.scope() if streamer else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            loss = model(data(index)).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    engines: list = []
    records = []
    for streamed in (True, False):
        torch.manual_seed(0)
        model = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with streaming(model) if streamed else nullcontext() as streamer:
            engines[:] = [streamer] if streamed else []
            records.append(
                [step(model, optimizer, index) for index in range(4)] + [p.detach().clone() for p in model.parameters()]
            )
    assert all(map(torch.equal, *records))
