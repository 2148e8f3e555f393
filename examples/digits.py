"""Classify scikit-learn's handwritten digits with streamed weights, from the data to the test accuracy.

    python examples/digits.py        # half a minute on two CPU cores

A model this small needs no streaming; it shows that fit, validate, test and metrics stay as they are.
"""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from ramtorch_lightning import OffloadStrategy


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class DigitClassifier(L.LightningModule):
    """Maps images of 8 x 8 pixels, flattened, to the logits of ten digits."""

    def __init__(self, width: int = 256, blocks: int = 4, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(64, width), *(Block(width) for _ in range(blocks)), nn.LayerNorm(width), nn.Linear(width, 10)
        )
        self.validation_accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        images, digits = batch
        loss = F.cross_entropy(self(images), digits, label_smoothing=0.1)
        self.log("training_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_index: int) -> None:
        images, digits = batch
        self.validation_accuracy(self(images), digits)
        self.log("validation_accuracy", self.validation_accuracy, prog_bar=True)

    def test_step(self, batch: list[Tensor], batch_index: int) -> None:
        images, digits = batch
        self.test_accuracy(self(images), digits)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), weight_decay=0.05, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.learning_rate, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def load_data() -> dict[str, TensorDataset]:
    """The 1797 digits in three parts that depend on nothing but this function; pixels are scaled to [0, 1]."""
    images, digits = load_digits(return_X_y=True)
    rest, test, rest_digits, test_digits = train_test_split(
        images / 16, digits, test_size=360, stratify=digits, random_state=0
    )
    training, validation, training_digits, validation_digits = train_test_split(
        rest, rest_digits, test_size=180, stratify=rest_digits, random_state=0
    )
    parts = {
        "training": (training, training_digits),
        "validation": (validation, validation_digits),
        "test": (test, test_digits),
    }
    return {
        name: TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y)) for name, (x, y) in parts.items()
    }


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for checkpoints")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
    L.seed_everything(0)

    data = load_data()
    training = DataLoader(data["training"], batch_size=64, shuffle=True)
    validation = DataLoader(data["validation"], batch_size=180)
    test = DataLoader(data["test"], batch_size=360)
    trainer = L.Trainer(
        strategy=OffloadStrategy(window=2, pin=1, resident_below=0),  # 0 bytes: even layers this small stream
        max_epochs=options.epochs,
        logger=False,
        callbacks=[ModelCheckpoint(options.out, "best", monitor="validation_accuracy", mode="max")],
    )
    trainer.fit(DigitClassifier(), training, validation)
    accuracy = trainer.test(dataloaders=test, ckpt_path="best", verbose=False)[0]["test_accuracy"]
    print(f"test accuracy: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
