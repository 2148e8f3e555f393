"""What cannot work with weights in RAM, and in one process; told before anything is allocated."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from ramtorch_core import ConfigurationError
from ramtorch_core.errors import shown
from ramtorch_lightning._lightning import Accelerator, CheckpointIO, Precision

__all__ = [
    "allow_clipping",
    "check_agreement",
    "check_fused",
    "check_optimizer",
    "check_plugins",
    "check_precision",
    "check_single_process",
    "devices_were_automatic",
]

_PRECISIONS = {
    "BitsandbytesPrecision": "it replaces weights by quantised ones that live on the GPU",
    "TransformerEnginePrecision": "its modules keep their own copies of the weights on the GPU",
    "DeepSpeedPrecision": "it belongs to DeepSpeed's engine",
    "FSDPPrecision": "it belongs to FSDP's engine",
}
_OPTIMIZERS = {
    "bitsandbytes": "its kernels run on the GPU only",
    "apex": "its kernels run on the GPU only",
    "deepspeed": "it keeps masters of its own",
}


def check_plugins(accelerator: object, checkpoint_io: object, precision_plugin: object) -> None:
    """Refuse what is no object of Lightning's; names are for the Trainer.

    Raises:
        ConfigurationError: one of them is.
    """
    kinds = {"accelerator": Accelerator, "checkpoint_io": CheckpointIO, "precision_plugin": Precision}
    given = {"accelerator": accelerator, "checkpoint_io": checkpoint_io, "precision_plugin": precision_plugin}
    for name, kind in kinds.items():
        if given[name] is not None and not isinstance(given[name], kind):
            raise ConfigurationError(
                f"{name}={shown(given[name])}: give a {kind.__name__} of Lightning's, or leave it out; "
                f"Trainer(accelerator=, precision=) takes names"
            )


def check_single_process(strategy: str) -> None:
    """Refuse to be one of several processes, which would each train on its own.

    Raises:
        ConfigurationError: a launcher started this process as one of several.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and ("LOCAL_RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ):
        raise ConfigurationError(
            f"this process is one of {processes} that a launcher started, and {strategy} runs in one: each would train "
            f"on its own. Start the script with plain python."
        )


def check_precision(plugin: Precision) -> None:
    """Refuse precision plugins that put weights where they cannot stream from.

    Raises:
        ConfigurationError: the plugin is one of these.
    """
    for kind in type(plugin).__mro__:
        if kind.__name__ in _PRECISIONS:
            raise ConfigurationError(
                f"{type(plugin).__name__} does not work with weights in RAM: {_PRECISIONS[kind.__name__]}. Use "
                f"precision='bf16-mixed', '16-mixed', or one of the '-true' precisions."
            )


def allow_clipping(optimizer: Optimizer, precision: Precision) -> None:
    """Let Lightning clip before a fused optimizer when there is no gradient scaler.

    Such optimizers announce that they can unscale gradients themselves, and Lightning then refuses to clip, whether or
    not anything is scaled.
    """
    if getattr(precision, "scaler", None) is None and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def check_fused(optimizer: Optimizer) -> None:
    """Refuse a fused kernel of the host that does not reach every element.

    Some releases of torch have such kernels (SGD in half precision, https://github.com/pytorch/pytorch/issues/191763),
    which a model on the GPU never meets. So each one is tried on a small tensor.

    Raises:
        ConfigurationError: the kernel left elements as they were.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    dtypes = {p.dtype for group in groups for p in group["params"] if p.device.type == "cpu" and p.is_floating_point()}
    for dtype in dtypes:
        trial = torch.nn.Parameter(torch.ones(131, dtype=dtype))
        trial.grad = torch.ones_like(trial)
        kind([trial], lr=0.5, fused=True).step()  # type: ignore[call-arg]
        if bool((trial == 1).any()):
            raise ConfigurationError(
                f"the fused kernel of {kind.__name__} for {dtype} on the host skips elements in torch "
                f"{torch.__version__}: the weights would not be trained. Pass fused=False."
            )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers whose kernels run on the GPU only, or do not work on the host.

    Raises:
        ConfigurationError: the optimizer, or one that it extends, is one of these, is capturable, or skips elements.
    """
    packages = [kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__]
    reason = next((_OPTIMIZERS[package] for package in packages if package in _OPTIMIZERS), None)
    if reason is None and any(group.get("capturable") for group in optimizer.param_groups):
        reason = "capturable=True needs parameters on the GPU"
    if reason is not None:
        raise ConfigurationError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot update weights in RAM: {reason}. Use an "
            f"optimizer of torch.optim (AdamW, Adam and SGD have fused=True kernels for the host)."
        )
    check_fused(optimizer)


def devices_were_automatic() -> bool:
    """Whether the Trainer that is being built was not told how many devices to use.

    With `devices="auto"` Lightning offers every GPU there is, and tells nobody that it was not asked to.
    """
    asked = _asked_for()
    return asked is not None and asked[0] == "auto"


def check_agreement(given: str, devices: Sequence[torch.device]) -> None:
    """Refuse a Trainer that is being built for other devices than its strategy, or for several machines.

    One device means one process to Lightning, so `devices=1` agrees with any. Without devices of the strategy's own,
    the Trainer's are taken.

    Args:
        given: the strategy's argument, for the message.
        devices: the strategy's own.

    Raises:
        ConfigurationError: they differ.
    """
    asked = _asked_for()
    if asked is None:
        return
    wanted, nodes = asked
    if nodes not in (None, 1, "1"):
        raise ConfigurationError(
            f"Trainer(num_nodes={nodes}): this strategy runs in one process on one machine; leave num_nodes out"
        )
    if not devices or wanted in ("auto", -1, "-1", 1, "1"):
        return
    indices = [device.index for device in devices]
    try:
        listed = [int(part) for part in wanted.split(",") if part.strip()] if isinstance(wanted, str) else wanted
    except ValueError:
        return  # Lightning says what is wrong with it
    if isinstance(wanted, str) and "," not in wanted:
        listed = listed[0]
    agrees = listed == len(devices) if isinstance(listed, int) else list(listed) == indices
    if not agrees:
        raise ConfigurationError(
            f"Trainer(devices={wanted!r}) and {given}, which names {', '.join(map(str, devices))}, contradict each "
            f"other: leave the Trainer's devices out, or let the Trainer choose and leave out the strategy's"
        )


def _asked_for() -> tuple[Any, Any] | None:
    """`devices` and `num_nodes` of the Trainer that is being built; None if none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_code.co_filename.endswith("accelerator_connector.py"):
            return frame.f_locals.get("devices"), frame.f_locals.get("num_nodes")
        frame = frame.f_back
    return None
