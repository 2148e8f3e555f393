"""`PipelineStrategy` in the Trainer: the results of gradient accumulation on one device, from one changed argument."""

import copy
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_pipeline_cases import CPU, WIDTH, Model, assert_same_weights, dataset, fit, make_trainer, pipeline
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ramtorch_core import ConfigurationError
from ramtorch_lightning import OffloadStrategy, PipelineStrategy


def compare(
    model: pl.LightningModule, strategy: PipelineStrategy, accumulate: int = 1, rows: int = 32, **options: Any
) -> tuple[pl.Trainer, pl.Trainer]:
    """Batches of 16 in 4 microbatches against batches of 4, accumulated; weights bit for bit."""
    reference = copy.deepcopy(model)
    expected = fit(reference, "auto", 4, rows, accumulate_grad_batches=4 * accumulate, **options)
    trainer = fit(model, strategy, 16, rows, accumulate_grad_batches=accumulate, **options)
    assert_same_weights(model, reference)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), type(model)().parameters(), strict=True))
    return trainer, expected


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "zb_h1", "zbv"])
def test_training_equals_accumulation_on_one_device(schedule: str) -> None:
    trainer, expected = compare(Model(), pipeline(schedule), gradient_clip_val=0.5)
    for name in ("loss_epoch", "val"):
        torch.testing.assert_close(trainer.callback_metrics[name], expected.callback_metrics[name])


def test_accumulation_on_top_of_microbatches() -> None:
    compare(Model(), pipeline(), accumulate=2, gradient_clip_val=0.5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_precisions(precision: Any) -> None:
    compare(Model(), pipeline(), precision=precision)


def test_a_gradient_scaler_scales_unscales_and_skips_as_without_a_pipeline() -> None:
    class Overflowing(Model):
        """An infinite gradient in the second batch: the scaler skips that step and halves its scale."""

        def on_train_start(self) -> None:
            self.seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen = seen = self.seen + 1
            loss = super().training_step(batch, batch_idx)
            return loss * 1e30 * 1e30 if seen == 6 else loss

    def plugins() -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]

    model = Overflowing()
    reference = copy.deepcopy(model)
    expected = fit(reference, "auto", 4, accumulate_grad_batches=4, plugins=plugins(), gradient_clip_val=0.5)
    trainer = fit(model, pipeline(), 16, plugins=plugins(), gradient_clip_val=0.5)
    assert_same_weights(model, reference)
    scales = [t.precision_plugin.scaler.get_scale() for t in (trainer, expected)]
    assert scales == [2.0**9] * 2


def test_a_ragged_last_batch_is_weighted_by_the_size_of_its_microbatches() -> None:
    """27 rows: a batch of 16 in four, one of 11 in parts of 3, 3, 3 and 2. The reference is the whole batch."""

    class Descending(Model):  # no division by tiny moments, which would magnify rounding
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Descending()
    reference = copy.deepcopy(model)
    expected = fit(reference, "auto", 16, rows=27, max_epochs=1)
    trainer = fit(model, pipeline(), 16, rows=27, max_epochs=1)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    for name in ("loss_step", "loss_epoch", "val"):
        torch.testing.assert_close(trainer.callback_metrics[name], expected.callback_metrics[name])


class Padded(Model):
    """A mean over the rows that count; that of none is NaN."""

    def loss(self, batch: Any) -> Tensor:
        x, y, counts = batch
        return F.mse_loss(self(x)[counts], y[counts])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", [PipelineStrategy, OffloadStrategy])
def test_a_mean_over_something_else_than_rows_is_that_of_the_batch_with_weights_for_it(strategy: Any) -> None:
    """Of the microbatches of four rows, four, one, none and two count."""
    counts = torch.tensor([True] * 4 + [False] * 3 + [True] + [False] * 4 + [True, False] * 2).repeat(2)
    data = TensorDataset(*dataset(32).tensors, counts)
    where = {"devices": CPU} if strategy is PipelineStrategy else {}
    ours = strategy(n_microbatches=4, weight_fn=lambda batch: batch[2].sum(), **where)
    model = Padded()
    reference = copy.deepcopy(model)
    trainers = []
    for each, how in ((model, ours), (reference, "auto")):
        trainers.append(make_trainer(how, precision="64-true"))
        trainers[-1].fit(each, DataLoader(data, 16), DataLoader(data, 16))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    found, expected = (trainer.callback_metrics for trainer in trainers)
    for name in ("loss_step", "loss_epoch", "val"):
        assert found[name].isfinite()
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "many", None, torch.ones(2)])
def test_weights_that_cannot_be_are_refused(weight: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"weight_fn returned .* finite numbers of at least 0 are needed"):
        fit(Model(), pipeline(weight_fn=lambda batch: weight), 16)
    with pytest.raises(ConfigurationError, match="weight_fn=3: a function microbatch -> weight is needed"):
        pipeline(weight_fn=3)


def test_a_batch_smaller_than_the_number_of_microbatches() -> None:
    model = Model()
    reference = copy.deepcopy(model)
    fit(reference, "auto", 1, rows=3, accumulate_grad_batches=3)
    fit(model, pipeline(n_microbatches=8), 3, rows=3)
    assert_same_weights(model, reference)


