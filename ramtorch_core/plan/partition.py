"""Balanced cuts of a sequence of costs into contiguous parts (which modules become which stage), and even choices."""

import itertools
import math
from collections.abc import Callable, Sequence

from ramtorch_core.errors import ConfigurationError

__all__ = ["imbalance", "partition", "partition_by", "spread"]


def partition(costs: Sequence[float], parts: int, weights: Sequence[float] | None = None) -> tuple[range, ...]:
    """Cut `costs` into `parts` contiguous, non-empty ranges so that the slowest part is as fast as possible.

    Args:
        costs: one non-negative number per item, in any unit (parameters, seconds, bytes).
        parts: number of parts.
        weights: relative speed of each part, one positive number each; a part with weight 2 takes twice the cost in
            the same time. Equal by default.

    Returns:
        The items of each part, as ranges that follow each other. Among the cuts with the least maximum, the one whose
        parts are most alike (least sum of squares).

    Raises:
        ConfigurationError: fewer items than parts, a wrong number of weights, or a negative cost or weight.
    """
    speed = [1.0] * parts if weights is None else list(weights)
    if len(speed) != parts:
        raise ConfigurationError(f"{len(speed)} weights for {parts} parts: give one for each part")
    if any(not (w > 0 and math.isfinite(w)) for w in speed):
        raise ConfigurationError(f"weights must be positive and finite, got {speed}")
    if any(not (c >= 0 and math.isfinite(c)) for c in costs):
        raise ConfigurationError("costs must be finite and not negative")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    return partition_by(lambda part, first, last: (total[last] - total[first]) / speed[part], len(costs), parts)


def partition_by(time: Callable[[int, int, int], float], items: int, parts: int) -> tuple[range, ...]:
    """Like `partition`, for any cost model: `time(part, first, last)` is that of items [first, last) in `part`.

    `time` must not be negative. Exact, by dynamic programming; takes `parts * items**2` calls of `time`, twice.
    """
    if parts < 1 or items < parts:
        raise ConfigurationError(f"cannot cut {items} items into {parts} parts: every part needs at least one item")
    slowest = _best(time, items, parts, combine=max, bound=math.inf)[0]
    bound = slowest * (1 + 1e-12)
    _, cuts = _best(lambda *at: time(*at) ** 2, items, parts, combine=lambda a, b: a + b, bound=bound**2)
    return tuple(range(a, b) for a, b in itertools.pairwise(cuts))


def spread(count: int, items: int) -> frozenset[int]:
    """`count` indices of `items`, as far from each other as can be: `floor(i * items / count)`, so 0 is among them.

    Chosen are chunks that stay on the GPU. A `count` beyond `items` chooses all; neither may be negative.
    """
    count = min(count, items)
    return frozenset(i * items // count for i in range(count))


def imbalance(costs: Sequence[float], parts: Sequence[range], weights: Sequence[float] | None = None) -> float:
    """Time of the slowest part over the time that a perfectly even cut would take; 1.0 is perfect."""
    speed = [1.0] * len(parts) if weights is None else list(weights)
    slowest = max(sum(costs[i] for i in part) / w for part, w in zip(parts, speed, strict=True))
    ideal = sum(costs) / sum(speed)
    return slowest / ideal if ideal else 1.0


def _best(
    time: Callable[[int, int, int], float],
    items: int,
    parts: int,
    combine: Callable[[float, float], float],
    bound: float,
) -> tuple[float, list[int]]:
    """The least combined time, and the cuts that reach it, over parts whose time does not exceed `bound`."""
    best: list[float] = [math.inf] * (items + 1)  # best[end]: the first `part` parts cover items [0, end)
    best[0] = 0.0
    came_from: list[list[int]] = []
    for part in range(parts):
        following = [math.inf] * (items + 1)
        back = [0] * (items + 1)
        for last in range(part + 1, items - (parts - part - 1) + 1):
            for first in range(part, last):
                taken = time(part, first, last)
                if best[first] < math.inf and taken <= bound:
                    value = combine(best[first], taken)
                    if value < following[last]:
                        following[last], back[last] = value, first
        best = following
        came_from.append(back)
    cuts = [items]
    for back in reversed(came_from):
        cuts.append(back[cuts[-1]])
    return best[items], cuts[::-1]
