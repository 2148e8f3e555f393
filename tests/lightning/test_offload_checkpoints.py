"""Checkpoints of streamed runs: ordinary Lightning checkpoints, resumable bit for bit, with or without the strategy."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from offload_cases import Classifier, Net, Watched, fit, loader, make_trainer
from stream_cases import assert_same
from torch.utils._pytree import tree_leaves

PRECISIONS = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])


class Remembering(Classifier):
    """With dropout, so that the state of the random numbers matters, and a hyperparameter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(Net(dropout=0.2))
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer_for(strategy: Any, precision: str = "32-true", **options: Any) -> pl.Trainer:
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    else:
        options["precision"] = precision
    return make_trainer(strategy, **options)


def train(
    strategy: Any, path: Path, precision: str = "32-true", save_at: int = 8, resume: Path | None = None
) -> dict[str, Any]:
    """Train two epochs of 4 batches, save on the way, and return what the checkpoint holds."""
    torch.manual_seed(1)
    model = Remembering()
    saver = ModelCheckpoint(path.parent, filename=path.stem, every_n_train_steps=save_at)
    trainer = trainer_for(strategy, precision, callbacks=[saver], enable_checkpointing=True)
    torch.manual_seed(2 if resume is None else 3)
    trainer.fit(model, loader(), ckpt_path=resume)
    return read(path)


def read(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=False)
    return checkpoint


def assert_same_checkpoint(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "hyper_parameters"):
        assert_same(found.get(key), expected.get(key), key)
    order = lambda checkpoint: [list(each["state"]) for each in checkpoint["optimizer_states"]]
    assert order(found) == order(expected)
    assert found.get("MixedPrecision") == expected.get("MixedPrecision")


@PRECISIONS
def test_a_checkpoint_of_a_streamed_run_equals_the_resident_one(tmp_path: Path, precision: str) -> None:
    found = train(Watched(), tmp_path / "a.ckpt", precision, 6)
    assert_same_checkpoint(found, train("auto", tmp_path / "b.ckpt", precision, 6))
    assert (precision == "16-mixed") == ("MixedPrecision" in found)


@PRECISIONS
@pytest.mark.parametrize("strategies", [(True, True), (True, False), (False, True)], ids=str)
def test_a_run_resumed_in_the_middle_of_an_epoch_continues_bit_for_bit(
    tmp_path: Path, strategies: tuple[bool, bool], precision: str
) -> None:
    """Saved by a streamed or a plain run, resumed by either."""

    def resumed(streamed: tuple[bool, bool], name: str) -> dict[str, Any]:
        first, second = (Watched() if one else "auto" for one in streamed)
        path = tmp_path / f"{name}-first.ckpt"
        train(first, path, precision, save_at=6)
        return train(second, tmp_path / f"{name}-second.ckpt", precision, resume=path)

    found = resumed(strategies, "found")
    assert_same_checkpoint(found, resumed((False, False), "expected"))
    assert found["global_step"] == 8


def test_a_checkpoint_holds_host_tensors_that_own_exactly_their_bytes(tmp_path: Path) -> None:
    checkpoint = train(Watched(pin=2), tmp_path / "a.ckpt")
    tensors = [leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, torch.Tensor)]
    assert len(tensors) > 40
    for tensor in tensors:
        assert tensor.device.type == "cpu"
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    resident = train("auto", tmp_path / "b.ckpt")
    assert checkpoint["state_dict"].keys() == resident["state_dict"].keys()
    assert abs((tmp_path / "a.ckpt").stat().st_size - (tmp_path / "b.ckpt").stat().st_size) < 1000


def test_checkpoints_written_during_the_fit_load_without_the_strategy(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=4, save_last=True)
    run = fit(Remembering, Watched(), callbacks=lambda: [saver], enable_checkpointing=True)
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == 3
    model = Remembering.load_from_checkpoint(saver.last_model_path, weights_only=False)
    assert model.hparams.width == 8
    assert not any(
        torch.equal(p, q) for p, q in zip(model.parameters(), Remembering().parameters(), strict=True) if p.dim() > 1
    )
    assert_same(make_trainer().predict(model, loader()), make_trainer(Watched()).predict(model, loader()))
    assert run.trainer.checkpoint_callback is saver


