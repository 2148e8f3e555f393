"""The same Trainer with each of the two strategies and with none: what has to agree, and how closely."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import Classifier, Run, Watched, fit
from stream_cases import assert_same
from torch.utils._pytree import tree_map_only

from ramtorch_lightning import PipelineStrategy

ROUNDING = 2e-5
"""A pipeline adds up the losses and gradients of microbatches, a plain Trainer those of rows."""

either = pytest.mark.parametrize("name", ["offload", "pipeline"])
"""For tests that take the `name` of a strategy."""


class Descent(Classifier):
    """Trained by an optimizer that does not blow up differences of rounding, as AdamW does."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)


def strategy_of(name: str) -> Any:
    """A strategy that streams every tensor, or one with two stages and two microbatches."""
    return Watched() if name == "offload" else PipelineStrategy(devices=["cpu", "cpu"], n_microbatches=2)


def assert_agree(name: str, found: Any, expected: Any) -> None:
    """The same bits when streamed, and the same up to rounding in a pipeline."""
    as_tensors = [tree_map_only(float, torch.tensor, side) for side in (found, expected)]
    assert_same(*as_tensors, tolerance=0.0 if name == "offload" else ROUNDING)


def outcome(run: Run) -> dict[str, Any]:
    """What a fit with any strategy has in common with the plain one."""
    kept = {key: run.record[key] for key in ("weights", "callback metrics", "logged")}
    return kept | {"steps": run.trainer.global_step, "epochs": run.trainer.current_epoch}


def compare(name: str, build: Callable[[], Any] = Descent, **options: Any) -> Run:
    """Weights, metrics, logs and counts of a fit under the strategy are those of the plain one."""
    found = fit(build, strategy_of(name), **options)
    assert_agree(name, outcome(found), outcome(fit(build, **options)))
    return found
