"""The norm of all gradients of a step, wherever they are: on the device as they appear, or published on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ramtorch_core.memory.weights import Weight


class Norms:
    """Norms of gradients that have left for the host, and were never published."""

    def __init__(self) -> None:
        self._norms: dict[nn.Parameter, Tensor] = {}

    def clear(self) -> None:
        """A new step begins."""
        self._norms.clear()

    def add(self, grads: Mapping[Weight, Tensor]) -> None:
        """Note the norms of these gradients, on their device, in the dtypes in which they would be published."""
        with torch.no_grad():
            for weight, grad in grads.items():
                self._norms[weight.parameter] = torch.linalg.vector_norm(grad.to(weight.parameter.dtype))

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> tuple[Tensor, float]:
        """Scale published gradients so that the norm of all is `max_norm` at the most.

        As `torch.nn.utils.clip_grad_norm_`, in the order of `parameters`; those that were noted here count too.

        Returns the norm of all before, and the factor, 1 at the most, with which those that were noted have to be
        multiplied.
        """
        with torch.no_grad():
            parameters = list(parameters)
            found = [self._norms.get(p) for p in parameters]
            for index, parameter in enumerate(parameters):
                if found[index] is None and parameter.grad is not None:
                    found[index] = torch.linalg.vector_norm(parameter.grad)
            norms = [norm.to("cpu", torch.float32) for norm in found if norm is not None]
            if not norms:
                return torch.tensor(0.0), 1.0
            total = torch.linalg.vector_norm(torch.stack(norms))
            scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale.to(parameter.grad.device))
            return total, float(scale)
