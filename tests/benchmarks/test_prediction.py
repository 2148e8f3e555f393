"""The comparison of predicted with measured steps runs at a tiny size on the CPU."""

import json
from pathlib import Path

import prediction
import pytest

from ramtorch_core.engine import rates
from ramtorch_core.engine.rates import Rates


def test_every_plan_and_schedule_gets_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rates, "measure_rates", lambda device: Rates(1e10, 1e10, 1e10, 1e10, 1e-9, 1e-9, None))
    output = tmp_path / "predictions.json"
    report = prediction.main(
        "--layers 1 --width 128 --batch 1 --seq 8 --steps 1 --windows 1 --microbatches 1 2 --pipeline-microbatches 2 "
        "--gpu-memory 1e9 "
        f"--schedules gpipe zb_h1 --pipeline-devices cpu cpu --device cpu --resident-below 0 --output {output}".split()
    )
    assert len(report["rows"]) == 2 * 2 * 2 + 1 + 2
    for row in report["rows"]:
        assert row["measured_parts"]["compute"] > 0
        assert row["predicted_parts"]["compute"] > 0
        assert row["most_off"] in row["measured_parts"]
    assert report["rows"][8]["fits"]
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in report["rows"])
    assert json.loads(output.read_text())["rows"] == report["rows"]
    assert [chunk["name"] for chunk in report["calibration"]["chunks"]] == ["0", "1", "2"]
