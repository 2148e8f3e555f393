"""Random programs on random stages: whatever a training step does, its gradients equal those of accumulation.

python tests/engine/test_pipeline_random.py 1000 2000   # many more programs, by number
"""

import contextlib
import copy
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import Chain, accumulate, assert_exact, assert_same_gradients, batch, pipeline, run
from pipeline_programs import Program, runs
from torch import Tensor

SCHEDULES = ["sequential", "gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1", "interleaved", "zbv"]
DTYPES = [None, None, None, torch.bfloat16]


def check(number: int, schedule: str | None = None) -> None:
    """One program under one schedule, three steps."""
    torch.manual_seed(number)
    choose = random.Random(-number - 1)
    schedule = schedule or choose.choice(SCHEDULES)
    model = Program(number)
    several = [2, 4] if schedule in ("interleaved", "zbv") else range(1, model.depth + 1)
    stages = min(choose.choice(several), model.depth)
    cuts = [f"cells.{i}" for i in sorted(choose.sample(range(1, model.depth), stages - 1))]
    microbatches, rows, dtype = choose.randint(1, 6), choose.randint(2, 3), choose.choice(DTYPES)
    inputs = [[batch(rows, 1000 * step + m) for m in range(microbatches)] for step in range(3)]
    with torch.autocast("cpu", dtype, cache_enabled=False) if dtype else contextlib.nullcontext():
        if runs(model, inputs):
            assert_exact(model, cuts, inputs, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("number", range(6))
def test_random_programs_are_exact_under_every_schedule(number: int, schedule: str) -> None:
    check(number, schedule)


@pytest.mark.parametrize("number", range(6, 30))
def test_more_random_programs_are_exact(number: int) -> None:
    check(number)


class Skipping(Chain):
    """Each microbatch leaves other blocks out, by its number, which comes with it: also those that begin stages."""

    left_out: Sequence[set[int]] = ()

    def training_step(self, item: Any) -> Tensor:
        x, y, number = item
        for index, block in enumerate(self.blocks):
            time.sleep(self.delays.random() * 0.001 if self.delays else 0)
            x = x if index in self.left_out[number] else block(x)
        return F.cross_entropy(self.head(x), y)

    delays: random.Random | None = None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("number", range(5))
def test_microbatches_may_differ_in_the_modules_that_they_leave_out(number: int, schedule: str) -> None:
    """Then weights are used in other stages by some, and still add up in the order of the microbatches."""
    torch.manual_seed(number)
    choose = random.Random(number)
    model, microbatches, depth = Skipping(8), choose.randint(2, 6), 8
    stages = choose.choice([2, 4] if schedule in ("interleaved", "zbv") else [2, 3, 4])
    often = [choose.choice([0, 0.3, 0.6]) for _ in range(microbatches)]
    model.left_out = [{i for i in range(depth) if choose.random() < share} for share in often]
    reference = copy.deepcopy(model)
    items = [(*batch(2, m), m) for m in range(microbatches)]
    accumulate(reference, reference.training_step, items)
    model.delays = choose
    with pipeline(model, [f"blocks.{depth * stage // stages}" for stage in range(1, stages)]) as executor:
        assert_same_gradients(model, reference, run(executor, model.training_step, items, schedule))


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:])
    for number in range(first, last):
        try:
            check(number)
        except Exception as error:
            print(number, type(error).__name__, str(error).splitlines()[0], flush=True)
