"""Random programs on random stages: whatever a training step does, its gradients equal those of accumulation.

python tests/engine/test_pipeline_random.py 1000 2000   # many more programs, by number
"""

import contextlib
import random
import sys

import pytest
import torch
from pipeline_cases import assert_exact, batch
from pipeline_programs import Program, runs

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


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:])
    for number in range(first, last):
        try:
            check(number)
        except Exception as error:
            print(number, type(error).__name__, str(error).splitlines()[0], flush=True)
