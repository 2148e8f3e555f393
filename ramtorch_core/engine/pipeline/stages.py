"""Which module starts which stage, and the stage at which every parameter and buffer is at home."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ramtorch_core.engine.module_tree import is_never_called
from ramtorch_core.engine.pipeline.running_order import AS_REGISTERED, RunningOrder
from ramtorch_core.errors import ConfigurationError, suggest

__all__ = ["StageMap", "StageRow", "format_stage_rows", "place", "resolve_entries"]

_SPLIT = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True, slots=True)
class StageRow:
    """One line of the stage table."""

    stage: int
    device: str
    first_module: str
    parameters: int
    bytes: int
    share: float


@dataclass
class StageMap:
    """The stages of one module.

    Entering `entries[i]` begins stage `i + 1`; whatever runs between two entries belongs to the earlier stage. A
    parameter or buffer is at home in the stage of the first module that owns it. Shared ones are lent to other stages.
    Modules run in the order of their registration, unless `order` tells when each is called first; an entry that is
    never called then begins no stage.
    """

    root: nn.Module
    entries: tuple[tuple[str, nn.Module], ...]
    order: RunningOrder = AS_REGISTERED
    homes: dict[int, int] = field(default_factory=dict)
    """`id` of a parameter or buffer -> stage."""
    streamed: dict[int, int] = field(default_factory=dict)
    """The same for parameters that stay in RAM: no tensor of a device, so user code meets what stands for them."""
    owned: list[list[Tensor]] = field(default_factory=list)
    """Per stage, the parameters at home there."""
    buffers: list[Tensor] = field(default_factory=list)
    """All buffers; held here so that no other tensor can get the `id` of one."""
    _known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._known = _parameters_of(self.root)
        self.owned = [[] for _ in range(self.count)]
        for stage, module in self.walk():
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in self.homes:
                    self.homes[id(parameter)] = stage
                    self.owned[stage].append(parameter)
            for buffer in module.buffers(recurse=False):
                self.homes.setdefault(id(buffer), stage)
                self.buffers.append(buffer)

    def outdated(self) -> bool:
        """Whether the tree has other parameters than when it was cut: user code has put other modules into it."""
        return _parameters_of(self.root) != self._known

    def deferrable(self) -> frozenset[int]:
        """`id`s of the parameters of linear and convolution modules, whose gradients can be ops of their own."""
        return frozenset(
            id(p) for m in self.root.modules() if isinstance(m, _SPLIT) for p in m.parameters(recurse=False)
        )

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.entries) + 1

    def walk(self) -> Iterator[tuple[int, nn.Module]]:
        """Every module once, in running order, with its stage."""
        starts = {id(m): stage for stage, (_, m) in enumerate(self.entries, start=1) if self.order.is_called(m)}
        stage = 0
        for module in self.order.modules(self.root):
            stage = starts.get(id(module), stage)
            yield stage, module

    def stages_of(self, calls: Sequence[int]) -> dict[int, set[int]]:
        """The stages in which a microbatch that makes `calls` runs each module, by `id`."""
        found: dict[int, set[int]] = {}
        for key, stage, _ in self._follow(calls):
            found.setdefault(key, set()).add(stage)
        return found

    def out_of_turn(self, order: RunningOrder) -> tuple[str, int, int] | None:
        """The first entry that is called too late, by its name, its stage and the stage that runs, if `order` is right.

        Too late is when its stage, or a later one, has begun.
        """
        for calls in (*order.calls, *order.evaluated):
            for _, stage, missed in self._follow(calls):
                if missed is not None:
                    return self.entries[missed - 1][0], missed, stage
        return None

    def away(self, order: RunningOrder) -> float:
        """The share of the parameters' bytes that run in another stage than that of their home, if `order` is right."""
        homes = StageMap(self.root, self.entries, order).homes
        sizes = {id(p): p.nbytes for owned in self.owned for p in owned}
        present = self.homes | self.streamed
        return sum(size for key, size in sizes.items() if homes[key] != present[key]) / max(1, sum(sizes.values()))

    def never_entered(self, order: RunningOrder) -> list[str]:
        """The names of the modules that begin stages and were not called, if `order` is right."""
        return [name for name, module in self.entries if not order.is_called(module)]

    def largest(self) -> float:
        """The share of the parameters that the largest stage has."""
        totals = [sum(p.numel() for p in parameters) for parameters in self.owned]
        return max(totals) / max(1, sum(totals))

    def rows(self, devices: Sequence[str]) -> list[StageRow]:
        """The stage table; `devices[s]` names the device of stage s."""
        totals = [sum(p.numel() for p in parameters) for parameters in self.owned]
        names = ["(start)", *(name for name, _ in self.entries)]
        return [
            StageRow(
                stage=stage,
                device=devices[stage],
                first_module=names[stage],
                parameters=totals[stage],
                bytes=sum(p.numel() * p.element_size() for p in self.owned[stage]),
                share=totals[stage] / max(1, sum(totals)),
            )
            for stage in range(self.count)
        ]

    def _follow(self, calls: Sequence[int]) -> Iterator[tuple[int, int, int | None]]:
        """Each call, the stage in which it runs, and the stage that it would begin if its turn were not over."""
        starts = {id(module): stage for stage, (_, module) in enumerate(self.entries, start=1)}
        stage = 0
        for key in calls:
            begins = starts.get(key, 0)
            missed = begins if 0 < begins <= stage else None
            stage = max(stage, begins)
            yield key, stage, missed


