"""Nobody sees weights or state whose update is under way, or what stands for them in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ramtorch_core import Streamer
from ramtorch_lightning.microbatches import MicrobatchedStrategy

__all__ = ["WaitingStrategy"]


class WaitingStrategy(MicrobatchedStrategy):
    """Waits for updates before state is read or replaced, and before code that may look at weights."""

    _streamer: Streamer | None

    @override
    def _takes_gradients(self) -> bool:
        return self._streamer is not None and bool(self._streamer.updates.taken())

    def _wait(self) -> None:
        if self._streamer is not None:
            self._streamer.updates.wait()

    def _invalidate(self) -> None:
        self._wait()
        if self._streamer is not None:
            self._streamer.invalidate()

    # Hooks and callbacks that run now and then may write weights in ways that cannot be seen.
    on_train_start = on_validation_start = on_validation_end = on_test_start = on_predict_start = _invalidate

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's, but that hooks before and after it see parameters, not what stands for them in a backward."""
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        loss = precision.pre_backward(closure_loss, module)
        self.pre_backward(loss)
        precision.backward(loss, module, optimizer, *args, **kwargs)
        self.post_backward(loss)
        return precision.post_backward(loss, module)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._wait()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._wait()
        return super().optimizer_state(optimizer)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._wait()
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._wait()
        super().load_optimizer_state_dict(checkpoint)
