"""Random numbers that depend on step, microbatch and stage, and not on which thread came first."""

import random
import sys
from typing import Any

import torch

from ramtorch_core.memory.device import Device

__all__ = ["Dice"]

_MIX = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: neighbouring counters give unrelated seeds
_MASK = 2**64 - 1


class Dice:
    """Seeds the generators at the start of every stage of every microbatch, and restores them after the step.

    Covered are torch's CPU generator, the generator of the stage's device, `random`, and numpy's global generator
    where numpy is loaded. The step itself draws from none of them, so whatever the caller draws afterwards (the order
    of the next epoch, say) is what it would be without a pipeline.

    Args:
        step: distinguishes the steps; the same step under the same `torch.manual_seed` repeats its numbers.
        devices: the devices whose generators are restored.
    """

    def __init__(self, step: int, devices: list[Device]) -> None:
        self._base = (torch.initial_seed() + _MIX * (step + 1)) & _MASK
        self._generators = [torch.default_generator]
        self._generators += [g for device in devices if (g := device.generator()) is not None]
        self._states = [generator.get_state() for generator in self._generators]
        self._python = random.getstate()
        self._numpy: Any = sys.modules["numpy"].random if "numpy" in sys.modules else None
        self._numpy_state = self._numpy.get_state() if self._numpy else None

    def throw(self, microbatch: int, stage: int, device: Device) -> None:
        """Seed the generators for this stage of this microbatch; to be called while no other thread draws from them."""
        seed = _scramble(self._base + _MIX * (microbatch * 4096 + stage + 1))
        torch.default_generator.manual_seed(seed & (2**63 - 1))
        generator = device.generator()
        if generator is not None:
            generator.manual_seed(seed & (2**63 - 1))
        random.seed(seed)
        if self._numpy:
            self._numpy.seed(seed & (2**32 - 1))

    def restore(self) -> None:
        """Put all generators back to where they were before the step."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy:
            self._numpy.set_state(self._numpy_state)


def _scramble(value: int) -> int:
    """The finalizer of splitmix64 (Steele et al., 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
