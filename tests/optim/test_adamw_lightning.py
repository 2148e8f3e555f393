"""The AdamW with less memory under the Trainer: streamed, overlapped, saved and resumed, bit for bit."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import Classifier, Watched, compare_fits, fit, loader, make_trainer
from stream_cases import assert_same

from ramtorch_core import AdamW

COMBINATIONS = [("32-true", torch.bfloat16), ("bf16-mixed", torch.bfloat16), ("bf16-true", torch.float32)]
COMBINATIONS += [("bf16-true", torch.bfloat16)]


def classifier(moments: torch.dtype) -> Any:
    class Light(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters(), lr=self.lr, moments=moments, seed=4)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]

    return Light


@pytest.mark.parametrize(("precision", "moments"), COMBINATIONS)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05}], ids=str)
def test_a_streamed_fit_gives_the_bits_of_the_plain_one(precision: Any, moments: Any, options: dict[str, Any]) -> None:
    compare_fits(classifier(moments), precision=precision, **options)


@pytest.mark.parametrize(("precision", "moments"), COMBINATIONS)
@pytest.mark.parametrize("streamed", list(itertools.product([False, True], repeat=2)), ids=str)
def test_a_resumed_fit_continues_with_the_same_bits(
    precision: Any, moments: Any, streamed: tuple[bool, bool], tmp_path: Path
) -> None:
    def strategy(index: int) -> Any:
        return Watched(kernel="auto") if streamed[index] else "auto"

    build = classifier(moments)
    expected = fit(build, max_epochs=3, precision=precision)
    first = fit(build, strategy(0), max_epochs=2, precision=precision)
    first.trainer.save_checkpoint(tmp_path / "saved.ckpt")
    second = build()
    trainer = make_trainer(strategy(1), max_epochs=3, precision=precision)
    trainer.fit(second, loader(), loader(8, seed=6), ckpt_path=tmp_path / "saved.ckpt")
    assert_same(second.state_dict(), expected.record["weights"])
    assert_same(trainer.optimizers[0].state_dict(), expected.record["optimizers"][0])
    states = trainer.optimizers[0].state_dict()["state"].values()
    assert {state["exp_avg"].dtype for state in states} == {moments}
