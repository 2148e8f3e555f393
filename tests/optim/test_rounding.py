"""Stochastic rounding: right on average, exact where it can be, and a function of key and index alone."""

import math

import pytest
import torch
from torch import Tensor

from ramtorch_core.optim.rounding import derive_key, random_bits, store

CPU = torch.device("cpu")


def rounded(values: Tensor, key: int = 7) -> Tensor:
    target = torch.empty_like(values, dtype=torch.bfloat16)
    store(target, values, random_bits(key, 0, values.numel(), CPU)[0])
    return target


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("base", [1.0, -1.0, 3e-39, 2.0**100])
def test_a_value_goes_up_as_often_as_it_is_nearer_to_the_next(fraction: float, base: float) -> None:
    """Also negative numbers and those below the smallest normal one. 5 standard deviations."""
    count = 1 << 16
    low = torch.tensor(base).bfloat16()
    high = (low.view(torch.int16) + 1).view(torch.bfloat16)
    value = low.double() + fraction * (high.double() - low.double())
    found = rounded(torch.full((count,), float(value)))
    up = int((found == high).sum())
    assert up + int((found == low).sum()) == count
    assert up == pytest.approx(fraction * count, abs=5 * math.sqrt(fraction * (1 - fraction) * count) + 1)


def test_what_bfloat16_can_hold_is_kept() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    torch.testing.assert_close(rounded(every.float()), every, rtol=0, atol=0, equal_nan=True)


def test_infinities_and_not_a_number_stay_and_nothing_else_becomes_one() -> None:
    payload = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([math.inf, -math.inf, math.nan]), payload]).repeat(1000)
    found = rounded(values)
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.float()[~values.isnan()], values[~values.isnan()])


@pytest.mark.parametrize("start", [0, (1 << 31) - 50, (1 << 32) - 100, 1 << 32])
def test_bits_do_not_depend_on_how_elements_are_divided(start: int) -> None:
    whole = random_bits(99, start, 100, CPU)
    parts = [random_bits(99, start + first, 20, CPU) for first in range(0, 100, 20)]
    for one, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(one, torch.cat(pieces))


def test_bits_are_even_and_pairs_of_them_independent() -> None:
    """Among the three of an element, of neighbours, of neighbouring keys, and of elements that are 2**32 apart."""
    count = 1 << 16
    first = random_bits(derive_key(0, 0, 1), 0, count, CPU)
    others = [
        *random_bits(derive_key(0, 0, 2), 0, count, CPU),
        *random_bits(derive_key(0, 1, 1), 0, count, CPU),
        *random_bits(derive_key(1, 0, 1), 0, count, CPU),
        *random_bits(derive_key(0, 0, 1), 1 << 32, count, CPU),
        *(bits.roll(1) for bits in first),
    ]
    series = torch.stack([*first, *others]).double()
    assert int(series.min()) >= 0
    assert int(series.max()) < 1 << 16
    uniform = (series / (1 << 16)) - 0.5
    assert float(uniform.mean(1).abs().max()) < 5 * math.sqrt(1 / 12 / count)
    correlation = torch.corrcoef(uniform) - torch.eye(len(uniform), dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / math.sqrt(count)
    each_bit = (torch.stack(first).unsqueeze(-1) >> torch.arange(16)) & 1
    assert float((each_bit.double().mean(1) - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(count)


def test_keys_depend_on_every_number_and_their_order() -> None:
    keys = {derive_key(*numbers) for numbers in [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0), (0, 0), (0, 0, 2), (-1,)]}
    assert len(keys) == 7
    assert all(0 <= key < 1 << 64 for key in keys)
