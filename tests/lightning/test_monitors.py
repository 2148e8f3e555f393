"""Monitors and traces in the Trainer: figures arrive, results stay the same, and updates still overlap."""

import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from offload_cases import Classifier, Metrics, Watched, fit, loader, make_trainer
from stream_cases import assert_same
from trace_cases import ops_in, ranges_in

from ramtorch_core import ConfigurationError
from ramtorch_core.memory.ranges import FOR_TRANSFER, Kind, Moment
from ramtorch_lightning import OffloadMonitor, PipelineMonitor, PipelineStrategy, TraceCallback, callbacks

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


def test_tokens_may_be_counted_on_the_device() -> None:
    tokens = lambda batch: torch.tensor(5)
    run = fit(Classifier, Kept(), callbacks=lambda: [OffloadMonitor(every_n_steps=2, tokens=tokens)])
    for row in rows_of(run, "offload"):
        assert type(row["tokens_per_second"]) is float
        assert row["tokens_per_second"] == pytest.approx(5 / row["seconds_per_batch"])


def test_the_monitor_counts_every_byte_once() -> None:
    run = fit(Classifier, Kept(), callbacks=lambda: [OffloadMonitor(every_n_steps=1)], validation=lambda: None)
    rows = rows_of(run, "offload")
    moved = sum(row["h2d_gb_per_s"] * row["seconds_per_batch"] * 1e9 for row in rows)
    assert moved == pytest.approx(run.strategy.copied_bytes, rel=1e-6)


def test_without_steps_given_figures_come_as_often_as_the_trainer_logs() -> None:
    run = fit(Classifier, Kept(), callbacks=lambda: [OffloadMonitor()], log_every_n_steps=4)
    assert len(rows_of(run, "offload")) == 2


class Asks(Classifier):
    """Notes in each step whether somebody listens."""

    def __init__(self) -> None:
        super().__init__()
        self.training_heard: list[bool] = []
        self.validation_heard: list[bool] = []

    def heard(self) -> bool:
        return bool(self.trainer.strategy.streamer.device.ranges._listeners)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.training_heard.append(self.heard())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.validation_heard.append(self.heard())
        return super().validation_step(batch, batch_idx)


def test_where_the_trainer_logs_nothing_loggers_get_no_figures_and_nobody_listens() -> None:
    run = fit(Asks, Kept(), callbacks=lambda: [OffloadMonitor()], log_every_n_steps=0)
    assert rows_of(run, "offload") == []
    assert not any(run.model.training_heard)


def test_where_the_trainer_logs_nothing_the_progress_bar_shows_every_batch() -> None:
    """As Lightning shows there what is logged with `prog_bar=True`."""
    run = fit(Asks, Kept(), callbacks=lambda: [OffloadMonitor(progress_bar=True)], log_every_n_steps=0)
    assert rows_of(run, "offload") == []
    assert "offload/stall_percent" in run.trainer.progress_bar_metrics


def test_steps_that_are_given_count_also_where_the_trainer_logs_nothing() -> None:
    run = fit(Classifier, Kept(), callbacks=lambda: [OffloadMonitor(every_n_steps=4)], log_every_n_steps=0)
    assert len(rows_of(run, "offload")) == 2


@pytest.mark.parametrize("interval", [1, 4, 12, 50])
def test_one_of_twenty_steps_is_timed_or_more_where_figures_come_more_often(interval: int) -> None:
    run = fit(Asks, Kept(), callbacks=lambda: [OffloadMonitor()], log_every_n_steps=interval, max_epochs=6)
    heard = [step for step, heard in enumerate(run.model.training_heard) if heard]
    assert heard == {1: [*range(24)], 4: [2, 6, 10, 14, 18, 22], 12: [10, 22], 50: [18]}[interval]
    rows = rows_of(run, "offload")
    assert len(rows) == 24 // interval
    for row in rows:
        assert row.keys() == OFFLOAD
        assert row["update_seconds"] > 0


