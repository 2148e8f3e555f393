"""Which chunks are updated on the device, with their state streamed through it, and which on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ramtorch_core.engine.census import STREAMS, Chunk
from ramtorch_core.engine.chunks import named_chunks
from ramtorch_core.engine.rates import Rates
from ramtorch_core.errors import ConfigurationError, shown
from ramtorch_core.memory.weights import WeightGroup
from ramtorch_core.plan import placement

__all__ = ["HOST", "UpdateSpec", "UpdatesAt", "check_updates", "choose_places"]

UpdateSpec: TypeAlias = str | float | Sequence[str]
"""`"host"`, `"auto"`, the share of the streamed parameters that is updated on the device, or names of chunks."""

STATE_BYTES = 8
"""Of Adam's moments, per parameter."""


@dataclass(frozen=True, slots=True)
class UpdatesAt:
    """What was decided.

    Attributes:
        device: the groups that are updated there; all others are on the host.
        text: which, and why, for the log.
    """

    device: frozenset[WeightGroup]
    text: str


HOST = UpdatesAt(frozenset(), "on the host")


def check_updates(updates: UpdateSpec) -> None:
    """Refuse what no model can make work.

    Raises:
        ConfigurationError: an unknown word, or a share that is not between 0 and 1.
        TypeError: neither a word, nor a number, nor names.
    """
    named = isinstance(updates, Sequence) and all(isinstance(name, str) for name in updates)
    if isinstance(updates, bool) or not (named or isinstance(updates, str | int | float)):
        raise TypeError(f"updates={shown(updates)}: use 'host', 'auto', a share, or a list of chunks' names")
    if isinstance(updates, str) and updates not in ("host", "auto"):
        raise ConfigurationError(f"updates={updates!r}: use 'host', 'auto', a share, or a list of chunks' names")
    if isinstance(updates, int | float) and not 0.0 <= updates <= 1.0:
        raise ConfigurationError(f"updates={updates}: the share of parameters must be between 0 and 1")


def choose_places(
    updates: UpdateSpec, streamed: Sequence[Chunk], rates: Callable[[], Rates], *, built: bool
) -> UpdatesAt:
    """Decide, and write it into the chunks' reasons.

    A share takes the first chunks, to the nearest: their gradients come last, and the next forward needs them first.

    Args:
        streamed: the chunks that have a group.
        rates: of the machine, asked for "auto" only.
        built: dtypes in which weights cross are known; before, "auto" leaves everything on the host.

    Raises:
        ConfigurationError: a name that no streamed chunk has.
    """
    places, why = HOST, ""
    able = [chunk for chunk in streamed if _trained(chunk)]
    total = sum(map(_trained, streamed))
    if updates == "auto":
        chosen, why = _planned(streamed, rates()) if built and able else ([], "")
    elif isinstance(updates, str):
        chosen = []
    elif isinstance(updates, int | float):
        chosen = _first(able, updates * total)
    else:
        found = {index for name in updates for index in named_chunks(name, [c.name for c in streamed], "updates")}
        chosen = [chunk for index, chunk in enumerate(streamed) if index in found]
    if chosen:
        part = sum(map(_trained, chosen)) / max(1, total)
        names = chosen[0].name if len(chosen) == 1 else f"{chosen[0].name} ... {chosen[-1].name}"
        text = f"{len(chosen)} of {len(streamed)} chunks ({names}, {part:.0%} of their parameters) on the device{why}"
        places = UpdatesAt(frozenset(_group(chunk) for chunk in chosen), text)
    for chunk in streamed:
        chunk.reason = f"{STREAMS}; updated on the device" if _group(chunk) in places.device else STREAMS
    return places


def _first(chunks: Sequence[Chunk], wanted: float) -> list[Chunk]:
    """The first chunks, as many as come closest to so many parameters."""
    chosen: list[Chunk] = []
    taken = 0
    for chunk in chunks:
        count = _trained(chunk)
        if taken + count - wanted > wanted - taken:
            break
        chosen.append(chunk)
        taken += count
    return chosen


def _planned(streamed: Sequence[Chunk], rates: Rates) -> tuple[list[Chunk], str]:
    """What the planner says of everything but compute, which is the same for all choices; and why."""
    machine = placement.Machine(
        h2d=rates.both_ways / 2,
        d2h=rates.both_ways / 2,
        host_memory=rates.host_memory,
        host_update=rates.host_update,
        gpu_update=rates.device_update,
    )
    plan = placement.place([_described(chunk) for chunk in streamed], machine, gpu_bytes=0)
    chosen = [streamed[index] for index in plan.chosen(placement.Place.GPU)]
    return chosen, f": copies and updates take {plan.seconds:.3g} s a step, which {plan.load.limit} limits"


def _described(chunk: Chunk) -> placement.Chunk:
    group = _group(chunk)
    trained = [weight for weight in group.weights if weight.parameter.requires_grad]
    own = all(weight.own_shadow for weight in group.weights)
    crossing = sum(weight.nbytes for weight in group.weights)
    return placement.Chunk(
        name=chunk.name,
        compute=0.0,
        parameters=_trained(chunk),
        weight_bytes=crossing,
        master_bytes=crossing if own else sum(weight.parameter.nbytes for weight in trained),
        state_bytes=STATE_BYTES * _trained(chunk),
        gradient_bytes=sum(weight.nbytes for weight in trained),
    )


def _trained(chunk: Chunk) -> int:
    """How many of its streamed parameters could be updated on the device."""
    weights: list[Any] = [weight.parameter for weight in _group(chunk).weights]
    return sum(p.numel() for p in weights if p.requires_grad and p.dtype == torch.float32)


def _group(chunk: Chunk) -> WeightGroup:
    assert chunk.group is not None, "only streamed chunks are asked for"
    return chunk.group
