"""Proves that a pipeline schedule can run: complete, ordered, free of deadlock, within a memory bound.

Every refusal is a `PlanError` whose text shows the schedule with the offending op marked, `>2F0<`.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from ramtorch_core.errors import PlanError
from ramtorch_core.plan.schedule import Op, Schedule

__all__ = ["check", "dependencies", "grid", "peak_activations"]


def check(schedule: Schedule, max_activations: int | None = None) -> None:
    """Raise `PlanError` unless `schedule` can be executed.

    It must hold that every stage runs F and either B, or I then W, exactly once per microbatch (or F alone for every
    microbatch, if there is no backward at all); that each kind comes in microbatch order on every stage, so that
    gradients accumulate in that order; that each op's `dependencies` can come before it; and, if `max_activations` is
    given, that no device holds more microbatches of activations than that.
    """
    _check_complete(schedule)
    _check_order(schedule)
    _check_progress(schedule)
    if max_activations is not None:
        _check_memory(schedule, max_activations)


def dependencies(op: Op, stages: int) -> tuple[Op, ...]:
    """The ops that must end before `op` begins; of B and I, which stand for each other, the I is named.

    F needs the previous stage's F. B and I need the own F and the next stage's I. W needs the own I.
    """
    if op.kind == "F":
        return (Op("F", op.stage - 1, op.microbatch),) if op.stage else ()
    if op.kind == "W":
        return (Op("I", op.stage, op.microbatch),)
    own = Op("F", op.stage, op.microbatch)
    return (own,) if op.stage == stages - 1 else (own, Op("I", op.stage + 1, op.microbatch))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per device, the largest number of forwards whose activations are held at once.

    B frees them; where the backward is split, W does. Stages of one device count separately.
    """
    return tuple(max(held for _, held in _held(lane)) for lane in schedule.lanes)


def grid(schedule: Schedule, marked: Iterable[Op] = ()) -> str:
    """The schedule as text: a line per device, a column per position, marked ops between `>` and `<`."""
    marks = set(marked)
    rows = [[f">{op}<" if op in marks else f" {op} " for op in lane] for lane in schedule.lanes]
    width = max((len(cell) for row in rows for cell in row), default=0)
    return "\n".join(f"device {d}:" + "".join(cell.center(width) for cell in row) for d, row in enumerate(rows))


def _refuse(schedule: Schedule, message: str, marked: Iterable[Op]) -> PlanError:
    return PlanError(f"schedule {schedule.name!r} cannot run: {message}\n{grid(schedule, marked)}")


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(op for lane in schedule.lanes for op in lane)
    for op, count in counts.items():
        if count > 1:
            raise _refuse(schedule, f"{op} occurs {count} times; every op runs once", [op])
        if not (0 <= op.stage < schedule.stages and 0 <= op.microbatch < schedule.microbatches):
            size = f"{schedule.stages} stages and {schedule.microbatches} microbatches"
            raise _refuse(schedule, f"{op} is outside {size}", [op])
    kinds = {op.kind for op in counts}
    allowed = [{"F"}] if kinds == {"F"} else [{"F", "B"}, {"F", "I", "W"}]
    for device, lane in enumerate(schedule.lanes):
        strangers = [op for op in lane if schedule.placement[op.stage] != device]
        if strangers:
            home = schedule.placement[strangers[0].stage]
            raise _refuse(schedule, f"{strangers[0]} is on device {device}, its stage on device {home}", strangers[:1])
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            present = [op for kind in "FBIW" if (op := Op(kind, stage, m)) in counts]  # type: ignore[arg-type]
            if {op.kind for op in present} not in allowed:
                have = ", ".join(map(str, present)) or "nothing"
                message = f"stage {stage} has {have} of microbatch {m}; it needs F and B, or F, I and W"
                raise _refuse(schedule, message, present)


def _check_order(schedule: Schedule) -> None:
    for stage, ops in enumerate(schedule.ops):
        for kinds, what in (("F", "forward"), ("BI", "backward"), ("W", "weight gradient")):
            chosen = [op for op in ops if op.kind in kinds]
            for earlier, later in itertools.pairwise(chosen):
                if earlier.microbatch > later.microbatch:
                    message = (
                        f"stage {stage} runs the {what} of microbatch {earlier.microbatch} before that of "
                        f"{later.microbatch}; gradients must accumulate in microbatch order"
                    )
                    raise _refuse(schedule, message, [earlier, later])


def _check_progress(schedule: Schedule) -> None:
    done: set[Op] = set()
    positions = [0] * schedule.devices
    moved = True
    while moved:
        moved = False
        for device, lane in enumerate(schedule.lanes):
            while positions[device] < len(lane):
                op = lane[positions[device]]
                if not done.issuperset(dependencies(op, schedule.stages)):
                    break
                done.add(Op("I", op.stage, op.microbatch) if op.kind == "B" else op)
                positions[device] += 1
                moved = True
    blocked = [lane[at] for lane, at in zip(schedule.lanes, positions, strict=True) if at < len(lane)]
    if blocked:
        waits = "; ".join(
            f"{op} waits for {' and '.join(str(d) for d in dependencies(op, schedule.stages) if d not in done)}"
            for op in blocked
        )
        raise _refuse(schedule, f"it deadlocks: {waits}", blocked)


def _check_memory(schedule: Schedule, limit: int) -> None:
    for device, lane in enumerate(schedule.lanes):
        for op, held in _held(lane):
            if held > limit:
                message = f"{op} is forward number {held} held on device {device}, where {limit} are allowed"
                raise _refuse(schedule, message, [op])


def _held(lane: Iterable[Op]) -> Iterator[tuple[Op, int]]:
    held = 0
    for op in lane:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]
        yield op, held
