"""Knobs as they are given, some of them "auto", and sizes in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ramtorch_core.errors import ConfigurationError, shown

__all__ = ["PLANNED", "USABLE", "Auto", "Wish", "bytes_of", "usable_of"]

Auto: TypeAlias = Literal["auto"]

USABLE = 0.95
"""Part of the free memory that is planned with where no gpu_memory is given: allocators need more than tensors take."""
PLANNED = 0.98
"""Part of a given gpu_memory that is planned with. A plan that was not measured is not known to the last byte: torch's
allocator gives tensors up to a megabyte more than they ask for, and libraries take work space for what they compute."""
CONTEXT_BYTES = 500_000_000
"""What CUDA and its libraries take of a GPU before there is any tensor."""

_UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3, "TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def bytes_of(size: float | str, name: str = "gpu_memory") -> int:
    """Bytes, from a whole number of them or, for example, `"24GB"` or `"22.5 GiB"`.

    A text without a unit is a number of bytes too, from a megabyte on: `"24"` can only be meant otherwise.

    Raises:
        ConfigurationError: anything else, or nothing.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    try:
        if found is not None:
            nbytes = int(float(found[1]) * (_UNITS[found[2]] if found[2] else 1))
            sure = bool(found[2]) or nbytes >= _UNITS["MB"]
        else:
            nbytes = int(size)
            sure = not isinstance(size, bool | str) and nbytes == size
        if not sure:
            raise ValueError
    except (KeyError, OverflowError, TypeError, ValueError):
        units = ", ".join(_UNITS)
        raise ConfigurationError(f"{name}={shown(size)}: give bytes, or a number of {units}, as in '24GB'") from None
    if nbytes <= 0:
        raise ConfigurationError(f"{name}={size!r}: it must be more than 0 bytes")
    return nbytes


def usable_of(device_bytes: float) -> float:
    """Bytes to plan with on a device of so many on which nothing runs; at least one."""
    return max(1.0, USABLE * (device_bytes - CONTEXT_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Knobs as they were given, some of them "auto".

    Attributes:
        gpu_memory: bytes that the plan may take of the device; None for what is free.
    """

    window: int | Auto = 2
    pin: int | Sequence[int] | Sequence[str] | Auto = 0
    activations: str = "checkpoint"
    gpu_memory: int | None = None

    @classmethod
    def of(cls, window: Any, pin: Any, activations: str, gpu_memory: int | str | None) -> Wish:
        """From the arguments of `attach`.

        Raises:
            ConfigurationError: a size that is none, or memory for a plan that is not to be chosen.
        """
        nbytes = None if gpu_memory is None else bytes_of(gpu_memory)
        wish = cls(window=window, pin=pin, activations=activations, gpu_memory=nbytes)
        if nbytes is not None and not wish.open:
            raise ConfigurationError(
                f"gpu_memory={gpu_memory!r} limits what is chosen, and nothing is: pass window='auto', pin='auto' or "
                f"activations='auto'"
            )
        return wish

    @property
    def open(self) -> bool:
        """Whether there is anything to choose."""
        return "auto" in (self.window, self.pin, self.activations)

    def first(self) -> dict[str, Any]:
        """The knobs with which the first steps run."""
        return {
            "window": 2 if self.window == "auto" else self.window,
            "pin": 0 if self.pin == "auto" else self.pin,
            "activations": "checkpoint" if self.activations == "auto" else self.activations,
        }
