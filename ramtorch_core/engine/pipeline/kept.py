"""What modules keep of a microbatch from one stage to the next: attributes, and what dictionaries and lists there hold.

A mask that the blocks look up, an auxiliary loss, what a hook saw: user code sets it in one stage and reads it in a
later one, and meanwhile another microbatch has set it too. So each microbatch finds what it set itself; anything else
is as the last op left it, which for state that is carried on in one stage is the previous microbatch's. What several
microbatches append to a list stays there for all.

What is kept is seen in the first step of each kind, whose first microbatch is alone until its forward has ended.
"""

import contextlib
import itertools
import numbers
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

from ramtorch_core.plan.schedule import Schedule, forward_only, one_by_one

__all__ = ["Keeping", "Kept", "first_alone"]

Namespace: TypeAlias = dict[Any, Any]
"""The `__dict__` or the buffers of a module, or a dictionary that is an attribute."""

_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING: Any = object()
_NONE: frozenset[Any] = frozenset()


class Kept:
    """The places where one module tree keeps what belongs to a microbatch, as far as it was seen.

    Args:
        aside: submodules for which it is true are left out: they count, whatever they do.
    """

    def __init__(self, root: nn.Module, aside: Callable[[nn.Module], bool] = lambda module: False) -> None:
        self._root, self._aside = root, aside
        self.places: list[tuple[Namespace, Any]] = []
        self.lists: list[list[Any]] = []
        self.emptied: set[int] = set()
        """Indices of lists out of which each microbatch takes things, so that it has one of its own."""
        self._seen: set[bool] = set()

    @contextlib.contextmanager
    def step(self, plan: Schedule, training: bool) -> Iterator[tuple[Schedule, "Keeping | None"]]:
        """One step: in which order it runs, and what keeps its microbatches apart; None where nothing has to.

        Args:
            plan: the order, if the step need not be watched.
        """
        watched, several = training not in self._seen, plan.microbatches > 1 and plan.stages > 1
        if not several or not (watched or self.places or self.lists):
            yield plan, None
            return
        if watched and not first_alone(plan):
            alone = one_by_one(plan.placement, plan.microbatches, split=plan.split_backward)
            plan = alone if training else forward_only(alone)
        yield plan, Keeping(self, training, watched)
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

    def all_lists(self) -> Iterator[list[Any]]:
        """Those that are attributes, some more than once."""
        for namespace, skipped in self.namespaces():
            yield from (value for key, value in namespace.items() if isinstance(value, list) and key not in skipped)


