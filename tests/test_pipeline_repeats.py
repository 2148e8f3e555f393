"""Whatever the timing, a run gives the same bits, logs and metrics, and side effects in the order of microbatches."""

import random
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning_pipeline_cases import Model, fit, pipeline
from torch import Tensor, nn


class Delayed(Model):
    """Sleeps for random times in every stage, draws dropout masks, and logs from the first stage and from the last."""

    def __init__(self, delays: random.Random | None = None) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.mean, self.extreme = torchmetrics.MeanMetric(), torchmetrics.MaxMetric()
        self.delays = delays
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.delays is not None:
                time.sleep(self.delays.random() * 0.002)
            x = self.drop(layer(x))
            if index == 0:
                self.log("early", x.mean(), on_step=True, on_epoch=True)
                self.extreme.update(x.max())
        return x * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.update(loss)
        self.calls.append(f"{float(loss):.9f}")
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"mean": self.mean, "extreme": self.extreme}, on_step=False, on_epoch=True)
        return loss


class Steps(pl.Callback):
    """Keeps what is logged after every batch and epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append({name: value.clone() for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append({name: value.clone() for name, value in trainer.callback_metrics.items()})


def trained(schedule: str, delays: random.Random | None = None) -> tuple[Delayed, Steps]:
    torch.manual_seed(1)
    model, steps = Delayed(delays), Steps()
    fit(model, pipeline(schedule), 16, max_epochs=1, validate=False, callbacks=[steps])
    return model, steps


@pytest.mark.timeout(120)
def test_ten_runs_with_random_delays_give_the_same_bits_logs_and_metrics() -> None:
    model, steps = trained("sequential")
    assert len(model.calls) == 8
    assert {"early_step", "loss_step"} <= steps.seen[0].keys()
    assert {"mean", "extreme", "early_epoch"} <= steps.seen[-1].keys()
    for number in range(10):
        other, others = trained(["gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1"][number % 4], random.Random(number))
        assert other.calls == model.calls
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
        for mine, theirs in zip(steps.seen, others.seen, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
