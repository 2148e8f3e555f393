"""Batches to microbatches and back."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramtorch_core.engine.pipeline.split import batch_size, join, sizes_of, split

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


class Encoding(dict[str, Any]):
    """A mapping of its own type, like a tokenizer's."""


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_sizes_are_as_equal_as_possible_and_none_is_empty(total: int, parts: int) -> None:
    sizes = sizes_of(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == min(total, parts)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_every_container_is_cut_and_keeps_its_type() -> None:
    x = torch.arange(10).view(5, 2)
    batch = {
        "pair": Pair(x, [x + 1]),
        "record": Record(x, "name"),
        "encoding": Encoding(ids=x),
        "names": ["a", "b", "c", "d", "e"],
        "scalar": torch.tensor(3.0),
        "other": None,
        "short": ("p", "q"),
    }
    assert batch_size(batch) == 5
    first, second = split(batch, [3, 2])
    assert type(first["pair"]) is Pair
    assert torch.equal(second["pair"].y[0], x[3:] + 1)
    assert type(second["record"]) is Record
    assert (second["record"].name, second["record"].x.tolist()) == ("name", x[3:].tolist())
    assert type(first["encoding"]) is Encoding
    assert first["encoding"]["ids"].shape == (3, 2)
    assert (first["names"], second["names"]) == (["a", "b", "c"], ["d", "e"])
    assert first["scalar"] == 3
    assert first["other"] is None
    assert second["short"] == ("p", "q")


def test_microbatches_are_views_of_the_batch() -> None:
    x = torch.zeros(4, 2)
    split(x, [2, 2])[1].fill_(1)
    assert x.sum() == 4


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"x": torch.ones(4), "y": torch.ones(3)}, r"4 in batch\['x'\], 3 in batch\['y'\]"),
        ([torch.ones(4, 1), (torch.ones(2), 1)], r"4 in batch\[0\], 2 in batch\[1\]\[0\]"),
        ("text", "no tensor"),
        (torch.tensor(1.0), "no tensor"),
        (iter([1]), "no tensor"),
    ],
)
def test_a_batch_without_a_common_first_dimension_gives_the_reason(batch: Any, reason: str) -> None:
    found = batch_size(batch)
    assert isinstance(found, str)
    assert pytest.importorskip("re").search(reason, found)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4))
def test_joining_the_parts_gives_the_batch(total: int, parts: int) -> None:
    batch = {"x": torch.randn(total, 2), "names": [str(i) for i in range(total)], "pair": Pair(torch.ones(total), None)}
    sizes = sizes_of(total, parts)
    joined = join(split(batch, sizes), sizes)
    assert torch.equal(joined["x"], batch["x"])
    assert joined["names"] == batch["names"]
    assert torch.equal(joined["pair"].x, batch["pair"].x)


def test_numbers_are_averaged_by_size_and_the_rest_is_listed() -> None:
    sizes = [3, 1]
    assert join([torch.tensor(1.0), torch.tensor(5.0)], sizes) == 2
    assert join([1.0, 5.0], sizes) == 2
    assert join([None, None], sizes) is None
    assert join(["a", "b"], sizes) == ["a", "b"]
    assert join([{"a": 1}, {"b": 2}], sizes) == [{"a": 1}, {"b": 2}]
    assert join([torch.ones(2, 2), torch.ones(7)], sizes)[1].shape == (7,)
    assert join([1, "x"], sizes) == [1, "x"]
    assert join(["whole"], [4]) == "whole"
    assert join([True, False], sizes) == [True, False]
