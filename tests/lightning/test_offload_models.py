"""What models and their hooks may do while they stream: the resident run, bit for bit."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from offload_cases import CLASSES, WIDTH, Classifier, Net, compare_fits
from torch import Tensor, nn

EVERY_PRECISION = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
PUBLISHED = {"gradients": "published"}
"""For models that look at `.grad` where the strategy does not expect it: in a hook after the step."""


def test_hooks_that_read_gradients_see_the_resident_ones() -> None:
    class Reading(Classifier):
        def on_after_backward(self) -> None:
            self.seen.append({name: p.grad.clone() for name, p in self.named_parameters()})

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, norm_type=2))

    found = compare_fits(Reading, accumulate_grad_batches=2)
    assert any("grad_2.0_norm_total" in row for _, row in found.record["logged"])


def test_a_callback_reads_the_resident_gradients_after_they_are_clipped() -> None:
    class Reader(pl.Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            module.seen.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])

    compare_fits(Classifier, callbacks=lambda: [Reader()], gradient_clip_val=0.05)


def test_parameter_hooks_change_gradients_as_in_the_resident_run() -> None:
    class Hooked(Classifier):
        def on_fit_start(self) -> None:
            for parameter in self.net.blocks[1].parameters():
                parameter.register_hook(lambda grad: grad * 0.5)

    compare_fits(Hooked)


def test_anomaly_detection_trains_the_same() -> None:
    compare_fits(Classifier, detect_anomaly=True)


@EVERY_PRECISION
def test_frozen_weights_keep_their_values_and_get_no_gradients(precision: Any) -> None:
    class Frozen(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.embed.requires_grad_(False)
            self.net.blocks[1].requires_grad_(False)

        def on_train_batch_end(self, *_: Any) -> None:
            self.without_gradient = {name for name, p in self.named_parameters() if p.grad is None}

    found = compare_fits(Frozen, strategy=PUBLISHED, precision=precision)
    assert found.model.without_gradient == {n for n, p in found.model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("streaming", [{}, {"resident_below": 200}, {"chunks": "net.blocks.*"}], ids=str)
def test_finetuning_unfreezes_in_the_middle(streaming: dict[str, Any]) -> None:
    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze([module.net.embed, module.net.blocks])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net.blocks[2], optimizer, lr=1e-3)
            if epoch == 2:
                self.unfreeze_and_add_param_group(module.net.embed, optimizer)

    found = compare_fits(Classifier, strategy=streaming, callbacks=lambda: [Unfreeze()], max_epochs=3)
    assert len(found.trainer.optimizers[0].param_groups) == 3


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return out


class Adapted(Classifier):
    """Adapters over a frozen base; keeps what there is at the end of training."""

    host_bytes = 0
    without_gradient: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        for block in self.net.blocks:
            block[1], block[4] = LowRank(block[1]), LowRank(block[4])

    def on_train_batch_end(self, *_: Any) -> None:
        self.without_gradient = tuple(name for name, p in self.named_parameters() if p.grad is None)
        streamer = getattr(self.trainer.strategy, "streamer", None)
        if streamer is not None:
            self.host_bytes = streamer.gradients.host_bytes()


@EVERY_PRECISION
@pytest.mark.parametrize("streaming", [{"chunks": "net.blocks.*"}, {"chunks": "leaves"}], ids=str)
def test_adapters_over_a_frozen_base_take_gradients_for_the_adapters_only(
    streaming: dict[str, Any], precision: Any
) -> None:
    found = compare_fits(Adapted, strategy=streaming | PUBLISHED, precision=precision)
    adapters = [p for p in found.model.parameters() if p.requires_grad]
    assert len(adapters) == 12
    assert found.model.without_gradient == tuple(n for n, p in found.model.named_parameters() if not p.requires_grad)
    assert len(found.trainer.optimizers[0].state) == len(adapters)
    assert 0 < found.model.host_bytes <= 2 * sum(p.nbytes for p in adapters)


def test_unused_parameters_keep_no_gradient_and_do_not_decay() -> None:
    class Partial(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.blocks.append(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for module in [self.net.embed, *self.net.blocks[:3]]:
                x = module(x)
            out: Tensor = self.net.head(x)
            return out

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)

        def on_train_batch_end(self, *_: Any) -> None:
            assert self.net.embed.weight.grad is not None
            assert self.net.blocks[3].weight.grad is None

    with pytest.warns(UserWarning, match=r"never called: net\.blocks\.3"):
        compare_fits(Partial, strategy=PUBLISHED)


@EVERY_PRECISION
def test_tied_weights_train_the_same_and_stay_tied(precision: Any) -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.blocks[2][1].weight = self.net.blocks[0][1].weight
            self.net.head = nn.Linear(WIDTH, WIDTH)
            self.net.head.weight = self.net.embed.weight

    found = compare_fits(Tied, precision=precision)
    assert found.model.net.head.weight is found.model.net.embed.weight


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_metrics_inside_the_module_count_the_same(options: dict[str, Any]) -> None:
    class Measured(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
            self.metrics = torchmetrics.MetricCollection(
                {"f1": torchmetrics.F1Score("multiclass", num_classes=CLASSES), "mean": torchmetrics.MeanMetric()},
                compute_groups=False,
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.accuracy(self(batch[0]), batch[1])
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            out = self(batch[0])
            self.metrics["f1"].update(out, batch[1])
            self.metrics["mean"].update(out.float().mean())
            self.log_dict(self.metrics)
            assert self.accuracy.device == self.device == self.trainer.strategy.root_device

    compare_fits(Measured, **options)


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("streaming", [{}, {"chunks": "net.blocks.*"}, {"chunks": nn.Linear}], ids=str)
def test_batch_norm_keeps_the_resident_statistics(streaming: dict[str, Any], activations: str) -> None:
    strategy = {**streaming, "activations": activations}
    found = compare_fits(lambda: Classifier(Net(norm=nn.BatchNorm1d)), strategy=strategy, accumulate_grad_batches=2)
    norm = found.model.net.blocks[0][0]
    assert norm.num_batches_tracked == 8
    assert norm.running_mean.abs().sum() > 0


def test_spectral_norm_iterates_as_in_the_resident_run() -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            for block in self.net.blocks:
                block[1] = nn.utils.parametrizations.spectral_norm(block[1])

    compare_fits(Normed, strategy={"chunks": "net.blocks.*"})


class Momentum(Classifier):
    """A query network and a key network that follows it, written through `.data` inside of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.key = Net().requires_grad_(False)

    def move(self) -> None:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.move()
        with torch.no_grad():
            target = self.key(batch[0])
        self.seen.append(target.clone())
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), target)


