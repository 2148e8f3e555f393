"""benchmarks/pipeline_overhead.py runs, and says why a peer is left out."""

import json
from pathlib import Path
from typing import Any

import pipeline_overhead
import pytest

SMALL = ["--stages", "2", "--microbatches", "2", "--width", "4", "--batch", "4", "--rounds", "2", "--warm-up", "1"]


@pytest.mark.parametrize("given", [True, False])
def test_every_system_gets_a_row_and_a_missing_peer_a_reason(
    given: bool, tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    pipeline_overhead.main([*SMALL, *(["--ramtorch", str(tmp_path)] if given else [])])
    out, err = capsys.readouterr()
    assert f"there is no ramtorch in {tmp_path}" in err if given else "pass --ramtorch PATH" in err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["system"] for row in rows] == [
        "plain", "ours gpipe", "ours staggered_1b1f", "ours sequential", "ours zb_h1",
    ]  # fmt: skip
    for row in rows:
        assert row["microseconds per op"]["median"] >= row["microseconds per op"]["minimum"] > 0
