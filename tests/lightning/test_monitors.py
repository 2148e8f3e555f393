"""Monitors and traces in the Trainer: figures arrive, results stay the same, and updates still overlap."""

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from offload_cases import Classifier, Watched, fit
from stream_cases import assert_same
from trace_cases import ops_in, ranges_in

from ramtorch_core import ConfigurationError
from ramtorch_lightning import OffloadMonitor, PipelineMonitor, PipelineStrategy, TraceCallback

OFFLOAD = {
    "stall_percent", "transfer_stall_percent", "gradient_stall_percent", "update_stall_percent", "h2d_gb_per_s",
    "d2h_gb_per_s", "h2d_busy_percent", "d2h_busy_percent", "update_seconds", "seconds_per_batch", "samples_per_second",
    "host_gb",
}  # fmt: skip
PIPELINE = {
    "bubble_percent", "device_0_busy_percent", "device_1_busy_percent", "pipeline_seconds", "seconds_per_batch",
    "samples_per_second", "host_gb",
}  # fmt: skip


def rows_of(run: Any, prefix: str) -> list[dict[str, float]]:
    rows = [row for _, row in run.record["logged"]]
    figures = [
        {name.partition("/")[2]: value for name, value in row.items() if name.startswith(f"{prefix}/")} for row in rows
    ]
    return [row for row in figures if row]


def strip(run: Any) -> dict[str, Any]:
    """The record without the monitor's figures."""
    record = dict(run.record)
    kept = [(step, {k: v for k, v in row.items() if "/" not in k}) for step, row in record.pop("logged")]
    record["callback metrics"] = {k: v for k, v in record["callback metrics"].items() if "/" not in k}
    return record | {"logged": [(step, row) for step, row in kept if row]}


class Kept(Watched):
    """Remembers whether updates ran on."""

    ran_on = False

    def _detach(self) -> None:
        if self._streamer is not None:
            self.ran_on |= self.streamer.updates.run_on and self.streamer.updates.updater.updated > 0
        super()._detach()


@pytest.mark.parametrize("gradients", ["auto", "published"])
def test_the_monitor_logs_its_figures_and_changes_nothing(gradients: Any) -> None:
    plain = fit(Classifier, Kept(gradients=gradients))
    watched = fit(
        Classifier,
        Kept(gradients=gradients),
        callbacks=lambda: [OffloadMonitor(every_n_steps=2, progress_bar=True, tokens=lambda batch: 3 * len(batch[0]))],
    )
    assert_same(strip(watched), strip(plain))
    assert watched.strategy.conservative == [False]
    assert watched.strategy.ran_on is (gradients == "auto")
    rows = rows_of(watched, "offload")
    assert len(rows) == 4
    for row in rows:
        assert row.keys() == OFFLOAD | {"tokens_per_second"}
        assert row["tokens_per_second"] == pytest.approx(3 * row["samples_per_second"])
        assert row["h2d_gb_per_s"] > 0
        assert row["d2h_gb_per_s"] > 0
        assert row["update_seconds"] > 0
        assert 0 <= row["stall_percent"] <= 100
    assert "offload/stall_percent" in watched.trainer.progress_bar_metrics


def test_the_monitor_counts_every_byte_once() -> None:
    run = fit(Classifier, Kept(), callbacks=lambda: [OffloadMonitor(every_n_steps=1)], validation=lambda: None)
    rows = rows_of(run, "offload")
    moved = sum(row["h2d_gb_per_s"] * row["seconds_per_batch"] * 1e9 for row in rows)
    assert moved == pytest.approx(run.strategy.copied_bytes, rel=1e-6)


def test_without_steps_given_figures_come_as_often_as_the_trainer_logs() -> None:
    run = fit(Classifier, Kept(), callbacks=lambda: [OffloadMonitor()], log_every_n_steps=4)
    assert len(rows_of(run, "offload")) == 2


def test_nobody_listens_when_training_is_over_or_has_failed() -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    monitor = OffloadMonitor(1)
    with pytest.raises(ZeroDivisionError):
        fit(Fails, Kept(), callbacks=lambda: [monitor])
    assert monitor._listeners == []
    run = fit(Classifier, Kept(), callbacks=lambda: [monitor])
    assert monitor._listeners == []
    assert rows_of(run, "offload")


