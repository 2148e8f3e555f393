"""What the host needs to launch each chunk's compute where its weights stay on the device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ramtorch_core.engine.census import Chunk
from ramtorch_core.engine.footprints import Run
from ramtorch_core.engine.modules import tensors_in
from ramtorch_core.engine.visits import Activations

log = logging.getLogger(__name__)

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Launches:
    """Seconds of the host to launch a chunk's forward and backward, without what lending its weights takes."""

    forward: float = 0.0
    backward: float = 0.0


def time_launches(run: Run) -> list[Launches | None]:
    """Of each group, the least of some forwards, in which each chunk runs its backward at once; no activations stay.

    None where the host computes itself, where a chunk is not called, and of a model whose chunks cannot run backward
    one by one, which the log tells.
    """
    streamer = run.streamer
    rounds: list[dict[int, Launches]] = []
    if streamer.device.asynchronous:
        try:
            for _ in range(ROUNDS):
                found: dict[int, Launches] = {}
                with _each_alone(run, found):
                    run.forward()
                rounds.append(found)
        except RuntimeError as error:
            log.info("launches are not timed: chunks of this model do not run backward one by one: %s", error)
    if len(rounds) < ROUNDS:
        return [None] * len(streamer.groups)
    return [_least([found[index] for found in rounds if index in found]) for index in range(len(streamer.groups))]


def _least(seen: Sequence[Launches]) -> Launches | None:
    return Launches(min(each.forward for each in seen), min(each.backward for each in seen)) if seen else None


@contextlib.contextmanager
def _each_alone(run: Run, found: dict[int, Launches]) -> Iterator[None]:
    """Inside, a chunk's forward is followed by its backward, and its output has no graph."""
    streamer, visits = run.streamer, run.streamer._visits
    call, device, policy = visits._call, streamer.device, visits.activations

    def timed(inner: Callable[..., Any], chunk: Chunk, /, *args: Any, **kwargs: Any) -> Any:
        if chunk.group is None:
            return call(inner, chunk, *args, **kwargs)
        device.synchronize()
        begun = device.ranges.clock()
        output = call(inner, chunk, *args, **kwargs)
        middle = device.ranges.clock()
        results = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        lent = [module.__dict__[name] for weight in chunk.group.weights for module, name in weight.sites[:1]]
        wanted = [tensor for tensor in [*lent, *tensors_in((args, kwargs))] if tensor.requires_grad]
        backward = 0.0
        if results and wanted:
            ones = [torch.ones_like(tensor) for tensor in results]
            launched = device.ranges.clock()
            torch.autograd.grad(results, wanted, ones, allow_unused=True)
            backward = device.ranges.clock() - launched
        found[chunk.group.index] = Launches(middle - begun, backward)
        return tree_map_only(Tensor, _without_graph, output)

    instead = {
        "activations": Activations.KEEP,
        "_call": timed,
        "_hooks": lambda *_: contextlib.nullcontext(),  # what is saved is used before the visit ends
        "watch": lambda *_, **__: None,  # no backward visit begins
    }
    vars(visits).update(instead)
    try:
        yield
    finally:
        for name in instead:
            del vars(visits)[name]
        visits.activations = policy


def _without_graph(tensor: Tensor) -> Tensor:
    """As the next chunk would get it, for all it can see; no leaf, which could not be written in place."""
    return tensor.detach().requires_grad_().clone() if tensor.requires_grad else tensor
