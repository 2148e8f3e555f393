"""Who holds which parameter: divides a module tree's weights among chunks, the window, and the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.weights import Weight, WeightGroup

STREAMS = "streams through the window"


class Placement(Enum):
    """Where the weights of a row of the chunk table are.

    STREAMED: master on the host, copied into a slot for each visit.
    RESIDENT: a `Parameter` on the device, with its gradient and optimizer state (`pin=`).
    COPY: master on the host, and a copy that stays on the device (small or shared tensors).
    """

    STREAMED = "streamed"
    RESIDENT = "resident"
    COPY = "copy stays"


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A row of the chunk table: parameters are counted in elements, `nbytes` is what it occupies on the device."""

    name: str
    parameters: int
    nbytes: int
    dtype: str
    placement: str
    reason: str


@dataclass(eq=False, slots=True)
class Chunk:
    """A module whose weights move together.

    Attributes:
        group: its streamed weights, or None if it has none.
        resident: its parameters live on the device.
        parameters: every parameter that it owns, wherever it is placed.
    """

    index: int
    name: str
    module: nn.Module
    resident: bool
    reason: str
    group: WeightGroup | None = None
    parameters: list[nn.Parameter] = field(default_factory=list)
    small: list[Weight] = field(default_factory=list)


@dataclass(slots=True)
class Census:
    """The result: chunks, and the weights whose copies stay, each with the reason."""

    chunks: list[Chunk]
    copies: list[Weight]
    reasons: dict[Weight, str]


@dataclass(eq=False, slots=True)
class _Found:
    parameter: nn.Parameter
    name: str
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    chunks: set[int | None] = field(default_factory=set)


def take_census(
    root: nn.Module,
    chunks: Sequence[tuple[str, nn.Module]],
    *,
    resident: frozenset[int],
    resident_below: int,
    also_copies: frozenset[nn.Parameter] = frozenset(),
) -> Census:
    """Place every parameter of `root`.

    Args:
        chunks: qualified names and modules.
        resident: indices of chunks whose parameters live on the device.
        resident_below: bytes; smaller tensors get a copy that stays.
        also_copies: parameters that were seen in use outside of their chunk's forward.

    Raises:
        ConfigurationError: a parameter is not on the host, or has no values yet.
    """
    index_of = {id(module): index for index, (_, module) in enumerate(chunks)}
    outer: set[int] = set()
    found: dict[int, _Found] = {}
    for module, prefix, chunk, inside in _walk(root, index_of):
        if chunk is not None and inside is not None and inside != chunk:
            outer.add(inside)
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            _check_host(name, parameter)
            entry = found.setdefault(id(parameter), _Found(parameter, name))
            if (module, attribute) not in entry.sites:
                entry.sites.append((module, attribute))
            entry.chunks.add(chunk)
    result = [
        Chunk(index, name, module, index in resident, "pinned on the device" if index in resident else "")
        for index, (name, module) in enumerate(chunks)
    ]
    streamed: dict[int, list[Weight]] = {}
    copies: list[Weight] = []
    reasons: dict[Weight, str] = {}
    for entry in found.values():
        weight = Weight(entry.name, entry.parameter, tuple(entry.sites))
        index = next(iter(entry.chunks)) if len(entry.chunks) == 1 else None
        if index is not None:
            result[index].parameters.append(entry.parameter)
            if result[index].resident:
                continue
        before_forward = index is not None and any(
            module is result[index].module and any(map(_may_read, module._forward_pre_hooks.values()))
            for module, _ in entry.sites
        )
        reason = _reason_for_copy(entry, index, outer, resident_below, also_copies)
        if reason is None and before_forward:
            reason = "read by a hook before its chunk's forward"
        if reason is None and index is not None:
            streamed.setdefault(index, []).append(weight)
        else:
            copies.append(weight)
            reasons[weight] = reason or ""
            if index is not None:
                result[index].small.append(weight)
    position = 0
    for each in result:
        if each.index in streamed:
            each.group = WeightGroup(position, each.name, streamed[each.index])
            each.reason = each.reason or STREAMS
            position += 1
        elif not each.resident:
            each.reason = "has no tensor that streams"
    return Census(result, copies, reasons)


