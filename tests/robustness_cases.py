"""A small training that is killed, interrupted or starved of disk space, the same for both strategies.

    python tests/robustness_cases.py STRATEGY FOLDER [--kill-in-file N] [--endless]

trains with checkpoints after each epoch, from the last one in FOLDER on if there is one. The process kills itself in
the middle of its N-th file; `--endless` trains on until a signal comes, and says "ready" in the second epoch.
"""

import argparse
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from offload_cases import Classifier, Watched, loader, make_trainer

from ramtorch_lightning import PipelineStrategy

EPOCHS = 4
STRATEGIES: dict[str, Callable[[], Any]] = {
    "offload": Watched,
    "offload-published": lambda: Watched(gradients="published"),
    "pipeline": lambda: PipelineStrategy(devices=["cpu", "cpu"], n_microbatches=2),
    "pipeline-streamed": lambda: PipelineStrategy(
        devices=["cpu", "cpu"], n_microbatches=2, window=2, chunks="leaves", resident_below=0
    ),
}


def saving_trainer(strategy: str, folder: Path, epochs: int = EPOCHS) -> pl.Trainer:
    """Saves two files per epoch, one of a new name and last.ckpt, and keeps the newest three and last.ckpt."""
    checkpoints = ModelCheckpoint(folder, monitor="step", mode="max", save_top_k=3, save_last=True)
    return make_trainer(STRATEGIES[strategy](), max_epochs=epochs, enable_checkpointing=True, callbacks=[checkpoints])


def train(trainer: pl.Trainer, folder: Path, model: pl.LightningModule | None = None) -> None:
    """To the end, from the last checkpoint in `folder` on if there is one."""
    torch.manual_seed(1)
    last = folder / "last.ckpt"
    model = Classifier() if model is None else model
    trainer.fit(model, loader(), loader(8, seed=6), ckpt_path=str(last) if last.exists() else None)


def contents(path: Path) -> list[Any]:
    """Weights and optimizer state in a checkpoint, read by torch alone."""
    checkpoint = torch.load(path, weights_only=True)
    return [checkpoint["state_dict"], checkpoint["optimizer_states"]]


@contextmanager
def watching_files(act: Callable[[int, int], None]) -> Iterator[None]:
    """Inside, `act(file, bytes)` is called before bytes are written: how many were, of the so-many-th saved file."""
    save, numbers = torch.save, itertools.count(1)

    class Watch:
        def __init__(self, file: Any) -> None:
            self.file, self.number, self.written = file, next(numbers), 0

        def write(self, data: Any) -> int:
            act(self.number, self.written)
            count: int = self.file.write(data)
            self.file.flush()
            self.written += count
            return count

        def flush(self) -> None:
            self.file.flush()

    torch.save = lambda what, file, **more: save(what, Watch(file), **more)
    try:
        yield
    finally:
        torch.save = save


class Announcing(Classifier):
    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            print("ready", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy", choices=list(STRATEGIES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-in-file", type=int)
    parser.add_argument("--endless", action="store_true")
    arguments = parser.parse_args()

    def kill(file: int, written: int) -> None:
        if file == arguments.kill_in_file and written > 2000:
            os.kill(os.getpid(), signal.SIGKILL)

    with watching_files(kill):
        epochs = 10**6 if arguments.endless else EPOCHS
        trainer = saving_trainer(arguments.strategy, arguments.folder, epochs)
        train(trainer, arguments.folder, Announcing() if arguments.endless else None)


if __name__ == "__main__":
    main()
