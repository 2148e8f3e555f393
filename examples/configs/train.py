"""Learn to sort eight numbers, configured from the command line or from a file: LightningCLI with a strategy's knobs.

    python examples/configs/train.py fit --config examples/configs/offload.yaml
    python examples/configs/train.py fit --trainer.strategy=offload --trainer.strategy.window=3 --trainer.max_steps=50
    python examples/configs/train.py fit --trainer.strategy.help=OffloadStrategy

A model this small needs no streaming; `resident_below: 0` in the files makes even its small tensors stream.
"""

from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ramtorch_lightning  # noqa: F401  registers the strategies


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Sorter(L.LightningModule):
    """Maps eight numbers to the same numbers in order.

    Args:
        width: of the blocks.
        depth: how many blocks there are.
        learning_rate: of AdamW.
    """

    def __init__(self, width: int = 64, depth: int = 4, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(nn.Linear(8, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 8))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.layers(numbers)

    def training_step(self, numbers: Tensor, batch_index: int) -> Tensor:
        loss = F.mse_loss(self(numbers), numbers.sort(dim=1).values)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)


class Numbers(L.LightningDataModule):
    """Rows of eight random numbers.

    Args:
        rows: per epoch.
        batch: rows per batch.
    """

    def __init__(self, rows: int = 2048, batch: int = 64) -> None:
        super().__init__()
        self.rows, self.batch = rows, batch

    def train_dataloader(self) -> DataLoader:
        numbers = torch.rand(self.rows, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(numbers, self.batch, shuffle=True)


def main(arguments: Sequence[str] | None = None) -> LightningCLI:
    return LightningCLI(Sorter, Numbers, args=arguments, save_config_callback=None)


if __name__ == "__main__":
    main()
