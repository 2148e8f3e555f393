"""Random models, knobs and optimizers: overlapped, published and resident training leave the same bits.

Each case is drawn from its seed. `RAMTORCH_FUZZ_CASES` says how many there are, and `RAMTORCH_FUZZ_FIRST` which seed is
the first:

    RAMTORCH_FUZZ_CASES=2000 RAMTORCH_FUZZ_FIRST=1000 python -m pytest tests/engine/test_updates_fuzz.py
"""

import os

import pytest
from fuzz_cases import draw
from fuzz_training import Training, compare, slow_down

FIRST = int(os.environ.get("RAMTORCH_FUZZ_FIRST", "0"))
CASES = int(os.environ.get("RAMTORCH_FUZZ_CASES", "20"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_random_cases_leave_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(seed)
    slow_down(monkeypatch, seed)
    found = {way: Training(case, way).run() for way in ("plain", "published", "overlapped")}
    try:
        compare(case, found)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error
