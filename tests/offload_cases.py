"""Small LightningModules, and the comparison that most tests of `OffloadStrategy` make: the same Trainer without it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from stream_cases import assert_same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ramtorch_core import ChunkRow
from ramtorch_lightning import OffloadStrategy

WIDTH = 8
CLASSES = 4


class Watched(OffloadStrategy):
    """Streams even tiny tensors, fills slots with NaN before each copy, and keeps its figures past the end of a run.

    Updates run the optimizer's own code, as they do in the plain Trainer to which it is compared.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"chunks": "leaves", "resident_below": 0, "kernel": "torch", **options})
        self._options["poison"] = True
        self.copied_bytes = 0
        self.conservative: list[bool] = []
        self.tables: list[list[ChunkRow]] = []

    def _detach(self) -> None:
        if self._streamer is not None:
            if self._streamer._inventory.built:
                self.copied_bytes += self.streamer.window.copied_bytes
            self.conservative.append(self.streamer.conservative)
            self.tables.append(self.chunk_table())
        super()._detach()

    @property
    def streamed(self) -> set[str]:
        """Names of the chunks that streamed in the last run."""
        return {row.name for row in self.tables[-1] if row.placement == "streamed"}


class Metrics(Logger):
    """Keeps what is logged. A logger and no callback, since callbacks make the strategy more careful with `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Net(nn.Module):
    """Blocks of every common kind of layer; classifies vectors."""

    def __init__(self, depth: int = 3, dropout: float = 0.0, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                norm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(2 * WIDTH, WIDTH),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


class Classifier(pl.LightningModule):
    """Keeps each loss and output in `seen`, and logs on steps and epochs."""

    def __init__(self, net: nn.Module | None = None, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = Net() if net is None else net
        self.lr = lr
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.seen.append(loss.detach().clone())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.seen.append(loss.clone())
        self.log("val", loss)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def dataset(rows: int = 16, seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(rows, WIDTH, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)
    )


def loader(rows: int = 16, batch: int = 4, seed: int = 5) -> Any:
    return DataLoader(dataset(rows, seed), batch)


def make_trainer(strategy: Any = "auto", **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, **(defaults | options))


@dataclass
class Run:
    """What is compared, and the objects for further checks."""

    trainer: pl.Trainer
    model: Any
    strategy: Any
    record: dict[str, Any] = field(default_factory=dict)


def state_of(trainer: pl.Trainer, model: Any) -> dict[str, Any]:
    return {
        "seen": getattr(model, "seen", None),
        "callback metrics": dict(trainer.callback_metrics),
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "random": torch.get_rng_state(),
    }


def fit(build: Callable[[], Any], strategy: Any = "auto", plugins: Callable[[], Any] = list, **options: Any) -> Run:
    """One `Trainer.fit`, always from the same seed; `build` and `plugins` are called anew.

    Callbacks are given as a function too, since they have state: `callbacks=lambda: [...]`.
    """
    torch.manual_seed(1)
    callbacks = options.pop("callbacks", list)()
    train, validation = options.pop("train", loader)(), options.pop("validation", lambda: loader(8, seed=6))()
    model, logger = build(), Metrics()
    trainer = make_trainer(strategy, plugins=plugins(), callbacks=callbacks, logger=logger, **options)
    torch.manual_seed(2)
    trainer.fit(model, train, validation)
    return Run(trainer, model, strategy, state_of(trainer, model) | {"logged": logger.rows})


def compare_fits(build: Callable[[], Any], *, strategy: dict[str, Any] | None = None, **options: Any) -> Run:
    """Losses, logs, weights, optimizer state and random numbers of a streamed fit equal the plain one's."""
    expected = fit(build, **options)
    found = fit(build, Watched(**(strategy or {})), **options)
    assert_same(found.record, expected.record)
    assert found.strategy.copied_bytes > 0, "nothing streamed"
    before = build_weights(build)
    changed = [name for name, w in found.record["weights"].items() if name not in before or not equal(w, before[name])]
    assert changed, "nothing was trained"
    return found


def build_weights(build: Callable[[], Any]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    weights: dict[str, Tensor] = build().state_dict()
    return weights


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
