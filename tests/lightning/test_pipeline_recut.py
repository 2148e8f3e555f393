"""`PipelineStrategy` with models that run in another order than they are registered in."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning_pipeline_cases import Model, assert_same_weights, fit, pipeline
from torch import Tensor

from ramtorch_core.errors import StageOrderError
from ramtorch_lightning import PipelineStrategy


class Turned(Model):
    """Its second half runs first, and a part of its last block runs before that; evaluation may differ."""

    evaluation: Sequence[int] = (4, 5, 6, 7, 0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers[3][0](x)
        for index in (4, 5, 6, 7, 0, 1, 2, 3) if self.training else self.evaluation:
            x = self.layers[index](x)
        return x * self.scale


class Otherwise(Turned):
    evaluation = (4, 6, 5, 7, 0, 2, 1, 3)


class Again(Turned):
    evaluation = (*range(8), *range(8))


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("kind", [Turned, Otherwise])
@pytest.mark.parametrize("options", [{}, {"schedule": "zbv", "devices": ["cpu", "cpu"]}, {"schedule": "auto"}])
def test_training_with_validation_equals_one_device(kind: Any, options: dict[str, Any], sanity: int) -> None:
    """The sanity check comes first, and stages are cut in order of registration then."""
    torch.manual_seed(0)
    model = kind()
    reference = copy.deepcopy(model)
    expected = fit(reference, "auto", 4, accumulate_grad_batches=4, num_sanity_val_steps=sanity)
    trainer = fit(model, pipeline(**options), 16, num_sanity_val_steps=sanity)
    assert_same_weights(model, reference)
    for name in ("loss_epoch", "val"):
        torch.testing.assert_close(trainer.callback_metrics[name], expected.callback_metrics[name])


def test_a_validation_that_runs_the_model_twice_is_refused_with_both_remedies_and_works_whole() -> None:
    for sanity in (0, 2):
        with pytest.raises(
            StageOrderError, match=r"once per forward.*stages=\[.*PipelineStrategy\(evaluate='whole'\)$"
        ):
            fit(Again(), pipeline(), 16, num_sanity_val_steps=sanity)
    fit(Again(), PipelineStrategy(devices=["cpu"] * 4, evaluate="whole"), 16)
