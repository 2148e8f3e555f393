"""Weights that several stages use: their gradients are the sums that one graph would have, term by term."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Chain, Shared, assert_exact, batches
from torch import Tensor, nn

SCHEDULES = ["sequential", "gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1", "interleaved", "zbv"]
CUTS = ["blocks.1", "blocks.2", "blocks.3"]


def steps(microbatches: int = 3, count: int = 2) -> list[list[Any]]:
    return [batches(microbatches, seed=s) for s in range(count)]


class Tied(Chain):
    """Embedding and head share a weight, on the first and the last stage."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.functional = functional
        self.head = nn.Identity() if functional else nn.Linear(WIDTH, 11, bias=False)
        if not functional:
            self.head.weight = self.embedding.weight
        self._modules["blocks"] = self._modules.pop("blocks")  # after the embedding

    def training_step(self, batch: Any) -> Tensor:
        x = self(self.embedding(batch))
        logits = F.linear(x, self.embedding.weight) if self.functional else x
        return F.cross_entropy(logits, batch)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_tied_across_stages(functional: bool, schedule: str) -> None:
    ids = [[torch.randint(0, 11, (4,)) for _ in range(4)] for _ in range(3)]
    assert_exact(Tied(functional), CUTS, ids, schedule)


USERS = [{0: 1, 3: 1}, {0: 3, 1: 3, 3: 3}, {0: 1, 1: 2, 2: 3, 3: 4}, {2: 3, 3: 2}, {0: 2, 1: 1}]


@pytest.mark.parametrize("users", USERS)
@pytest.mark.parametrize("home", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["sequential", "staggered_1b1f", "zb_h1", "zbv"])
def test_a_weight_used_before_at_and_after_its_home_has_the_sum_of_one_graph(
    home: int, users: dict[int, int], schedule: str
) -> None:
    """Gradients used to be added up per stage, and those of stages before the home only after the step."""
    assert_exact(Shared(home, users), CUTS, steps(5), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_that_some_microbatches_use_before_its_home_and_others_do_not(schedule: str) -> None:
    class Sometimes(Shared):
        def users_of(self, x: Tensor) -> dict[int, int]:
            return ({0: 2} if float(x[0, 0]) > 0 else {3: 2}) | ({1: 1} if float(x[0, 1]) > 0 else {2: 3})

    assert_exact(Sometimes(2, {}), CUTS, steps(8, 3), schedule)


@pytest.mark.parametrize("home", [0, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_under_autocast_that_keeps_no_casts_shared_weights_have_the_sum_of_one_graph(home: int, schedule: str) -> None:
    """As Lightning enters it. Where autocast keeps a cast, it adds up what its uses give in half precision."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert_exact(Shared(home, {0: 1, 1: 2, 2: 3, 3: 4}), CUTS, steps(4), schedule)
