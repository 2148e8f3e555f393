"""Lightning's callbacks and tools around a streamed model: the results of the resident run."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from offload_cases import WIDTH, Classifier, Net, Watched, compare_fits, fit, loader, make_trainer
from stream_cases import assert_same
from torch import nn
from torch.utils.data import DataLoader

EVERY_PRECISION = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])


@EVERY_PRECISION
@pytest.mark.parametrize("build", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.9, update_every_n_steps=2)])
def test_weight_averaging_swaps_weights_in_and_out_the_same(build: Any, precision: Any) -> None:
    found = compare_fits(Classifier, callbacks=lambda: [build()], precision=precision, max_epochs=3)
    (averaging,) = (one for one in found.trainer.callbacks if isinstance(one, WeightAveraging))
    assert {p.device.type for p in averaging._average_model.parameters()} == {"cpu"}


def test_weight_averaging_is_told_to_keep_its_model_on_the_host() -> None:
    averaging = WeightAveraging()
    fit(Classifier, Watched(), callbacks=lambda: [averaging])
    assert averaging._device == torch.device("cpu")


def test_weight_averaging_is_saved_and_resumed_the_same(tmp_path: Path) -> None:
    def resumed(strategies: list[Any], name: str) -> Any:
        for epochs, strategy in enumerate(strategies, 1):
            torch.manual_seed(1)
            trainer = make_trainer(strategy, max_epochs=epochs, callbacks=[EMAWeightAveraging(decay=0.9)])
            model = Classifier()
            trainer.fit(model, loader(), ckpt_path=tmp_path / name if epochs > 1 else None)
            trainer.save_checkpoint(tmp_path / name)
        return model.state_dict()

    assert_same(resumed([Watched(), Watched()], "a"), resumed(["auto", "auto"], "b"))


@EVERY_PRECISION
def test_stochastic_weight_averaging_trains_the_same(precision: Any) -> None:
    def swa() -> list[Any]:
        return [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)]

    compare_fits(lambda: Classifier(Net(norm=nn.BatchNorm1d)), callbacks=swa, precision=precision, max_epochs=4)


@pytest.mark.parametrize("options", [{}, {"pin": 2}, {"chunks": "net.blocks.*"}], ids=str)
def test_the_summary_counts_every_parameter_during_the_fit(options: dict[str, Any]) -> None:
    class Summing(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.found = summarize(module, max_depth=-1)

    callback = Summing()
    fit(Classifier, Watched(**options), callbacks=lambda: [callback, ModelSummary(max_depth=-1)])
    expected = summarize(Classifier(), max_depth=-1)
    assert callback.found.total_parameters == expected.total_parameters > 0
    assert callback.found.param_nums == expected.param_nums
    assert callback.found.model_size == expected.model_size


def test_the_summary_shows_sizes_of_an_example_input() -> None:
    class Example(Classifier):
        example_input_array = torch.ones(2, WIDTH)

    found = fit(Example, Watched(), callbacks=lambda: [ModelSummary(max_depth=-1)])
    assert found.strategy.copied_bytes > 0


def test_an_example_input_and_a_graph_in_tensorboard_do_not_disturb_training(tmp_path: Path) -> None:
    class Example(Classifier):
        example_input_array = torch.ones(2, WIDTH)

    def result(strategy: Any, name: str) -> Any:
        torch.manual_seed(1)
        logger = TensorBoardLogger(tmp_path, name=name, log_graph=True)
        model = Example()
        make_trainer(strategy, logger=logger).fit(model, loader(), loader(8))
        return [model.state_dict(), model.seen]

    assert_same(result(Watched(), "a"), result("auto", "b"))
    events = [path.stat().st_size for name in "ab" for path in sorted((tmp_path / name).rglob("events*"))]
    assert min(events) > 1000


def test_monitors_and_loggers_see_the_same(tmp_path: Path) -> None:
    def written(strategy: Any, name: str) -> str:
        torch.manual_seed(1)
        callbacks = [LearningRateMonitor("step"), EarlyStopping("val", patience=1), Timer(), DeviceStatsMonitor()]
        trainer = make_trainer(strategy, callbacks=callbacks[:3], logger=CSVLogger(tmp_path, name, ""))
        trainer.fit(Classifier(), loader(), loader(8))
        return (tmp_path / name / "metrics.csv").read_text()

    assert written(Watched(), "a") == written("auto", "b")


def test_the_learning_rate_finder_suggests_the_same_and_restores_the_weights() -> None:
    def result(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        model, trainer = Classifier(), make_trainer(strategy, max_epochs=1)
        finder = Tuner(trainer).lr_find(model, loader(), num_training=12)
        found = [finder.results["loss"], finder.suggestion(), model.lr, copy.deepcopy(model.state_dict())]
        trainer.fit(model, loader())
        return [*found, model.state_dict()]

    assert_same(result(Watched()), result("auto"))


def test_the_batch_size_finder_finds_the_same_and_restores_the_weights() -> None:
    class Sized(Classifier):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(loader().dataset, self.batch_size)

        val_dataloader = train_dataloader

    def result(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        model, trainer = Sized(), make_trainer(strategy, max_epochs=1)
        size = Tuner(trainer).scale_batch_size(model, max_trials=2, steps_per_trial=2)
        before = [size, copy.deepcopy(model.state_dict())]
        trainer.fit(model)
        return [*before, model.state_dict()]

    assert_same(result(Watched()), result("auto"))


class Copying(pl.Callback):
    """Copies, pickles and saves the module in the middle of a fit."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 3:
            return
        self.weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        self.copy = copy.deepcopy(module)
        self.pickled = pickle.dumps(module.net)
        self.strategy = pickle.dumps(trainer.strategy)
        self.module = pickle.dumps(module)
        buffer = io.BytesIO()
        torch.save(module.net, buffer)
        self.saved = buffer.getvalue()


