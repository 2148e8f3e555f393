"""One Trainer or strategy for several runs, checkpoints between them, several loaders, and runs that end early."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from both_cases import Descent, assert_agree, compare, either, outcome, strategy_of
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from offload_cases import CLASSES, WIDTH, Watched, fit, loader, make_trainer
from torch import nn

from ramtorch_lightning import PipelineStrategy


def weights(model: Any) -> dict[str, Any]:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


@either
def test_every_order_of_runs_with_one_trainer_gives_the_same(name: str) -> None:
    def results(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        model, trainer = Descent(), make_trainer(strategy, max_epochs=1)
        found: list[Any] = [trainer.validate(model, loader(8), verbose=False)]
        trainer.fit(model, loader(), loader(8))
        found.append(trainer.predict(model, loader(8)))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader(), loader(8))
        found += [trainer.test(model, loader(8), verbose=False), trainer.global_step, weights(model)]
        other = Descent()
        trainer.fit_loop.max_epochs = 3
        trainer.fit(other, loader())
        return [*found, weights(other), trainer.predict(other, loader(4))]

    assert_agree(name, results(strategy_of(name)), results("auto"))


@either
def test_the_best_and_the_last_checkpoint_are_evaluated_the_same(name: str, tmp_path: Path) -> None:
    def results(strategy: Any, folder: str) -> list[Any]:
        torch.manual_seed(1)
        saver = ModelCheckpoint(tmp_path / folder, monitor="val", save_top_k=2, save_last=True)
        trainer = make_trainer(strategy, max_epochs=3, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(Descent(), loader(), loader(8))
        best = trainer.test(dataloaders=loader(8), ckpt_path="best", verbose=False)
        return [best, trainer.predict(dataloaders=loader(8), ckpt_path="last"), Path(saver.best_model_path).name]

    assert_agree(name, results(strategy_of(name), "a"), results("auto", "b"))


@either
@pytest.mark.parametrize("only", [True, False], ids=["weights only", "any object"])
def test_checkpoints_go_from_one_strategy_to_the_other(name: str, only: bool, tmp_path: Path) -> None:
    """From the strategy to a plain Trainer, to `load_from_checkpoint`, and back."""

    def results(strategies: list[Any], folder: str) -> list[Any]:
        torch.manual_seed(1)
        path, found = tmp_path / folder, []
        for epochs, strategy in enumerate(strategies, 1):
            trainer = make_trainer(strategy, max_epochs=epochs)
            before = {} if epochs == 1 else {"ckpt_path": path, "weights_only": only}
            trainer.fit(Descent(), loader(), **before)
            trainer.save_checkpoint(path)
            found.append(weights(Descent.load_from_checkpoint(path, weights_only=only)))
        trainer.save_checkpoint(path, weights_only=True)
        return [*found, weights(Descent.load_from_checkpoint(path, weights_only=only))]

    through = [strategy_of(name), "auto", strategy_of(name)]
    assert_agree(name, results(through, "a"), results(["auto"] * 3, "b"))


def test_an_asynchronous_checkpoint_of_a_pipeline_holds_the_weights_of_its_moment(tmp_path: Path) -> None:
    def saved(strategy: Any, folder: str) -> list[Any]:
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        options: dict[str, Any] = {"callbacks": lambda: [saver], "enable_checkpointing": True, "max_epochs": 1}
        fit(Descent, strategy, plugins=lambda: [AsyncCheckpointIO()], **options)
        files = sorted((tmp_path / folder).iterdir())
        return [[file.name, torch.load(file, weights_only=False)["state_dict"]] for file in files]

    found = saved(strategy_of("pipeline"), "a")
    assert len(found) == 4
    assert_agree("pipeline", found, saved("auto", "b"))


class Ending(pl.Callback):
    """Ends the fit in the middle, in one way or another."""

    def __init__(self, way: str) -> None:
        self.way, self.error = way, None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> Any:
        if trainer.global_step != 2:
            return None
        if self.way == "interrupt":
            raise KeyboardInterrupt
        if self.way == "error":
            raise ZeroDivisionError("of the user")
        trainer.should_stop = self.way == "stop"
        return -1 if self.way == "skip" else None

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.error = type(exception), weights(module)


@either
@pytest.mark.parametrize("way", ["interrupt", "error", "stop", "skip"])
def test_a_fit_that_ends_early_leaves_the_same_and_the_next_one_trains(name: str, way: str) -> None:
    def results(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        model, callback = Descent(), Ending(way)
        trainer = make_trainer(strategy, max_epochs=1, callbacks=[callback])
        errors = {"interrupt": (KeyboardInterrupt, SystemExit), "error": ZeroDivisionError}
        if way in errors:
            with pytest.raises(errors[way]):
                trainer.fit(model, loader(), loader(8))
        else:
            trainer.fit(model, loader(), loader(8))
        found = [trainer.global_step, callback.error, weights(model)]
        make_trainer("auto" if strategy == "auto" else strategy_of(name), max_epochs=1).fit(model, loader())
        return [*found, weights(model)]

    assert_agree(name, results(strategy_of(name)), results("auto"))


class Together(Descent):
    """Takes a row of each of two loaders, in one call of the model, since a pipeline is entered once per step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in batch.values() if part is not None]
        x, y = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return super().training_step((x, y), batch_idx)


@either
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_several_training_loaders_train_the_same(name: str, mode: str) -> None:
    loaders = lambda: CombinedLoader({"a": loader(16, 4), "b": loader(8, 4, seed=9)}, mode)
    compare(name, Together, train=loaders)


