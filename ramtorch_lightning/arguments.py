"""Types of the strategies' arguments: for type checkers what code may pass, at run time what a file may say.

LightningCLI reads types at run time, offers to build whatever class they name, and lists all its subclasses in its
help: for a Module these are hundreds, and none is of use in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch

    from ramtorch_core import ChunkSpec
    from ramtorch_core.pipeline import ScheduleSpec, StageSpec

    Device = int | str | torch.device | None
    Devices = list[int] | list[str] | list[torch.device] | None
else:
    ChunkSpec = str | list[str] | None
    StageSpec = list[str] | Callable[[nn.Module], list[str]] | None
    ScheduleSpec = str
    Device = int | str | None  # what is a number is read as one
    Devices = list[int] | list[str] | None

__all__ = ["ChunkSpec", "Device", "Devices", "ScheduleSpec", "StageSpec"]
