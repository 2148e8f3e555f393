"""Globs over qualified names, and which chunks `pin` keeps resident."""

import warnings
from typing import Any

import pytest
import torch

from ramtorch_core.engine.chunks import choose_resident
from ramtorch_core.engine.module_tree import glob_regex
from ramtorch_core.errors import ConfigurationError

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.**", "a.b.c", True),
        ("a.**", "a", False),
        ("**.c", "c", True),
        ("**.c", "abc", False),
        ("a.**.c", "a.c", True),
        ("a.**.c", "a.b.b.c", True),
        ("a?", "a.", False),
        ("h[01]", "h1", True),
        ("a+*", "a+b", True),
    ],
)
def test_globs_treat_dots_as_separators(pattern: str, name: str, matches: bool) -> None:
    assert bool(glob_regex(pattern).fullmatch(name)) is matches


@pytest.mark.parametrize(
    ("pin", "n", "expected"),
    [
        (0, 6, []),
        (1, 6, [0]),
        (2, 6, [0, 3]),
        (4, 6, [0, 1, 3, 4]),
        (5, 7, [0, 1, 2, 4, 5]),
        (6, 6, range(6)),
        (0, 0, []),
    ],
)
def test_a_count_is_spread_evenly(pin: int, n: int, expected: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_resident(pin, [str(i) for i in range(n)]) == frozenset(expected)


def test_a_count_always_keeps_that_many() -> None:
    for n in range(30):
        for k in range(n + 1):
            assert len(choose_resident(k, [str(i) for i in range(n)])) == k


def test_a_count_beyond_the_chunks_keeps_all_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="pin=9 exceeds the number of chunks, 3") as caught:
        assert choose_resident(9, BLOCKS) == {0, 1, 2}
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_indices_names_and_globs_keep_what_they_say() -> None:
    assert choose_resident([2, 0, 2], BLOCKS) == {0, 2}
    assert choose_resident(["blocks.1"], BLOCKS) == choose_resident("blocks.1", BLOCKS) == {1}
    assert choose_resident(["blocks.[12]", "blocks.*"], BLOCKS) == {0, 1, 2}
    assert choose_resident([], BLOCKS) == frozenset()
    assert choose_resident([torch.tensor(1)], BLOCKS) == {1}  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("pin", "error", "message"),
    [
        (-1, ConfigurationError, "pin=-1.*cannot be negative"),
        ([3], ConfigurationError, r"index 3 is out of range for 3 chunks; use 0 \.\.\. 2"),
        ([-1], ConfigurationError, "index -1 is out of range for 3 chunks"),
        (["block.1"], ConfigurationError, "no chunk is named 'block.1'; did you mean 'blocks.1'"),
        ("head*", ConfigurationError, r"no chunk is named 'head\*'; there are 'blocks.0'"),
        (True, TypeError, "True"),
        ([True], TypeError, "True"),
        (1.5, TypeError, "1.5"),
        (None, TypeError, "None"),
        ([None], TypeError, "None"),
    ],
)
def test_a_bad_pin_is_named_with_the_remedy(pin: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_resident(pin, BLOCKS)
