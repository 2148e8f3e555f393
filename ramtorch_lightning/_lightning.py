"""Whichever Lightning is there: `lightning`, or the stand-alone `pytorch_lightning`. Their classes do not mix.

With both installed, `lightning` is taken unless only `pytorch_lightning` has been imported so far.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or (
    find_spec("lightning") is not None and not ("pytorch_lightning" in sys.modules and "lightning" not in sys.modules)
):
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
    from lightning.pytorch.utilities.model_helpers import is_overridden
else:
    import pytorch_lightning as pl
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning_fabric.utilities.cloud_io import get_filesystem
    from pytorch_lightning.accelerators import Accelerator
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.strategies import SingleDeviceStrategy, StrategyRegistry
    from pytorch_lightning.trainer.states import TrainerFn
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
    from pytorch_lightning.utilities.model_helpers import is_overridden

__all__ = [
    "Accelerator",
    "CheckpointIO",
    "Precision",
    "SingleDeviceStrategy",
    "StrategyRegistry",
    "TorchCheckpointIO",
    "TrainerFn",
    "get_filesystem",
    "is_overridden",
    "pl",
    "rank_zero_info",
    "rank_zero_warn",
]
