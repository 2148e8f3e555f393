"""Pipelines over several devices in one process: the public engine without Lightning."""

from ramtorch_core.engine.pipeline.executor import StepResult
from ramtorch_core.engine.pipeline.runner import (
    PipelineRunner,
    ScheduleSpec,
    StageSpec,
    format_stage_rows,
    plan_schedule,
    resolve_devices,
)
from ramtorch_core.engine.pipeline.split import batch_size, join, sizes_of, split
from ramtorch_core.engine.pipeline.stages import StageRow

__all__ = [
    "PipelineRunner",
    "ScheduleSpec",
    "StageRow",
    "StageSpec",
    "StepResult",
    "batch_size",
    "format_stage_rows",
    "join",
    "plan_schedule",
    "resolve_devices",
    "sizes_of",
    "split",
]
