"""Updates that overlap backward under the Trainer: which way is taken and why, and the plain Trainer's results."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from offload_cases import Classifier, Net, compare_fits, dataset, fit, loader
from offload_updates_cases import (
    OVERLAPPED,
    PUBLISHED,
    RUNS_ON,
    Counting,
    compare,
    late,
    logged,
    overlapped,
    with_optimizer,
)
from stream_cases import assert_same
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from updater_cases import Ahead

from ramtorch_core.optim.compiled import adam_kernel

__all__ = ["late"]


class Overrides(Classifier):
    def on_after_backward(self) -> None: ...


class Plain(pl.Callback):
    """Runs after every batch, and looks at no gradient."""

    def on_train_batch_end(self, *_: Any) -> None: ...


class Transforms(Classifier):
    """Looks at weights between two steps."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(self.net.head.weight.detach().clone())
        return batch


def in_processes() -> DataLoader[Any]:
    return DataLoader(dataset(), 4, num_workers=2)


class Looks(pl.Callback):
    def on_before_zero_grad(self, *_: Any) -> None: ...


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Declared(Own):
    update_granularity = "element"

    def step(self, closure: Any = None) -> Any:
        return torch.optim.SGD.step(self, closure)


class Inherits(torch.optim.AdamW):
    """Overrides something else than the step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


def hooked(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


class Replaced(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        step = optimizer.step
        optimizer.step = lambda closure=None: step(closure)  # type: ignore[method-assign]
        return optimizer


class WithModuleHook(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].register_full_backward_hook(lambda *_: None)


class OwnPrecision(Precision):
    pass


def scaler() -> Any:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))


REASONS: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "asked": ("gradients='published'", Classifier, {"gradients": "published"}, {}),
    "manual": ("optimisation is manual", Manual, {}, {}),
    "module hook": ("Overrides.on_after_backward is overridden, and may look at gradients", Overrides, {}, {}),
    "callback": ("Looks.on_before_zero_grad may look at gradients", Classifier, {}, {"callbacks": lambda: [Looks()]}),
    "lambda": (
        "LambdaCallback.on_before_optimizer_step may look at gradients",
        Classifier,
        {},
        {"callbacks": lambda: [LambdaCallback(on_before_optimizer_step=lambda *_: None)]},
    ),
    "scaler": ("gradients are scaled (precision='16-mixed')", Classifier, {}, {"plugins": lambda: [scaler()]}),
    "value": (
        "gradients are clipped by value",
        Classifier,
        {},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "precision": ("OwnPrecision is not Lightning's own", Classifier, {}, {"plugins": lambda: [OwnPrecision()]}),
    "closure": ("LBFGS is not known to update each", with_optimizer(lambda p: torch.optim.LBFGS(p, lr=0.01)), {}, {}),
    "own step": ("Own is not known to update each parameter", with_optimizer(lambda p: Own(p, lr=0.1)), {}, {}),
    "optimizer hook": ("SGD has step hooks", with_optimizer(hooked), {}, {}),
    "replaced step": ("the step method of this SGD was replaced", Replaced, {}, {}),
    "backward hook": ("'net.blocks.0' has backward hooks, which may look at weights", WithModuleHook, {}, {}),
}


@pytest.mark.parametrize("case", REASONS.values(), ids=REASONS)
def test_each_reason_to_publish_gradients_is_logged_once_and_trains_the_same(
    case: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reason, build, strategy, options = case
    expected = fit(build, **options)
    caplog.clear()
    with caplog.at_level("INFO"):
        found = fit(build, Counting(**strategy), **options)
    assert_same(found.record, expected.record)
    assert found.strategy.updated == 0
    (message,) = logged(caplog)
    assert PUBLISHED + reason in message


def test_a_function_that_stands_where_torch_clips_is_given_gradients(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[int] = []

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = list(parameters)
        given.append(sum(p.grad is not None for p in listed))
        return clip_grad_norm_(listed, *args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    with caplog.at_level("INFO"):
        found = fit(Classifier, Counting(), gradient_clip_val=0.1)
    assert found.strategy.updated == 0
    assert given
    assert given == [len(list(Classifier().parameters()))] * len(given)
    (message,) = logged(caplog)
    assert PUBLISHED + "torch.nn.utils.clip_grad_norm_ was replaced" in message


OVERLAPS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "plain": (RUNS_ON, Classifier, {}),
    "clipped": (RUNS_ON, Classifier, {"gradient_clip_val": 0.05}),
    "clipped mixed": (RUNS_ON, Classifier, {"gradient_clip_val": 0.05, "precision": "bf16-mixed"}),
    "hardly clipped": (RUNS_ON, Classifier, {"gradient_clip_val": 0.45, "max_epochs": 4}),
    "accumulated": (RUNS_ON, Classifier, {"accumulate_grad_batches": 3}),
    "half": (RUNS_ON, Classifier, {"precision": "bf16-true"}),
    "half clipped": (RUNS_ON, Classifier, {"precision": "bf16-true", "gradient_clip_val": 0.05}),
    "double clipped": (RUNS_ON, Classifier, {"precision": "64-true", "gradient_clip_val": 0.05}),
    "callback": ("", Classifier, {"callbacks": lambda: [Plain()]}),
    "transfer": ("", Transforms, {}),
    "processes": (RUNS_ON, Classifier, {"train": in_processes}),
    "declared": (RUNS_ON, with_optimizer(lambda p: Declared(p, lr=0.1, momentum=0.9)), {}),
    "inherits": (RUNS_ON, with_optimizer(lambda p: Inherits(p, lr=0.1)), {}),
    "dropout": (RUNS_ON, lambda: Classifier(Net(dropout=0.2)), {"precision": "bf16-mixed"}),
    "stopping": (RUNS_ON, Classifier, {"callbacks": lambda: [EarlyStopping("val", patience=1)], "max_epochs": 4}),
}


@pytest.mark.parametrize("case", OVERLAPS.values(), ids=OVERLAPS)
def test_otherwise_updates_overlap_and_train_the_same(case: Any, caplog: pytest.LogCaptureFixture) -> None:
    runs_on, build, options = case
    with caplog.at_level("INFO"):
        compare(build, **options)
    (message,) = logged(caplog)
    assert f"{OVERLAPPED}{runs_on};" in message


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
def test_the_compiled_kernel_trains_as_fused_optimizers_do(optimizer: Any, options: dict[str, Any]) -> None:
    if adam_kernel() is None:
        pytest.skip("no compiler")
    build = with_optimizer(lambda p: optimizer(p, lr=0.01, weight_decay=0.1, fused=True))
    expected = fit(build, **options)
    found = fit(build, Counting(kernel="auto"), **options)
    assert_same(found.record, expected.record)
    overlapped(found)


def test_weights_that_a_training_step_reads_now_and_then_are_those_of_the_last_step() -> None:
    class Reads(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx in (1, 3):
                self.seen.append(self.net.head.weight.detach().clone())
                self.seen.append({name: w.clone() for name, w in self.state_dict().items()})
                loss = loss + 0.1 * self.net.blocks[2][1].weight.square().sum()
            return loss

    compare(Reads, every=False)


def test_a_penalty_over_all_parameters_trains_the_same() -> None:
    class Penalised(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(p.square().sum() for p in self.parameters()) * 0.1 + super().training_step(batch, batch_idx)

    compare_fits(Penalised)


def test_a_backbone_that_is_thawed_later_trains_the_same() -> None:
    class Backbone(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net.blocks

    compare(
        Backbone,
        callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)],
        max_epochs=3,
        every=False,
    )


def test_a_backward_hook_that_comes_after_the_set_up_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Classifier):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net.blocks[1][1].register_full_backward_pre_hook(lambda *_: None)

    with caplog.at_level("INFO"):
        fit(Late, Counting())
    first, second = logged(caplog)
    assert "while backward goes on" in first
    assert PUBLISHED + "'net.blocks.1.1' has backward hooks" in second


def test_a_hook_that_comes_after_the_set_up_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Classifier):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.optimizers[0].register_step_pre_hook(self.look)

        def look(self, optimizer: Any, *_: Any) -> None:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            self.seen.append(all(grad is not None for grad in grads))

    with caplog.at_level("INFO"):
        compare_fits(Late)
    first, second = logged(caplog)
    assert OVERLAPPED in first
    assert PUBLISHED + "AdamW has step hooks" in second


def test_an_unfinished_window_of_accumulated_batches_trains_the_same() -> None:
    compare(accumulate_grad_batches=3, train=lambda: loader(28), max_epochs=3)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_updates_run_ahead_of_the_norm_and_are_undone_only_where_it_is_above_the_limit(
    precision: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing in the Trainer's loop looks at weights between backward and clipping."""
    monkeypatch.setattr("ramtorch_core.optim.ahead.BYTES", 30)
    ahead = Ahead(monkeypatch)
    ahead.wait_for(monkeypatch)

    class Varies(Classifier):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (1e3 if self.trainer.global_step % 4 == 3 else 1.0)

    options: Any = {"precision": precision, "gradient_clip_val": 100.0, "max_epochs": 2}
    with caplog.at_level("INFO"):
        compare(Varies, **options)
    chunks, steps = 11, 8
    scaled, waited = steps // 4, 1 + (steps - 1) // 4  # every fourth; the first one, and those after a scaled one
    assert (ahead.made, ahead.undone) == (chunks * (steps - waited), chunks * scaled)
    assert "with clipping most wait" in caplog.text
