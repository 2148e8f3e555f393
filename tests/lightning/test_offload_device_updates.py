"""`OffloadStrategy(updates=...)`: the Trainer's results, its checkpoints, and what is shown and logged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from device_updates_cases import small_pieces
from lightning.pytorch.callbacks import ModelCheckpoint
from offload_cases import Classifier, Run, Watched, fit, loader, make_trainer
from offload_updates_cases import with_optimizer
from stream_cases import assert_same

from ramtorch_core import ConfigurationError
from ramtorch_lightning import OffloadStrategy

__all__ = ["small_pieces"]

Fused = with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True))


class Placed(Watched):
    """Keeps how many updates were made where."""

    on_host = on_device = 0

    def _detach(self) -> None:
        if self._streamer is not None:
            self.on_host += self.streamer.updates.updater.updated
            self.on_device += self.streamer.updates.on_device.updated
        super()._detach()


CASES: list[dict[str, Any]] = [
    {},
    {"precision": "bf16-mixed"},
    {"accumulate_grad_batches": 3},
    {"accumulate_grad_batches": 3, "precision": "bf16-mixed", "max_epochs": 3},
]


def run(updates: Any, **options: Any) -> Run:
    """Trains as the plain Trainer does."""
    expected = fit(Fused, **options)
    found = fit(Fused, Placed(updates=updates), **options)
    assert_same(found.record, expected.record)
    return found


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("updates", [0.5, 1.0])
def test_chunks_that_are_updated_on_the_device_train_as_in_the_plain_trainer(
    updates: float, options: dict[str, Any]
) -> None:
    strategy = run(updates, **options).strategy
    assert strategy.on_device > 0
    assert (strategy.on_host > 0) == (updates < 1.0)


def test_clipping_leaves_every_update_on_the_host() -> None:
    strategy = run(1.0, gradient_clip_val=0.05).strategy
    assert strategy.on_device == 0
    assert strategy.on_host > 0


def test_microbatches_train_as_accumulated_batches() -> None:
    expected = fit(Fused, accumulate_grad_batches=2, train=lambda: loader(16, 2))
    found = fit(Fused, Placed(updates=1.0, n_microbatches=2), train=lambda: loader(16, 4))
    assert_same(found.record["weights"], expected.record["weights"])
    assert found.strategy.on_device > 0


def test_the_table_and_the_log_say_what_is_updated_where(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        found = fit(Fused, Placed(updates=["net.head"]))
    assert [row.name for row in found.strategy.tables[-1] if "updated on the device" in row.reason] == ["net.head"]
    (message,) = [text for text in caplog.messages if "chunks are updated while backward goes on" in text]
    assert "Adam and AdamW update 1 of " in message
    assert "(net.head, " in message


def test_a_checkpoint_resumes_with_the_same_bits_wherever_updates_are_made(tmp_path: Path) -> None:
    def train(name: str, updates: Any, resume: Path | None = None) -> dict[str, Any]:
        torch.manual_seed(1)
        saver = ModelCheckpoint(tmp_path, filename=name, every_n_train_steps=4 if resume is None else 8)
        strategy = "auto" if updates is None else Placed(updates=updates)
        epochs = 1 if resume is None else 2
        trainer = make_trainer(strategy, callbacks=[saver], enable_checkpointing=True, max_epochs=epochs)
        trainer.fit(Fused(), loader(), ckpt_path=resume)
        found = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
        return {"weights": found["state_dict"], "optimizers": found["optimizer_states"]}

    assert_same(train("device", 0.5), train("plain", None))
    expected = train("plain again", None, tmp_path / "plain.ckpt")
    assert_same(train("device again", 1.0, tmp_path / "plain.ckpt"), expected)
    assert_same(train("back", None, tmp_path / "device.ckpt"), expected)


@pytest.mark.parametrize("updates", ["gpu", 2.0])
def test_what_cannot_be_is_refused_at_once(updates: Any) -> None:
    with pytest.raises(ConfigurationError, match="updates="):
        OffloadStrategy(updates=updates)


def test_a_name_that_no_chunk_has_is_refused_when_the_trainer_is_set_up() -> None:
    with pytest.raises(ConfigurationError, match="updates: no chunk is named 'tail'"):
        fit(Classifier, Watched(updates=["tail"]))
