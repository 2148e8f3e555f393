"""Stream and pipeline models larger than GPU memory; usable without Lightning.

`attach` streams the weights of any module tree, `OffloadModel` those of a list of chunks.
"""

from ramtorch_core.engine.activations import offload_checkpoint
from ramtorch_core.engine.census import ChunkRow, format_rows
from ramtorch_core.engine.chunks import ChunkSpec, find_chunks
from ramtorch_core.engine.microbatches import MicrobatchRunner
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.update_places import UpdateSpec
from ramtorch_core.errors import ConfigurationError, HostMemoryError, PlanError, RamtorchError, WindowError
from ramtorch_core.offload import OffloadModel, OffloadResult, attach
from ramtorch_core.optim.adamw import AdamW
from ramtorch_core.optim.offload_adamw import OffloadAdamW
from ramtorch_core.optim.steps import why_whole
from ramtorch_core.pipeline import Pipeline, PipelineModel, PipelineResult

__all__ = [
    "AdamW",
    "ChunkRow",
    "ChunkSpec",
    "ConfigurationError",
    "HostMemoryError",
    "MicrobatchRunner",
    "OffloadAdamW",
    "OffloadModel",
    "OffloadResult",
    "Pipeline",
    "PipelineModel",
    "PipelineResult",
    "PlanError",
    "RamtorchError",
    "Streamer",
    "UpdateSpec",
    "WindowError",
    "attach",
    "find_chunks",
    "format_rows",
    "offload_checkpoint",
    "why_whole",
]
