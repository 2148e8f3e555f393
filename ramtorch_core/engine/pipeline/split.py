"""Batches to microbatches and back."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["batch_size", "join", "sizes_of", "split"]


def batch_size(batch: Any) -> int | str:
    """The common first dimension of all tensors in `batch`; a sentence saying why, if there is none.

    Looks into lists, tuples, mappings and dataclasses. Tensors without dimensions do not count.
    """
    found: dict[int, str] = {}
    _walk(batch, "batch", lambda tensor, path: found.setdefault(tensor.shape[0], path))
    if not found:
        return "it holds no tensor with a batch dimension"
    if len(found) > 1:
        (a, at_a), (b, at_b) = list(found.items())[:2]
        return f"its tensors have no common first dimension: {a} in {at_a}, {b} in {at_b}"
    return next(iter(found))


def sizes_of(total: int, parts: int) -> list[int]:
    """`total` items in at most `parts` parts, none of them empty, as equal as possible, larger ones first."""
    parts = max(1, min(total, parts))
    return [total // parts + (i < total % parts) for i in range(parts)]


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """The microbatches of `batch`, of these `sizes` along the first dimension of each tensor, as views.

    Lists and tuples of other things (strings, for example) as long as the batch are cut as well; everything else goes
    into every microbatch as it is. Containers keep their types.
    """
    total = sum(sizes)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(batch, end - size, end, total) for size, end in zip(sizes, ends, strict=True)]


def join(outputs: Sequence[Any], sizes: Sequence[float]) -> Any:
    """One output for the whole batch from those of its microbatches.

    Tensors whose first dimension is their microbatch's size are concatenated, numbers and tensors with one element
    are averaged, weighted by size; containers of equal structure are joined item by item, lists as long as their
    microbatch are chained. Anything else becomes the list of the microbatches' values.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(output is None for output in outputs):
        return None
    if all(isinstance(output, Tensor) for output in outputs):
        if all(t.dim() > 0 and t.shape[0] == size for t, size in zip(outputs, sizes, strict=True)):
            return torch.cat([t.to(outputs[-1].device) for t in outputs])
        if all(t.numel() == 1 for t in outputs):
            return _mean([t.to(outputs[-1].device) for t in outputs], sizes)
        return list(outputs)
    if all(isinstance(output, int | float) and not isinstance(output, bool) for output in outputs):
        return _mean(outputs, sizes)
    if any(type(output) is not type(first) for output in outputs):
        return list(outputs)
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        return _rebuild_mapping(first, {key: join([output[key] for output in outputs], sizes) for key in first})
    if isinstance(first, list) and all(len(output) == size for output, size in zip(outputs, sizes, strict=True)):
        return [item for output in outputs for item in output]
    if isinstance(first, list | tuple) and all(len(output) == len(first) for output in outputs):
        return _rebuild_sequence(first, [join(list(items), sizes) for items in zip(*outputs, strict=True)])
    return list(outputs)


def _mean(values: Sequence[Any], sizes: Sequence[float]) -> Any:
    if len(set(sizes)) == 1:
        return sum(values[1:], start=values[0]) / len(values)
    weighted = [value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True)]
    return sum(weighted[1:], start=weighted[0])


def _walk(value: Any, path: str, visit: Callable[[Tensor, str], object]) -> None:
    if isinstance(value, Tensor):
        if value.dim() > 0:
            visit(value, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _walk(item, f"{path}[{key!r}]", visit)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _walk(item, f"{path}[{i}]", visit)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _walk(getattr(value, field.name), f"{path}.{field.name}", visit)


def _slice(value: Any, start: int, end: int, total: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:end] if value.dim() > 0 else value
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, {key: _slice(item, start, end, total) for key, item in value.items()})
    if isinstance(value, list | tuple):
        if len(value) == total and not any(isinstance(item, Tensor | Mapping | list | tuple) for item in value):
            return _rebuild_sequence(value, list(value[start:end]))
        return _rebuild_sequence(value, [_slice(item, start, end, total) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _slice(getattr(value, f.name), start, end, total) for f in dataclasses.fields(value)}
        copy = object.__new__(type(value))
        copy.__dict__.update(getattr(value, "__dict__", {}))
        for name, item in changed.items():
            object.__setattr__(copy, name, item)
        return copy
    return value


def _rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    return items if type(original) is dict else type(original)(items)  # type: ignore[call-arg]


def _rebuild_sequence(original: Sequence[Any], items: list[Any]) -> Any:
    if isinstance(original, tuple) and hasattr(original, "_fields"):
        return type(original)(*items)
    return type(original)(items)  # type: ignore[call-arg]
