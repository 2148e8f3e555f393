"""Trains for a long time, and tells whether memory, threads and open files stay what they were.

    python benchmarks/soak.py [--minutes 60] [--strategy offload|pipeline|plain] [--options "window=3"] [--json FILE]

Ordinary Trainers, one after the other (`--fits`), each resumed from the last checkpoint of the one before, with
validation and two checkpoint files per epoch, a logger, a monitor, dropout, and clipped gradients in every third epoch.
A sample is taken at the end of an epoch. The table has the first, those after a quarter and after half of the time, and
the last; the status is 1 if a loss was not finite or if, from the quarter to the end, anything grew by more than its
bound. `plain` is the Trainer's own strategy, for comparison. Linux only: figures of the process come from /proc.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from systems import parse_options
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ramtorch_lightning import OffloadMonitor, OffloadStrategy, PipelineMonitor, PipelineStrategy

BATCH = 16
CLASSES = 8
BOUNDS = {"anonymous_mb": 16.0, "shared_mb": 1.0, "device_mb": 1.0, "threads": 0.0, "files": 0.0}
"""By how much each figure may grow from a quarter of the time to the end."""


@dataclass
class Sample:
    """What the process holds at the end of an epoch, and the mean loss of that epoch."""

    minutes: float
    epochs: int
    steps: int
    loss: float
    anonymous_mb: float
    shared_mb: float
    device_mb: float
    threads: int
    files: int


class Block(nn.Module):
    """Adds what two layers, with dropout between them, make of the normed input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))
        return result


class Classifier(L.LightningModule):
    """Learns the classes of random vectors; samples at the end of each epoch, and ends a fit at its time."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, CLASSES))
        self.losses: list[Tensor] = []
        self.samples: list[Sample] = []
        self.began = self.until = time.monotonic()
        self.finite = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _index: int) -> None:
        self.log("validation", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_epoch_start(self) -> None:
        self.trainer.gradient_clip_val = 1.0 if self.current_epoch % 3 == 2 else None

    def on_train_epoch_end(self) -> None:
        losses = [float(loss) for loss in self.losses]
        self.losses.clear()
        self.finite &= all(map(math.isfinite, losses))
        minutes = (time.monotonic() - self.began) / 60
        loss = sum(losses) / len(losses)
        self.samples.append(Sample(minutes, self.current_epoch + 1, self.global_step, loss, *held()))
        self.trainer.should_stop = time.monotonic() >= self.until


def held() -> tuple[float, float, float, int, int]:
    """Anonymous, shared and device memory in MB, threads, and open files of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = {name: int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem", "Threads")}
    device = sum(torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count()))
    files = len(os.listdir("/proc/self/fd"))
    anonymous, shared = kilobytes["RssAnon"] * 1024 / 1e6, kilobytes["RssShmem"] * 1024 / 1e6
    return anonymous, shared, device / 1e6, kilobytes["Threads"], files


def fit(module: Classifier, arguments: argparse.Namespace, folder: Path, resumed: bool) -> None:
    """One fit, until `module.until`."""
    options = parse_options(arguments.options)
    strategy: Any = "auto"
    monitors: list[L.Callback] = []
    if arguments.strategy == "offload":
        strategy = OffloadStrategy(**{"resident_below": 0, "device": arguments.devices[0], **options})
        monitors = [OffloadMonitor(every_n_steps=50)]
    elif arguments.strategy == "pipeline":
        strategy = PipelineStrategy(**{"devices": arguments.devices, **options})
        monitors = [PipelineMonitor(every_n_steps=50)]
    gpu = "cuda" in arguments.devices[0]
    trainer = L.Trainer(
        accelerator="gpu" if gpu else "cpu", devices=1, strategy=strategy, precision=arguments.precision, max_epochs=-1,
        logger=CSVLogger(folder, name="logs"),
        callbacks=[ModelCheckpoint(folder, monitor="step", mode="max", save_top_k=2, save_last=True), *monitors],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    width = module.net[-1].in_features
    torch.manual_seed(1)
    inputs = torch.randn(arguments.batches * BATCH - 5, width)  # the last batch is smaller
    data = TensorDataset(inputs, (inputs @ torch.randn(width, CLASSES)).argmax(1))
    loaders = DataLoader(data, BATCH, shuffle=True), DataLoader(data, 2 * BATCH)
    trainer.fit(module, *loaders, ckpt_path=str(folder / "last.ckpt") if resumed else None)


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse(given)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|exists and is not empty|not used).*")
    module = Classifier(arguments.layers, arguments.width)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(arguments.fits):
            module.until = module.began + 60 * arguments.minutes * (index + 1) / arguments.fits
            fit(module, arguments, Path(folder), resumed=index > 0)
    rows = table(module.samples, arguments.minutes)
    found = problems(rows, module.finite)
    report = {
        "arguments": {name: value for name, value in vars(arguments).items() if name != "json"},
        "table": {moment: asdict(sample) for moment, sample in rows.items()},
        "growth": growth(rows),
        "bounds": BOUNDS,
        "problems": found,
        "versions": {"torch": torch.__version__, "lightning": L.__version__},
        "samples": [asdict(sample) for sample in module.samples],
    }
    print(show(rows))
    print("; ".join(found) or "all losses were finite, and nothing grew beyond its bound")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report))
    return report


def table(samples: Sequence[Sample], minutes: float) -> dict[str, Sample]:
    """The samples at the start, after a quarter and half of the time, and at the end."""
    at = lambda moment: next((sample for sample in samples if sample.minutes >= moment * minutes), samples[-1])
    return {"start": samples[0], "quarter": at(0.25), "half": at(0.5), "end": samples[-1]}


def growth(rows: dict[str, Sample]) -> dict[str, float]:
    """From the quarter to the end, of every figure that has a bound."""
    return {name: getattr(rows["end"], name) - getattr(rows["quarter"], name) for name in BOUNDS}


def problems(rows: dict[str, Sample], finite: bool) -> list[str]:
    """What must not be."""
    grown = [
        f"{name} grew by {by:g}, more than {BOUNDS[name]:g}" for name, by in growth(rows).items() if by > BOUNDS[name]
    ]
    return grown if finite else [*grown, "a loss was not finite"]


def show(rows: dict[str, Sample]) -> str:
    """The table as text."""
    names = list(asdict(rows["end"]))
    lines = [["", *names]] + [
        [moment, *(f"{value:.6g}" for value in asdict(row).values())] for moment, row in rows.items()
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names) + 1)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--strategy", choices=["offload", "pipeline", "plain"], default="offload")
    parser.add_argument("--options", default="", help="of the strategy, as in 'window=3,n_microbatches=2'")
    parser.add_argument("--devices", nargs="+", help="of the pipeline, or the one to stream to")
    parser.add_argument("--fits", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batches", type=int, default=50, help="in an epoch")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--json", type=Path, help="write everything there, all samples included")
    arguments = parser.parse_args(given)
    pipeline = arguments.strategy == "pipeline"
    several = [f"cuda:{index}" for index in range(cuda)] if cuda > 1 else ["cuda:0" if cuda else "cpu"] * 2
    arguments.devices = arguments.devices or (several if pipeline else several[:1])
    return arguments


if __name__ == "__main__":
    raise SystemExit(1 if main()["problems"] else 0)