class Pointing(Momentum):
    def move(self) -> None:
        for k, q in zip(self.key.parameters(), self.net.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1


class InPlace(Momentum):
    def move(self) -> None:
        for k, q in zip(self.key.parameters(), self.net.parameters(), strict=True):
            k.data.mul_(0.9).add_(q.data, alpha=0.1)


class Counted(Momentum):
    def move(self) -> None:
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.net.parameters(), strict=True):
                k.lerp_(q, 0.1)


@EVERY_PRECISION
@pytest.mark.parametrize("streaming", [{}, {"resident_below": 300}, {"chunks": "net.blocks.*"}], ids=str)
@pytest.mark.parametrize("build", [Pointing, InPlace, Counted])
def test_a_key_network_follows_by_momentum(build: Any, streaming: dict[str, Any], precision: Any) -> None:
    compare_fits(build, strategy=streaming, precision=precision)


@EVERY_PRECISION
def test_weights_that_a_hook_clamps_through_data_are_seen(precision: Any) -> None:
    class Clamped(Classifier):
        def on_train_batch_end(self, *_: Any) -> None:
            self.net.blocks[1][1].weight.data.clamp_(-0.2, 0.2)

    found = compare_fits(Clamped, precision=precision)
    assert found.model.net.blocks[1][1].weight.abs().max() <= 0.2


@EVERY_PRECISION
def test_weights_loaded_between_epochs_are_seen(precision: Any) -> None:
    class Reset(Classifier):
        def on_train_epoch_end(self) -> None:
            self.net.load_state_dict({name: t * 0.5 for name, t in self.net.state_dict().items()})

        def on_validation_start(self) -> None:
            for parameter in self.parameters():
                parameter.data.flatten()[0] = 0.25

    compare_fits(Reset, precision=precision, max_epochs=3)


def test_a_forward_in_a_hook_outside_of_any_step_works() -> None:
    class Sampling(Classifier):
        def on_train_epoch_end(self) -> None:
            with torch.no_grad():
                self.seen.append(self(torch.ones(2, WIDTH)))
                self.seen.append(self.net.head(torch.ones(2, WIDTH)))

    compare_fits(Sampling)


@EVERY_PRECISION
def test_parameters_of_the_root_and_weights_used_outside_of_forward_train_the_same(precision: Any) -> None:
    class Functional(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x) * self.scale
            return out + F.linear(F.linear(x, self.net.embed.weight), self.net.head.weight)

    compare_fits(Functional, precision=precision)


def test_dictionaries_none_and_keywords_pass_through_chunks() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, *, state: dict[str, Any], mask: Tensor | None = None) -> dict[str, Any]:
            out = torch.relu_(self.linear(state["x"]))
            return {"x": out if mask is None else out * mask, "count": state["count"] + 1, "none": None}

    class Passing(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.ModuleList([*(Named() for _ in range(3)), nn.Linear(WIDTH, CLASSES)]))

        def forward(self, x: Tensor) -> Tensor:
            state = {"x": x, "count": 0}
            for index in range(3):
                state = self.net[index](state=state, mask=x if index == 1 else None)
            out: Tensor = self.net[3](state["x"] * state["count"])
            return out

    compare_fits(Passing, strategy={"chunks": "net.*"})
