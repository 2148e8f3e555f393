"""Evaluating microbatches in a pipeline, except where a step computes gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ramtorch_core.errors import StageOrderError
from ramtorch_core.pipeline import PipelineRunner

__all__ = ["evaluate_pipelined", "evaluate_whole"]


class _GraphNeeded(Exception):
    """The next stage was entered with gradients enabled, which the Trainer had disabled."""


def evaluate_pipelined(
    runner: PipelineRunner, step: Callable[[Any], Any], inputs: Sequence[Any], number: int
) -> list[Any] | None:
    """The outputs of `step`, stage by stage; None where it enables gradients, because stages would end its graph."""
    hooks = [module.register_forward_pre_hook(_refuse_graph) for _, module in runner.stages.entries]
    try:
        return runner.evaluate(step, inputs, step=number)
    except _GraphNeeded:
        return None
    except StageOrderError as error:
        error.args = (f"{error}, or leave batches of evaluations whole: PipelineStrategy(evaluate='whole')",)
        raise
    finally:
        for hook in hooks:
            hook.remove()


def evaluate_whole(runner: PipelineRunner, step: Callable[[Any], Any], inputs: Sequence[Any]) -> list[Any]:
    """The outputs of `step`, one microbatch after the other, each with its graph whole."""
    with runner.transparent():
        return [step(each) for each in inputs]


def _refuse_graph(module: nn.Module, _args: Any) -> None:
    if torch.is_grad_enabled():
        raise _GraphNeeded