@either
def test_several_evaluation_loaders_give_the_same(name: str) -> None:
    class Several(Descent):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("val", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("test", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"index": torch.tensor([dataloader_idx] * len(batch[0])), "out": self(batch[0])}

    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch")
            self.written: list[Any] = []

        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
            self.written.append([prediction, list(indices or [])])

    def results(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        writer = Writer()
        model, trainer = Several(), make_trainer(strategy, max_epochs=1, callbacks=[writer])
        trainer.fit(model, loader(), [loader(8), loader(4)])
        metrics = dict(trainer.callback_metrics)
        tested = trainer.test(model, [loader(4), loader(4)], verbose=False)
        trainer.predict(model, [loader(8), loader(6)], return_predictions=False)
        return [metrics, tested, writer.written]

    assert_agree(name, results(strategy_of(name)), results("auto"))


@either
@pytest.mark.parametrize("how", ["autograd.grad", "backward"])
def test_a_validation_step_may_compute_gradients(name: str, how: str) -> None:
    """Stages of a pipeline end the graph where they meet, which such a step must not notice."""

    class Forces(Descent):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_()
                energy = self(x).square().sum()
                if how == "backward":
                    energy.backward()
                force = x.grad if how == "backward" else torch.autograd.grad(energy, x)[0]
            self.log("force", force.square().sum(dim=1).mean())

    found = compare(name, Forces, max_epochs=1)  # validation during a fit is never in inference mode
    assert found.trainer.callback_metrics["force"] > 0

    def validated(strategy: Any) -> Any:
        torch.manual_seed(1)
        return make_trainer(strategy, inference_mode=False).validate(Forces(), loader(8), verbose=False)

    assert_agree(name, validated(strategy_of(name)), validated("auto"))


@pytest.mark.parametrize("build", [lambda: strategy_of("pipeline"), lambda: Watched(n_microbatches=2)])
def test_gradients_through_the_model_in_a_microbatch_are_refused_with_the_remedy(build: Any) -> None:
    class Forces(Descent):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0].clone().requires_grad_()
            (force,) = torch.autograd.grad(self(x).square().sum(), x, create_graph=True)
            return force.square().mean()

    class Manual(Forces):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    with pytest.raises(RuntimeError, match="or manual optimization"):
        fit(Forces, build())
    found = fit(Manual, build(), max_epochs=1)
    assert_agree("pipeline", found.record["weights"], fit(Manual, max_epochs=1).record["weights"])


class Growing(Descent):
    """Gets another head or one more block, before its second epoch or before a validation."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.grown = what, False

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.grow()

    def on_validation_start(self) -> None:
        if "validation" in self.what and not self.trainer.sanity_checking:
            self.grow()

    def grow(self) -> None:
        if self.grown:
            return
        self.grown = True
        torch.manual_seed(4)
        with torch.inference_mode(False):
            new = nn.Linear(WIDTH, WIDTH if self.what == "block" else CLASSES).to(self.device)
        if self.what == "block":
            self.net.blocks.insert(1, new)
        else:
            self.net.head = new
        self.optimizers().optimizer.add_param_group({"params": list(new.parameters())})


@pytest.mark.parametrize("what", ["head", "block", "head in validation"])
@pytest.mark.parametrize("strategy", ["offload", "microbatches", "pipeline", "streamed pipeline"])
def test_modules_that_come_during_a_fit_are_trained(what: str, strategy: str) -> None:
    """Gradients of weights that were not there at the set-up were taken for old ones, and zeroed before each step."""
    streaming = {"window": 2, "chunks": "leaves", "resident_below": 0}
    build = {
        "offload": Watched,
        "microbatches": lambda: Watched(n_microbatches=2),
        "pipeline": lambda: strategy_of("pipeline"),
        "streamed pipeline": lambda: PipelineStrategy(devices=["cpu", "cpu"], n_microbatches=2, **streaming),
    }[strategy]
    found, expected = fit(lambda: Growing(what), build()), fit(lambda: Growing(what))
    assert_agree("offload" if strategy == "offload" else "pipeline", outcome(found), outcome(expected))


def test_compiled_blocks_of_a_pipeline_train_the_same() -> None:
    class Compiled(Descent):
        def __init__(self) -> None:
            super().__init__()
            for block in self.net.blocks:
                block.compile(backend="eager")

    compare("pipeline", Compiled, max_epochs=1)
    torch.compiler.reset()


@pytest.mark.parametrize("window", [None, 2])
def test_a_fused_optimizer_of_a_pipeline_is_clipped_where_nothing_scales_gradients(window: int | None) -> None:
    """Lightning refuses this under autocast, so it is compared with an optimizer that is not fused."""

    class Chosen(Descent):
        fused = True

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, fused=self.fused)

    class Plain(Chosen):
        fused = False

    def trained(build: Any) -> Any:
        strategy = PipelineStrategy(devices=["cpu", "cpu"], n_microbatches=2, window=window)
        return list(
            fit(build, strategy, precision="bf16-mixed", gradient_clip_val=0.01, max_epochs=1).model.parameters()
        )

    torch.testing.assert_close(trained(Chosen), trained(Plain), rtol=1e-6, atol=1e-7)


@either
def test_the_callbacks_of_a_trainer_are_those_that_it_was_given(name: str) -> None:
    """Before the first step and after the fit; Lightning's own tests compare the lists."""

    class Copying(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.seen = list(trainer.callbacks)

    callback = Copying()
    trainer = make_trainer(strategy_of(name), max_epochs=1, callbacks=[callback])
    given = list(trainer.callbacks)
    for _ in range(2):
        trainer.fit(Descent(), loader(), loader(8))
        trainer.fit_loop.max_epochs += 1
        assert callback.seen == given == trainer.callbacks
