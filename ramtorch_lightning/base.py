"""What both strategies share: models are built, saved and restored on the host, and names are registered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.optim import Optimizer
from typing_extensions import override

from ramtorch_lightning._lightning import CheckpointIO, SingleDeviceStrategy, pl
from ramtorch_lightning.checkpoint import LocalCheckpointIO
from ramtorch_lightning.state import in_order, on_host

__all__ = ["HostStrategy"]


class HostStrategy(SingleDeviceStrategy):
    """A strategy whose checkpoints are plain CPU tensors, and whose models never have to fit on the device."""

    strategy_name = ""
    _alias: type[HostStrategy]  # what LightningCLI finds by that name

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        if model._trainer is not None:
            _let_see_threads(model._trainer.profiler)  # type: ignore[attr-defined]  # which begins with the next hook

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models are built on the host, never on the device."""
        with super().tensor_init_context(empty_init=empty_init), torch.device("cpu"):
            yield

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        io = self._checkpoint_io
        if io is None:
            io = self._checkpoint_io = LocalCheckpointIO()
        elif isinstance(getattr(type(io), "checkpoint_io", None), property):  # a wrapper; it keeps the one it has
            io.checkpoint_io = LocalCheckpointIO()  # type: ignore[attr-defined]
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return on_host(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return in_order(on_host(super().optimizer_state(optimizer)))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)  # torch puts each state where its parameter is

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        description = (cls.__doc__ or "").partition("\n")[0]
        # The Trainer lower-cases names. With those of the class LightningCLI takes the class without arguments.
        kind = cls.__name__.lower()
        for name in (cls.strategy_name, kind, f"ramtorch_lightning.{kind}"):
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=description)
        _let_command_lines_name(cls)


def _let_command_lines_name(strategy: type[HostStrategy]) -> None:
    """Let LightningCLI take the short name together with arguments: `--trainer.strategy=offload ...window=3`.

    With arguments it needs a class. It looks for one of that name among the subclasses of Lightning's Strategy, and
    imports what that is called: so there is such a subclass, and what is imported is the strategy itself.
    """
    if "_alias" not in vars(strategy):
        name = strategy.strategy_name
        strategy._alias = type(name, (strategy,), {"__module__": __name__, "__doc__": strategy.__doc__})
        globals()[name] = strategy


def _let_see_threads(profiler: object) -> None:
    """Let torch's profiler record microbatches and updates, which run in threads of their own.

    By default it records the thread that starts it. An `experimental_config` of the user's own stays.
    """
    if isinstance(profiler, pl.profilers.PyTorchProfiler):
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        profiler._profiler_kwargs.setdefault("experimental_config", everywhere)
