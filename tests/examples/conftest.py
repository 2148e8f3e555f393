"""The examples are scripts: their folder goes onto the path, and they run in this process with small settings."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
pytest.importorskip("matplotlib", reason="the examples draw charts")
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True)
def settings_restored() -> Iterator[None]:
    """A script may set what it likes for its process; here other tests follow."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill
