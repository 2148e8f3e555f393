"""AdamW whose moments, and masters if they are in bfloat16, are rounded stochastically when they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ramtorch_core.errors import ConfigurationError, check_choice, check_number, shown
from ramtorch_core.memory.weights import as_vector, dense_stride
from ramtorch_core.optim.compiled import AdamWeight, adam_kernel, adam_rates, read_number, takes
from ramtorch_core.optim.rounding import derive_key, random_bits, store

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements that torch's operations update at once. Results do not depend on it; it bounds what they take on top, about
40 bytes for each, and a block on the CPU stays in the cache."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DTYPES = (torch.float32, torch.bfloat16)


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with less memory: moments, and masters too, may be bfloat16.

    Arithmetic is in float32, the operations are those of `torch.optim.AdamW(fused=True)`. What is stored in bfloat16 is
    rounded stochastically, so that changes far below its precision are kept on average. Rounded to nearest, a second
    moment would not decay with `beta2=0.999`, and a weight would not move at rates of 1e-4. With everything in float32
    results are those of `torch.optim.AdamW(fused=True)`, bit for bit.

    Bytes per parameter, without the gradient, and what a step reads and writes when gradients arrive in bfloat16:

    | masters | moments | master | moments | shadow in bfloat16 | together | traffic of a step |
    | --- | --- | --- | --- | --- | --- | --- |
    | float32 | float32 | 4 | 8 | 2 | 14 | 28 |
    | float32 | bfloat16 | 4 | 4 | 2 | 10 | 20 |
    | bfloat16 | float32 | 2 | 8 | 0 (the master) | 10 | 22 |
    | bfloat16 | bfloat16 | 2 | 4 | 0 (the master) | 6 | 14 |

    The random bits depend on `seed`, the position of the parameter among all of the optimizer's, the number of the step
    and the index of the element, in the parameter's memory order. So results are the same bits however updates are
    divided among blocks and threads, overlapped with backward or not, and after a resume: `state_dict` holds all of it.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for `torch.optim.AdamW`. Parameters are float32 or
            bfloat16, on any device; their dtype is that of their masters.
        moments: torch.float32 or torch.bfloat16.
        seed: of the random bits.
        kernel: "auto" updates parameters on the CPU with the compiled kernel where there is one, "torch" with torch's
            operations. Both give the same bits.

    These are options of parameter groups, so they may differ between groups. As always, `load_state_dict` brings those
    that were saved; moments that were saved in float32, by `torch.optim.AdamW` for instance, are rounded to nearest
    once if the group's are bfloat16.

    Raises:
        TypeError: a parameter of another dtype.
        ValueError: an option out of range.
    """

    update_granularity = "element"

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
        moments: torch.dtype = torch.float32,
        seed: int = 0,
        kernel: Literal["auto", "torch"] = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "moments": moments,
            "seed": seed,
            "kernel": kernel,
        }
        check_parameters(params)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options of its own.

        Raises:
            TypeError: a parameter of another dtype than float32 and bfloat16.
            ValueError: an option out of range.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key in ("amsgrad", "maximize", "moments", "seed", "kernel"):
                group.setdefault(key, self.defaults[key])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or that of `torch.optim.AdamW`.

        (torch would bring moments to the dtype of their parameters.)
        """
        indices: list[int] = []
        moments: dict[int, dict[str, Tensor]] = {}

        def take_moments(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            indices.extend(index for group in given["param_groups"] for index in group["params"])
            rest = {}
            for index, state in given["state"].items():
                moments[index] = {key: value for key, value in state.items() if key in (*_MOMENTS, "max_exp_avg_sq")}
                rest[index] = {key: value for key, value in state.items() if key not in moments[index]}
            return {**given, "state": rest}

        handle = self.register_load_state_dict_pre_hook(take_moments)  # after any others
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        owners = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for index, (parameter, group) in zip(indices, owners, strict=True):
            for key, value in moments.get(index, {}).items():
                self.state[parameter][key] = value.to(parameter.device, group["moments"])
                self.state[parameter]["step"] = torch.tensor(float(self.state[parameter]["step"]))

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
        updates: dict[Tensor, AdamWeight] = {}
        position = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self.prepare(parameter, parameter.grad, position=position, options=group)
                    updates[parameter] = update
                position += 1
        fast = [update for update in updates.values() if suits_kernel(update)]
        kernel = adam_kernel() if fast else None
        if kernel is not None:
            kernel(fast, torch.get_num_threads())
        for parameter, update in updates.items():
            if kernel is None or not suits_kernel(update):
                update_in_torch(update)
            self.state[parameter]["step"] += 1
            torch.autograd.graph.increment_version(parameter)
        return loss

    def prepare(
        self,
        parameter: Tensor,
        grad: Tensor,
        *,
        position: int,
        options: Mapping[str, Any],
        grad_scale: float = 1.0,
        shadow: Tensor | None = None,
    ) -> AdamWeight:
        """The next update of `parameter`, whose state is made if need be. `state["step"]` is left as it is.

        Args:
            grad: of the parameter's size, or flat in its memory order (see `dense_stride`).
            position: of the parameter among all of the optimizer's.
            options: of its group, as they shall be in this step.
            grad_scale: the gradient is multiplied with it, in the parameter's dtype.
            shadow: is to hold the new value, to nearest, in its own dtype; laid out as the parameter.
        """
        if parameter.dtype not in _DTYPES or grad.layout != torch.strided:
            raise TypeError(_refusal(parameter.dtype, grad.layout))
        size, stride = parameter.size(), dense_stride(parameter)
        if grad.size() == size and grad.stride() != stride:
            grad = torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for key in (*_MOMENTS, "max_exp_avg_sq") if options["amsgrad"] else _MOMENTS:
            known = state.get(key)
            if known is None or known.stride() != stride or known.dtype != options["moments"]:
                moment = torch.empty_strided(size, stride, dtype=options["moments"], device=parameter.device)
                state[key] = moment.zero_() if known is None else moment.copy_(known)
        step = int(read_number(state["step"])) + 1
        return AdamWeight(
            parameter.detach(),
            state["exp_avg"],
            state["exp_avg_sq"],
            grad,
            shadow,
            step=step,
            **adam_rates(options),
            decoupled=True,
            grad_scale=-grad_scale if options["maximize"] else grad_scale,
            key=derive_key(options["seed"], position, step),
            max_exp_avg_sq=state["max_exp_avg_sq"] if options["amsgrad"] else None,
            compiled=options["kernel"] == "auto",
        )


def suits_kernel(update: AdamWeight) -> bool:
    """Whether the compiled kernel does this update."""
    master, shadow = update.master, None if update.shadow is None else update.shadow.dtype
    return (
        update.compiled
        and master.device.type == "cpu"
        and update.max_exp_avg_sq is None
        and master.stride() == update.exp_avg.stride()
        and takes(update.grad.dtype, shadow, master=master.dtype, moments=update.exp_avg.dtype)
    )


def update_in_torch(update: AdamWeight) -> None:
    """Do it with torch's operations, block by block: widened, updated by torch's fused kernel, and rounded.

    The bits are those of the compiled kernel; on another device, those of torch's fused kernel there.
    """
    master, device = update.master, update.master.device
    dense = master.stride() == update.exp_avg.stride()
    stored = [
        as_vector(master if dense else master.contiguous()),
        as_vector(update.exp_avg),
        as_vector(update.exp_avg_sq),
    ]
    if update.max_exp_avg_sq is not None:
        stored.append(as_vector(update.max_exp_avg_sq))
    grads, step = as_vector(update.grad), torch.full((), float(update.step), device=device)
    shadow = None if update.shadow is None else as_vector(update.shadow)
    block = BLOCK["cpu" if device.type == "cpu" else "cuda"]
    for start in range(0, master.numel(), block):
        piece = slice(start, min(start + block, master.numel()))
        values = [tensor[piece].float() for tensor in stored]  # float32 itself, otherwise a copy
        grad = grads[piece].to(master.dtype)
        p, m, v, *maximum = values
        torch._fused_adamw_(
            [p],
            [(grad if update.grad_scale == 1.0 else grad * update.grad_scale).float()],
            [m],
            [v],
            maximum,
            [step],
            lr=update.lr,
            beta1=update.beta1,
            beta2=update.beta2,
            weight_decay=update.weight_decay,
            eps=update.eps,
            amsgrad=bool(maximum),
            maximize=False,
        )
        if any(tensor.dtype != torch.float32 for tensor in stored):
            for_m, for_v, for_p = random_bits(update.key, start, piece.stop - start, device)
            for tensor, value, bits in zip(stored, values, (for_p, for_m, for_v, for_v), strict=False):
                store(tensor[piece], value, bits)
        if shadow is not None:
            shadow[piece].copy_(p)
    if not dense:
        master.copy_(stored[0].view(master.size()))


def _check(group: Mapping[str, Any]) -> None:
    for parameter in group["params"]:
        if parameter.dtype not in _DTYPES:
            raise TypeError(_refusal(parameter.dtype, torch.strided))
    check_rates(group)
    if group["moments"] not in _DTYPES:
        raise ConfigurationError(f"moments={shown(group['moments'])}: use torch.float32 or torch.bfloat16")
    if not isinstance(group["seed"], int):
        raise ConfigurationError(f"seed={shown(group['seed'])}: a whole number is needed")
    check_choice("kernel", group["kernel"], ("auto", "torch"))


def check_rates(group: Mapping[str, Any]) -> None:
    """Refuse options with which no Adam can step.

    Raises:
        ConfigurationError: lr, betas, eps or weight_decay is no number, or out of range.
    """
    lr, betas = group["lr"], group["betas"]
    check_number("lr", float(lr) if isinstance(lr, Tensor) and lr.numel() == 1 else lr)
    for name in ("eps", "weight_decay"):
        check_number(name, group[name])
    pair = (
        isinstance(betas, Sequence)
        and len(betas) == 2
        and all(isinstance(beta, int | float | Tensor) for beta in betas)
    )
    if not pair or not all(bool((beta >= 0.0) & (beta < 1.0)) for beta in betas):
        raise ConfigurationError(f"betas={shown(betas)}: two numbers of at least 0 and less than 1 are needed")


def check_parameters(params: object) -> None:
    """Refuse what is no collection of parameters; torch looks into it.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(params, str | nn.Module) or not isinstance(params, Iterable):
        raise ConfigurationError(
            f"params={shown(params)}: give parameters, as in model.parameters(), or groups of them"
        )


def _refusal(dtype: torch.dtype, layout: torch.layout) -> str:
    if layout != torch.strided:
        return f"AdamW needs dense gradients, got {layout}: use torch.optim.SparseAdam for that parameter"
    return f"AdamW updates float32 and bfloat16 parameters, got {dtype}: use torch.optim.AdamW for that one"
