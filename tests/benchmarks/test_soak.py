"""The long run, made short: every strategy trains, is resumed, and is sampled; what grows is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import soak

SMALL = ["--minutes", "0", "--fits", "2", "--layers", "2", "--width", "8", "--batches", "4", "--devices", "cpu", "cpu"]


@pytest.mark.parametrize("strategy", ["offload", "pipeline", "plain"])
def test_every_strategy_is_sampled_after_each_epoch_of_each_fit(tmp_path: Path, strategy: str) -> None:
    report = soak.main([*SMALL, "--strategy", strategy, "--json", str(tmp_path / "out.json")])
    assert [(sample["epochs"], sample["steps"]) for sample in report["samples"]] == [(1, 4), (2, 8)]
    assert report["table"]["end"] == report["samples"][-1]
    assert json.loads((tmp_path / "out.json").read_text())["growth"] == report["growth"]
    assert all(sample["loss"] > 0 and sample["anonymous_mb"] > 0 for sample in report["samples"])


def sample(minutes: float, **held: Any) -> soak.Sample:
    figures = {"anonymous_mb": 300.0, "shared_mb": 2.0, "device_mb": 0.0, "threads": 3, "files": 7, "loss": 1.0}
    return soak.Sample(minutes=minutes, epochs=1, steps=4, **{**figures, **held})


@pytest.mark.parametrize(("name", "bound"), list(soak.BOUNDS.items()))
def test_what_grows_by_more_than_its_bound_after_the_first_quarter_is_named(name: str, bound: float) -> None:
    figure = getattr(sample(0), name)
    samples = [
        sample(0, **{name: 0}),
        *(sample(minutes) for minutes in (5, 16, 31)),
        sample(60, **{name: figure + bound}),
    ]
    rows = soak.table(samples, 60)
    assert [row.minutes for row in rows.values()] == [0, 16, 31, 60]
    assert soak.problems(rows, finite=True) == []
    rows["end"] = sample(60, **{name: figure + bound + 1})
    assert soak.problems(rows, finite=True) == [f"{name} grew by {bound + 1:g}, more than {bound:g}"]


def test_a_loss_that_is_not_finite_is_told() -> None:
    rows = soak.table([sample(1)], 60)
    assert soak.problems(rows, finite=False) == ["a loss was not finite"]
