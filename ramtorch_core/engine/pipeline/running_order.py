"""The order in which the modules of a tree run, and what follows parameters that move because of it."""

import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ramtorch_core.engine.pipeline.step import current_step

__all__ = ["AS_REGISTERED", "FirstCalls", "RunningOrder", "optimizers_follow"]


@dataclass(frozen=True, slots=True)
class RunningOrder:
    """When each module is called first, by its `id`. Without any times, modules run as they are registered.

    Attributes:
        times: of modules that were called, how many were called before.
        repeated: modules that were called more than once in one forward.
        spread: modules that were called in several stages.
    """

    times: Mapping[int, int] = field(default_factory=dict)
    repeated: frozenset[int] = frozenset()
    spread: frozenset[int] = frozenset()

    def modules(self, root: nn.Module) -> list[nn.Module]:
        """Every module of `root` once, in this order; those that are never called follow their parents."""
        times: dict[int, int] = {}
        waiting = [(root, -1)]
        while waiting:
            module, parents = waiting.pop()
            if id(module) not in times:
                times[id(module)] = self.times.get(id(module), parents)
                waiting += [(child, times[id(module)]) for child in reversed(list(module.children()))]
        return sorted(root.modules(), key=lambda module: times[id(module)])  # else as they are registered

    def first(self, module: nn.Module) -> float:
        """When `module`, or a part of it, is called first; infinity for never."""
        return min((self.times[id(m)] for m in module.modules() if id(m) in self.times), default=float("inf"))

    def is_called(self, module: nn.Module) -> bool:
        """Whether `module` itself is, as far as is known."""
        return not self.times or id(module) in self.times

    def may_begin(self, module: nn.Module) -> bool:
        """Whether `module` is called once in a forward, as far as is known, so that a stage may begin there."""
        return self.is_called(module) and id(module) not in self.repeated


AS_REGISTERED = RunningOrder()


class FirstCalls:
    """A context in which is noted in which order a step calls the modules of `root`."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._times: dict[int, int] = {}
        self._repeated: set[int] = set()
        self._stages: dict[int, set[int]] = defaultdict(set)
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        self._times.clear()
        self._repeated.clear()
        self._stages.clear()
        self._hooks = [module.register_forward_pre_hook(self._note) for module in self._root.modules()]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def order(self) -> RunningOrder:
        """What was seen."""
        spread = frozenset(key for key, stages in self._stages.items() if len(stages) > 1)
        return RunningOrder(dict(self._times), frozenset(self._repeated), spread)

    def _note(self, module: nn.Module, _args: Any) -> None:
        current = current_step()
        if current is None or current[1].in_backward or current[1].index > 0:
            return  # one microbatch tells
        if id(module) in self._times:
            self._repeated.add(id(module))
        self._times.setdefault(id(module), len(self._times))
        self._stages[id(module)].add(current[1].stage)


def optimizers_follow(before: Mapping[Tensor, torch.device]) -> RemovableHandle:
    """At the next step of every optimizer, bring its state to where its parameters have gone.

    An optimizer that was restored from a checkpoint has moments before its first step.

    Args:
        before: parameters that have moved, and where each was.
    """
    done = weakref.WeakSet[torch.optim.Optimizer]()

    def follow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in done:
            return
        done.add(optimizer)
        for parameter, device in before.items():
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device == device:
                    state[name] = value.to(parameter.device)

    return register_optimizer_step_pre_hook(follow)
