"""Other knobs for a model that streams already, between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ramtorch_core.engine.backward import current_task
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.visits import Activations
from ramtorch_core.errors import RamtorchError

__all__ = ["Knobs", "knobs_of", "rearrange", "why_not_now"]


@dataclass(frozen=True, slots=True)
class Knobs:
    """What may be changed: slots, indices of resident chunks, and the activation policy."""

    window: int
    resident: frozenset[int]
    activations: Activations


def knobs_of(streamer: Streamer) -> Knobs:
    """Those with which it streams now."""
    inventory = streamer._inventory
    return Knobs(inventory.slots, inventory.resident, streamer._visits.activations)


def why_not_now(streamer: Streamer) -> str | None:
    """Why knobs cannot be changed at this moment, None if they can."""
    if streamer.closed:
        return "nothing streams any more"
    if streamer._depth or current_task() != -1 or streamer._backwards.open:
        return "a step is under way"
    if streamer._visits.graphs:
        return "a graph that has not run backward is alive"
    if streamer.gradients.waiting():
        return "gradients wait to be published"
    return None


def rearrange(streamer: Streamer, knobs: Knobs, optimizers: Iterable[Optimizer] = ()) -> None:
    """Go on with `knobs`: what becomes resident moves to the device, what streams from now on to the host.

    Parameters stay the same objects; their values, `.grad`, and the state that `optimizers` keep of them go with them.
    Results of later steps are those of a model that had these knobs from the beginning. Waits for the device and for
    updates under way.

    Raises:
        RamtorchError: it is not between two steps.
        HostMemoryError: too little host memory.
    """
    reason = why_not_now(streamer)
    if reason is not None:
        raise RamtorchError(f"knobs can be changed between two steps only, and {reason}")
    inventory = streamer._inventory
    built, compute = inventory.built, streamer.dtypes.compute
    before = {parameter: parameter.device for parameter in streamer.root.parameters()}
    inventory.slots, inventory.resident = knobs.window, knobs.resident
    streamer._visits.activations = knobs.activations
    streamer._start_over()
    follow(optimizers, {p: device for p, device in before.items() if p.device != device})
    if built:
        streamer._build(compute)


def follow(optimizers: Iterable[Optimizer], before: Mapping[nn.Parameter, torch.device]) -> None:
    """Bring the optimizers' state to where its parameters have gone, as torch does when it loads a state.

    Args:
        before: parameters that have moved, and where each was.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counted_there = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                if parameter not in before:
                    continue
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    moves = isinstance(value, Tensor) and value.device == before[parameter]
                    if moves and (name != "step" or counted_there):
                        state[name] = value.to(parameter.device)