@pytest.mark.parametrize("options", [{}, {"pin": 2}, {"chunks": "net.blocks.*"}], ids=str)
def test_copies_and_pickles_made_during_a_fit_compute_with_their_own_weights(options: dict[str, Any]) -> None:
    callback = Copying()
    found = compare_fits(Classifier, strategy=options, callbacks=lambda: [callback])
    nets = {
        "copy": callback.copy.net,
        "pickle": pickle.loads(callback.pickled),
        "module": pickle.loads(callback.module).net,
        "saved": torch.load(io.BytesIO(callback.saved), weights_only=False),
    }
    x = torch.ones(2, WIDTH)
    plain = Net()
    plain.load_state_dict({name.removeprefix("net."): tensor for name, tensor in callback.weights.items()})
    for name, net in nets.items():
        assert_same(net.state_dict(), plain.state_dict(), name)
        assert_same(net(x), plain(x), name)
        net.head.weight.data.zero_()
        assert not torch.equal(net(x), plain(x)), name
        net(x).sum().backward()
        assert net.embed.weight.grad is not None, name
    assert found.model.net.embed.weight.grad is None or not torch.equal(
        found.model.net.embed.weight, plain.embed.weight
    )
    assert pickle.loads(callback.strategy)._streamer is None


def test_module_and_strategy_pickle_before_and_after_a_fit() -> None:
    strategy = Watched(window=3)
    assert pickle.loads(pickle.dumps(strategy))._options["window"] == 3
    found = fit(Classifier, strategy)
    assert pickle.loads(pickle.dumps(strategy))._options["window"] == 3
    assert_same(pickle.loads(pickle.dumps(found.model)).state_dict(), found.model.state_dict())


def test_a_copy_of_the_best_model_is_tested_with_its_weights(tmp_path: Path) -> None:
    def result(strategy: Any, name: str) -> Any:
        torch.manual_seed(1)
        saver = ModelCheckpoint(tmp_path / name, monitor="val")
        trainer = make_trainer(strategy, callbacks=[saver], enable_checkpointing=True, max_epochs=3)
        trainer.fit(Classifier(), loader(), loader(8))
        return [trainer.test(dataloaders=loader(), ckpt_path="best", verbose=False), saver.best_model_score]

    assert_same(result(Watched(), "a"), result("auto", "b"))
