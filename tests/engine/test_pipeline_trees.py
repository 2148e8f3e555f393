"""Containers of tensors."""

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ramtorch_core.engine.pipeline.trees import map_tensors, tensors_in

Pair = namedtuple("Pair", ["x", "y"])


class Opaque:
    """Nothing that torch looks into."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: ((a, [b, 1, None]), {"k": a, "text": "x"}),
        lambda a, b: Pair(a, [b]),
        lambda a, b: OrderedDict(z=a, a=(b,)),
        lambda a, b: defaultdict(list, z=a, a=b),
        lambda a, b: [torch.Size([2]), torch.float32, slice(1), {1, 2}, a.max(0), nn.Parameter(b)],
        lambda a, b: a,
        lambda a, b: None,
    ],
)
def test_the_same_as_torchs_own_walk(make: Any) -> None:
    value = make(torch.arange(2.0), torch.arange(3.0))
    expected = tree_map_only(torch.Tensor, torch.neg, value)
    found = map_tensors(torch.neg, value)
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    assert all(a is b for a, b in zip(tensors_in(value), tensors, strict=True))


def test_what_torch_does_not_look_into_stays_itself() -> None:
    opaque = Opaque()
    assert map_tensors(torch.neg, [opaque])[0] is opaque
