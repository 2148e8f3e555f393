"""Checkpoints of a pipelined run are those of a plain one, both ways."""

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning_pipeline_cases import Model, assert_same_weights, dataset, fit, make_trainer, pipeline
from torch.utils.data import DataLoader

from ramtorch_lightning import PipelineStrategy

MICRO, WHOLE = {"accumulate_grad_batches": 4}, {}


def run(strategy: Any, batch: int, epochs: int, folder: Path, resume: str | None = None, **options: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    trainer = make_trainer(strategy, max_epochs=epochs, default_root_dir=folder, **options)
    trainer.fit(model, DataLoader(dataset(), batch), ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return model


@pytest.mark.parametrize("first", ["plain", "pipeline"])
@pytest.mark.parametrize("second", ["plain", "pipeline"])
def test_a_run_resumes_bit_for_bit_across_strategies(first: str, second: str, tmp_path: Path) -> None:
    def go(kind: str, epochs: int, folder: str, resume: str | None = None) -> Model:
        strategy, batch, options = ("auto", 4, MICRO) if kind == "plain" else (pipeline(), 16, WHOLE)
        (tmp_path / folder).mkdir(exist_ok=True)
        return run(strategy, batch, epochs, tmp_path / folder, resume, **options)

    whole = go("plain", 4, "whole")
    go(first, 2, "half")
    resumed = go(second, 4, "resumed", str(tmp_path / "half" / "last.ckpt"))
    assert_same_weights(resumed, whole)


def test_a_checkpoint_has_plain_keys_and_host_tensors_of_their_own_size(tmp_path: Path) -> None:
    run(pipeline(), 16, 1, tmp_path)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert checkpoint["state_dict"].keys() == Model().state_dict().keys()
    for tensor in checkpoint["state_dict"].values():
        assert tensor.device.type == "cpu"
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    states = checkpoint["optimizer_states"][0]["state"]
    assert len(states) == len(list(Model().parameters()))


def test_model_checkpoint_and_saving_after_a_test(tmp_path: Path) -> None:
    model = Model()
    saver = ModelCheckpoint(tmp_path, monitor="val", save_top_k=1)
    trainer = fit(model, pipeline(), 16, enable_checkpointing=True, callbacks=[saver])
    trainer.test(model, DataLoader(dataset(), 16), ckpt_path="best", verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert Model.load_from_checkpoint(tmp_path / "after.ckpt")


def test_stochastic_weight_averaging_equals_the_plain_run() -> None:
    """Its last epoch runs forwards only."""
    results = []
    for strategy, batch, options in (("auto", 4, MICRO), (pipeline(), 16, WHOLE)):
        torch.manual_seed(0)
        model = Model()
        averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
        fit(model, strategy, batch, max_epochs=3, callbacks=[averaging], **options)
        results.append(model)
    assert_same_weights(*results)


def test_the_strategy_and_a_copy_of_the_module_pickle_during_training() -> None:
    class Pickling(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            self.strategy = pickle.loads(pickle.dumps(trainer.strategy))
            self.module = pickle.loads(pickle.dumps(module.layers))

    callback = Pickling()
    model = Model()
    fit(model, pipeline(), 16, max_epochs=1, validate=False, callbacks=[callback])
    assert isinstance(callback.strategy, PipelineStrategy)
    assert torch.equal(callback.module(dataset()[:4][0]), model.layers(dataset()[:4][0]))
