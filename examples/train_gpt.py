"""Train a GPT of any size on one GPU, or a tiny one on the CPU: weights stream from RAM, the Trainer stays ordinary.

    python examples/train_gpt.py                                   # two minutes on two CPU cores
    python examples/train_gpt.py --size 8b --pin 4 --steps 1000    # one GPU and 200 GB of RAM
    python examples/train_gpt.py --resume last                     # go on from the newest checkpoint

The text is the Python standard library's own source code, byte by byte; `--text FILE` takes another. The checkpoints,
a loss curve and a sample of generated text end up in the folder `--out`.
"""

import argparse
import csv
import math
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning as L
import torch
from gpt import GPT, SIZES, next_byte_loss
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Sampler

from ramtorch_lightning import OffloadStrategy

# Folders of the standard library that are absent on some machines, or hold tables and prose instead of code.
SKIPPED = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data", "idlelib", "lib2to3"}


class LanguageModel(L.LightningModule):
    """Learns to predict the next byte; nothing in here knows where the weights live."""

    def __init__(self, size: str = "tiny", learning_rate: float = 3e-3, sample_bytes: int = 400) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: GPT | None = None

    def configure_model(self) -> None:
        """Builds the model where the strategy wants it, in RAM; called once per run, so it builds only once."""
        if self.model is None:
            self.model = GPT(SIZES[self.hparams.size])

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = next_byte_loss(self.model(batch[:, :-1]), batch[:, 1:])
        self.log("training_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("validation_loss", next_byte_loss(self.model(batch[:, :-1]), batch[:, 1:]), prog_bar=True)

    def predict_step(self, prompt: Tensor, batch_index: int) -> Tensor:
        return self.model.generate(prompt, self.hparams.sample_bytes)

    def configure_optimizers(self) -> dict:
        """AdamW with weight decay on matrices alone; its fused kernel exists for the CPU too, and is far faster."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.99), fused=True)
        steps = self.trainer.estimated_stepping_batches
        warmup = max(1, steps // 20)

        def share_of_peak(step: int) -> float:
            """Linear warm-up, then a cosine down to 2 % of the peak learning rate."""
            if step < warmup:
                return (step + 1) / warmup
            return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

        schedule = LambdaLR(optimizer, share_of_peak)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Windows(Dataset[Tensor]):
    """The item `start` is the `length` bytes of the text that begin there, as int64."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return len(self.text) - self.length + 1

    def __getitem__(self, start: int) -> Tensor:
        return self.text[start : start + self.length].long()


class RandomStarts(Sampler[int]):
    """Random items, decided by the seed and the epoch alone: a resumed run draws what an uninterrupted one would."""

    def __init__(self, highest: int, count: int, seed: int) -> None:
        self.highest, self.count, self.seed, self.epoch = highest, count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this at the start of every epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.randint(self.highest, (self.count,), generator=generator).tolist()


class TextData(L.LightningDataModule):
    """Random windows of the first nine tenths for training, fixed windows of the last tenth for validation."""

    def __init__(self, text: bytes, prompt: str, context: int, batch: int, epoch_steps: int, seed: int) -> None:
        super().__init__()
        if len(text) < 20 * (context + 1):
            raise ValueError(f"the text has {len(text)} bytes; a context of {context} needs {20 * (context + 1)}")
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        border = len(tokens) * 9 // 10
        self.training = Windows(tokens[:border], context + 1)
        self.validation = Windows(tokens[border:], context + 1)
        self.prompt = torch.tensor([list(prompt.encode())])
        self.batch, self.epoch_steps, self.seed = batch, epoch_steps, seed

    def train_dataloader(self) -> DataLoader:
        starts = RandomStarts(len(self.training), self.batch * self.epoch_steps, self.seed)
        return DataLoader(self.training, self.batch, sampler=starts)

    def val_dataloader(self) -> DataLoader:
        count = min(8 * self.batch, len(self.validation))
        starts = range(0, len(self.validation) // count * count, len(self.validation) // count)
        return DataLoader(self.validation, self.batch, sampler=starts)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.prompt)


def standard_library() -> bytes:
    """The standard library's modules in one string, in an order that does not depend on the file system."""
    root = Path(sysconfig.get_paths()["stdlib"])
    packages = [folder for folder in root.iterdir() if folder.is_dir() and folder.name not in SKIPPED]
    files = [*root.glob("*.py"), *(file for package in packages for file in package.rglob("*.py"))]
    files = [file for file in files if not SKIPPED.intersection(file.relative_to(root).parts)]
    files = [file for file in files if not file.name.startswith("_sysconfigdata")]  # written by each build of Python
    return b"\n".join(file.read_bytes() for file in sorted(files, key=Path.as_posix))


def read_history(folder: Path) -> dict[str, dict[int, float]]:
    """Step to loss for both losses, over a run and those that it resumed: each replaces what came after its start."""
    history: dict[str, dict[int, float]] = {"training_loss": {}, "validation_loss": {}}
    files = folder.glob("version_*/metrics.csv")  # a run that resumed one that was done has none
    for path in sorted(files, key=lambda path: int(path.parent.name.removeprefix("version_"))):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        start = min(int(row["step"]) for row in rows)
        for name, points in history.items():
            kept = {step: loss for step, loss in points.items() if step < start}
            history[name] = kept | {int(row["step"]): float(row[name]) for row in rows if row.get(name)}
    return history


def draw_history(history: dict[str, dict[int, float]], title: str, file: Path) -> None:
    """Writes the loss curves, in bits per byte, as a PNG."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, points), style in zip(history.items(), ("-", "o-"), strict=True):
        bits = [loss / math.log(2) for loss in points.values()]
        axes.plot(list(points), bits, style, label=name.replace("_", " "), linewidth=1.5, markersize=4)
    axes.set(xlabel="optimizer step", ylabel="loss in bits per byte", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="number of parameters")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--epochs", type=int, default=10, help="equal parts that end with a validation")
    parser.add_argument("--batch", type=int, help="sequences per step; the default depends on the size")
    parser.add_argument("--learning-rate", type=float, help="at its peak; the default depends on the size")
    parser.add_argument("--window", type=int, default=2, help="slots: chunks that are on the GPU at a time")
    parser.add_argument("--pin", type=int, default=0, help="chunks that stay on the GPU instead of streaming")
    parser.add_argument("--activations", choices=["keep", "checkpoint"], default="checkpoint")
    parser.add_argument("--precision", help="of the Trainer; by default bf16-mixed on a GPU, else 32-true")
    parser.add_argument("--text", type=Path, help="a file to learn instead of the standard library")
    parser.add_argument("--prompt", default="class ", help="how the generated sample begins")
    parser.add_argument("--sample-bytes", type=int, default=400, help="length of the generated sample")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for all results")
    parser.add_argument("--resume", help="a checkpoint to go on from, or 'last' for the newest one in --out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.steps % options.epochs:
        parser.error(f"--steps {options.steps} is not a multiple of --epochs {options.epochs}")
    if options.resume == "last":
        options.resume = str(options.out / "last.ckpt")
    return options


def build_trainer(options: argparse.Namespace) -> L.Trainer:
    """Everything but `strategy` is what any other Trainer would get."""
    checkpoints = ModelCheckpoint(
        options.out, "best", monitor="validation_loss", save_last=True, enable_version_counter=False
    )
    return L.Trainer(
        strategy=OffloadStrategy(
            window=options.window,
            pin=options.pin,
            activations=options.activations,
            resident_below=16 * SIZES[options.size].width,  # bytes: norms stay on the GPU, matrices stream
        ),
        precision=options.precision or ("bf16-mixed" if torch.cuda.is_available() else "32-true"),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        logger=CSVLogger(options.out, name="metrics"),
        callbacks=[checkpoints],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # slicing a text in memory needs none
    L.seed_everything(options.seed)
    size = SIZES[options.size]
    data = TextData(
        text=options.text.read_bytes() if options.text else standard_library(),
        prompt=options.prompt,
        context=size.context,
        batch=options.batch or size.batch,
        epoch_steps=options.steps // options.epochs,
        seed=options.seed,
    )
    model = LanguageModel(options.size, options.learning_rate or size.learning_rate, options.sample_bytes)
    trainer = build_trainer(options)

    if options.resume is None:
        trainer.validate(model, data, verbose=False)  # where the loss curve begins
    trainer.fit(model, data, ckpt_path=options.resume)
    sample = bytes(trainer.predict(model, data)[0][0].tolist()).decode(errors="replace")

    history = read_history(options.out / "metrics")
    draw_history(history, f"GPT {options.size}, weights streamed from RAM", options.out / "loss.png")
    (options.out / "sample.txt").write_text(sample, encoding="utf-8")
    bits = [loss / math.log(2) for loss in history["validation_loss"].values()]
    print(f"\n{sample}\n\nvalidation loss: {bits[0]:.2f} bits per byte at the start, {bits[-1]:.2f} at the end")
    if torch.cuda.is_available():
        print(f"GPU memory at its peak: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    print(f"loss.png, sample.txt and the checkpoints are in {options.out}")


if __name__ == "__main__":
    main()
