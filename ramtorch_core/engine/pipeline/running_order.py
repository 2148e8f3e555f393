"""The order in which the modules of a tree run, and what follows parameters that move because of it."""

import contextlib
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ramtorch_core.engine.module_tree import is_never_called
from ramtorch_core.engine.pipeline.step import current_step
from ramtorch_core.engine.pipeline.trees import map_tensors

__all__ = ["AS_REGISTERED", "Calls", "Observed", "RunningOrder", "optimizers_follow"]

Calls = Sequence[Sequence[int]]
"""Per microbatch, the `id`s of the modules that it called, in the order of the calls."""


class RunningOrder:
    """The order in which modules are called. Without any calls, modules run as they are registered.

    A module runs when it is called itself: one that only holds others runs with the first of them, one of which a part
    is called early still runs at its own call, and one that is never called, such as a weight that its parent uses,
    runs with its parent.

    Args:
        calls: of the microbatches of a training step. Where they differ, a module that the first of them does not call
            follows what precedes it where it is called.
        evaluated: of an evaluation, which may run in another order: stages begin at modules that suit both. Without
            `calls` it tells when modules run.
    """

    def __init__(self, calls: Calls = (), evaluated: Calls = ()) -> None:
        self.calls, self.evaluated = calls or evaluated, evaluated
        self.times = {key: time for time, key in enumerate(_merged(self.calls))}
        self._steady = self._find_steady()

    def modules(self, root: nn.Module) -> list[nn.Module]:
        """Every module of `root` once, in this order; those that run at the same time as they are registered."""
        times: dict[int, int] = {}
        waiting = [(root, -1)]
        while waiting:
            module, parents = waiting.pop()
            if id(module) not in times:
                times[id(module)] = time = self._time(module, parents)
                waiting += [(child, time) for child in reversed(list(module.children()))]
        return sorted(root.modules(), key=lambda module: times[id(module)])

    def is_called(self, module: nn.Module) -> bool:
        """Whether `module` itself is, as far as is known."""
        return id(module) in self.times if self.calls else not is_never_called(module)

    def may_begin(self, module: nn.Module) -> bool:
        """Whether a stage may begin at `module`, as far as is known.

        Every microbatch calls it, and calls it once, and all call such modules in the same order.
        """
        return id(module) in self._steady if self.calls else not is_never_called(module)

    def uses(self, root: nn.Module) -> set[int]:
        """`id`s of the modules that are called, or are parts of such, of others than the root."""
        if not self.calls:
            return {id(module) for module in root.modules()}
        called = (module for module in root.modules() if module is not root and id(module) in self.times)
        found: set[int] = set()
        for module in called:
            if id(module) not in found:
                found.update(id(part) for part in module.modules())
        return found

    def _time(self, module: nn.Module, parents: int) -> int:
        if id(module) in self.times:
            return self.times[id(module)]
        return min((self.times[id(part)] for part in module.modules() if id(part) in self.times), default=parents)

    def _find_steady(self) -> frozenset[int]:
        several = {key for calls in (*self.calls, *self.evaluated) for key, n in Counter(calls).items() if n > 1}
        steady = set(self.times).intersection(*self.calls) - several
        for calls in (*self.calls, *self.evaluated):
            here = [key for key in calls if key in steady]
            kept = _longest_increasing([self.times[key] for key in here])
            steady -= {key for key in here if self.times[key] not in kept}
        return frozenset(steady)


class Observed:
    """What the first run of each kind that ends well shows of the order in which the modules of `root` run.

    Args:
        kinds: True: training steps are noted, False: evaluations.
    """

    def __init__(self, root: nn.Module, kinds: Iterable[bool]) -> None:
        self._root = root
        self._awaited = set(kinds)
        self._calls: dict[bool, Calls] = {}

    @contextlib.contextmanager
    def run(self, training: bool) -> Iterator[bool]:
        """Around a training step or an evaluation; yields whether its order is noted."""
        if training not in self._awaited:
            yield False
            return
        with _noting(self._root) as calls:
            yield True
        self._awaited.remove(training)
        self._calls[training] = [calls[index] for index in sorted(calls)]

    def order(self, evaluated: bool = True) -> RunningOrder:
        """The order of what was seen, with or without the evaluation."""
        return RunningOrder(self._calls.get(True, ()), self._calls.get(False, ()) if evaluated else ())


@contextlib.contextmanager
def _noting(root: nn.Module) -> Iterator[dict[int, list[int]]]:
    """Inside, the forwards of microbatches note which modules of `root` they call, by microbatch."""
    found: dict[int, list[int]] = {}

    def note(module: nn.Module, _args: Any) -> None:
        current = current_step()
        if current is not None and not current[1].in_backward:
            found.setdefault(current[1].index, []).append(id(module))

    hooks = [module.register_forward_pre_hook(note) for module in root.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def optimizers_follow(before: Mapping[Tensor, torch.device]) -> RemovableHandle:
    """At the next step of every optimizer, bring its state to where its parameters have gone.

    An optimizer that was restored from a checkpoint has moments before its first step. Numbers that optimizers keep on
    the host, such as the steps of one that is neither fused nor capturable, stay there.

    Args:
        before: parameters that have moved, and where each was.
    """
    done = weakref.WeakSet[torch.optim.Optimizer]()

    def follow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in done:
            return
        done.add(optimizer)
        for group in optimizer.param_groups:
            with_parameters = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                if parameter not in before or parameter not in optimizer.state:
                    continue

                def move(value: Tensor, parameter: Tensor = parameter, numbers: bool = with_parameters) -> Tensor:
                    kept = value.device.type == "cpu" and value.dim() == 0 and not numbers
                    return value if kept or value.device != before[parameter] else value.to(parameter.device)

                state = optimizer.state[parameter]
                for name, value in state.items():
                    state[name] = map_tensors(move, value)

    return register_optimizer_step_pre_hook(follow)


def _merged(calls: Calls) -> list[int]:
    """Every key once: as in the first sequence, and what later ones have besides after what precedes it there."""
    merged: list[int] = []
    for sequence in calls:
        known = set(merged)
        after: dict[int | None, list[int]] = defaultdict(list)
        last: int | None = None
        for key in dict.fromkeys(sequence):
            if key in known:
                last = key
            else:
                after[last].append(key)
        merged = after[None] + [key for old in merged for key in (old, *after[old])]
    return merged


def _longest_increasing(numbers: Iterable[int]) -> set[int]:
    """The members of a longest increasing subsequence of distinct numbers, by patience sorting."""
    tops: list[int] = []
    below: dict[int, int | None] = {}
    for number in numbers:
        pile = bisect_left(tops, number)
        below[number] = tops[pile - 1] if pile else None
        tops[pile : pile + 1] = [number]
    found: set[int] = set()
    last = tops[-1] if tops else None
    while last is not None:
        found.add(last)
        last = below[last]
    return found


AS_REGISTERED = RunningOrder()
"""Nothing was seen yet."""
