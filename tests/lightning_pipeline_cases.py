"""A LightningModule, its data, and Trainers with and without a pipeline, for the tests of `PipelineStrategy`."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ramtorch_lightning import PipelineStrategy

WIDTH = 8
CPU = ["cpu"] * 4


class Model(pl.LightningModule):
    """Eight layers and a parameter of its own; logs a loss on every step and epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(8))
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def dataset(rows: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator))


def make_trainer(strategy: Any = "auto", **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, **(defaults | options))


def pipeline(schedule: Any = "staggered_1b1f", **options: Any) -> PipelineStrategy:
    return PipelineStrategy(**{"devices": CPU, "schedule": schedule, "n_microbatches": 4} | options)


def fit(
    model: pl.LightningModule, strategy: Any, batch: int, rows: int = 32, validate: bool = True, **options: Any
) -> pl.Trainer:
    trainer = make_trainer(strategy, **options)
    data = dataset(rows)
    trainer.fit(model, DataLoader(data, batch), DataLoader(data, 16) if validate else None)
    return trainer


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