def _may_read(hook: Callable[..., object]) -> bool:
    """Whether a hook may read weights. Those with which Lightning's profilers name modules in traces do not."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    return ".profilers." not in str(getattr(function, "__module__", ""))


def chunk_rows(census: Census) -> list[ChunkRow]:
    """The chunk table: one row per chunk, then the tensors whose copies stay, by reason."""
    rows = []
    for chunk in census.chunks:
        count = sum(parameter.numel() for parameter in chunk.parameters)
        small = sum(weight.parameter.nbytes for weight in chunk.small)
        if chunk.resident:
            dtypes = {parameter.dtype for parameter in chunk.parameters}
            nbytes, placement = sum(parameter.nbytes for parameter in chunk.parameters), Placement.RESIDENT
        elif chunk.group is not None:
            dtypes = {weight.dtype for weight in chunk.group.weights}
            nbytes, placement = chunk.group.nbytes + small, Placement.STREAMED
        else:
            dtypes = {weight.parameter.dtype for weight in chunk.small}
            nbytes, placement = small, Placement.COPY
        rows.append(ChunkRow(chunk.name, count, nbytes, _names(dtypes), placement.value, chunk.reason))
    inside = {weight for chunk in census.chunks for weight in chunk.small}
    by_reason: dict[str, list[Weight]] = {}
    for weight in census.copies:
        if weight not in inside:
            by_reason.setdefault(census.reasons[weight], []).append(weight)
    for reason, weights in by_reason.items():
        name = weights[0].name if len(weights) == 1 else f"{weights[0].name} and {len(weights) - 1} more"
        count, nbytes = sum(w.parameter.numel() for w in weights), sum(w.parameter.nbytes for w in weights)
        dtypes = {weight.parameter.dtype for weight in weights}
        rows.append(ChunkRow(name, count, nbytes, _names(dtypes), Placement.COPY.value, reason))
    return rows


def format_rows(rows: Sequence[ChunkRow]) -> str:
    """The table as text, one line per row; equal neighbours are folded into one line."""
    header = ("chunk", "parameters", "MB on device", "dtype", "placement", "why")
    lines: list[tuple[str, ...]] = [header]
    position = 0
    while position < len(rows):
        row, end = rows[position], position + 1
        while end < len(rows) and _kind(row) == _kind(rows[end]):
            end += 1
        name = row.name if end == position + 1 else f"{row.name} .. {rows[end - 1].name}"
        times = "" if end == position + 1 else f"{end - position} x "
        lines.append(
            (name, f"{times}{row.parameters:,}", f"{times}{row.nbytes / 1e6:.1f}", row.dtype, row.placement, row.reason)
        )
        position = end
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _kind(row: ChunkRow) -> tuple[object, ...]:
    return (row.parameters, row.nbytes, row.dtype, row.placement, row.reason)


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "-"


def _walk(root: nn.Module, index_of: dict[int, int]) -> Iterator[tuple[nn.Module, str, int | None, int | None]]:
    """Every (module, name, innermost chunk, next outer chunk), along every path, each combination once."""
    seen: set[tuple[int, int | None]] = set()
    stack: list[tuple[nn.Module, str, int | None]] = [(root, "", None)]
    while stack:
        module, prefix, inside = stack.pop()
        chunk = index_of.get(id(module), inside)
        if (id(module), chunk) in seen:
            continue
        seen.add((id(module), chunk))
        yield module, prefix, chunk, inside
        for name, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((child, f"{prefix}.{name}" if prefix else name, chunk))


def _reason_for_copy(
    entry: _Found, index: int | None, outer: set[int], resident_below: int, also_copies: frozenset[nn.Parameter]
) -> str | None:
    if index is None:
        return "shared between chunks" if len(entry.chunks) > 1 else "outside of every chunk"
    if index in outer:
        return "owned by a chunk that contains chunks"
    if entry.parameter in also_copies:
        return "used outside of its chunk's forward"
    if any(isinstance(module, nn.RNNBase) for module, _ in entry.sites):
        return "recurrent weights keep cuDNN's layout"
    if entry.parameter.numel() == 0 or entry.parameter.nbytes < resident_below:
        return "small"
    return None


def _check_host(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ConfigurationError(
            f"parameter '{name}' is not initialised (a lazy module): run one forward pass before streaming the model"
        )
    if parameter.device.type == "meta":
        raise ConfigurationError(
            f"parameter '{name}' is on the meta device: give it values first, with load_state_dict(assign=True) or "
            f"module.to_empty(device='cpu')"
        )
    if parameter.device.type != "cpu":
        raise ConfigurationError(
            f"parameter '{name}' is on '{parameter.device}', but masters live on the host: build the model on 'cpu', "
            f"or move it there with module.cpu() before it is streamed"
        )
