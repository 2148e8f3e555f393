"""Whole runs with overlapped updates: checkpoints, resuming, errors, copies and memory."""

import copy
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from offload_cases import Classifier, Net, fit, loader, make_trainer
from offload_updates_cases import (
    Counting,
    late,
    overlapped,
    with_optimizer,
)
from stream_cases import assert_same
from torch import Tensor

from ramtorch_core import HostMemoryError

__all__ = ["late"]


def test_checkpoints_in_the_middle_hold_whole_steps(tmp_path: Path) -> None:
    def run(strategy: Any, name: str) -> dict[str, Any]:
        saving = ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        fit(Classifier, strategy, callbacks=lambda: [saving], enable_checkpointing=True)
        files = sorted((tmp_path / name).glob("*.ckpt"))
        return {file.name: torch.load(file, weights_only=False) for file in files}

    found, expected = run(Counting(), "ours"), run("auto", "theirs")
    assert len(found) == 8
    for name, checkpoint in expected.items():
        for key in ("state_dict", "optimizer_states", "global_step"):
            assert_same(found[name][key], checkpoint[key], f"{name}/{key}")


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_run_that_is_resumed_in_the_middle_ends_with_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    def resumed(name: str, first: Any, second: Any) -> Any:
        saving = ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        fit(Classifier, first, callbacks=lambda: [saving], enable_checkpointing=True, **options)
        torch.manual_seed(7)
        trainer, model = make_trainer(second, **options), Classifier()
        trainer.fit(model, loader(), loader(8, seed=6), ckpt_path=tmp_path / name / "step=2.ckpt")
        return dict(model.state_dict()), [optimizer.state_dict() for optimizer in trainer.optimizers]

    expected = resumed("plain", "auto", "auto")
    assert_same(resumed("ours", Counting(), Counting()), expected)
    assert_same(resumed("mixed", Counting(), "auto"), expected)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("where", ["backward", "step", "interrupt"])
def test_an_error_of_the_user_ends_the_run_with_that_error_and_the_next_run_trains(where: str, clip: Any) -> None:
    class Fails(Classifier):
        failing = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.failing and batch_idx == 2 and where != "backward":
                raise {"step": ZeroDivisionError("mine"), "interrupt": KeyboardInterrupt()}[where]
            x, y = batch
            x = x.clone().requires_grad_()
            if self.failing and batch_idx == 2:
                x.register_hook(self.fail)
            return super().training_step((x, y), batch_idx)

        def fail(self, _grad: Tensor) -> None:
            raise ZeroDivisionError("mine")

    model = Fails()
    trainer = make_trainer(Counting(), gradient_clip_val=clip)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit if where == "interrupt" else ZeroDivisionError):
        trainer.fit(model, loader())
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from the first interrupt on
    assert all(p.isfinite().all() for p in model.parameters())
    model.failing = False
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(Counting(), gradient_clip_val=clip)
    trainer.fit(model, loader())
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
    assert not any("Wait" in type(callback).__name__ for callback in trainer.callbacks)


def test_an_error_of_the_optimizer_ends_the_run_with_that_error() -> None:
    class Fails(torch.optim.SGD):
        update_granularity = "element"
        count = 0

        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            type(self).count += 1
            if type(self).count == 12:
                raise ZeroDivisionError("mine")
            return loss

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(with_optimizer(lambda p: Fails(p, lr=0.1)), Counting())


COPIES: list[Any] = []


class Copies(Classifier):
    def on_train_epoch_end(self) -> None:
        COPIES[:] = copy.deepcopy(self), copy.deepcopy(self.trainer.callbacks)
        pickle.loads(pickle.dumps(self.trainer.strategy))


def test_the_strategy_the_model_and_callbacks_can_be_copied_while_updates_run() -> None:
    found = fit(Copies, Counting())
    assert_same(dict(COPIES[0].state_dict()), dict(found.model.state_dict()))
    overlapped(found)
    COPIES.clear()


def test_host_memory_is_checked_for_what_each_way_needs() -> None:
    deep = lambda: Classifier(Net(depth=8))
    # A half-precision shadow of almost every weight takes half of this, all gradients take as much again, and four
    # times the gradients of the largest layer less than a quarter.
    weights = sum(p.nbytes for p in deep().parameters())
    options: dict[str, Any] = {"host_memory": weights * 8 // 10}
    fit(deep, Counting(**options))
    for trainer_options in ({"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}):
        with pytest.raises(HostMemoryError):
            fit(deep, Counting(**options), **trainer_options)
    with pytest.raises(HostMemoryError):
        fit(deep, Counting(gradients="published", **options))


def test_gradients_that_wait_for_the_norm_are_counted_as_they_cross() -> None:
    """A half-precision shadow of almost every weight takes half of the weights' bytes, and its gradient as much."""
    deep = lambda: Classifier(Net(depth=8))
    weights = sum(p.nbytes for p in deep().parameters())
    options: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
    fit(deep, Counting(host_memory=weights * 12 // 10), **options)
    for memory, more in ((8, {}), (12, {"accumulate_grad_batches": 2})):
        with pytest.raises(HostMemoryError):
            fit(deep, Counting(host_memory=weights * memory // 10), **options, **more)


def test_finding_the_learning_rate_restores_the_weights_that_were(tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    def find(strategy: Any) -> Any:
        torch.manual_seed(1)
        model = Classifier()
        trainer = make_trainer(strategy, default_root_dir=tmp_path)
        before = copy.deepcopy(dict(model.state_dict()))
        found = Tuner(trainer).lr_find(model, loader(), num_training=12, early_stop_threshold=None)
        assert found is not None
        assert_same(dict(model.state_dict()), before)
        trainer.fit(model, loader())
        return found.results, dict(model.state_dict())

    assert_same(find(Counting()), find("auto"))
