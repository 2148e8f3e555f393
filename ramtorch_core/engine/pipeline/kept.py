"""What modules keep of a microbatch from one stage to the next: attributes, and entries of dictionaries among them.

A mask that the blocks look up, an auxiliary loss, what a hook saw: user code sets it in one stage and reads it in a
later one, and meanwhile another microbatch has set it too. So each microbatch finds what it set itself; anything else
is as the last op left it, which for state that is carried on in one stage is the previous microbatch's.

What is kept is seen in the first step of each kind, whose first microbatch is alone until its forward has ended.
"""

import itertools
import numbers
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

from ramtorch_core.plan.schedule import Schedule

__all__ = ["Keeping", "Kept", "first_alone"]

Namespace: TypeAlias = dict[Any, Any]
"""The `__dict__` or the buffers of a module, or a dictionary that is an attribute."""

_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING: Any = object()


class Kept:
    """The places where one module tree keeps what belongs to a microbatch, as far as it was seen.

    Args:
        aside: submodules for which it is true are left out: they count, whatever they do.
    """

    def __init__(self, root: nn.Module, aside: Callable[[nn.Module], bool] = lambda module: False) -> None:
        self._root, self._aside = root, aside
        self.places: list[tuple[Namespace, Any]] = []
        self._seen: set[bool] = set()

    def step(self, training: bool) -> "Keeping | None":
        """For one step of several microbatches; None if nothing is kept."""
        watched = training not in self._seen
        return Keeping(self, training, watched) if watched or self.places else None

    def learned(self, training: bool) -> None:
        """A step of this kind was watched to its end."""
        self._seen.add(training)

    def namespaces(self) -> Iterator[tuple[Namespace, frozenset[Any]]]:
        """Each with the keys that do not count."""
        waiting, met = [self._root], {id(self._root)}
        for module in waiting:
            for child in module.children():
                if id(child) not in met:
                    met.add(id(child))
                    waiting += [] if self._aside(child) else [child]
            yield vars(module), _OF_TORCH | frozenset(module._parameters)
            yield module._buffers, frozenset()
            for name, value in vars(module).items():
                if isinstance(value, dict) and name not in _OF_TORCH and id(value) not in met:
                    met.add(id(value))
                    yield value, frozenset()


class Keeping:
    """One step: `begin` and `end` are called around each forward op, of which only one is under way at a time.

    Attributes:
        watched: the first microbatch shows what is kept; others begin when it has ended.
    """

    def __init__(self, kept: Kept, training: bool, watched: bool) -> None:
        self._kept, self.training, self.watched = kept, training, watched
        self._own: dict[int, dict[int, Any]] = {}
        """Microbatch -> index of a place -> what it set there."""
        self._shared: list[Any] = []
        self._found: list[Any] = []
        """Per place, before this op, and at its beginning."""
        self._alone = threading.Event()
        self._before: list[tuple[Namespace, frozenset[Any], Namespace]] = []
        self._writes: dict[tuple[int, Any], tuple[Namespace, list[tuple[int, Any]]]] = {}

    def wait(self, microbatch: int, given_up: Callable[[], bool]) -> None:
        """Until this microbatch may begin its forward, or the step was given up."""
        while self.watched and microbatch and not given_up() and not self._alone.wait(0.05):
            pass

    def begin(self, microbatch: int) -> None:
        """A forward op begins."""
        places = self._kept.places
        self._shared = [namespace.get(key, _MISSING) for namespace, key in places]
        for index, value in self._own.get(microbatch, {}).items():
            _put(*places[index], value)
        self._found = [namespace.get(key, _MISSING) for namespace, key in places]
        if self.watched and microbatch == 0:
            self._before = [(n, skipped, dict(n)) for n, skipped in self._kept.namespaces()]

    def end(self, microbatch: int, stage: int, over: bool) -> None:
        """It ends in `stage`; `over`: it was the last of its microbatch."""
        if self.watched and microbatch == 0:
            self._watch(stage)
        own = self._own.setdefault(microbatch, {})
        for index, (shared, found) in enumerate(zip(self._shared, self._found, strict=True)):
            place = self._kept.places[index]
            value = place[0].get(place[1], _MISSING)
            if value is not found:
                own[index] = value
            elif found is not shared:
                _put(*place, shared)
        if over:
            del self._own[microbatch]
            if microbatch == 0:
                self._conclude(stage)

    def _watch(self, stage: int) -> None:
        for namespace, skipped, before in self._before:
            for key in [key for key in itertools.chain(namespace, before) if key not in skipped]:
                value = namespace.get(key, _MISSING)
                if value is not before.get(key, _MISSING):
                    writes = self._writes.setdefault((id(namespace), key), (namespace, []))[1]
                    if not writes or writes[-1][0] != stage:
                        writes.append((stage, value))
        self._before = []

    def _conclude(self, last: int) -> None:
        """The first microbatch is through: whatever it set before the `last` stage, later ones set too."""
        known = {(id(namespace), key) for namespace, key in self._kept.places}
        for (number, key), (namespace, writes) in self._writes.items():
            if (number, key) not in known and writes[0][0] != last and not _counts(writes):
                self._kept.places.append((namespace, key))
        self._writes.clear()
        self._alone.set()


def first_alone(schedule: Schedule) -> bool:
    """Whether the first microbatch may go through all forwards before another one begins."""
    for lane in schedule.lanes:
        first = [op.kind == "F" and op.microbatch == 0 for op in lane]
        if False in first and True in first[first.index(False) :]:
            return False
    return True


def _counts(writes: list[tuple[int, Any]]) -> bool:
    """Whether several stages of one microbatch set a number without graph: it counts or adds up, for all of them."""
    values = [value for _, value in writes if _is_number(value)]
    return len(values) > 1


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.grad_fn is None
    return isinstance(value, numbers.Number)


def _put(namespace: Namespace, key: Any, value: Any) -> None:
    if value is _MISSING:
        namespace.pop(key, None)
    else:
        namespace[key] = value
