"""What a pipelined step logs equals what one call on the whole batch logs."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning_pipeline_cases import Model, dataset, fit, pipeline
from torch import Tensor, nn

from ramtorch_lightning.logs import LogCapture


class Logging(Model):
    """Logs means, sums, extremes, dictionaries, metrics, twice the same name, and given batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_metric = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.collection = torchmetrics.MetricCollection(
            [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()]
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        loss = (out - y).pow(2).mean()
        both = {"on_step": True, "on_epoch": True}
        self.log("loss", loss, **both)
        self.log("rows", float(len(x)), reduce_fx="sum", **both)
        self.log("largest", y.max(), reduce_fx=torch.max, **both)
        self.log("smallest", y.min(), reduce_fx="min", **both)
        self.log("weighted", y[:, 0].sum() / (2 * len(y)), batch_size=2 * len(y), **both)
        self.log_dict({"a": y.mean(), "b": 2.0}, **both)
        self.log("constant", 3)
        self.mean_metric(y, torch.ones_like(y))
        self.log("mean_metric", self.mean_metric, on_step=False, on_epoch=True)
        self.accuracy((out[:, 0] > 0).int(), (y[:, 0] > 0).int())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.collection.update(out, y)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", (self(x) - y).pow(2).mean())
        self.log("val_rows", len(x) * 1.0, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Steps(pl.Callback):
    """Keeps the logged metrics of every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("rows", [32, 27])
def test_every_kind_of_log_equals_the_single_call(rows: int) -> None:
    """Also with a ragged last batch, per step and per epoch."""
    torch.manual_seed(0)
    model, reference = Logging(), Logging()
    reference.load_state_dict(model.state_dict())
    got, expected = Steps(), Steps()
    plain = fit(reference, "auto", 16, rows=rows, max_epochs=1, callbacks=[expected])
    trainer = fit(model, pipeline(), 16, rows=rows, max_epochs=1, callbacks=[got])
    for a, b in zip([*got.seen, trainer.callback_metrics], [*expected.seen, plain.callback_metrics], strict=True):
        assert a.keys() == b.keys()
        for name, value in b.items():
            assert float(a[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    assert trainer.callback_metrics["accuracy"] > 0
    assert trainer.callback_metrics["rows_epoch"] == rows


class Loop(pl.LightningModule):
    """A module whose calls of log are recorded instead of made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.calls.append((name, value, args, kwargs))


def captured(sizes: list[int], *logged: list[tuple[str, Any, dict[str, Any]]]) -> list[tuple[Any, ...]]:
    module = Loop()
    capture = LogCapture(module, sizes)
    with capture.active():
        for m, entries in enumerate(logged):
            with capture.microbatch(m):
                for name, value, options in entries:
                    module.log(name, value, **options)
    assert module.calls == []
    capture.replay()
    return module.calls


def test_the_same_name_logged_twice_in_a_step_stays_two_entries_in_order() -> None:
    calls = captured([2, 2], [("a", 1.0, {}), ("a", 2.0, {})], [("a", 3.0, {}), ("a", 4.0, {})])
    assert [(name, value) for name, value, _, _ in calls] == [("a", 2.0), ("a", 3.0)]


def test_a_name_that_only_some_microbatches_log_is_averaged_over_those() -> None:
    calls = captured([3, 1], [("a", 1.0, {})], [("a", 5.0, {}), ("b", 7.0, {"prog_bar": True})])
    assert [(name, value, kwargs) for name, value, _, kwargs in calls] == [
        ("a", 2.0, {}),
        ("b", 7.0, {"prog_bar": True}),
    ]


def test_a_logged_tensor_is_taken_at_the_time_of_the_call() -> None:
    module = Loop()
    capture = LogCapture(module, [1, 1])
    value = torch.zeros(())
    with capture.active(), capture.microbatch(0):
        module.log("a", value)
        value.add_(1)
    capture.replay()
    assert module.calls[0][1] == 0


@pytest.mark.parametrize("value", ["text", {"a": {"b": 1}}, torch.zeros(2), None, nn.Identity()])
def test_a_value_that_cannot_be_logged_is_refused_in_the_call(value: Any) -> None:
    module = Loop()
    capture = LogCapture(module, [1, 1])
    with capture.active(), capture.microbatch(0), pytest.raises(ValueError, match=r"self\.log\(bad"):
        module.log("bad", value)


def test_positional_arguments_of_log_keep_their_meaning() -> None:
    module = Loop()
    capture = LogCapture(module, [1, 1])
    with capture.active(), capture.microbatch(0):
        module.log("a", 1.0, True, False)
    capture.replay()
    assert module.calls == [("a", 1.0, (), {"prog_bar": True, "logger": False})]


def test_the_module_is_left_without_an_attribute_of_its_own() -> None:
    module = Loop()
    with LogCapture(module, [1, 1]).active():
        assert "log" in vars(module)
    assert "log" not in vars(module)
    assert len(dataset()) == 32
