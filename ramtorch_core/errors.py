"""Exceptions of both packages; every module may import this one.

Bad input raises `ConfigurationError` (a `ValueError`) before anything changes. What goes wrong later raises a
`RamtorchError` (a `RuntimeError`). An error in user code is never wrapped: it surfaces as the original exception.

A message gives both numbers (asked for, and possible), the name of the module, and the remedy.
"""

__all__ = ["ConfigurationError", "HostMemoryError", "PlanError", "RamtorchError", "StageOrderError", "WindowError"]


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
