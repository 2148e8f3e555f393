"""The pipeline examples learn, on two CPU "devices"."""

from pathlib import Path

import digits_pipeline
import pipeline_gpt
import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_digits_reach_the_accuracy_of_the_model_on_one_device(tmp_path: Path) -> None:
    assert digits_pipeline.main(["--out", str(tmp_path)]) >= 0.97
    assert (tmp_path / "best.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["staggered_1b1f", "zb_h1"])
def test_a_tiny_gpt_learns_and_every_schedule_learns_the_same(schedule: str, losses: dict[str, float]) -> None:
    losses[schedule] = pipeline_gpt.main(["--steps", "30", "--schedule", schedule, "--devices", "cpu", "cpu"])
    assert losses[schedule] < 3.5  # 5.5 before training
    assert len(set(losses.values())) == 1


@pytest.fixture(scope="module")
def losses() -> dict[str, float]:
    return {}