def test_validation_and_prediction_read_a_checkpoint(tmp_path: Path) -> None:
    train("auto", tmp_path / "a.ckpt")
    results = []
    for strategy in (Watched(), "auto"):
        torch.manual_seed(9)
        trainer, model = make_trainer(strategy), Remembering()
        results.append(trainer.validate(model, loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False))
        results.append(trainer.predict(model, loader(), ckpt_path=tmp_path / "a.ckpt"))
    assert_same(results[:2], results[2:])


def test_saving_works_after_the_fit_and_after_a_test(tmp_path: Path) -> None:
    for strategy, name in ((Watched(), "a"), ("auto", "b")):
        torch.manual_seed(1)
        trainer, model = make_trainer(strategy, max_epochs=1), Classifier()
        trainer.fit(model, loader())
        trainer.save_checkpoint(tmp_path / f"{name}.fit")
        trainer.test(model, loader(), verbose=False)
        trainer.save_checkpoint(tmp_path / f"{name}.test")
        trainer.save_checkpoint(tmp_path / f"{name}.weights", weights_only=True)
    for suffix in ("fit", "test", "weights"):
        found, expected = read(tmp_path / f"a.{suffix}"), read(tmp_path / f"b.{suffix}")
        assert found.keys() == expected.keys()
        assert_same(found["state_dict"], expected["state_dict"])
        assert_same(found.get("optimizer_states"), expected.get("optimizer_states"))


def test_optimizer_state_that_exists_from_the_start_is_saved_and_resumed(tmp_path: Path) -> None:
    class Summing(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.5)

    def resumed(strategies: list[Any], name: str) -> dict[str, Any]:
        for epochs, strategy in enumerate(strategies, 1):
            torch.manual_seed(1)
            trainer = make_trainer(strategy, max_epochs=epochs)
            trainer.fit(Summing(), loader(), ckpt_path=tmp_path / name if epochs > 1 else None)
            trainer.save_checkpoint(tmp_path / name)
        return read(tmp_path / name)

    assert_same_checkpoint(resumed([Watched(), Watched()], "a"), resumed(["auto", "auto"], "b"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_asynchronous_checkpoint_holds_the_weights_of_its_moment(tmp_path: Path, wrapped: bool) -> None:
    from ramtorch_lightning import LocalCheckpointIO

    def plugins() -> list[Any]:
        return [AsyncCheckpointIO(LocalCheckpointIO() if wrapped else None)]

    for folder, strategy in (("a", Watched()), ("b", "auto")):
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
        run = fit(Classifier, strategy, plugins=plugins, callbacks=lambda one=saver: [one], enable_checkpointing=True)
        assert isinstance(run.trainer.strategy.checkpoint_io, AsyncCheckpointIO)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(names) == 4
    for name in names:
        assert_same_checkpoint(read(tmp_path / "a" / name), read(tmp_path / "b" / name))


def test_by_default_the_base_of_an_asynchronous_checkpoint_is_the_local_one() -> None:
    from ramtorch_lightning import LocalCheckpointIO

    io = AsyncCheckpointIO()
    assert make_trainer(Watched(), plugins=[io]).strategy.checkpoint_io is io
    assert isinstance(io.checkpoint_io, LocalCheckpointIO)
    assert isinstance(make_trainer(Watched()).strategy.checkpoint_io, LocalCheckpointIO)


def test_a_checkpoint_io_given_to_the_strategy_is_used() -> None:
    class Own(pl.plugins.io.TorchCheckpointIO):
        pass

    assert isinstance(make_trainer(Watched(checkpoint_io=Own())).strategy.checkpoint_io, Own)
