"""The reference work as a LightningModule, and the Trainer that every benchmark of the strategies uses."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
import torch
from reference import build, loss_function
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RATE = 1e-4


class Stack(L.LightningModule):
    """The stack; `checkpointed` recomputes each module's activations, as a user of the plain Trainer would.

    With `learn=False` the weights stay as they are: SGD at a rate of 0.
    """

    def __init__(self, layers: int, width: int, checkpointed: bool, learn: bool = True) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        self.checkpointed, self.learn = checkpointed, learn
        self.make()

    def make(self) -> None:
        self.net = nn.ModuleList(build(self.layers, self.width))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.net:
            x = checkpoint(module, x, use_reentrant=False) if self.checkpointed and self.training else module(x)
        return x

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        return loss_function(self(batch[0]), batch[1])

    def predict_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        total: Tensor = self(batch[0])[:, -1].sum()
        return total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not self.learn:
            return torch.optim.SGD(self.parameters(), lr=0.0)
        return torch.optim.AdamW(self.parameters(), lr=RATE, fused=True)


def make_trainer(device: str, strategy: Any, **options: Any) -> L.Trainer:
    """A Trainer on one `device` ("cuda" or "cpu") with bf16 autocast and none of the usual company."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|GPU available but not used).*")
    torch.backends.cuda.matmul.allow_tf32 = True
    return L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, strategy=strategy, precision="bf16-mixed",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