class Hooked(Model):
    """Looks at gradients in every hook that may."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor | None]] = []

    def look(self, name: str) -> None:
        gradient = self.scale.grad
        self.seen.append((name, None if gradient is None else gradient.clone()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look("zero_grad")

    def on_after_backward(self) -> None:
        self.look("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.look("clipping")
        self.clip_gradients(optimizer, 0.1, "norm")


def test_hooks_see_final_gradients_once_per_batch() -> None:
    model = Hooked()
    reference = copy.deepcopy(model)
    fit(reference, "auto", 4, accumulate_grad_batches=4, max_epochs=1, validate=False)
    fit(model, pipeline(), 16, max_epochs=1, validate=False)
    kept = [item for item in reference.seen if item[0] != "after_backward"]
    got = [item for item in model.seen if item[0] != "after_backward"]
    assert [name for name, _ in got] == [name for name, _ in kept] == ["zero_grad", "optimizer_step", "clipping"] * 2
    assert all((a is None and b is None) or torch.equal(a, b) for (_, a), (_, b) in zip(got, kept, strict=True))
    assert sum(name == "after_backward" for name, _ in model.seen) == 2
    assert_same_weights(model, reference)


def test_an_overridden_backward_may_scale_the_loss() -> None:
    class Doubling(Model):
        def backward(self, loss: Tensor) -> None:
            (2 * loss).backward()

    model = Doubling()
    reference = copy.deepcopy(model)
    compare(Doubling(), pipeline())
    fit(reference, "auto", 4, accumulate_grad_batches=8)
    fit(model, pipeline(), 16, accumulate_grad_batches=2)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_step_that_skips_a_microbatch_or_returns_a_dict() -> None:
    class Skipping(Model):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls = calls = self.calls + 1
            loss = super().training_step(batch, batch_idx)
            return None if calls == 3 else {"loss": loss, "rows": batch[0], "note": "x", "size": len(batch[0])}

    class Outputs(pl.Callback):
        seen: list[Any]

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = [*getattr(self, "seen", []), outputs]

    outputs = Outputs()
    model = Skipping()
    reference = copy.deepcopy(model)
    fit(reference, "auto", 4, accumulate_grad_batches=4, max_epochs=1, validate=False)
    fit(model, pipeline(), 16, max_epochs=1, validate=False, callbacks=[outputs])
    assert_same_weights(model, reference)
    first, second = outputs.seen
    assert first["rows"].shape == (12, WIDTH)
    assert torch.equal(second["rows"], dataset()[16:][0])
    assert second["note"] == ["x"] * 4
    assert second["size"] == 4


def test_an_optimizer_that_calls_its_closure_several_times() -> None:
    class Lbfgs(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    class FullBatch(Model):
        configure_optimizers = Lbfgs.configure_optimizers

    model = Lbfgs()
    reference = copy.deepcopy(model)
    fit(reference, "auto", 16, max_epochs=1, validate=False)
    fit(model, pipeline(), 16, max_epochs=1, validate=False)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


class Manual(Model):
    """A small GAN-like loop: two optimizers, manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("manual", loss)

    def configure_optimizers(self) -> Any:
        halves = list(self.parameters())
        return [torch.optim.SGD(halves[::2], lr=0.1), torch.optim.SGD(halves[1::2], lr=0.1)]


def test_manual_optimization_runs_whole_batches() -> None:
    model = Manual()
    reference = copy.deepcopy(model)
    fit(reference, "auto", 16)
    fit(model, pipeline(), 16)
    assert_same_weights(model, reference)


def test_a_batch_that_cannot_be_split_runs_whole_and_says_how_to_split_it() -> None:
    class Ragged(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss((batch["x"], batch["y"])) + 0 * batch["other"].sum()

    def collate(rows: Sequence[tuple[Tensor, Tensor]]) -> Any:
        return {"x": torch.stack([r[0] for r in rows]), "y": torch.stack([r[1] for r in rows]), "other": torch.ones(7)}

    def go(model: Ragged, strategy: Any, batch: int = 16) -> None:
        make_trainer(strategy, accumulate_grad_batches=16 // batch).fit(
            model, DataLoader(dataset(), batch, collate_fn=collate)
        )

    model = Ragged()
    reference, other = copy.deepcopy(model), copy.deepcopy(model)
    go(reference, "auto")
    with pytest.warns(
        UserWarning, match=r"no common first dimension: 16 in batch\['x'\], 7 in batch\['other'\].*split_fn"
    ):
        go(model, pipeline())
    assert_same_weights(model, reference)

    def split_fn(batch: Any, n: int) -> list[Any]:
        pairs = zip(batch["x"].chunk(n), batch["y"].chunk(n), strict=True)
        return [{"x": x, "y": y, "other": batch["other"]} for x, y in pairs]

    split = copy.deepcopy(other)
    go(other, "auto", 4)
    go(split, pipeline(split_fn=split_fn))
    assert_same_weights(split, other)


def test_a_step_on_the_dataloader_iterator_runs_whole() -> None:
    class Iterating(Model):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    model = Iterating()
    reference = copy.deepcopy(model)
    fit(reference, "auto", 16, validate=False)
    fit(model, pipeline(), 16, validate=False)
    assert_same_weights(model, reference)


class Predicting(Model):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        return {"out": out, "mean": out.mean(), "names": [f"{batch_idx}-{i}" for i in range(len(out))]}


@pytest.mark.parametrize("evaluate", ["pipelined", "whole"])
def test_validate_test_and_predict_equal_the_plain_run(evaluate: Any) -> None:
    model, data = Predicting(), DataLoader(dataset(28), 16)
    plain, trainer = make_trainer(), make_trainer(pipeline(evaluate=evaluate))
    for name in ("validate", "test"):
        expected, got = (getattr(t, name)(model, data, verbose=False) for t in (plain, trainer))
        assert got[0].keys() == expected[0].keys() == {"val"}
        assert got[0]["val"] == pytest.approx(expected[0]["val"], rel=1e-6)
    expected, got = plain.predict(model, data), trainer.predict(model, data)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a["out"], b["out"])
        torch.testing.assert_close(a["mean"], b["mean"])
        assert len(a["names"]) == len(b["names"])


