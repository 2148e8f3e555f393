"""Optimizers, schedulers, accumulation, clipping and manual optimisation, streamed: the resident run, bit for bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_cases import CLASSES, WIDTH, Classifier, Net, Watched, compare_fits, fit, loader
from stream_cases import assert_same
from torch import Tensor, nn

EVERY_PRECISION = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        {"accumulate_grad_batches": 3, "val_check_interval": 2},
        {"accumulate_grad_batches": 2, "val_check_interval": 1, "precision": "bf16-mixed"},
        {"accumulate_grad_batches": 3, "precision": "64-true"},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "precision": "bf16-mixed"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_accumulation_and_clipping_train_the_same(options: dict[str, Any]) -> None:
    compare_fits(Classifier, **options)


def test_accumulation_of_half_precision_gradients_rounds_once() -> None:
    """Resident training rounds after every batch; here the sum is kept in float32 and rounded at the end."""
    found = fit(Classifier, Watched(), precision="bf16-true", accumulate_grad_batches=3)
    assert found.strategy.copied_bytes > 0
    assert all(torch.isfinite(p).all() for p in found.model.parameters())


def test_a_gradient_accumulation_schedule_trains_the_same() -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    compare_fits(Classifier, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})])


@EVERY_PRECISION
def test_groups_with_their_own_rates_and_a_scheduler_per_step_train_the_same(precision: Any) -> None:
    class Grouped(Classifier):
        def configure_optimizers(self) -> Any:
            decayed = [p for p in self.parameters() if p.dim() > 1]
            others = [p for p in self.parameters() if p.dim() <= 1]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=int(steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, *_: Any) -> None:
            self.log_dict({f"lr{i}": rate for i, rate in enumerate(self.lr_schedulers().get_last_lr())})

    rows = compare_fits(Grouped, precision=precision).record["logged"]
    rates = [row["lr0"] for _, row in rows if "lr0" in row]
    assert len(set(rates)) > 5


def test_a_scheduler_that_watches_the_validation_loss_trains_the_same() -> None:
    class Watching(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}

    found = compare_fits(Watching, max_epochs=3)
    assert found.trainer.optimizers[0].param_groups[0]["lr"] < 1.0


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
        lambda p, lr: torch.optim.AdamW(p, lr, fused=True),
        lambda p, lr: torch.optim.AdamW(p, lr, foreach=True),
        lambda p, lr: torch.optim.Adam(p, lr, amsgrad=True, weight_decay=0.01),
    ],
)
def test_torch_optimizers_train_the_same(optimizer: Any) -> None:
    class Chosen(Classifier):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=self.lr)

    compare_fits(Chosen)


@EVERY_PRECISION
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_which_calls_the_closure_several_times_trains_the_same(search: str | None, precision: Any) -> None:
    class Closures(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, line_search_fn=search)

    found = compare_fits(Closures, precision=precision, max_epochs=1)
    assert len(found.model.seen) > 4


def test_overridden_hooks_around_the_step_train_the_same() -> None:
    class Custom(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = self.lr / (1 + self.trainer.global_step)
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (loss * 2).backward(*args, **kwargs)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    compare_fits(Custom, gradient_clip_val=0.1, accumulate_grad_batches=2)


def test_a_step_that_is_skipped_now_and_then_trains_the_same() -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx == 2:
                optimizer_closure()
            else:
                optimizer.step(closure=optimizer_closure)

    compare_fits(Skipping)


class Gan(Classifier):
    """Two optimizers, each for one network; toggled."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.ModuleDict({"generator": Net(depth=1), "critic": nn.Linear(CLASSES, 1)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net["generator"](x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        generator, critic = self.optimizers()
        self.toggle_optimizer(generator)
        loss = -self.net["critic"](self(x)).mean()
        self.log("generator", loss)
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        real, fake = self.net["critic"](F.one_hot(y, CLASSES).float()), self.net["critic"](self(x).detach())
        loss = fake.mean() - real.mean()
        self.log("critic", loss)
        self.seen.append(loss.detach())
        self.manual_backward(loss)
        self.clip_gradients(critic, 0.1, "norm")
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)
        self.after_critic()

    def after_critic(self) -> None: ...

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net[name].parameters(), lr=1e-2) for name in ("generator", "critic")]


@EVERY_PRECISION
@pytest.mark.parametrize("chunks", ["leaves", "net.generator.head", "net.critic"])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_a_gan_with_toggled_optimizers_trains_the_same(activations: str, chunks: str, precision: Any) -> None:
    """Also when the network that is toggled is called directly, and is no chunk."""
    compare_fits(Gan, strategy={"chunks": chunks, "activations": activations}, precision=precision)


@EVERY_PRECISION
def test_weights_clamped_through_data_are_seen(precision: Any) -> None:
    class Wasserstein(Gan):
        def after_critic(self) -> None:
            for parameter in self.net["critic"].parameters():
                parameter.data.clamp_(-0.2, 0.2)

    found = compare_fits(Wasserstein, precision=precision)
    assert found.model.net["critic"].weight.abs().max() <= 0.2


@EVERY_PRECISION
def test_manual_optimisation_with_accumulation_and_several_losses_trains_the_same(precision: Any) -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            x, y = batch
            out = self(x)
            losses = F.cross_entropy(out, y), out.square().mean()
            self.seen.append(torch.stack(losses).detach())
            self.manual_backward(losses[0], retain_graph=True)
            self.manual_backward(losses[1])
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

    compare_fits(Manual, precision=precision)


@EVERY_PRECISION
def test_a_closure_in_manual_optimisation_trains_the_same(precision: Any) -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.seen.append(loss.detach())
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    compare_fits(Manual, precision=precision)


def test_a_gradient_penalty_in_training_step_trains_the_same() -> None:
    """To the last bit but one: each weight's gradient is a sum of three parts, formed in another order."""

    class Penalised(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0].requires_grad_()
            (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            return super().training_step(batch, batch_idx) + (gradient.norm(dim=1) - 1).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    expected, found = fit(Penalised), fit(Penalised, Watched())
    torch.testing.assert_close(found.record["seen"], expected.record["seen"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.record["weights"], expected.record["weights"], rtol=1e-6, atol=1e-6)


def test_gradients_keep_their_values_when_the_user_holds_them() -> None:
    class Holding(Classifier):
        def on_after_backward(self) -> None:
            self.held = [p.grad for p in self.parameters()]
            self.copies = [p.grad.clone() for p in self.parameters()]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx:
                assert_same(self.held, self.copies)

    fit(Holding, Watched())


def test_a_regulariser_over_the_parameters_reaches_every_gradient() -> None:
    class Regularised(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + 1e-2 * sum(p.abs().sum() for p in self.parameters())

    with pytest.warns(UserWarning, match="never called"):
        compare_fits(Regularised)


def test_one_batch_only_overfits_the_same() -> None:
    compare_fits(Classifier, overfit_batches=1, max_epochs=4, validation=lambda: None)


def test_max_steps_and_limits_stop_at_the_same_step() -> None:
    found = compare_fits(Classifier, max_epochs=-1, max_steps=5, limit_train_batches=3, train=lambda: loader(32))
    assert found.trainer.global_step == 5


@EVERY_PRECISION
def test_a_fused_optimizer_is_clipped_where_nothing_scales_gradients(precision: Any) -> None:
    """Lightning refuses this under autocast, so the resident run clips with an optimizer that is not fused."""

    class Fused(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)

    class Plain(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)

    mine = fit(Fused, Watched(), precision=precision, gradient_clip_val=0.01).model
    theirs = fit(Plain, precision=precision, gradient_clip_val=0.01).model
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
