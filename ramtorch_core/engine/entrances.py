"""Where user code enters the engine: forwards of chunks, of the root, and of children that are called directly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ramtorch_core.engine.backward import current_task
from ramtorch_core.engine.census import Chunk
from ramtorch_core.engine.inventory import Inventory
from ramtorch_core.engine.module_tree import is_never_called
from ramtorch_core.engine.modules import ChunkForward
from ramtorch_core.engine.observe import is_compiled
from ramtorch_core.engine.tracing import is_tracing, trace_call
from ramtorch_core.engine.visits import Visits
from ramtorch_core.errors import RamtorchError
from ramtorch_core.memory.weights import Weight


class Scopes(Protocol):
    """Who opens and closes scopes; see `Streamer`."""

    closed: bool

    @property
    def nested(self) -> bool:
        """Whether a scope is open inside another one."""

    def scope(self) -> AbstractContextManager[None]:
        """Run code that uses the model."""

    def new_epoch(self) -> None:
        """User code ran: masters may have been written."""


class Entrances:
    """Replaces the forwards of a module tree, until `remove`.

    Args:
        unwatched: around visits, in which nobody watches for uses of masters.
        learn: around visits, with the index of the chunk, to watch how it uses its weights.

    Attributes:
        around_visit: around each forward visit, with the chunk, its arguments, and keyword arguments.
    """

    def __init__(
        self,
        scopes: Scopes,
        inventory: Inventory,
        visits: Visits,
        unwatched: Callable[[], AbstractContextManager[None]],
        learn: Callable[[Visits, int], AbstractContextManager[None]],
    ) -> None:
        self._scopes, self._inventory, self._visits = scopes, inventory, visits
        self._unwatched, self._learn = unwatched, learn
        self.around_visit: Callable[[Chunk, Any, Any], AbstractContextManager[None]] | None = None
        self._entered = 0  # forwards of the root or its children, one inside another
        chunks = inventory.census.chunks
        self._forwards = [ChunkForward(chunk.module, self._visit, chunk) for chunk in chunks]
        chunk_modules = {id(chunk.module) for chunk in chunks}
        entries = [m for m in (inventory.root, *self._entry_children()) if id(m) not in chunk_modules]
        self._forwards += [ChunkForward(module, partial(self._enter, module), None) for module in entries]
        self._inside = self._find_inside()

    def divided(self) -> None:
        """The tree was divided anew."""
        for forward in self._forwards:
            if forward.chunk is not None:
                forward.chunk = self._inventory.census.chunks[forward.chunk.index]
        self._inside = self._find_inside()

    def remove(self) -> None:
        """Give every module its own forward back."""
        for forward in self._forwards:
            forward.remove()

    def _visit(self, inner: Callable[..., Any], chunk: Chunk | None, args: Any, kwargs: Any) -> Any:
        """Stands in for the forward of a chunk."""
        assert chunk is not None
        if self._scopes.closed:
            return inner(*args, **kwargs)
        if is_tracing():
            return self._trace(inner, args, kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RamtorchError(
                f"chunk '{chunk.name}' runs inside a torch.func transform, which cannot see streamed weights: keep it "
                f"on the device (pin=['{chunk.name}'])"
            )
        with self._scopes.scope():
            self._refuse_replaced(chunk.module)
            if self._entered == 0 and self._scopes.nested and current_task() == -1:
                self._inventory.rest.follow_toggles()
            around = nullcontext() if self.around_visit is None else self.around_visit(chunk, args, kwargs)
            with self._unwatched(), around, self._learn(self._visits, chunk.index):
                return self._visits.forward(inner, chunk, args, kwargs)

    def _enter(self, module: nn.Module, inner: Callable[..., Any], _chunk: Chunk | None, args: Any, kwargs: Any) -> Any:
        """Stands in for the forward of the root, or of a child that is called directly."""
        if self._scopes.closed:
            return inner(*args, **kwargs)
        if is_tracing():
            return self._trace(inner, args, kwargs)
        with self._scopes.scope():
            self._refuse_replaced(module)
            if self._entered == 0 and self._scopes.nested and current_task() == -1:
                self._scopes.new_epoch()
            self._entered += 1
            try:
                output = inner(*args, **kwargs)
            finally:
                self._entered -= 1
        if torch.is_grad_enabled():
            self._visits.watch(None, output, args, kwargs)
        return output

    def _find_inside(self) -> dict[int, list[Weight]]:
        """By id of each module whose forward is replaced: the weights that are lent to it and its parts."""
        of: dict[int, list[Weight]] = {}  # by id of the module that registers them
        for weight in self._inventory.weights.values():
            for module, _ in weight.sites:
                of.setdefault(id(module), []).append(weight)
        modules = [forward.module for forward in self._forwards]
        return {id(each): [w for part in each.modules() for w in of.get(id(part), ())] for each in modules}

    def _refuse_replaced(self, module: nn.Module) -> None:
        """In a step modules look where weights are lent before they look for parameters."""
        for weight in self._inside[id(module)]:
            if weight.moved():
                raise RamtorchError(
                    f"parameter '{weight.name}' was replaced in a step, as torch.func.functional_call does, and "
                    f"the forward would not see it: replace it between steps, or write its values in place"
                )

    def _trace(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return trace_call(inner, self._inventory.weights.values(), self._inventory.device.torch, args, kwargs)

    def _entry_children(self) -> list[nn.Module]:
        """The outermost modules that users may call directly, and that need copies of the rest."""
        copies = {id(module) for weight in self._inventory.census.copies for module, _ in weight.sites}
        entries: list[nn.Module] = []
        waiting = list(self._inventory.root.children())
        while waiting:
            module = waiting.pop(0)
            if is_never_called(module):
                waiting.extend(module.children())
            elif not is_compiled(module) and any(id(part) in copies for part in module.modules()):
                entries.append(module)
        return list(dict.fromkeys(entries))