def test_fit_validate_fit_and_test_with_one_strategy() -> None:
    """Inference mode between two trainings breaks neither."""
    model = Model()
    reference = copy.deepcopy(model)
    for m, strategy, batch, accumulate in ((reference, "auto", 4, 4), (model, pipeline(), 16, 1)):
        trainer = make_trainer(strategy, accumulate_grad_batches=accumulate, max_epochs=1)
        data = DataLoader(dataset(), batch)
        trainer.validate(m, data, verbose=False)
        trainer.fit(m, data, data)
        trainer.test(m, data, verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(m, data, data)
    assert_same_weights(model, reference)


def test_an_exception_in_the_step_reaches_the_caller_and_a_new_fit_works() -> None:
    class Failing(Model):
        fail = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.fail and batch_idx == 1:
                raise ArithmeticError("here")
            return super().training_step(batch, batch_idx)

    model, trainer = Failing(), make_trainer(pipeline())
    with pytest.raises(ArithmeticError, match="here"):
        trainer.fit(model, DataLoader(dataset(), 16))
    model.fail = False
    reference = Model()
    reference.load_state_dict(model.state_dict())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, DataLoader(dataset(), 16))
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_the_stage_table_is_available_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Table(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            self.rows = trainer.strategy.stage_table()

    table = Table()
    with caplog.at_level("INFO"):
        fit(Model(), pipeline(device_weights=[1, 1, 1, 2]), 16, callbacks=[table], max_epochs=1)
    assert [row.first_module for row in table.rows][::3] == ["(start)", "layers.4"]
    assert table.rows[3].share == pytest.approx(0.5, abs=0.01)
    assert "begins at" in caplog.text
    assert sum(row.parameters for row in table.rows) == sum(p.numel() for p in Model().parameters())
    with pytest.raises(RuntimeError, match="no pipeline yet"):
        pipeline().stage_table()


def test_stages_are_timed_in_the_third_batch_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """With one schedule and with the choice of one, which comes afterwards."""
    for options in ({}, {"schedule": "auto"}, {"window": 1, "resident_below": 0}):
        caplog.clear()
        with caplog.at_level("INFO"):
            compare(Model(), pipeline(balance="time", **options), max_epochs=5)
        (message,) = [text for text in caplog.messages if "cut by time" in text]
        assert "begins at" in message


def test_stages_named_by_the_module_are_honoured() -> None:
    class Configured(Model):
        def configure_stages(self) -> list[Any]:
            return ["layers.1", self.layers[2], "layers.7"]

    class Table(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            if isinstance(trainer.strategy, PipelineStrategy):
                self.names = [row.first_module for row in trainer.strategy.stage_table()]

    table = Table()
    compare(Configured(), pipeline(), callbacks=[table])
    assert table.names == ["(start)", "layers.1", "layers.2", "layers.7"]


def test_every_stage_trains() -> None:
    model = Model()
    before = copy.deepcopy(model)
    fit(model, pipeline(), 16)
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_two_strategies_in_one_process() -> None:
    first, second = Model(), Model()
    references = copy.deepcopy(first), copy.deepcopy(second)
    strategies = pipeline(), pipeline("gpipe", devices=["cpu", "cpu"])
    for model, reference, strategy in zip((first, second), references, strategies, strict=True):
        fit(reference, "auto", 4, accumulate_grad_batches=4)
        fit(model, strategy, 16)
        assert_same_weights(model, reference)


def test_the_registered_name_and_an_accelerator_with_several_devices() -> None:
    model = Model()
    reference = copy.deepcopy(model)
    fit(reference, "auto", 4, accumulate_grad_batches=4)
    trainer = fit(model, "pipeline", 16, devices=3)
    assert isinstance(trainer.strategy, PipelineStrategy)
    assert len(trainer.strategy.parallel_devices) == 3
    assert_same_weights(model, reference)
