"""What streaming and pipelines refuse before they look at a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ramtorch_core.engine.dtypes import StreamDtypes
from ramtorch_core.engine.modules import ForwardWrapper
from ramtorch_core.engine.pipeline.given import check_device_weights
from ramtorch_core.engine.update_places import UpdateSpec, check_updates
from ramtorch_core.engine.visits import Activations
from ramtorch_core.errors import ConfigurationError, check_choice, check_number, check_window, shown
from ramtorch_core.memory.device import parse_device

__all__ = ["ACTIVATIONS", "check_device_weights", "check_list", "check_modules", "check_options", "parse_device"]

ACTIVATIONS = {
    "keep": Activations.KEEP,
    "checkpoint": Activations.CHECKPOINT,
    "recompute": Activations.CHECKPOINT,
}


def check_options(
    window: int,
    pin: int | Sequence[int] | Sequence[str],
    activations: str,
    stream_dtype: torch.dtype | str | Mapping[str, torch.dtype],
    resident_below: int,
    updates: UpdateSpec,
    kernel: str = "auto",
    host_memory: int | None = None,
) -> None:
    """Refuse what no module tree can make work; the arguments are those of `attach`.

    Raises:
        ConfigurationError: an argument that cannot work.
        TypeError: `updates` is of another type.
    """
    check_window(window)
    if isinstance(pin, int) and pin < 0:
        raise ConfigurationError(f"pin={pin}: the number of resident chunks cannot be negative; use 0 for none")
    check_choice("activations", activations, ACTIVATIONS)
    check_choice("kernel", kernel, ("auto", "torch"))
    check_number("resident_below", resident_below, float("-inf"))
    if resident_below < 0:
        raise ConfigurationError(f"resident_below={resident_below} bytes is negative; use 0 to stream everything")
    if host_memory is not None:
        check_number("host_memory", host_memory)
    StreamDtypes(stream_dtype)
    check_updates(updates)


def check_not_streamed(module: nn.Module) -> None:
    """Refuse a module to which an engine is attached, or to a part of it.

    Raises:
        ConfigurationError: one is.
    """
    if any(isinstance(each.__dict__.get("forward"), ForwardWrapper) for each in module.modules()):
        raise ConfigurationError("this module is streamed already: close() the engine that streams it first")


def check_modules(name: str, given: Any) -> list[nn.Module]:
    """The modules that were given.

    Raises:
        ConfigurationError: something else was.
    """
    modules = check_list(name, given, "modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ConfigurationError(f"{name}: a list of modules is needed, and {shown(module)} in it is none")
    return modules


def check_list(name: str, given: Any, what: str) -> list[Any]:
    """What was given, as a list.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(given, str | torch.Tensor) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{name}={shown(given)}: a list of {what} is needed")
    return list(given)
