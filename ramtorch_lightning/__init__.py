"""Lightning strategies that train and run models larger than GPU memory.

Importing this package registers the strategies: `Trainer(strategy="offload")`.
"""

from ramtorch_lightning._lightning import StrategyRegistry
from ramtorch_lightning.callbacks import OffloadMonitor, PipelineMonitor
from ramtorch_lightning.checkpoint import LocalCheckpointIO
from ramtorch_lightning.offload import OffloadStrategy
from ramtorch_lightning.pipeline import PipelineStrategy
from ramtorch_lightning.traces import TraceCallback

__all__ = [
    "LocalCheckpointIO",
    "OffloadMonitor",
    "OffloadStrategy",
    "PipelineMonitor",
    "PipelineStrategy",
    "TraceCallback",
]

OffloadStrategy.register_strategies(StrategyRegistry)
PipelineStrategy.register_strategies(StrategyRegistry)