def test_what_is_timed_is_of_the_steps_that_are(monkeypatch: pytest.MonkeyPatch, clock: "Clock") -> None:
    class Slow(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            step, ranges = self.trainer.global_step, self.trainer.strategy.streamer.device.ranges
            with ranges.span(Kind.STALL, FOR_TRANSFER):
                clock.now += 1.0
            clock.now += 3.0 if step % 4 == 2 else 7.0
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(Moment, "__init__", lambda self: setattr(self, "_seconds", clock.now))
    run = fit(Slow, Kept(), callbacks=lambda: [OffloadMonitor(every_n_steps=4)])
    for row in rows_of(run, "offload"):
        assert row["transfer_stall_percent"] == pytest.approx(25.0)
        assert row["seconds_per_batch"] == pytest.approx(7.0)


def test_figures_that_nothing_shows_are_not_taken_and_a_warning_says_so() -> None:
    model = Asks()
    trainer = make_trainer(Kept(), callbacks=[OffloadMonitor()])
    with pytest.warns(UserWarning, match="OffloadMonitor shows nothing: there is no logger, and progress_bar=False"):
        trainer.fit(model, loader())
    assert not any(model.training_heard)


@pytest.mark.parametrize("gradients", ["auto", "published"])
def test_batches_that_accumulate_are_parts_of_a_step(gradients: Any) -> None:
    run = fit(
        Classifier,
        Kept(gradients=gradients),
        callbacks=lambda: [OffloadMonitor(every_n_steps=1)],
        accumulate_grad_batches=2,
    )
    steps = [step for step, row in run.record["logged"] if "offload/stall_percent" in row]
    assert steps == [0, 1, 2, 3]


def test_steps_are_those_at_which_lightning_logs_also_in_a_run_that_is_resumed(tmp_path: Path) -> None:
    def steps(run: Any, name: str) -> list[int]:
        return [step for step, row in run.record["logged"] if name in row]

    first = fit(Classifier, Kept(), max_epochs=-1, max_steps=3)
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    second = make_trainer(
        Kept(), callbacks=[OffloadMonitor()], max_epochs=3, log_every_n_steps=2, logger=(logger := Metrics())
    )
    second.fit(Classifier(), loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    run = SimpleNamespace(record={"logged": logger.rows})
    assert steps(run, "offload/seconds_per_batch") == steps(run, "loss_step") == [3, 5, 7, 9]
    assert steps(run, "offload/stall_percent") == [5, 7, 9]  # the step that would have been timed came before


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(callbacks, "time", made := Clock())
    return made


@pytest.mark.parametrize("monitor", [OffloadMonitor, PipelineMonitor])
def test_validation_what_follows_it_and_what_is_between_epochs_do_not_count(monitor: Any, clock: Clock) -> None:
    class Slow(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.now += 1 / 2  # once per microbatch of the pipeline
            return super().training_step(batch, batch_idx)

        def _passes(self, *_: Any) -> None:
            clock.now += 1000

        on_validation_start = on_validation_end = on_train_epoch_start = on_train_epoch_end = _passes

    strategy: Any = Kept(n_microbatches=2)
    if monitor is PipelineMonitor:
        strategy = PipelineStrategy(devices=["cpu", "cpu"], n_microbatches=2)
    run = fit(Slow, strategy, callbacks=lambda: [monitor(every_n_steps=3)], val_check_interval=2)
    rows = rows_of(run, monitor.prefix)
    assert [row["seconds_per_batch"] for row in rows] == [1, 1]
    assert [row["samples_per_second"] for row in rows] == [4, 4]


def test_nobody_listens_to_validation() -> None:
    run = fit(Asks, Kept(), callbacks=lambda: [OffloadMonitor()], val_check_interval=2)
    assert all(run.model.training_heard)
    assert run.model.validation_heard
    assert not any(run.model.validation_heard)


def test_an_optimizer_step_whose_end_has_not_come_yet_is_counted_later() -> None:
    class Late(Moment):
        """Comes when it has been asked for once."""

        asked = 0

        def query(self) -> bool:
            self.asked += 1
            return self.asked > 1

    class Slow(Kept):
        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            self.streamer.device.mark = Late  # type: ignore[method-assign]

    run = fit(Classifier, Slow(gradients="published"), callbacks=lambda: [OffloadMonitor(1)], max_epochs=1)
    first, *others = [row["update_seconds"] for row in rows_of(run, "offload")]
    assert first == 0
    assert others
    assert all(seconds > 0 for seconds in others)


@pytest.mark.parametrize("monitor", [OffloadMonitor, PipelineMonitor])
def test_a_monitor_can_be_pickled_before_and_after_training(monitor: Any) -> None:
    made = monitor(1)
    pickle.loads(pickle.dumps(made))
    strategy = Kept() if monitor is OffloadMonitor else PipelineStrategy(devices=["cpu", "cpu"], window=1)
    fit(Classifier, strategy, callbacks=lambda: [made], max_epochs=1)
    pickle.loads(pickle.dumps(made))


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


def test_the_pipeline_monitor_tells_what_crosses_the_bus_and_who_waits_for_it() -> None:
    kept: list[Any] = []

    class Streams(PipelineStrategy):
        def teardown(self) -> None:
            assert self.runner.streamed is not None
            kept.extend(
                (each.window.copied_bytes, each.gradients.copied_bytes) for each in self.runner.streamed.streamers
            )
            super().teardown()

    streaming: dict[str, Any] = {"chunks": "leaves", "window": 1, "resident_below": 0}
    strategy = Streams(devices=["cpu", "cpu"], n_microbatches=2, **streaming)
    run = fit(Classifier, strategy, callbacks=lambda: [PipelineMonitor(every_n_steps=1)], validation=lambda: None)
    rows = rows_of(run, "pipeline")
    assert rows[-1].keys() == PIPELINE | {"stall_percent", "h2d_gb_per_s", "d2h_gb_per_s"}
    assert len(kept) == 2
    for way, crossed in zip(("h2d", "d2h"), map(sum, zip(*kept, strict=True)), strict=True):
        moved = sum(row[f"{way}_gb_per_s"] * row["seconds_per_batch"] * 1e9 for row in rows)
        assert moved == pytest.approx(crossed, rel=1e-6), way
    for row in rows[1:]:
        busy = (row["device_0_busy_percent"] + row["device_1_busy_percent"]) / 2
        assert busy + row["stall_percent"] + row["bubble_percent"] == pytest.approx(100)


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


def test_torchs_profiler_of_the_trainer_leaves_chunks_streaming(tmp_path: Path) -> None:
    """It hooks into every module, to name it."""
    strategy = Kept()
    fit(Classifier, strategy, profiler=pl.profilers.PyTorchProfiler(dirpath=tmp_path), max_epochs=1)
    assert len(strategy.streamed) == len(strategy.tables[-1]) > 0


def test_a_trace_beside_torchs_profiler_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    profiler = pl.profilers.PyTorchProfiler(dirpath=tmp_path)
    with pytest.raises(ConfigurationError, match="leave one out"):
        fit(Classifier, Kept(), callbacks=lambda: [TraceCallback(tmp_path / "trace.json")], profiler=profiler)
    profiler.teardown("fit")  # Lightning lets it run on after an error


def test_traces_of_the_same_batch_are_refused_before_the_first_one(tmp_path: Path) -> None:
    traces = lambda *steps: [TraceCallback(tmp_path / f"{each[0]}.json", steps=each) for each in steps]
    with pytest.raises(ConfigurationError, match=r"steps=\[1, 2\] and steps=\[2, 3\], overlap"):
        fit(Classifier, Kept(), callbacks=lambda: traces([1, 2], [2, 3]), max_epochs=1)
    fit(Classifier, Kept(), callbacks=lambda: traces([1], [2, 3]), max_epochs=1)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["1.json", "2.json"]


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
