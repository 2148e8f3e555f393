"""Traces for Chrome and Perfetto, and the ranges that they show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as running
from torch.profiler import profile, supported_activities

from ramtorch_core.errors import ConfigurationError, shown
from ramtorch_core.memory.ranges import (
    FOR_GRADIENTS,
    FOR_STAGE,
    FOR_TRANSFER,
    FOR_UPDATE,
    Kind,
    Listener,
    Mark,
    Range,
    Ranges,
)

__all__ = [
    "FOR_GRADIENTS",
    "FOR_STAGE",
    "FOR_TRANSFER",
    "FOR_UPDATE",
    "Kind",
    "Listener",
    "Mark",
    "Range",
    "Ranges",
    "check_path",
    "trace",
]


@contextlib.contextmanager
def trace(path: str | PathLike[str] | None) -> Iterator[None]:
    """Write what happens inside to `path`, for chrome://tracing or ui.perfetto.dev; None: do nothing.

    Visits (`F3`, `B3`), transfers (`t3`), gradients on their way to the host (`g3`), updates on the host (`u3`), ops of
    pipelines (`2F0`) and waits of the host (`stall for an update`) are shown in the thread that issues them, and where
    they launch device work also on the device, in its own time. Waits of the device are shown there, between two
    kernels (`spin_kernel`) that are launched only while a profiler runs: `stall for a transfer`, `stall for gradients
    to leave`, and `stall for another stage`, which is a pipeline's bubble; one as short as these kernels was no wait.
    A path that ends with `.gz` is compressed. Recording slows the host down, so times of a trace are no measurement of
    a step.

    Raises:
        ConfigurationError: a path that cannot be that of a file.
        OSError: its folder cannot be made.
        RuntimeError: another profiler runs, which torch would end.
    """
    if path is None:
        yield
        return
    file = check_path(path)
    if running._is_profiler_enabled:
        raise RuntimeError(f"another profiler runs, and torch has one at a time: end it before {file} is recorded")
    file.parent.mkdir(parents=True, exist_ok=True)
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # updates and the stages of pipelines have their own
    with profile(activities=supported_activities(), experimental_config=every_thread) as profiler:
        yield
    profiler.export_chrome_trace(str(file))


def check_path(path: object) -> Path:
    """The path of a file that can be written, as far as that can be told.

    Raises:
        ConfigurationError: it is none, or that of a folder.
    """
    if not isinstance(path, str | PathLike) or Path(path).is_dir():
        raise ConfigurationError(f"path={shown(path)}: the path of a file is needed")
    return Path(path)
