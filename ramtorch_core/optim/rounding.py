"""Stochastic rounding to bfloat16: up or down at random, so that what is stored is right on average.

Rounding to the nearest value loses every change that is smaller than half the distance to the next one: with 8 bits of
precision a weight that changes by less than 0.2 % per step never moves. Rounded stochastically it moves now and then,
by the full distance, with the probability that makes the expected value exact.

The random bits are a function of numbers, not of a generator's state: of a key (seed, which parameter, which step) and
of an element's index. So they do not depend on how the work is divided, and `adam.c` computes the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFFFFFFFFFF


def derive_key(*numbers: int) -> int:
    """64 bits that depend on all of `numbers` and on their order.

    Each number is added to what there is so far, and mixed in by the output function of SplitMix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    key = 0
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key


def random_bits(key: int, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Three times 16 random bits for each of the elements from `start` on, as int32.

    Any two of the three are independent. `start` to `start + count` must not cross a multiple of 2**32. Mixing is that
    of `random_bits` and `more_bits` in `adam.c`: "lowbias32" of Wellons' hash prospector, with half of the key added
    between its rounds. Products wrap around.
    """
    key0 = ((key & 0xFFFFFFFF) + (start >> 32) * 0x9E3779B1) & 0xFFFFFFFF
    x = torch.arange(count, dtype=torch.int32, device=device)
    x += _signed(start)
    x ^= _signed(key0)
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x ^= _signed(key >> 32)
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    more = x * _signed(0x9E3779B1)
    more ^= (more >> 16) & 0xFFFF
    return x & 0xFFFF, (x >> 16) & 0xFFFF, (more >> 16) & 0xFFFF


def store(target: Tensor, value: Tensor, random: Tensor) -> None:
    """Write float32 `value` to `target`: rounded by 16 `random` bits if that is bfloat16, as it is if it is float32.

    Infinities and NaN stay what they are. Sizes are equal.
    """
    if target.dtype == torch.float32:
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)
        return
    rounded = value.view(torch.int32) + random
    rounded >>= 16
    target.view(torch.int16).copy_(rounded)
    target.masked_fill_(value.isnan(), torch.nan)


def _signed(number: int) -> int:
    """The lowest 32 bits as an int32."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
