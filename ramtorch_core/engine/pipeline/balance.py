"""Where stages begin if nobody says so: the most even cuts between modules."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import nn

from ramtorch_core.engine.observe import runs_compiled
from ramtorch_core.engine.pipeline.running_order import AS_REGISTERED, RunningOrder
from ramtorch_core.engine.pipeline.stages import StageMap, resolve_entries
from ramtorch_core.errors import ConfigurationError, check_choice, shown
from ramtorch_core.plan.partition import imbalance, partition

__all__ = ["Balance", "Cost", "StageSpec", "balanced_entries", "find_stages", "memory_cost", "parameter_cost"]

GOOD_ENOUGH = 1.1
"""Slowest stage over a perfect cut at which no module is opened any further: a cut inside a block costs traffic."""

WORTH_OPENING = 0.95
"""A finer cut is taken if it makes the slowest stage at most this much of what it was."""

StageSpec: TypeAlias = Sequence[str | nn.Module] | Callable[[nn.Module], Sequence[str | nn.Module]] | None
"""The modules whose entry begins stages 1, 2, ..., or their names; a function that finds them; None: balanced."""

Cost: TypeAlias = Callable[[nn.Parameter], float]
Balance: TypeAlias = Literal["parameters", "memory", "time"]
_Piece: TypeAlias = tuple[str, nn.Module]


def parameter_cost(parameter: nn.Parameter) -> float:
    """Its number of elements."""
    return parameter.numel()


def memory_cost(parameter: nn.Parameter) -> float:
    """Its bytes, with a gradient and two moments if it is trained."""
    return parameter.numel() * parameter.element_size() * (4 if parameter.requires_grad else 1)


_COSTS = {"parameters": parameter_cost, "memory": memory_cost, "time": parameter_cost}
"""Of balances; that of time is for steps before one was timed."""


def find_stages(
    root: nn.Module,
    chosen: StageSpec,
    count: int,
    balance: Balance,
    weights: Sequence[float] | None,
    order: RunningOrder,
    seconds: Mapping[int, float] | None = None,
) -> StageMap:
    """The stages that `chosen` says, or balanced ones; `weights` and `count` are of stages, `seconds` of modules.

    Raises:
        ConfigurationError: cuts that cannot begin stages, too few of them, or too few modules.
    """
    if chosen is None:
        check_choice("balance", balance, _COSTS)
        return balanced_entries(root, count, weights, _COSTS[balance], order, seconds)
    function = callable(chosen) and not isinstance(chosen, type | nn.Module)
    entries: Any = chosen(root) if function else chosen  # type: ignore[operator]
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ConfigurationError(
            f"stages={shown(entries)}: give a list with the names of the modules whose entry begins stages 1, 2, ..."
        )
    return resolve_entries(root, entries, count, order)


def balanced_entries(
    root: nn.Module,
    stages: int,
    weights: Sequence[float] | None = None,
    cost: Cost = parameter_cost,
    order: RunningOrder = AS_REGISTERED,
    seconds: Mapping[int, float] | None = None,
) -> StageMap:
    """The most even stages for modules that run in the order of their registration, or in another that was seen.

    Starts from the parts of the root and opens the costliest one of the slowest stage for as long as that makes the
    stages more even, so that cuts fall between large modules where that is good enough, and inside them only where it
    is not. Modules that run compiled, whose code cannot be seen to take a tensor from an earlier stage, are opened only
    if there are too few parts without. A stage costs what runs between its entry and the next one.

    Args:
        weights: relative speed of the stages' devices.
        cost: of one parameter. One that several modules share counts where the first of them runs, and what is never
            called counts nowhere.
        seconds: instead, what each module costs by its `id`, from its call to the next call of any module, on a device
            whose weight is 1.

    Raises:
        ConfigurationError: the module has too few parts.
    """
    if stages == 1:
        return StageMap(root, (), order)
    line = _Line(root, cost, order, seconds)
    pieces = _children("", root)
    best: tuple[float, list[_Piece]] | None = None
    while True:
        pieces = line.sort(_opened(pieces, order))
        # The first stage begins with the root. A later one may begin with the first piece if something runs before it.
        items = [("", root), *pieces] if order.calls and line.costs([("", root), *pieces])[0] else pieces
        candidates = [i for i, piece in enumerate(items) if piece[1] is not root and _children(*piece)]
        costs = line.costs(items)
        if len(items) >= stages:
            parts = partition(costs, stages, weights)
            uneven = imbalance(costs, parts, weights)
            if best is None or uneven < best[0] * WORTH_OPENING:
                best = uneven, [items[part[0]] for part in parts[1:]]
            if uneven <= GOOD_ENOUGH:
                break
            speed = weights or [1.0] * stages
            slowest = max(range(stages), key=lambda s: sum(costs[i] for i in parts[s]) / speed[s])
            candidates = [i for i in candidates if i in parts[slowest] and not runs_compiled(items[i][1])]
        else:
            candidates = [i for i in candidates if not runs_compiled(items[i][1])] or candidates
        if not candidates:
            break
        opened = items[max(candidates, key=lambda i: costs[i])]
        pieces = [part for piece in pieces for part in (_children(*piece) if piece is opened else [piece])]
    if best is None:
        raise ConfigurationError(
            f"{type(root).__name__} has {len(pieces)} modules with parameters that could begin a stage, too few for "
            f"{stages} stages: use fewer devices"
        )
    return StageMap(root, tuple(best[1]), order)


class _Line:
    """The modules of `root` in running order, and what they cost up to each."""

    def __init__(self, root: nn.Module, cost: Cost, order: RunningOrder, seconds: Mapping[int, float] | None) -> None:
        modules = order.modules(root)
        self._places = {id(module): place for place, module in enumerate(modules)}
        self._before = [0.0]
        used, seen = order.uses(root), set[int]()
        for module in modules:
            fresh = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen.update(map(id, fresh))
            counted = sum(map(cost, fresh)) if id(module) in used else 0.0
            self._before.append(self._before[-1] + (counted if seconds is None else seconds.get(id(module), 0.0)))

    def sort(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """The pieces in running order, each once, without those that are part of others."""
        inside = {id(part) for _, module in pieces for part in module.modules() if part is not module}
        once = {id(piece[1]): piece for piece in reversed(pieces) if id(piece[1]) not in inside}
        return sorted(once.values(), key=lambda piece: self._places[id(piece[1])])

    def costs(self, pieces: Sequence[_Piece]) -> list[float]:
        """What runs from each piece to the next one; from the start in the case of the first."""
        places = [self._places[id(module)] for _, module in pieces]
        marks = [0, *places[1:], len(self._places)]
        return [self._before[end] - self._before[start] for start, end in itertools.pairwise(marks)]


def _children(name: str, module: nn.Module) -> list[_Piece]:
    prefix = f"{name}." if name else ""
    return [
        (prefix + child_name, child)
        for child_name, child in module.named_children()
        if any(True for _ in child.parameters())
    ]


def _opened(pieces: Sequence[_Piece], order: RunningOrder) -> list[_Piece]:
    """The pieces, and instead of those at which no stage may begin, what is in them."""
    found: list[_Piece] = []
    for piece in pieces:
        found += [piece] if order.may_begin(piece[1]) else _opened(_children(*piece), order)
    return found
