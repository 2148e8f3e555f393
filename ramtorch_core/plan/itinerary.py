"""Itineraries: the ordered visits of a step, written down once and printed the same way everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ramtorch_core.errors import PlanError


class Direction(Enum):
    """What a visit computes with the chunk's weights."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Visit:
    """One use of one chunk; prints as `F3` or `B3`."""

    direction: Direction
    chunk: int

    def __str__(self) -> str:
        return f"{self.direction.value}{self.chunk}"


Itinerary = tuple[Visit, ...]


def format_itinerary(itinerary: Iterable[Visit]) -> str:
    """The visits in order, separated by spaces: `F0 F1 B1 B0`."""
    return " ".join(map(str, itinerary))


def parse_itinerary(text: str) -> Itinerary:
    """The inverse of `format_itinerary`.

    Raises:
        PlanError: a word is not `F` or `B` followed by a chunk's index.
    """
    visits = []
    for word in text.split():
        if not re.fullmatch(r"[FB]\d+", word):
            raise PlanError(f"'{word}' is no visit: write F or B and the chunk's index, for example F0 or B12")
        visits.append(Visit(Direction(word[0]), int(word[1:])))
    return tuple(visits)


def straight_itinerary(chunks: Sequence[int], *, backward: bool = True) -> Itinerary:
    """Every chunk forward in order and, with `backward`, back again in reverse: one step of a plain stack."""
    forward = tuple(Visit(Direction.FORWARD, chunk) for chunk in chunks)
    return forward + tuple(Visit(Direction.BACKWARD, chunk) for chunk in reversed(chunks)) if backward else forward
