"""Callbacks, loggers, profilers and tuners of Lightning around either strategy: the results of the plain run."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from both_cases import Descent, assert_agree, compare, either, strategy_of
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import summarize
from offload_cases import Metrics, fit, loader, make_trainer
from torch.utils.data import DataLoader

from ramtorch_lightning.writers import keep_average_on_host


class Thaw(BaseFinetuning):
    """Trains the blocks from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.blocks)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.blocks, optimizer)


class Backbone(Descent):
    """Has a part under the name that `BackboneFinetuning` looks for."""

    @property
    def backbone(self) -> Any:
        return self.net.blocks


CALLBACKS = {
    "early stopping": lambda: EarlyStopping("val", patience=1, min_delta=0.5),
    "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "weight averaging": WeightAveraging,
    "moving average": lambda: EMAWeightAveraging(decay=0.9),
    "stochastic averaging": lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1),
    "finetuning": Thaw,
    "backbone finetuning": lambda: BackboneFinetuning(1),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False),
    "a finder of rates": lambda: LearningRateFinder(num_training_steps=4, update_attr=True),
}


@either
@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_callback_does_the_same(name: str, callback: str, tmp_path: Path) -> None:
    build = Backbone if callback == "backbone finetuning" else Descent
    options = {"callbacks": lambda: [CALLBACKS[callback]()], "max_epochs": 3, "default_root_dir": tmp_path}
    compare(name, build, **options)


@either
def test_the_second_model_of_weight_averaging_is_kept_on_the_host(name: str) -> None:
    """By default it goes to the device of the module, which may hold a part of the model only."""
    averaging, elsewhere = WeightAveraging(), WeightAveraging(device=torch.device("meta"))
    fit(Descent, strategy_of(name), callbacks=lambda: [averaging], max_epochs=1)
    assert averaging._device == torch.device("cpu")
    keep_average_on_host(elsewhere)
    assert elsewhere._device == torch.device("meta")


