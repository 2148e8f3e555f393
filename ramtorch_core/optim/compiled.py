"""The compiled kernel: Adam and AdamW in one pass over memory (`adam.c`), built on first use by the system's compiler.

It reads gradients in half precision or float32, updates state and masters in float32 or, rounded stochastically (see
`rounding`), in bfloat16, and writes half-precision shadows. In float32 its results are those of torch's own fused
kernels (`AdamW(fused=True)`), bit for bit; that is tried on a small tensor each time it is loaded, and a kernel that is
off by more than `TOLERATED_ULP` is not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
TOLERATED_ULP = 4
WIDTHS = (16, 8, 4)
"""Elements in torch's vectors, by the processor: the kernel takes the one with which its results are torch's."""
_SOURCE = Path(__file__).with_name("adam.c")
_DTYPES = {torch.float32: 1, torch.bfloat16: 2}


class _Weight(ctypes.Structure):
    """`Weight` of adam.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq", "grad", "shadow")),
        ("kept", ctypes.c_void_p * 3),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("master_dtype", "moment_dtype", "grad_dtype", "shadow_dtype", "width")),
        *((name, ctypes.c_uint32) for name in ("key0", "key1")),
        *((name, ctypes.c_float) for name in ("grad_scale", "decay", "l2", "beta2", "lerp_weight")),
        *((name, ctypes.c_float) for name in ("exp_avg_sq_weight", "negative_step_size")),
        *((name, ctypes.c_float) for name in ("bias_correction2_sqrt", "eps")),
    )


@dataclass(frozen=True, slots=True)
class AdamWeight:
    """One weight's update: dense tensors of one size and memory order, for the kernel on the host.

    Attributes:
        master: float32 or bfloat16; written.
        exp_avg, exp_avg_sq: float32 or bfloat16, both alike; written.
        grad: float32 or bfloat16; read.
        shadow: bfloat16, written; None if the master is its own shadow.
        step: of this update, counted from 1.
        decoupled: weight decay as in AdamW, instead of as in Adam.
        grad_scale: the gradient is multiplied with it, in the master's dtype.
        key: 64 bits, from `rounding.derive_key`, that decide how what is stored in bfloat16 is rounded.
        max_exp_avg_sq: the largest `exp_avg_sq` so far, for AMSGrad; not for the kernel.
        kept: where the values of master, exp_avg and exp_avg_sq before this update go, in the same memory order and
            aligned to 16 bytes; None of what nobody wants. For the kernel only.
        compiled: whether the kernel may be used.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    shadow: Tensor | None
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    grad_scale: float = 1.0
    key: int = 0
    max_exp_avg_sq: Tensor | None = None
    compiled: bool = True
    kept: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)


def adam_rates(options: Mapping[str, Any]) -> dict[str, Any]:
    """`lr`, `beta1`, `beta2`, `eps` and `weight_decay` of a parameter group, for optimizers like Adam."""
    beta1, beta2 = map(float, options["betas"])
    return {key: float(options[key]) for key in ("lr", "eps", "weight_decay")} | {"beta1": beta1, "beta2": beta2}


def read_number(value: Any) -> float:
    """The value of a number, or of a tensor that holds one: on the host without torch.

    Each operation of torch's lets other threads have the interpreter, and one that computes in Python gives it back
    after 5 ms.
    """
    place = _place(value)
    return float(value) if place is None else place.value


def write_number(state: dict[str, Any], key: str, number: float) -> None:
    """Give the number, or the tensor that holds one, under `key` another value, likewise."""
    place = _place(state[key])
    if place is not None:
        place.value = number
    elif isinstance(state[key], Tensor):
        state[key].fill_(number)
    else:
        state[key] = number


def _place(value: Any) -> ctypes.c_float | None:
    known = isinstance(value, Tensor) and value.dtype == torch.float32 and value.device.type == "cpu"
    return ctypes.c_float.from_address(value.data_ptr()) if known else None


def takes(
    grad: torch.dtype,
    shadow: torch.dtype | None,
    *,
    master: torch.dtype = torch.float32,
    moments: torch.dtype = torch.float32,
) -> bool:
    """Whether the kernel reads such gradients and writes such shadows, masters and moments."""
    shadows = (None, torch.bfloat16) if master == torch.float32 else (None,)
    return grad in _DTYPES and shadow in shadows and master in _DTYPES and moments in _DTYPES


class AdamKernel:
    """The loaded library.

    Args:
        library: defines `ramtorch_adam`.

    Attributes:
        width: elements in torch's vectors. What fills none at the end of a weight is rounded as by its scalar code.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._update = library.ramtorch_adam
        self._update.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
        self._update.restype = None
        self.width = 16

    def __call__(self, weights: Sequence[AdamWeight], threads: int) -> None:
        """Update all weights with up to `threads` threads. The interpreter is free for other threads meanwhile."""
        rows = (_Weight * len(weights))(*(_row(weight, self.width) for weight in weights))
        self._update(ctypes.addressof(rows), len(weights), threads)


