"""The code of docs/pipeline.md runs."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[1] / "docs" / "pipeline.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", [block for block in BLOCKS if "devices=[0, 1]" not in block])
def test_a_block_of_code_runs(code: str) -> None:
    exec(compile(code, str(DOCUMENT), "exec"), {})


def test_there_is_code_to_run() -> None:
    assert len(BLOCKS) >= 3
