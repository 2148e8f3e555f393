"""Exceptions of both packages, and checks of single arguments that raise them; every module may import this one.

Bad input raises `ConfigurationError` (a `ValueError`) before anything changes. What goes wrong later raises a
`RamtorchError` (a `RuntimeError`). An error in user code is never wrapped: it surfaces as the original exception.

A message gives both numbers (asked for, and possible), the name of the module, and the remedy.
"""

import math
import numbers
import operator
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from enum import Enum

__all__ = [
    "ConfigurationError",
    "HostMemoryError",
    "PlanError",
    "RamtorchError",
    "StageOrderError",
    "WindowError",
    "check_choice",
    "check_count",
    "check_flag",
    "check_function",
    "check_member",
    "check_number",
    "check_window",
    "shown",
    "sized",
    "suggest",
]


class RamtorchError(RuntimeError):
    """Base class of the errors that arise while a model is set up or run."""


class ConfigurationError(ValueError):
    """An argument, or a model together with an argument, that cannot work; raised before anything changes."""


class HostMemoryError(RamtorchError, MemoryError):
    """Host RAM is too small, or cannot be page-locked; raised before the memory is touched where that can be known."""


class WindowError(RamtorchError):
    """A chunk needs a slot and none can be had: it is larger than a slot, or every slot is lent."""


class StageOrderError(RamtorchError):
    """A module that begins a stage was called a second time, out of turn, or in a checkpoint around several stages.

    Attributes:
        module: its name.
    """

    def __init__(self, module: str, message: str) -> None:
        super().__init__(message)
        self.module = module


class PlanError(RamtorchError):
    """A schedule, an itinerary or transfers that break a rule; the message shows the grid with the bad cell marked."""


def check_choice(name: str, value: object, allowed: Collection[str] | Mapping[str, object]) -> None:
    """Refuse what is none of these words.

    Raises:
        ConfigurationError: `value` is another word, or none.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ConfigurationError(f"{name}={shown(value)}: use one of {', '.join(map(repr, allowed))}")


def check_count(name: str, value: object, least: int = 1) -> int:
    """The whole number `value`.

    Raises:
        ConfigurationError: it is none, or smaller than `least`.
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or count < least:
        raise ConfigurationError(f"{name}={shown(value)}: a whole number of at least {least} is needed")
    return count


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ConfigurationError: `value` is something else.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={shown(value)}: True or False is needed")


def check_function(name: str, value: object, what: str) -> None:
    """Refuse what is no function: a class is none.

    Args:
        what: it is from and to.

    Raises:
        ConfigurationError: `value` cannot be called, or is a class.
    """
    if not callable(value) or isinstance(value, type):
        raise ConfigurationError(f"{name}={shown(value)}: a function {what} is needed")


def check_member(name: str, value: object, members: type[Enum]) -> None:
    """Refuse what is no member of an enumeration; its values, such as words, are none.

    Raises:
        ConfigurationError: `value` is none.
    """
    if not isinstance(value, members):
        raise ConfigurationError(f"{name}={shown(value)}: use one of {', '.join(map(str, members))}")


def check_number(name: str, value: object, least: float = 0.0, most: float = math.inf) -> None:
    """Refuse what is no number, not a number, smaller than `least`, or larger than `most`.

    Raises:
        ConfigurationError: it is.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value < least or not value <= most:
        within = f" of at least {least:g}" if most == math.inf else f" between {least:g} and {most:g}"
        raise ConfigurationError(f"{name}={shown(value)}: a number{within * (least > -math.inf)} is needed")


def check_window(window: object) -> None:
    """Refuse what is no number of slots.

    Raises:
        ConfigurationError: `window` is no whole number, or less than one.
    """
    if type(window) is not int or window < 1:
        raise ConfigurationError(f"window={shown(window)}: at least 1 slot is needed; 2 let copies overlap compute")


def shown(value: object) -> str:
    """A value for a message, which a large one shall not fill."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def sized(nbytes: float, decimals: int = 2) -> str:
    """Bytes for a message, in GB; in MB or KB where so many decimals would leave little of them."""
    if nbytes >= 10 ** (9 - decimals):
        return f"{nbytes / 1e9:.{decimals}f} GB"
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.3g} KB"


def suggest(wanted: str, names: Iterable[str]) -> str:
    """The remedy for an unknown name: what ends with it or resembles it, else the first of what there is."""
    names = list(dict.fromkeys(name for name in names if name))
    close = [name for name in names if name.endswith(f".{wanted}")] or get_close_matches(wanted, names, cutoff=0.5)
    return f"{'did you mean' if close else 'there are'} {', '.join(map(repr, close[:3] or names[:6])) or 'none'}"
