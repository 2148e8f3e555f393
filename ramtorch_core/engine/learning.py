"""The first steps are watched: once with gradients and once without, under each autocast.

So is a chunk that none of them called, in the first step that does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ramtorch_core.engine.dtypes import StreamDtypes
from ramtorch_core.engine.observe import Observer
from ramtorch_core.memory.weights import Weight, WeightGroup

if TYPE_CHECKING:
    from ramtorch_core.engine.visits import Visits

log = logging.getLogger(__name__)


class Learning:
    """Whether somebody watches now, and what came of it.

    Args:
        device: the compute device.
        exact: gives a weight's exact, differentiable device copy; see `Observer`.
        dtypes: learns in which dtype each weight can cross.
    """

    def __init__(self, device: torch.device, exact: Callable[[Weight], Tensor], dtypes: StreamDtypes) -> None:
        self._device, self._exact, self._dtypes = device, exact, dtypes
        self._observer: Observer | None = None
        self._seen: set[bool] = set()
        self._chunks: set[tuple[int, bool]] = set()  # indices of those that were watched, with gradients and without
        self._new: set[tuple[int, bool]] = set()  # likewise, in the step under way
        self._gradients = self._compiled = False

    def begin_step(self, groups: Iterable[WeightGroup], *, compiled: bool) -> None:
        """A step begins; inside compiled code single operations cannot be seen."""
        self._gradients, self._compiled = torch.is_grad_enabled(), compiled
        if self._observer is None and not self._seen and not compiled:
            self._observer = Observer(self._device, self._exact, self._dtypes.is_fixed)
            self._observer.masters = {id(w.parameter): w for group in groups for w in group.weights}

    def observer(self) -> Observer | None:
        """Who should watch the calling code, if anybody: a mode that is entered keeps torch off its fast paths."""
        if self._observer is None or torch.is_grad_enabled() in self._seen:
            return None
        if self._dtypes.compute is None and self._device.type == "cpu":
            return None  # there is nothing to see
        self._observer.compute = self._dtypes.compute
        return self._observer

    @contextlib.contextmanager
    def first_visit(self, visits: Visits, chunk: int) -> Iterator[None]:
        """Around a forward visit of this chunk: watch it if no step before did, and nobody watches all of this one."""
        if self._dtypes.compute is None:
            self._dtypes.inside.add(visits.ambient())
            yield
            return
        visit = (chunk, torch.is_grad_enabled())
        if visit in self._chunks or self._compiled:
            yield
            return
        self._new.add(visit)
        if visits.observing is not None:
            yield
            return
        observer = visits.observing = Observer(self._device, self._exact, self._dtypes.is_fixed)
        observer.compute = self._dtypes.compute
        try:
            with observer:
                yield
        finally:
            visits.observing = None

    def finish_step(self) -> None:
        """A step like this has been seen."""
        self._chunks |= self._new
        self._new.clear()
        if self._dtypes.asked:
            self._tell_who_asked()
        if self._observer is not None:
            self._seen.add(self._gradients)
            if self._seen == {True, False} and not self._observer.stray:
                self._observer = None

    def _tell_who_asked(self) -> None:
        asked, self._dtypes.asked = self._dtypes.asked, {}
        log.warning(
            "%d weights (%.1f MB), such as '%s', cross in torch.float32 under autocast, because code in %s reads their "
            "dtype and may round something to it. Where that changes no result, stream_dtype={'%s': %s} halves what "
            "crosses.",
            len(asked),
            sum(weight.parameter.nbytes for weight in asked) / 1e6,
            (first := next(iter(asked))).name,
            ", ".join(sorted(set(asked.values()))),
            first.name,
            self._dtypes.compute,
        )

    def forget(self) -> None:
        """What was seen does not count any more."""
        self._observer, self._seen = None, set()
        self._chunks.clear()
        self._new.clear()

    def strays(self) -> set[nn.Parameter]:
        """Parameters that were used outside of their chunk's forward, each with a warning."""
        if self._observer is None:
            return set()
        for weight, function in self._observer.stray.items():
            log.warning(
                "parameter '%s' is used outside of its chunk's forward (by %s): a copy of it stays on the device. Make "
                "the module that uses it the chunk, if it should stream.",
                weight.name,
                function,
            )
        return {weight.parameter for weight in self._observer.stray}


def explain(error: RuntimeError, never_visited: Iterable[str]) -> None:
    """Add the likely cause and the remedy to torch's complaint about tensors on two devices."""
    message, never = str(error), list(never_visited)
    if "same device" not in message or "ramtorch" in message or not error.args:
        return
    names = f" Chunks not called so far: {', '.join(never[:5])}." if never else ""
    error.args = (
        f"{message}\n(ramtorch: the weights' masters are on the host. A parameter that is used outside of its chunk's "
        f"forward must stay on the device: make the module that uses it the chunk, or pin it. For the compute device "
        f"read an input's .device, not that of a parameter.{names})",
        *error.args[1:],
    )
