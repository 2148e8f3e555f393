"""What chunks cost and what a machine can do, in seconds and bytes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ramtorch_core.errors import ConfigurationError, shown
from ramtorch_core.plan.partition import spread

HOST_MEMORY = "host memory"
BOTH_WAYS = "PCIe both ways"
INWARD = "PCIe in"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCost:
    """One chunk, per microbatch or per step.

    Attributes:
        forward, backward: seconds of compute per microbatch; backward without the recompute of a checkpoint.
        recompute: seconds of compute to recompute what backward needs; None for as long as `forward`. It ends with the
            last tensor that backward needs, which can be long before the end of the forward.
        issue_forward, issue_recompute, issue_backward: seconds that the host takes to issue that compute.
        launch_forward, launch_backward: the same where it is resident; None for as where it streams.
        cast: seconds of compute to cast its weights, or its gradient, where it is resident and computes in half
            precision: each forward and recompute casts the weights, each backward the gradient.
        add: seconds of compute to add its gradient to that of the microbatches before, where it is resident.
        transfer: seconds to copy its weights into a slot.
        gradient: seconds to copy its gradient to the host.
        accumulate: seconds to add it to the sum on the host, on the device and back; 0 for `gradient`:
            it comes in piece by piece while it leaves.
        sum_bytes: that sum, if it is in a wider dtype than the gradient that crosses, which then is rounded from it and
            leaves beside it.
        recall: seconds to bring the sum on the host back to the device, to be added to there.
        update: seconds of the optimizer on the host.
        save: seconds that this takes longer ahead of the norm of all gradients, to copy what it overwrites.
        recast: seconds of the host to cast its master to what crosses the bus.
        device_update: seconds of the optimizer on the GPU.
        state_in, state_out: seconds to bring optimizer state to the GPU and back, for an update there.
        weight_bytes: what a slot must hold, as it crosses the bus.
        master_bytes: weights in the optimizer's dtype: what a resident chunk needs, if that is more.
        gradient_bytes: its gradient as it crosses the bus, and as it is summed.
        produced_bytes: its gradient as a backward leaves it on the GPU; None for as it crosses.
        resident_gradient_bytes: its gradient where it is resident; None for as it crosses.
        passing_bytes: of a gradient that is on its way there: in the dtype in which it was computed, or to be added.
        adding_bytes: besides the sum that stays on the GPU, while a gradient is added to it.
        state_bytes: what the optimizer keeps besides the master, on the GPU for resident chunks.
        update_bytes: traffic of host memory that an update on the host causes.
        saved_bytes: what it overwrites, and copies where it runs ahead; it is read in any case.
        kept_bytes: activations of one microbatch that backward needs.
        boundary_bytes: activations of one microbatch that stay where the chunk is checkpointed: its inputs.
        recomputed_bytes: those that a recompute makes besides; None for all that is kept.
    """

    forward: float
    backward: float
    recompute: float | None = None
    issue_forward: float = 0.0
    issue_recompute: float = 0.0
    issue_backward: float = 0.0
    launch_forward: float | None = None
    launch_backward: float | None = None
    cast: float = 0.0
    add: float = 0.0
    transfer: float = 0.0
    gradient: float = 0.0
    accumulate: float = 0.0
    sum_bytes: float = 0
    recall: float = 0.0
    update: float = 0.0
    save: float = 0.0
    recast: float = 0.0
    device_update: float = 0.0
    state_in: float = 0.0
    state_out: float = 0.0
    weight_bytes: float = 0
    master_bytes: float = 0
    gradient_bytes: float = 0
    produced_bytes: float | None = None
    resident_gradient_bytes: float | None = None
    passing_bytes: float = 0
    adding_bytes: float = 0
    state_bytes: float = 0
    update_bytes: float = 0
    saved_bytes: float = 0
    kept_bytes: float = 0
    boundary_bytes: float = 0
    recomputed_bytes: float | None = None

    def __post_init__(self) -> None:
        check_amounts(self)

    def issue_seconds(self, *, backward: bool, checkpoint: bool = False, resident: bool = False) -> float:
        """Seconds of the host to issue a forward or a backward, with the recompute that begins it."""
        forward, recompute, whole = self.issue_forward, self.issue_recompute, self.issue_backward
        if resident and self.launch_forward is not None and self.launch_backward is not None:
            forward, recompute, whole = self.launch_forward, self.launch_forward, self.launch_backward
        return whole + recompute * checkpoint if backward else forward

    @property
    def resident_bytes(self) -> float:
        """Bytes of its weights if it is resident."""
        return max(self.weight_bytes, self.master_bytes)

    @property
    def cast_bytes(self) -> float:
        """Bytes of a resident chunk's weights in half precision, while they are used."""
        return self.weight_bytes if self.weight_bytes < self.master_bytes else 0.0

    @property
    def left_bytes(self) -> float:
        """Bytes that one backward leaves on the GPU."""
        return self.gradient_bytes if self.produced_bytes is None else self.produced_bytes

    def made_bytes(self, checkpoint: bool) -> float:
        """Bytes of activations that a backward visit makes again."""
        recomputed = self.kept_bytes if self.recomputed_bytes is None else self.recomputed_bytes
        return recomputed * checkpoint

    def held_bytes(self, checkpoint: bool) -> float:
        """Bytes of activations of one microbatch between forward and backward."""
        return self.boundary_bytes if checkpoint else self.kept_bytes

    def backward_seconds(self, *, checkpoint: bool, resident: bool, adds: bool = False) -> float:
        """Seconds of compute of a backward visit; `adds`: of a later microbatch than the first."""
        recompute = self.forward if self.recompute is None else self.recompute
        own = (1 + checkpoint) * self.cast + adds * self.add
        return self.backward + recompute * checkpoint + own * resident

    def forward_seconds(self, resident: bool) -> float:
        """Seconds of compute of a forward visit."""
        return self.forward + self.cast * resident

    @property
    def added_bytes(self) -> tuple[float, float]:
        """Bytes that come to the device, and that leave it, to add its gradient to the sum on the host."""
        return self.sum_bytes or self.gradient_bytes, self.sum_bytes + self.gradient_bytes

    @property
    def sums_in_full(self) -> bool:
        """Whether its gradients are added up in float32, though its master is in half precision."""
        return self.gradient_bytes > self.own_gradient_bytes

    @property
    def own_gradient_bytes(self) -> float:
        """Bytes of its gradient if it is resident."""
        return self.gradient_bytes if self.resident_gradient_bytes is None else self.resident_gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step costs beside its chunks.

    Attributes:
        loss: seconds of compute per microbatch in no chunk: between forward and backward, or after a forward alone.
        issue_begin: seconds that the host takes, per microbatch, before it issues the first visit.
        issue_loss: seconds that it takes to issue what is between forward and backward.
        between: seconds of the host per step in which it issues nothing: the optimizer of what does not stream, the
            loop around, loading data.
        awaited: the host waits for all compute of a backward, because tensors that stay on the GPU get gradients, which
            come last; otherwise for the gradients of streamed chunks alone.
        base_bytes: GPU memory at any time: inputs, copies of small tensors, work space of libraries.
        bounce_bytes: GPU memory through which gradients are added to sums on the host, or cast.
        forward_bytes: GPU memory in a forward visit that keeps no activations.
        loss_bytes: GPU memory between the last forward visit and the backward, besides activations and what autocast
            has cast.
        turn_bytes: GPU memory at the beginning of a backward, when gradients of the step before are gone, likewise.
        first_bytes: GPU memory in the first visit of a backward, besides activations and gradients.
        work_bytes: GPU memory in the others, likewise.
        step_bytes: GPU memory while the optimizer steps what is resident.
    """

    loss: float = 0.0
    issue_begin: float = 0.0
    issue_loss: float = 0.0
    between: float = 0.0
    awaited: bool = True
    base_bytes: float = 0.0
    bounce_bytes: float = 0.0
    forward_bytes: float = 0.0
    loss_bytes: float = 0.0
    turn_bytes: float = 0.0
    first_bytes: float = 0.0
    work_bytes: float = 0.0
    step_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_amounts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What limits a machine; None where there is no limit, or none is known.

    Attributes:
        h2d, d2h: bytes per second from host to device and back, page-locked.
        both_ways: bytes per second that cross PCIe at most when both directions are busy, added up.
        host_memory: bytes per second of the host's memory, all traffic together.
        gpu_bytes: bytes of GPU memory that may be used.
        gpu_whole: bytes of all memory of the GPU, or whatever else those are a part of.
        host_update, gpu_update: seconds per parameter of the optimizer on the host and on the GPU.
        asynchronous: copies go on beside compute. On a CPU, which computes in the thread that copies, they do not.
    """

    h2d: float | None = None
    d2h: float | None = None
    both_ways: float | None = None
    host_memory: float | None = None
    gpu_bytes: float | None = None
    gpu_whole: float | None = None
    host_update: float | None = None
    gpu_update: float | None = None
    asynchronous: bool = True

    def __post_init__(self) -> None:
        check_amounts(self)
        for field in fields(self):
            if getattr(self, field.name) == 0 and field.name != "asynchronous":
                raise ConfigurationError(f"{field.name}=0: it must be positive; leave it out for no limit")

    def capacities(self, *gpus: str) -> dict[str, float]:
        """What streams share, in bytes per second: the host's memory, and per GPU (by default one) its bus."""
        known = {HOST_MEMORY: self.host_memory}
        for gpu in gpus or ("",):
            known |= {f"{gpu} {BOTH_WAYS}".strip(): self.both_ways, f"{gpu} {INWARD}".strip(): self.h2d}
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Bytes per trained parameter; by default float32 masters, AdamW, and bf16 autocast.

    Attributes:
        weight: what crosses PCIe and lies in a slot.
        gradient: on its way to the host.
        master, state: weights as the optimizer sees them, and its moments.
        update: traffic of host memory of one update on the host: three reads and writes, the gradient, the shadow.
    """

    weight: float = 2
    gradient: float = 4
    master: float = 4
    state: float = 8
    update: float = 30

    def __post_init__(self) -> None:
        check_amounts(self)


def chunk_cost(
    parameters: float,
    machine: Machine,
    *,
    forward: float,
    backward: float,
    kept_bytes: float = 0,
    boundary_bytes: float = 0,
    recipe: Recipe | None = None,
) -> ChunkCost:
    """The cost of a chunk of so many parameters on `machine`; what the machine leaves out takes no time.

    Args:
        forward, backward: seconds per microbatch, measured on a resident model.
        kept_bytes, boundary_bytes: activations of one microbatch, all of them and those of a checkpoint.
    """
    recipe = recipe or Recipe()
    saved, update = recipe.master + recipe.state, machine.host_update or 0.0

    def seconds(nbytes: float, rate: float | None) -> float:
        return nbytes / rate if rate else 0.0

    return ChunkCost(
        forward=forward,
        backward=backward,
        transfer=seconds(parameters * recipe.weight, machine.h2d),
        gradient=seconds(parameters * recipe.gradient, machine.d2h),
        recall=seconds(parameters * recipe.gradient, machine.h2d),
        update=parameters * update,
        save=parameters * update * (saved / recipe.update if recipe.update else 0.0),
        device_update=parameters * (machine.gpu_update or 0.0),
        state_in=seconds(parameters * (recipe.master + recipe.state), machine.h2d),
        state_out=seconds(parameters * (recipe.master + recipe.state + recipe.weight), machine.d2h),
        weight_bytes=parameters * recipe.weight,
        master_bytes=parameters * recipe.master,
        gradient_bytes=parameters * recipe.gradient,
        adding_bytes=parameters * recipe.gradient,
        state_bytes=parameters * recipe.state,
        update_bytes=parameters * recipe.update,
        saved_bytes=parameters * saved,
        kept_bytes=kept_bytes,
        boundary_bytes=boundary_bytes,
    )


def check_amounts(costs: object) -> None:
    """Refuse fields of a dataclass that are no numbers, negative or infinite; None is let through.

    Raises:
        ConfigurationError: names the field and its value.
    """
    for field in fields(costs):  # type: ignore[arg-type]  # the callers are dataclasses
        value = getattr(costs, field.name)
        if value is None:
            continue
        if not isinstance(value, numbers.Real):
            raise ConfigurationError(f"{field.name}={shown(value)}: a number is needed")
        if value < 0 or not value < math.inf:
            raise ConfigurationError(f"{field.name}={value}: it must be finite and not negative")


def traffic(nbytes: float, seconds: float, *capacities: str) -> dict[str, float]:
    """How fast a copy of so many bytes in so many seconds uses `capacities`, in bytes per second."""
    return dict.fromkeys(capacities, nbytes / seconds) if nbytes and seconds else {}


def resident_chunks(pin: int | Sequence[int], chunks: int) -> frozenset[int]:
    """Indices of the chunks that `pin` keeps resident: a count spread evenly as the engine does it, or indices.

    Raises:
        ConfigurationError: a negative count, or an index out of range.
    """
    if isinstance(pin, int):
        if pin < 0:
            raise ConfigurationError(f"pin={pin}: the number of resident chunks cannot be negative; use 0 for none")
        return spread(pin, chunks)
    wrong = [index for index in pin if not 0 <= index < chunks]
    if wrong:
        raise ConfigurationError(f"pin: index {wrong[0]} is out of range for {chunks} chunks; use 0 ... {chunks - 1}")
    return frozenset(pin)
