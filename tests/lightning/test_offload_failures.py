"""Errors anywhere in a streamed run: the user's exception comes out, no thread stays, and the next run is exact."""

import os
import signal
import traceback
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from offload_cases import Classifier, Watched, fit, loader, make_trainer
from stream_cases import assert_same
from torch import Tensor, nn

from ramtorch_lightning import OffloadStrategy


class MineError(Exception):
    pass


class Failing(Classifier):
    """Raises once, at the place named by `where`, in the second batch."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.armed = True
        self.net.blocks.append(Fragile(self))

    def fail(self, where: str, batch_idx: int = 1) -> None:
        if self.armed and where == self.where and batch_idx == 1:
            self.armed = False
            raise MineError(where)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("before the forward", batch_idx)
        self.current = batch_idx
        loss = super().training_step(batch, batch_idx)
        self.fail("after the forward", batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.current = batch_idx if not self.trainer.sanity_checking else 0
        super().validation_step(batch, batch_idx)
        if not self.trainer.sanity_checking:
            self.fail("validation", batch_idx)

    def on_after_backward(self) -> None:
        self.fail("after the backward", self.current)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail("before the optimizer's step", self.current)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fail("end of the batch", batch_idx)


class Fragile(nn.Module):
    def __init__(self, owner: Failing) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        (owner,) = self._owner
        owner.fail("inside a chunk", getattr(owner, "current", 0))
        out: Tensor = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda grad: owner.fail("inside a backward", owner.current))
        return out


PLACES = [
    "before the forward",
    "after the forward",
    "inside a chunk",
    "inside a backward",
    "after the backward",
    "before the optimizer's step",
    "end of the batch",
    "validation",
]


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_comes_out_as_it_is_and_the_same_trainer_then_trains_exactly(place: str, activations: str) -> None:
    class Here(Failing):
        where = place

    def result(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        model, trainer = Here(), make_trainer(strategy, max_epochs=2)
        with pytest.raises(MineError, match=place) as caught:
            trainer.fit(model, loader(), loader(8))
        assert any(frame.name == "fail" for frame in traceback.extract_tb(caught.value.__traceback__))
        assert all("forward" not in vars(module) for module in model.modules())
        middle = [p.detach().clone() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(3)
        trainer.fit(model, loader(), loader(8))
        return [middle, model.seen, model.state_dict()]

    strategy = Watched(chunks=["net.embed", "net.blocks.*", "net.head"], activations=activations)
    assert_same(result(strategy), result("auto"))
    assert len(strategy.tables) == 2


def test_after_an_error_a_new_trainer_works_on_the_same_model() -> None:
    class Here(Failing):
        where = "inside a backward"

    def result(strategies: list[Any]) -> Any:
        torch.manual_seed(1)
        model = Here()
        with pytest.raises(MineError):
            make_trainer(strategies[0]).fit(model, loader())
        model.zero_grad()
        make_trainer(strategies[1]).fit(model, loader())
        return model.state_dict()

    assert_same(result([Watched(), Watched(window=1)]), result(["auto", "auto"]))


def test_an_error_in_a_callback_comes_out_as_it_is() -> None:
    class Raising(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise MineError("callback")

    with pytest.raises(MineError, match="callback"):
        fit(Classifier, Watched(), callbacks=lambda: [Raising()])


@pytest.mark.parametrize("hook", ["setup", "configure_model", "configure_optimizers", "on_fit_start"])
def test_an_error_before_the_first_batch_comes_out_as_it_is(hook: str) -> None:
    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise MineError(hook)

    strategy = Watched()
    with pytest.raises(MineError, match=hook):
        make_trainer(strategy).fit(type("Early", (Classifier,), {hook: fail})(), loader())
    assert strategy._streamer is None
    fit(Classifier, strategy := Watched())
    assert strategy.copied_bytes > 0


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_error_while_evaluating_comes_out_and_the_next_evaluation_is_exact(stage: str) -> None:
    class Here(Classifier):
        armed = True

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.armed:
                raise MineError(stage)
            return out

    model = Here()
    trainer = make_trainer(Watched())
    with pytest.raises(MineError, match=stage):
        getattr(trainer, stage)(model, loader())
    model.armed = False
    assert_same(getattr(trainer, stage)(model, loader()), getattr(make_trainer(), stage)(model, loader()))


def test_an_interrupt_ends_the_fit_and_leaves_a_plain_model() -> None:
    class Interrupting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise KeyboardInterrupt
            return loss

    strategy = Watched()
    model = Interrupting()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        make_trainer(strategy).fit(model, loader())
    assert all("forward" not in vars(module) for module in model.modules())
    assert_same(make_trainer(Watched()).predict(model, loader()), make_trainer().predict(model, loader()))


def test_a_termination_signal_ends_the_fit_after_the_batch() -> None:
    class Signalled(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    model = Signalled()
    with pytest.raises(BaseException) as caught:
        make_trainer(Watched()).fit(model, loader())
    assert "SIGTERM" in type(caught.value).__name__
    assert len(model.seen) == 2


def test_teardown_is_harmless_before_set_up_and_twice() -> None:
    strategy = OffloadStrategy()
    strategy.teardown()
    strategy.teardown()
    found = fit(Classifier, strategy := Watched())
    strategy.teardown()
    assert found.trainer.state.finished


def test_a_device_error_in_a_step_explains_where_weights_live() -> None:
    """As torch words it when a weight that is used outside of its chunk meets an input on the device."""

    class Mixing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")

    with pytest.raises(RuntimeError, match=r"(?s)same device.*masters are on the host.*make the module"):
        fit(Mixing, Watched())