def test_the_pipeline_monitor_logs_bubbles() -> None:
    build = lambda: PipelineStrategy(devices=["cpu", "cpu"], n_microbatches=2)
    plain = fit(Classifier, build())
    watched = fit(Classifier, build(), callbacks=lambda: [PipelineMonitor(every_n_steps=4)])
    assert_same(strip(watched), strip(plain))
    rows = rows_of(watched, "pipeline")
    assert len(rows) == 2
    for row in rows:
        assert row.keys() == PIPELINE
        assert 0 <= row["bubble_percent"] <= 100
        assert row["pipeline_seconds"] <= row["seconds_per_batch"] * 2


@pytest.mark.parametrize("monitor", [OffloadMonitor, PipelineMonitor])
def test_another_strategy_is_refused(monitor: Any) -> None:
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy"):
        fit(Classifier, callbacks=lambda: [monitor()])


@pytest.mark.parametrize("monitor", [OffloadMonitor, PipelineMonitor])
def test_figures_every_0_steps_are_refused(monitor: Any) -> None:
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        monitor(every_n_steps=0)


# ------------------------------------------------------------------ traces


def test_a_trace_of_two_batches_shows_their_visits_and_updates(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    strategy = Kept(window=2)
    fit(Classifier, strategy, callbacks=lambda: [TraceCallback(path, steps=[2, 3])], max_epochs=1)
    assert strategy.conservative == [False]
    assert strategy.ran_on
    count = len(strategy.streamed)
    step = [f"F{i}" for i in range(count)] + [f"B{i}" for i in reversed(range(count))]
    assert ranges_in(path, "FB") == step * 2
    missing = Counter([f"u{i}" for i in range(count)] * 2) - Counter(ranges_in(path, "u"))
    assert not missing, "some may be of the batch before, which run on"


def test_a_trace_of_a_pipeline_shows_its_ops(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    strategy = PipelineStrategy(devices=["cpu", "cpu"], n_microbatches=2, schedule="gpipe")
    fit(Classifier, strategy, callbacks=lambda: [TraceCallback(path, steps=[1])], max_epochs=1)
    assert [op for op in ops_in(path) if op[0] == "0"] == ["0F0", "0F1", "0B0", "0B1"]


def test_a_trace_of_steps_that_do_not_come_is_not_written_and_a_warning_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.warns(UserWarning, match=r"ended after 4 batches: the trace of steps=\[4, 5\].* was not written"):
        fit(Classifier, Kept(), callbacks=lambda: [TraceCallback(path)], max_epochs=1)
    assert not path.exists()


def test_a_trace_of_which_only_the_first_step_comes_has_that_one_and_a_warning_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.warns(UserWarning, match=r"ended after 4 batches: the trace of steps=\[3, 4\].* only those before"):
        fit(Classifier, Kept(window=2), callbacks=lambda: [TraceCallback(path, steps=[3, 4])], max_epochs=1)
    assert ranges_in(path, "F")[0] == "F0"


def test_training_that_is_as_long_as_the_trace_gets_no_warning(tmp_path: Path, recwarn: Any) -> None:
    fit(Classifier, Kept(), callbacks=lambda: [TraceCallback(tmp_path / "trace.json", steps=[3])], max_epochs=1)
    assert not [each for each in recwarn if "trace" in str(each.message)]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "give at least one"),
        ([1, 3], "give at least one, and those in between"),
        ([-1], "steps=-1: a whole number of at least 0"),
        ([4, 5.5], r"steps=5\.5: a whole number"),
        ([True], "steps=True: a whole number"),
        (5, r"steps=5: give a list of batches, such as \[5\]"),
        (2.5, "give a list of batches"),
        (None, "give a list of batches"),
        ("45", "give a list of batches"),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(steps: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TraceCallback("trace.json", steps=steps)


@pytest.mark.parametrize("path", ["", ".", 5, None])
def test_what_is_no_path_of_a_file_is_refused_before_training(path: Any) -> None:
    with pytest.raises(ConfigurationError, match="path="):
        TraceCallback(path)


def test_a_failing_training_step_ends_the_trace(tmp_path: Path) -> None:
    class Fails(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError):
        fit(Fails, Kept(), callbacks=lambda: [TraceCallback(path, steps=[0])])
    assert not path.exists()
    fit(Classifier, Kept(), callbacks=lambda: [TraceCallback(path, steps=[0])])
    assert path.exists()