def _row(w: AdamWeight, width: int) -> _Weight:
    shadow = w.shadow
    return _Weight(
        w.master.data_ptr(),
        w.exp_avg.data_ptr(),
        w.exp_avg_sq.data_ptr(),
        w.grad.data_ptr(),
        None if shadow is None else shadow.data_ptr(),
        (ctypes.c_void_p * 3)(*(None if kept is None else kept.data_ptr() for kept in w.kept)),
        w.master.numel(),
        _DTYPES[w.master.dtype],
        _DTYPES[w.exp_avg.dtype],
        _DTYPES[w.grad.dtype],
        0 if shadow is None else _DTYPES[shadow.dtype],
        width,
        w.key & 0xFFFFFFFF,
        w.key >> 32,
        w.grad_scale,
        1 - w.lr * w.weight_decay if w.decoupled else 1.0,
        0.0 if w.decoupled else w.weight_decay,
        w.beta2,
        1 - w.beta1,
        1 - w.beta2,
        -w.lr / (1 - w.beta1**w.step),
        math.sqrt(1 - w.beta2**w.step),
        w.eps,
    )


@functools.cache
def adam_kernel() -> AdamKernel | None:
    """The kernel, built if need be (about a second, once per machine); None, and one line in the log, without it."""
    try:
        kernel = AdamKernel(_load())
        ulp, kernel.width = min((_difference(kernel, width), width) for width in WIDTHS)
        if ulp > TOLERATED_ULP:
            raise RuntimeError(f"its results differ from torch's fused kernel by {ulp} units in the last place")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("no compiled kernel for Adam, torch's own operations are used, which are slower: %s", error)
        return None
    return kernel


def compiler() -> list[str]:
    """The command of this machine's C compiler; empty if it has none."""
    found = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
    return found.split()


def _load() -> ctypes.CDLL:
    """The library from the user's cache; built, and put there if that can be, where it is missing or damaged."""
    if not compiler():
        raise RuntimeError("this machine has no C compiler (cc, gcc, clang, or CC=)")
    command = [*compiler(), *FLAGS]
    version = subprocess.run([*compiler(), "--version"], capture_output=True, check=True, timeout=60).stdout
    identity = b"\0".join((_SOURCE.read_bytes(), " ".join(command).encode(), version, _processor()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ramtorch_core"
    cached = folder / f"adam-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(cached))
    with tempfile.TemporaryDirectory(prefix="ramtorch_core-") as work:
        built = Path(work) / cached.name
        done = subprocess.run(
            [*command, "-o", str(built), str(_SOURCE), "-lm"], capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            copy = cached.with_suffix(f".{os.getpid()}")
            shutil.copyfile(built, copy)
            copy.replace(cached)  # whole or not at all, whoever else builds it now
            return ctypes.CDLL(str(cached))
        return ctypes.CDLL(str(built))  # which stays loaded when its file is gone


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model"))})).encode()


def _difference(kernel: AdamKernel, width: int) -> int:
    """Largest difference from torch's fused kernel on a small tensor, in units in the last place."""
    generator = torch.Generator().manual_seed(0)
    kernel.width = width

    def random() -> Tensor:
        return torch.randn(4111, generator=generator)

    theirs = [random(), random(), random().abs()]
    ours = [tensor.clone() for tensor in theirs]
    grad, shadow = random().bfloat16(), torch.empty(4111, dtype=torch.bfloat16)
    options: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    torch._fused_adamw_(
        [theirs[0]],
        [grad.float()],
        [theirs[1]],
        [theirs[2]],
        [],
        [torch.tensor(7.0)],
        amsgrad=False,
        maximize=False,
        **options,
    )
    kernel([AdamWeight(ours[0], ours[1], ours[2], grad, shadow, step=7, decoupled=True, **options)], threads=2)
    if not torch.equal(shadow, ours[0].bfloat16()):
        raise RuntimeError("its shadows are not the masters, rounded")
    bits = [torch.stack(tensors).view(torch.int32).long() for tensors in (ours, theirs)]
    return int((bits[0] - bits[1]).abs().max())
