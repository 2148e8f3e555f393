"""The digits again, the model cut over several devices: two CPU "devices" here, GPUs with --devices 0 1.

    python examples/digits_pipeline.py                  # half a minute on two CPU cores
    python examples/digits_pipeline.py --devices 0 1    # two GPUs

The module, its data and its metrics are those of digits.py; only the strategy differs.
"""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning as L
from digits import DigitClassifier, load_data
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from ramtorch_lightning import PipelineStrategy


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], help="GPU numbers, or cpu several times")
    parser.add_argument("--schedule", default="staggered_1b1f")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/digits_pipeline"), help="folder for checkpoints")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
    L.seed_everything(0)

    data = load_data()
    trainer = L.Trainer(
        strategy=PipelineStrategy(
            devices=[int(device) if device.isdigit() else device for device in options.devices],
            schedule=options.schedule,
            n_microbatches=options.microbatches,
        ),
        max_epochs=options.epochs,
        logger=False,
        callbacks=[ModelCheckpoint(options.out, "best", monitor="validation_accuracy", mode="max")],
    )
    training = DataLoader(data["training"], batch_size=64, shuffle=True)
    trainer.fit(DigitClassifier(), training, DataLoader(data["validation"], batch_size=180))
    test = DataLoader(data["test"], batch_size=360)
    accuracy = trainer.test(dataloaders=test, ckpt_path="best", verbose=False)[0]["test_accuracy"]
    print(f"test accuracy: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
