"""Pipeline schedules as data: which device runs which op of which microbatch, in which order.

This file is the only place where an order is written. The executor walks it, the simulator times it, `plan/check.py`
proves it, and traces and errors print it.

An op prints as `2F0`: stage 2, kind F, microbatch 0. The kinds are F (forward), B (whole backward), and, where the
backward is split, I (gradient of the stage's input) and W (gradient of its weights).
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ramtorch_core.errors import ConfigurationError, shown
from ramtorch_core.plan.size import check_size

__all__ = [
    "ALIASES",
    "SCHEDULES",
    "Kind",
    "Op",
    "Schedule",
    "build",
    "chunk_major",
    "eager_1f1b",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_by_one",
    "sequential",
    "staggered_1b1f",
    "uniform_1f1b",
    "zb_h1",
    "zbv",
]

Kind: TypeAlias = Literal["F", "B", "I", "W"]
_OP = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True)
class Op:
    """One unit of work: `kind` for one microbatch on one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """The op that prints as `text`, for example `2F0`. Raises `ConfigurationError` for anything else."""
        match = _OP.fullmatch(text.strip())
        if match is None:
            raise ConfigurationError(
                f"{text!r} is no pipeline op: write stage, kind (one of F, B, I, W) and microbatch, as in 2F0"
            )
        kind: Kind = match[2]  # type: ignore[assignment]  # the pattern admits these four letters only
        return cls(kind, int(match[1]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ordered ops of every device.

    `lanes[d]` are the ops of device `d` in the order in which it runs them; `placement[s]` is the device of stage `s`.
    With one stage per device, lane and stage are the same thing. A schedule is only data: `plan.check.check` proves
    that it is complete and free of deadlocks.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    lanes: tuple[tuple[Op, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @property
    def devices(self) -> int:
        """Number of devices; each owns one stage or several."""
        return len(self.lanes)

    @property
    def ops(self) -> tuple[tuple[Op, ...], ...]:
        """The ordered ops of every stage: the lanes, told apart by stage."""
        return tuple(tuple(op for op in self.lanes[d] if op.stage == s) for s, d in enumerate(self.placement))

    @property
    def split_backward(self) -> bool:
        """Whether weight gradients are ops of their own (W)."""
        return any(op.kind == "W" for lane in self.lanes for op in lane)

    def __str__(self) -> str:
        """One line per device; `Schedule.parse` reads it back."""
        return "\n".join(" ".join(map(str, lane)) for lane in self.lanes)

    @classmethod
    def parse(cls, text: str, name: str = "user") -> "Schedule":
        """A schedule from one line of ops per device, for example `"0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1"`.

        Raises `ConfigurationError` for a malformed op, a stage on two devices, or a stage without ops.
        """
        lanes = tuple(tuple(Op.parse(word) for word in line.split()) for line in text.strip().splitlines())
        return cls.from_lanes(lanes, name)

    @classmethod
    def from_lanes(cls, lanes: Iterable[Iterable[Op]], name: str = "user") -> "Schedule":
        """A schedule from the ordered ops of every device; placement and microbatches are read off them.

        Raises `ConfigurationError` for a stage on two devices or a stage without ops.
        """
        rows = tuple(tuple(lane) for lane in lanes)
        home: dict[int, int] = {}
        for device, lane in enumerate(rows):
            for op in lane:
                if home.setdefault(op.stage, device) != device:
                    raise ConfigurationError(
                        f"schedule {name!r} runs stage {op.stage} on devices {home[op.stage]} and {device}: "
                        "give all ops of a stage to one device"
                    )
        if not home:
            raise ConfigurationError(f"schedule {name!r} has no ops")
        stages = max(home) + 1
        if len(home) < stages:
            missing = next(s for s in range(stages) if s not in home)
            raise ConfigurationError(f"schedule {name!r} has {stages} stages but no op of stage {missing}")
        microbatches = max(op.microbatch for lane in rows for op in lane) + 1
        return cls(name, microbatches, tuple(home[s] for s in range(stages)), rows)


def sequential(stages: int, microbatches: int) -> Schedule:
    """One microbatch after the other, no overlap: plain gradient accumulation, the reference for all the others."""
    return one_by_one(range(stages), microbatches)


def one_by_one(placement: Sequence[int], microbatches: int, *, split: bool = False) -> Schedule:
    """`sequential` for any placement of stages on devices; `placement[s]` is the device of stage s.

    Args:
        split: weight gradients are ops of their own.
    """
    backward: tuple[Kind, ...] = ("I", "W") if split else ("B",)
    lanes = []
    for device in range(max(placement) + 1):
        owned = [s for s, d in enumerate(placement) if d == device]
        lane: list[Op] = []
        for m in range(microbatches):
            lane += [Op("F", s, m) for s in owned] + [Op(kind, s, m) for s in reversed(owned) for kind in backward]
        lanes.append(tuple(lane))
    return Schedule("sequential", microbatches, tuple(placement), tuple(lanes))


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards; keeps the activations of every microbatch.

    Source: Huang et al., GPipe, 2019, with the backwards in microbatch order.
    """
    return _one_stage_per_device("gpipe", microbatches, (_1f1b(s, microbatches, microbatches) for s in range(stages)))


def staggered_1b1f(stages: int, microbatches: int) -> Schedule:
    """Stage s runs `stages - s` forwards ahead, then alternates: at most `stages` microbatches are in memory.

    Source: Narayanan et al., PipeDream-Flush, 2021. Also known as 1F1B.
    """
    lanes = (_1f1b(s, microbatches, stages - s) for s in range(stages))
    return _one_stage_per_device("staggered_1b1f", microbatches, lanes)


def eager_1f1b(stages: int, microbatches: int) -> Schedule:
    """1F1B with twice the warm-up: hides slow links, keeps up to `2 * stages - 1` microbatches in memory."""
    lanes = (_1f1b(s, microbatches, 2 * (stages - s) - 1) for s in range(stages))
    return _one_stage_per_device("eager_1f1b", microbatches, lanes)


def uniform_1f1b(stages: int, microbatches: int) -> Schedule:
    """1F1B with the same warm-up on every stage, for teaching only: its later stages wait instead of overlapping."""
    lanes = (_1f1b(s, microbatches, stages) for s in range(stages))
    return _one_stage_per_device("uniform_1f1b", microbatches, lanes)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B whose weight gradients are postponed into the bubble; stage s holds back `s` of them.

    Memory equals 1F1B's. Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, schedule ZB-H1.
    """
    lanes = []
    for s in range(stages):
        lane: list[Op] = []
        backwards = weights = 0
        for op in _1f1b(s, microbatches, stages - s):
            if op.kind == "F":
                lane.append(op)
                continue
            lane.append(Op("I", s, op.microbatch))
            backwards += 1
            if backwards - weights > s:
                lane.append(Op("W", s, weights))
                weights += 1
        lane += [Op("W", s, m) for m in range(weights, microbatches)]
        lanes.append(lane)
    return _one_stage_per_device("zb_h1", microbatches, lanes)


def interleaved(devices: int, microbatches: int, stages_per_device: int = 2) -> Schedule:
    """1F1B over `stages_per_device` stages on each device, stage s on device `s % devices`: a smaller bubble.

    Microbatches advance in groups of at least one per device, as equal as `microbatches` allows. Source: Narayanan et
    al., Megatron-LM, 2021.
    """
    count = stages_per_device * microbatches
    groups = max(1, microbatches // devices)
    edges = [microbatches * g // groups for g in range(groups + 1)]
    largest = max(b - a for a, b in itertools.pairwise(edges))
    forwards, backwards = [], []
    for first, last in itertools.pairwise(edges):
        group = range(first, last)
        forwards += [(c, m) for c in range(stages_per_device) for m in group]
        backwards += [(c, m) for c in reversed(range(stages_per_device)) for m in group]
    lanes = []
    for d in range(devices):
        warm = min(count, 2 * (devices - d - 1) + (stages_per_device - 1) * largest + 1)
        forward = [Op("F", c * devices + d, m) for c, m in forwards]
        backward = [Op("B", c * devices + d, m) for c, m in backwards]
        lanes.append(_alternate(forward, backward, warm))
    placement = tuple(s % devices for s in range(stages_per_device * devices))
    return Schedule("interleaved", microbatches, placement, tuple(lanes))


def zbv(devices: int, microbatches: int) -> Schedule:
    """Split backward with two stages per device, placed in a V: device d owns stages d and `2 * devices - 1 - d`.

    The first and the last stage share device 0, so a microbatch's backward starts where its forward began. At most
    `devices` microbatches are on a device, hence 1F1B's memory. Source of the placement: Qi et al., Pipeline
    Parallelism with Controllable Memory, 2024; the order comes from list scheduling with equal costs for F, I and W.
    """
    stages = 2 * devices
    placement = tuple(min(s, stages - 1 - s) for s in range(stages))
    return Schedule("zbv", microbatches, placement, _list_schedule(placement, microbatches))


def chunk_major(chunks: int, microbatches: int) -> Schedule:
    """All microbatches through a chunk before the next one, on one device: weights that stream cross once per pass.

    The last chunk, with the loss behind it, runs forward and backward of each microbatch in turn, so that only one
    has its outputs in memory.
    """
    lane = [Op("F", s, m) for s in range(chunks - 1) for m in range(microbatches)]
    lane += [Op(kind, chunks - 1, m) for m in range(microbatches) for kind in ("F", "B")]
    lane += [Op("B", s, m) for s in reversed(range(chunks - 1)) for m in range(microbatches)]
    return Schedule("chunk_major", microbatches, (0,) * chunks, (tuple(lane),))


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule`, in its order: evaluation and prediction."""
    lanes = tuple(tuple(op for op in lane if op.kind == "F") for lane in schedule.lanes)
    return Schedule(f"{schedule.name} (forward only)", schedule.microbatches, schedule.placement, lanes)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "staggered_1b1f": staggered_1b1f,
    "eager_1f1b": eager_1f1b,
    "zb_h1": zb_h1,
    "interleaved": interleaved,
    "zbv": zbv,
}
"""Name -> builder from (devices, microbatches). `uniform_1f1b` is left out: it teaches, it is not for use."""

ALIASES = {"1f1b": "staggered_1b1f"}
"""Other accepted names."""


def build(name: str, devices: int, microbatches: int) -> Schedule:
    """The schedule called `name` for so many devices and microbatches.

    Raises `ConfigurationError` for an unknown name, for counts below one, or for more than `MAX_OPS` ops.
    """
    word: Any = name
    builder = SCHEDULES.get(ALIASES.get(word, word)) if isinstance(word, str) else None
    if builder is None:
        known = ", ".join(sorted([*SCHEDULES, *ALIASES]))
        raise ConfigurationError(f"no pipeline schedule is called {shown(name)}; there are {known}")
    check_size(devices, microbatches)
    return builder(devices, microbatches)


def _one_stage_per_device(name: str, microbatches: int, lanes: Iterable[Iterable[Op]]) -> Schedule:
    rows = tuple(tuple(lane) for lane in lanes)
    return Schedule(name, microbatches, tuple(range(len(rows))), rows)


def _1f1b(stage: int, microbatches: int, warm: int) -> tuple[Op, ...]:
    forward = [Op("F", stage, m) for m in range(microbatches)]
    backward = [Op("B", stage, m) for m in range(microbatches)]
    return _alternate(forward, backward, warm)


def _alternate(forward: Sequence[Op], backward: Sequence[Op], warm: int) -> tuple[Op, ...]:
    """`warm` forwards, then backward and forward in turn until the forwards end, then the remaining backwards."""
    lane = list(forward[:warm])
    for i, op in enumerate(backward):
        lane.append(op)
        lane += forward[warm + i : warm + i + 1]
    return tuple(lane)


def _list_schedule(placement: Sequence[int], microbatches: int) -> tuple[tuple[Op, ...], ...]:
    """Orders by repeatedly starting the op that can start first: I before F before W, later stages before earlier ones.

    Every op takes one unit of time. A device admits a microbatch only while fewer than `devices` of those it admitted
    still wait for their last W, which bounds memory and, because an admitted microbatch never waits for memory again,
    excludes deadlock. W runs when nothing else can start.
    """
    stages, devices = len(placement), max(placement) + 1
    entry = [min(s for s in range(stages) if placement[s] == d) for d in range(devices)]
    clock = [0] * devices
    lanes: list[list[Op]] = [[] for _ in range(devices)]
    following = {(kind, s): 0 for kind in "FIW" for s in range(stages)}
    end: dict[Op, int] = {}

    def candidates(device: int) -> Iterable[tuple[int, int, int, Op]]:
        for s in (s for s in range(stages) if placement[s] == device):
            f, i, w = (following[kind, s] for kind in "FIW")
            before = end.get(Op("F", s, i)) if s == stages - 1 else end.get(Op("I", s + 1, i))
            if i < f and before is not None:
                yield max(clock[device], before), 0, -s, Op("I", s, i)
            before = 0 if s == 0 else end.get(Op("F", s - 1, f))
            admitted = s != entry[device] or f - following["W", s] < devices
            if f < microbatches and before is not None and admitted:
                yield max(clock[device], before), 1, -s, Op("F", s, f)
            if w < i:
                yield clock[device], 2, -s, Op("W", s, w)

    for _ in range(3 * stages * microbatches):
        ready = [(*min(found), d) for d in range(devices) if (found := list(candidates(d)))]
        start, _, _, op, device = min(ready, key=lambda item: item[:3])
        lanes[device].append(op)
        following[op.kind, op.stage] += 1
        clock[device] = end[op] = start + 1
    return tuple(map(tuple, lanes))