class Keeping:
    """One step: `begin` and `end` are called around each forward op, of which only one is under way at a time.

    Attributes:
        watched: the first microbatch shows what is kept; others begin when it has ended.
    """

    def __init__(self, kept: Kept, training: bool, watched: bool) -> None:
        self._kept, self.training, self.watched = kept, training, watched
        self._own: dict[int, dict[int, Any]] = {}
        """Microbatch -> index of a place -> what it set there."""
        self._lists: dict[int, dict[int, list[Any]]] = {}
        """Microbatch -> index of a list -> what it found and left there."""
        self._shared: list[Any] = []
        self._found: list[Any] = []
        """Per place, and then per list, before this op, and at its beginning."""
        self._alone = threading.Event()
        self._start: dict[int, list[Any]] = {id(each): each[:] for each in kept.lists}
        """`id` of a list -> what it held when the step began."""
        self._owner: dict[int, int] = {}
        """Index of an emptied list -> the microbatch whose things it holds for all others."""
        self._lasting: list[Any] | None = None
        """Namespaces and lists that were there when the step began; what a microbatch makes itself is its own."""
        self._before: list[tuple[Any, frozenset[Any], Any]] = []
        self._writes: dict[tuple[int, Any], tuple[Any, list[tuple[int, Any]]]] = {}

    def wait(self, microbatch: int, given_up: Callable[[], bool]) -> None:
        """Until this microbatch may begin its forward, or the step was given up."""
        while self.watched and microbatch and not given_up() and not self._alone.wait(0.05):
            pass

    def begin(self, microbatch: int) -> None:
        """A forward op begins."""
        self._shared = self._present()
        for index, value in self._own.get(microbatch, {}).items():
            _put(*self._kept.places[index], value)
        lists = self._lists.setdefault(microbatch, {})
        for index in self._kept.emptied.difference(lists):
            lists[index] = self._start[id(self._kept.lists[index])]
        for index, content in lists.items():
            self._kept.lists[index][:] = content
        self._found = self._present()
        if self.watched:
            every: list[tuple[Any, frozenset[Any], Any]] = [(each, _NONE, each[:]) for each in self._kept.all_lists()]
            names = [(n, skipped, dict(n)) for n, skipped in self._kept.namespaces()] if microbatch == 0 else []
            self._before = [*names, *every]
            if self._lasting is None:
                self._lasting = [each for each, _, _ in self._before]
                self._start |= {id(each): content for each, _, content in every}

    def end(self, microbatch: int, stage: int, over: bool) -> None:
        """It ends in `stage`; `over`: it was the last of its microbatch."""
        if self.watched:
            self._watch(stage)
        self._end_places(self._own.setdefault(microbatch, {}))
        self._end_lists(microbatch, self._lists[microbatch])
        if over:
            del self._own[microbatch], self._lists[microbatch]
        if self.watched and (over or microbatch):
            self._conclude(microbatch, stage, over)

    def _present(self) -> list[Any]:
        kept = self._kept
        return [namespace.get(key, _MISSING) for namespace, key in kept.places] + [each[:] for each in kept.lists]

    def _end_places(self, own: dict[int, Any]) -> None:
        for index, (namespace, key) in enumerate(self._kept.places):
            value = namespace.get(key, _MISSING)
            if value is not self._found[index]:
                own[index] = value
            elif value is not self._shared[index]:
                _put(namespace, key, self._shared[index])

    def _end_lists(self, microbatch: int, own: dict[int, list[Any]]) -> None:
        first = len(self._kept.places)
        for index, each in enumerate(self._kept.lists):
            shared, found = self._shared[first + index], self._found[first + index]
            changed, grown = not _same(each, found), _same(each[: len(found)], found)
            if not grown:
                self._kept.emptied.add(index)
            if index in self._kept.emptied:
                if changed:
                    before = own.get(index)
                    if before is None or before is self._start[id(each)]:  # the first of this microbatch's own
                        self._owner[index] = microbatch
                    own[index] = each[:]
                if self._owner.get(index) != microbatch:
                    each[:] = shared
            elif index in own:  # what it adds is there for all
                own[index], each[:] = each[:], shared + each[len(found) :]
            elif changed:
                own[index] = each[:]

    def _watch(self, stage: int) -> None:
        lasting = set(map(id, self._lasting or ()))
        for where, skipped, before in self._before:
            if id(where) not in lasting:
                continue
            if isinstance(where, list):
                if not _same(where, before):
                    self._note(where, None, stage, _same(where[: len(before)], before))
                continue
            for key in [key for key in itertools.chain(where, before) if key not in skipped]:
                value = where.get(key, _MISSING)
                if value is not before.get(key, _MISSING):
                    self._note(where, key, stage, value)
        self._before = []

    def _note(self, where: Any, key: Any, stage: int, value: Any) -> None:
        writes = self._writes.setdefault((id(where), key), (where, []))[1]
        if not writes or writes[-1][0] != stage:
            writes.append((stage, value))

    def _conclude(self, microbatch: int, stage: int, over: bool) -> None:
        """Whatever the first microbatch set before its last stage, others set too; lists are emptied by the second."""
        kept = self._kept
        known = {(id(namespace), key) for namespace, key in kept.places} | {(id(each), None) for each in kept.lists}
        for (number, key), (where, writes) in self._writes.items():
            if (number, key) in known or (over and writes[0][0] == stage) or _counts(writes):
                continue
            if not isinstance(where, list):
                kept.places.append((where, key))
                continue
            index = len(kept.lists)
            if not all(grown for _, grown in writes):
                kept.emptied.add(index)
                self._owner[index] = microbatch
            if not over:
                self._lists[microbatch][index] = where[:]
            kept.lists.append(where)
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
    values = [value for _, value in writes if _is_number(value) and not isinstance(value, bool)]
    return len(values) > 1


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether the same objects are in both, in the same order."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.grad_fn is None
    return isinstance(value, numbers.Number)


def _put(namespace: Namespace, key: Any, value: Any) -> None:
    if value is _MISSING:
        namespace.pop(key, None)
    else:
        namespace[key] = value
