"""Watches user code between visits for uses of masters that are being updated, or that get gradients from there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from ramtorch_core.engine.observe import HARMLESS
from ramtorch_core.memory.weights import Weight, WeightGroup

if TYPE_CHECKING:
    from ramtorch_core.engine.updates import Updates

WATCHED_STEPS = 2

_gradient: Any = Tensor.grad
_NO_USE = HARMLESS | {_gradient.__get__, _gradient.__set__, _gradient.__delete__}


class Watching:
    """Decides when to watch, and what follows from what is seen.

    Attributes:
        outside: parameters that take part in the loss outside of their chunks.
        steps: how many have overlapped.
    """

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self.outside: set[nn.Parameter] = set()
        self.steps = 0
        self._watcher: _Watcher | None = None

    def watch(self, *, compiled: bool) -> AbstractContextManager[Any]:
        """Around user code between visits: whoever uses a master whose update is pending waits for it.

        In the first steps, also note masters that take part in the loss outside of their chunks: they get gradients
        from there, so they are left to the optimizer. Compiled code cannot be watched, and code without gradients may
        take fast paths that a watcher would close: there everything is waited for.
        """
        groups = self._updates.inventory.groups
        if not torch.is_grad_enabled() or compiled:
            self._updates.wait()
        elif self.steps < WATCHED_STEPS or any(map(self._updates.is_pending, groups)):
            self._watcher = _Watcher(groups, self._use_outside, self._watch_over)
            return self._watcher
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside a visit."""
        watcher = self._watcher
        if watcher is None or watcher.paused:
            yield
            return
        watcher.paused = True
        on_top = _get_current_function_mode() is watcher
        try:
            with _pop_mode_temporarily() if on_top else contextlib.nullcontext():
                yield
        finally:
            watcher.paused = False

    def _watch_over(self) -> None:
        self._watcher = None

    def _use_outside(self, group: WeightGroup, weight: Weight) -> None:
        """User code took a master outside of its chunk's forward."""
        if self._updates.is_pending(group):
            self._updates.wait(group)
        if torch.is_grad_enabled() and weight.parameter.requires_grad:
            self.outside.add(weight.parameter)


class _Watcher(TorchFunctionMode):
    """Sees every operation on a master in user code between the visits of chunks.

    Args:
        groups: whose masters are watched.
        used: called with each master that is used.
        over: called at the end.

    Attributes:
        paused: inside a visit.
    """

    def __init__(
        self, groups: Sequence[WeightGroup], used: Callable[[WeightGroup, Weight], None], over: Callable[[], None]
    ) -> None:
        super().__init__()
        self._used, self._over = used, over
        self.paused = False
        self._owner = {id(weight.parameter): (group, weight) for group in groups for weight in group.weights}

    def __exit__(self, *error: Any) -> None:
        self._over()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.paused and func not in _NO_USE and torch._C._current_graph_task_id() == -1:
            self._look(args)
            self._look(kwargs.values())
        return func(*args, **kwargs)

    def _look(self, values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor):
                owner = self._owner.get(id(value))
                if owner is not None:
                    self._used(*owner)
            elif isinstance(value, (list, tuple)):
                self._look(value)
