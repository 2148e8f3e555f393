"""Offline simulators: a plan, its costs and a virtual clock give a timeline. No torch, no threads, no real clock.

clock.py       tasks on resources that share capacities        timeline.py   spans, gaps and their causes, peaks
costs.py       what chunks cost, what a machine can do         lane.py       one GPU: transfers, visits, gradients
knobs.py       what is chosen                                  pipeline.py   a schedule's table, also streamed
steps.py, streaming.py    steps on one GPU
choose.py      the fastest knobs that fit                      chart.py      tables and charts
options.py, *_flags.py, *_command.py    command lines
"""

from ramtorch_core.simulate.choose import Choice, Offer, choose
from ramtorch_core.simulate.costs import ChunkCost, Machine, Recipe, StepCost, chunk_cost
from ramtorch_core.simulate.knobs import Accumulate, Optimizer, Order, StreamingPlan
from ramtorch_core.simulate.pipeline import DeviceResult, PipelinePlan, PipelineResult, simulate_pipeline
from ramtorch_core.simulate.streaming import StreamingResult, simulate_streaming
from ramtorch_core.simulate.timeline import Cause, Gap, Span, Timeline

__all__ = [
    "Accumulate",
    "Cause",
    "Choice",
    "ChunkCost",
    "DeviceResult",
    "Gap",
    "Machine",
    "Offer",
    "Optimizer",
    "Order",
    "PipelinePlan",
    "PipelineResult",
    "Recipe",
    "Span",
    "StepCost",
    "StreamingPlan",
    "StreamingResult",
    "Timeline",
    "choose",
    "chunk_cost",
    "simulate_pipeline",
    "simulate_streaming",
]
