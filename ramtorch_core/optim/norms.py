"""The norm of all gradients of a step, wherever they are: on the device as they appear, or published on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ramtorch_core.errors import RamtorchError
from ramtorch_core.memory.weights import Weight


class Norms:
    """Norms of gradients that have left for the host, and were never published."""

    def __init__(self) -> None:
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._over = False  # gradients that were not scaled, or scaled once, are being used

    def clear(self) -> None:
        """The step is over."""
        self._norms.clear()
        self._over = False

    def note(self, grads: Mapping[Weight, Tensor], held: bool) -> None:
        """Note the norms of these gradients, on their device, in the dtypes in which they would be published.

        Args:
            held: they can be scaled later, so `clip` may be called.
        """
        if not held:
            self._over = True
            return
        with torch.no_grad():
            for weight, grad in grads.items():
                self._norms[weight.parameter] = torch.linalg.vector_norm(grad.to(weight.parameter.dtype))

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> tuple[Tensor, float]:
        """Scale published gradients so that the norm of all is `max_norm` at the most.

        As `torch.nn.utils.clip_grad_norm_`, in the order of `parameters`; those that were noted here count too.

        Returns the norm of all before, and the factor, 1 at the most, with which those that were noted have to be
        multiplied.

        Raises:
            RamtorchError: gradients that were noted cannot be scaled any more, or are of other parameters.
        """
        parameters = list(parameters)
        if self._over:
            raise RamtorchError(
                "gradients cannot be clipped: they are being used already. Pass hold=True to `overlap`, and clip once, "
                "before the optimizer's step."
            )
        others = len(self._norms.keys() - set(parameters))
        if others:
            raise RamtorchError(
                f"gradients are held of {others} parameters besides the {len(parameters)} to be clipped: clip all "
                f"parameters of the optimizers in one call"
            )
        self._over = bool(self._norms)
        with torch.no_grad():
            found = [self._norms.get(p) for p in parameters]
            for index, parameter in enumerate(parameters):
                if found[index] is None and parameter.grad is not None:
                    found[index] = torch.linalg.vector_norm(parameter.grad)
            norms = _on_host([norm for norm in found if norm is not None])
            if not norms:
                return torch.tensor(0.0), 1.0
            total = torch.linalg.vector_norm(torch.stack(norms))
            scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
            scales = {scale.device: scale}
            for parameter in parameters:
                if (grad := parameter.grad) is not None:
                    if grad.device not in scales:
                        scales[grad.device] = scale.to(grad.device)
                    grad.mul_(scales[grad.device])
            return total, float(scale)


def _on_host(norms: Sequence[Tensor]) -> list[Tensor]:
    """These numbers in host memory; those of one device and dtype come in one copy, for which the host waits."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, norm in enumerate(norms):
        alike.setdefault((norm.device, norm.dtype), []).append(index)
    found = list(norms)
    for indices in alike.values():
        for index, norm in zip(indices, torch.stack([norms[i] for i in indices]).cpu(), strict=True):
            found[index] = norm
    return found
