"""AdamW on the GPU for parameters that live in host memory: they and their state stream through it, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ramtorch_core.memory.device import Device
from ramtorch_core.memory.homes import Homes
from ramtorch_core.memory.weights import as_vector, dense_stride
from ramtorch_core.optim.adamw import check_parameters, check_rates
from ramtorch_core.optim.pieces import Route, Row, check_piece_bytes, cut, fused_options

SLOTS = 2
"""One is loaded while the other is updated and stored."""


class OffloadAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` on a GPU, for parameters and state that stay in host memory.

    `step` copies master, moments and gradient of a piece to the GPU, updates them there with torch's fused kernel, and
    copies master and moments back. Two pieces are on the way at a time, on streams of their own, and when `step`
    returns, everything is in host memory. Results are those of the fused AdamW on that device, bit for bit.

    Per float32 parameter 16 bytes go in and 12 come back. Where the host has many cores and fast memory
    `torch.optim.AdamW(fused=True)` on host parameters is faster; this one is for hosts with few.

    Parameters may be anywhere. Those on the CPU stream; others are updated where they are. At the first step masters
    that are not page-locked are moved to memory that is: `parameter.data` is then another tensor, with the same values.
    Moments are made there. A gradient that is not page-locked is copied to memory that is on its way.

    Memory on the GPU: `SLOTS` times the tensors of a piece (four, with `amsgrad` five), `piece_bytes` each. In host
    memory: the page-locked state, and `SLOTS * piece_bytes` for gradients.

    `state_dict` is that of `torch.optim.AdamW`, and either loads the other's. The class does not divide its step, so
    with streamed weights it steps on published gradients, after backward.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for `torch.optim.AdamW`.
        device: where updates are computed. "cpu" computes on copies in host memory, for tests.
        piece_bytes: of each tensor of a piece; a multiple of 256.

    Raises:
        ConfigurationError: the device does not exist.
        ValueError: an option out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        device: torch.device | str | int = "cuda",
        piece_bytes: int = 1 << 24,
    ) -> None:
        check_parameters(params)
        check_rates({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        check_piece_bytes(piece_bytes)
        self._device, self._piece_bytes = Device(device), piece_bytes
        self._homes = Homes(self._device)
        self._route: Route | None = None
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True)
        self._step_supports_amp_scaling = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_where": (self._device.torch, self._piece_bytes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        where = state.pop("_where", None)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if where is not None:
            self._device, self._piece_bytes = Device(where[0]), where[1]
            self._homes, self._route, self._step_supports_amp_scaling = Homes(self._device), None, False

    def device_bytes(self) -> int:
        """Bytes of memory on the device that pieces take; 0 before the first step."""
        return 0 if self._route is None else self._route.device_bytes()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns what `closure` returns.

        Raises:
            TypeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors = 2 + max(len(_state_names(group)) for group in self.param_groups)
        if self._route is None or self._route.tensors != tensors:
            self._route = Route(self._device, tensors, self._piece_bytes, SLOTS)
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                if p.grad.layout != torch.strided:
                    raise TypeError(f"OffloadAdamW needs dense gradients, got {p.grad.layout}: use SparseAdam")
            self._update_in_place(group, [p for p in trained if p.device.type != "cpu"])
            rows = [self._row(group, p) for p in trained if p.device.type == "cpu"]
            for dtype in dict.fromkeys(row.tensors[0].dtype for row in rows):
                for piece in cut([row for row in rows if row.tensors[0].dtype == dtype], self._piece_bytes):
                    self._route.send(piece, fused_options(group))
        self._route.finish()
        return loss

    def _row(self, group: dict[str, Any], parameter: Tensor) -> Row:
        """Count a step of a parameter in host memory; its master and state are page-locked afterwards."""
        state, stride = self.state[parameter], dense_stride(parameter)
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        state["step"] += 1
        for name in _state_names(group):
            state[name] = self._homes.bring(parameter, name, state.get(name), stride)
        parameter.data = self._homes.bring(parameter, "master", parameter.detach(), stride)
        grad = parameter.grad
        assert grad is not None
        if grad.stride() != stride or grad.dtype != parameter.dtype:
            grad = torch.empty_strided(parameter.size(), stride, dtype=parameter.dtype).copy_(grad)
        tensors = (parameter.detach(), *(state[name] for name in _state_names(group)))
        return Row(tuple(map(as_vector, tensors)), float(state["step"]), incoming=as_vector(grad))

    def _update_in_place(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Step parameters that are on a device."""
        names = _state_names(group)
        for p in parameters:
            state = self.state[p]
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=p.device))
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        if parameters:
            lists = [[self.state[p][name] for p in parameters] for name in names]
            grads, steps = (
                [p.grad for p in parameters if p.grad is not None],
                [self.state[p]["step"] for p in parameters],
            )
            maximum = lists[2] if group["amsgrad"] else []
            adamw(list(parameters), grads, lists[0], lists[1], maximum, steps, fused=True, **fused_options(group))


def _state_names(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