@either
def test_monitors_and_displays_do_not_disturb_and_report_the_same_things(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def watched(strategy: Any) -> Any:
        throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
        callbacks = [DeviceStatsMonitor(), throughput, LearningRateMonitor(), Timer(), RichProgressBar()]
        options = {"enable_progress_bar": True, "enable_model_summary": True}
        return fit(Descent, strategy, callbacks=lambda: [*callbacks, RichModelSummary(max_depth=-1)], **options)

    found = watched(strategy_of(name))
    shown = capsys.readouterr().out
    expected = watched("auto")
    assert_agree(name, found.record["weights"], expected.record["weights"])
    rows = [[sorted(row) for _, row in run.record["logged"]] for run in (found, expected)]
    assert rows[0] == rows[1]
    assert "Trainable params" in shown
    assert "4/4" in shown  # of the progress bar


@either
def test_the_summary_counts_all_parameters_during_a_fit(name: str) -> None:
    class Summing(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            found = summarize(module, max_depth=-1)
            self.found = found.total_parameters, found.trainable_parameters, found.param_nums, found.model_size

    class Frozen(Descent):
        def __init__(self) -> None:
            super().__init__()
            self.net.embed.requires_grad_(False)

    callback = Summing()
    fit(Frozen, strategy_of(name), callbacks=lambda: [callback], max_epochs=1)
    plain = summarize(Frozen(), max_depth=-1)
    assert callback.found == (
        plain.total_parameters,
        plain.trainable_parameters,
        plain.param_nums,
        plain.model_size,
    )


@either
@pytest.mark.parametrize("kind", ["best", "every step", "on an exception", "weights only"])
def test_checkpoints_are_written_at_the_same_moments_with_the_same_contents(
    name: str, kind: str, tmp_path: Path
) -> None:
    class Failing(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if kind == "on an exception" and trainer.global_step == 3:
                raise ZeroDivisionError

    options: dict[str, Any] = {
        "best": {"monitor": "val", "save_top_k": 2, "save_last": True},
        "every step": {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"},
        "on an exception": {"save_on_exception": True},
        "weights only": {"save_weights_only": True, "monitor": "val", "filename": "{epoch}-{val:.2f}"},
    }[kind]

    def saved(folder: str, strategy: Any) -> dict[str, Any]:
        saver = ModelCheckpoint(tmp_path / folder, **options)
        callbacks = {"callbacks": lambda: [Failing(), saver], "enable_checkpointing": True}
        if kind == "on an exception":
            with pytest.raises(ZeroDivisionError):
                fit(Descent, strategy, **callbacks)
        else:
            fit(Descent, strategy, **callbacks)
        files = {path.name: torch.load(path, weights_only=False) for path in (tmp_path / folder).iterdir()}
        kept = ("state_dict", "optimizer_states", "global_step", "epoch")
        return {file: {key: state.get(key) for key in kept} for file, state in sorted(files.items())}

    found = saved("a", strategy_of(name))
    assert found
    assert_agree(name, found, saved("b", "auto"))


class Watching(Metrics):
    """What loggers of experiments do: hooks on parameters and modules, hyperparameters, checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, Any] = {}
        self.norms: list[Any] = []
        self.told: list[Any] = []

    def watch(self, module: Any) -> None:
        for key, parameter in module.named_parameters():
            parameter.register_hook(lambda gradient, key=key: self.take(key, gradient))
        module.register_forward_hook(lambda *_: self.norms.append(module.head.weight.detach().norm().clone()))

    def take(self, key: str, gradient: Any) -> None:
        self.gradients[key] = self.gradients.get(key, 0) + gradient.detach()

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.told.append(dict(params))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.told.append(Path(checkpoint_callback.best_model_path).name)


@either
def test_a_logger_that_watches_sees_the_same_gradients_weights_and_checkpoints(name: str, tmp_path: Path) -> None:
    class Tuned(Descent):
        def __init__(self, lr: float = 1e-2) -> None:
            super().__init__(lr=lr)
            self.save_hyperparameters()

    def seen(strategy: Any, folder: str) -> list[Any]:
        torch.manual_seed(1)
        logger, model = Watching(), Tuned()
        logger.watch(model.net)
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=2)
        loggers = [logger, CSVLogger(tmp_path, folder, ""), TensorBoardLogger(tmp_path, f"{folder}-board")]
        options = {"logger": loggers, "callbacks": [saver], "enable_checkpointing": True, "max_epochs": 1}
        make_trainer(strategy, **options).fit(model, loader())
        losses = (tmp_path / folder / "metrics.csv").read_text().splitlines()
        return [logger.gradients, logger.norms[0], logger.told, logger.rows, len(losses)]

    found = seen(strategy_of(name), "a")
    assert {"lr": 1e-2} in found[2]
    assert any("step" in str(one) for one in found[2])
    assert_agree(name, found, seen("auto", "b"))


@either
def test_norms_of_gradients_are_logged_as_in_a_plain_run(name: str) -> None:
    class Norms(Descent):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self.net, norm_type=2))
            worst = max(p.grad.abs().max() for p in self.parameters())
            self.log("largest", worst)

    found = compare(name, Norms, gradient_clip_val=0.5)
    assert found.trainer.callback_metrics["grad_2.0_norm_total"] > 0


@either
@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_a_profiler_changes_nothing_and_shows_what_the_model_does(name: str, kind: Any, tmp_path: Path) -> None:
    """Torch's profiler records one thread unless it is told otherwise, and microbatches run in others."""
    options: dict[str, Any] = {}
    if kind is PyTorchProfiler:
        options = {"export_to_chrome": False, "row_limit": 200}
    found = fit(Descent, strategy_of(name), profiler=kind(tmp_path, "figures", **options), max_epochs=1)
    assert_agree(name, found.record["weights"], fit(Descent, max_epochs=1).record["weights"])
    (figures,) = tmp_path.glob("*figures*")
    assert ("aten::linear" if kind is PyTorchProfiler else "training_step") in figures.read_text()


def test_the_size_of_a_batch_is_found_in_a_pipeline_and_the_weights_are_restored(tmp_path: Path) -> None:
    class Sized(Descent):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(loader().dataset, self.batch_size)

        val_dataloader = train_dataloader

    def result(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        model, trainer = Sized(), make_trainer(strategy, max_epochs=1, default_root_dir=tmp_path)
        size = Tuner(trainer).scale_batch_size(model, max_trials=2, steps_per_trial=2)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        trainer.fit(model)
        return [size, before, model.state_dict()]

    assert_agree("pipeline", result(strategy_of("pipeline")), result("auto"))
