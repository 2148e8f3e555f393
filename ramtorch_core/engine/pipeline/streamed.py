"""Stages whose chunks stay in RAM and stream through a window on the stage's device, in the order of the schedule."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from ramtorch_core.engine.chunks import ChunkSpec, choose_resident, find_chunks
from ramtorch_core.engine.dtypes import StreamDtypes
from ramtorch_core.engine.pipeline.running_order import RunningOrder
from ramtorch_core.engine.pipeline.stages import StageMap
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.visits import Activations
from ramtorch_core.memory.device import Device

__all__ = ["StreamOptions", "StreamedStages"]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How stages stream; see `ramtorch_core.attach`. `window` and `pin` are per device.

    Attributes:
        checkpoint: recompute a chunk's activations in backward, instead of keeping them.
        accumulate: where the gradients of microbatches add up. "host": each crosses the bus, with the sum so far.
            "gpu": the sums of all chunks stay on the device until the last microbatch, and cross once.
    """

    window: int = 2
    pin: int | Sequence[str] = 0
    chunks: ChunkSpec = None
    checkpoint: bool = True
    accumulate: Literal["host", "gpu"] = "host"
    stream_dtype: torch.dtype | Literal["auto"] | Mapping[str, torch.dtype] = "auto"
    resident_below: int = 1 << 20
    host_memory: int | None = None
    poison: bool = False


class StreamedStages:
    """One streaming engine per device, for the chunks of its stages, until `close`.

    A chunk that shares weights with modules outside of it, in which another stage begins, or of which several stages
    call parts, does not stream.

    Args:
        stages: of the whole module, its parameters on the host.
        devices: per stage.
    """

    def __init__(self, stages: StageMap, devices: Sequence[Device], options: StreamOptions) -> None:
        self._stages, self._spill = stages, options.accumulate == "host"
        stage_of = {id(module): stage for stage, module in stages.walk()}
        chunks = find_chunks(stages.root, options.chunks, resident_below=options.resident_below)
        wandering = _wandering([module for _, module in chunks], stages, stages.order)
        streams = [id(module) not in wandering and _may_stream(module, stages) for _, module in chunks]
        self.chunks = list(itertools.compress(chunks, streams))
        by_device: dict[Device, list[tuple[str, nn.Module]]] = {}
        for name, module in self.chunks:
            by_device.setdefault(devices[stage_of[id(module)]], []).append((name, module))
        if not isinstance(options.pin, int):
            names = [name for name, _ in chunks]  # also of chunks that stay because they cannot stream
            options = replace(options, pin=[names[index] for index in choose_resident(options.pin, names)])
        self.streamers: list[Streamer] = []
        try:
            for device, named in by_device.items():
                self.streamers.append(_attach(device, named, options))
        except BaseException:
            self.close()
            raise
        for parameter in (p for _, module in self.chunks for p in module.parameters()):
            if (home := stages.homes.pop(id(parameter), None)) is not None:
                stages.streamed[id(parameter)] = home

    def out_of_place(self, order: RunningOrder) -> bool:
        """Whether some chunk runs in several stages, or not in the one for which it streams, if `order` is right."""
        now, then = (
            {id(module): stage for stage, module in stages.walk()}
            for stages in (self._stages, StageMap(self._stages.root, self._stages.entries, order))
        )
        chunks = [module for _, module in self.chunks]
        return bool(_wandering(chunks, self._stages, order)) or any(now[id(m)] != then[id(m)] for m in chunks)

    def holds(self, module: nn.Module) -> bool:
        """Whether `module` is one of the chunks."""
        return any(module is chunk for _, chunk in self.chunks)

    @contextlib.contextmanager
    def step(self, microbatches: int) -> Iterator[Callable[[], None]]:
        """Around so many microbatches of one step; yields what publishes their gradients at its end."""
        with contextlib.ExitStack() as stack:
            for streamer in self.streamers:
                stack.enter_context(streamer.together(microbatches, spill=self._spill))
            yield self._finish

    @contextlib.contextmanager
    def scopes(self) -> Iterator[None]:
        """Around forwards without backward."""
        with contextlib.ExitStack() as stack:
            for streamer in self.streamers:
                stack.enter_context(streamer.scope())
            yield

    def refresh(self) -> None:
        """An optimizer has stepped: cast shadows again, and start the copies that the next step needs first."""
        for streamer in self.streamers:
            streamer.refresh()

    def close(self) -> None:
        """Detach from the chunks, whose parameters stay on the host. Idempotent."""
        for streamer in self.streamers:
            streamer.close()

    def _finish(self) -> None:
        for streamer in self.streamers:
            streamer.finish_together()


def _wandering(chunks: Sequence[nn.Module], stages: StageMap, order: RunningOrder) -> set[int]:
    """`id`s of the chunks that one microbatch calls, whole or in part, in several stages, if `order` is right."""
    found: set[int] = set()
    for calls in order.calls:
        stages_of = stages.stages_of(calls)
        for chunk in chunks:
            if len(set().union(*(stages_of.get(id(part), ()) for part in chunk.modules()))) > 1:
                found.add(id(chunk))
    return found


def _may_stream(chunk: nn.Module, stages: StageMap) -> bool:
    inside = {id(module) for module in chunk.modules()}
    if any(id(e) in inside and e is not chunk for _, e in stages.entries):
        return False
    elsewhere = (module for module in stages.root.modules() if id(module) not in inside)
    outside = {id(p) for module in elsewhere for p in module.parameters(recurse=False)}
    return not any(id(p) in outside for p in chunk.parameters())


def _attach(device: Device, named: Sequence[tuple[str, nn.Module]], options: StreamOptions) -> Streamer:
    names = [name for name, _ in named]
    pin = options.pin if isinstance(options.pin, int) else [name for name in options.pin if name in names]
    root = nn.Module()
    root._modules.update(named)  # under their names in the whole module, for tables and messages
    return Streamer(
        root,
        named,
        device=device,
        window=options.window,
        resident=choose_resident(pin, names),
        activations=Activations.CHECKPOINT if options.checkpoint else Activations.KEEP,
        dtypes=StreamDtypes(options.stream_dtype),
        resident_below=options.resident_below,
        host_memory=options.host_memory,
        poison=options.poison,
    )