def _parameters_of(root: nn.Module) -> set[int]:
    """The `id`s of its parameters; asked before every step, so without names."""
    found: set[int] = set()
    waiting, seen = [root], {root}
    for module in waiting:
        found.update(map(id, module._parameters.values()))
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return found - {id(None)}


def resolve_entries(
    root: nn.Module, chosen: Sequence[str | nn.Module], stages: int, order: RunningOrder = AS_REGISTERED
) -> StageMap:
    """The stages that begin at the modules `chosen`, by name or as modules, for stages 1, 2, ...

    Raises:
        ConfigurationError: an unknown name, a module outside `root`, one chosen twice, or a wrong number of them.
    """
    if len(chosen) != stages - 1:
        raise ConfigurationError(
            f"{len(chosen)} cuts make {len(chosen) + 1} stages, but {stages} are needed: name the {stages - 1} modules "
            "whose entry begins stages 1, 2, ..."
        )
    by_name = dict(root.named_modules(remove_duplicate=False))
    names = {id(module): name for name, module in root.named_modules()}
    entries = []
    for item in chosen:
        if isinstance(item, str):
            if item not in by_name:
                hint = suggest(item, by_name)
                raise ConfigurationError(f"cut '{item}' is no module of {type(root).__name__}; {hint}")
            entries.append((item, by_name[item]))
        elif id(item) in names:
            entries.append((names[id(item)], item))
        else:
            raise ConfigurationError(f"cut {type(item).__name__} is no submodule of {type(root).__name__}")
    for name, module in entries:
        if module is root:
            raise ConfigurationError("the whole module cannot be a cut: name a submodule that begins a stage")
        if is_never_called(module):
            raise ConfigurationError(
                f"cut '{name}' is a {type(module).__name__}, which is never called: name the module inside it that "
                f"begins the stage, such as '{name}.0'"
            )
        if sum(module is other for _, other in entries) > 1:
            raise ConfigurationError(f"cut '{name}' is named twice; every stage begins at a module of its own")
    return StageMap(root, tuple(entries), order)


def place(stages: StageMap, devices: Sequence[torch.device], aside: Callable[[nn.Module], bool]) -> None:
    """Move parameters and buffers in place to the devices of their homes; parameters stay the same objects.

    Args:
        devices: per stage.
        aside: modules for which it is true are left where they are.
    """
    moved: set[int] = set()
    skipped: set[int] = set()
    for stage, module in stages.walk():
        if id(module) in skipped or aside(module):
            skipped.update(id(m) for m in module.modules())
            continue
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in moved:
                moved.add(id(parameter))
                if parameter.device != devices[stage]:
                    parameter.data = parameter.data.to(devices[stage])
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(devices[stage])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != devices[stage]:
                moved_buffer = module._buffers[name] = buffer.to(devices[stage])
                stages.homes[id(moved_buffer)] = stage
                stages.buffers.append(moved_buffer)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def format_stage_rows(rows: Sequence[StageRow]) -> str:
    """The stage table as text."""
    lines = [f"{'stage':>5}  {'device':<8} {'parameters':>12} {'MB':>10} {'share':>6}  begins at"]
    lines += [
        f"{row.stage:>5}  {row.device:<8} {row.parameters:>12,} {row.bytes / 1e6:>10,.1f} {row.share:>6.1%}  "
        f"{row.first_module}"
        for row in rows
    ]
    return "\n".join(lines)
