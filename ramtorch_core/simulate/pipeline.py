"""A pipeline's step, simulated: the tables of `plan/schedule.py`, walked with times, links and streamed stages."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramtorch_core.errors import ConfigurationError, check_flag, check_member, check_number, check_window
from ramtorch_core.plan.check import check, dependencies, peak_activations
from ramtorch_core.plan.itinerary import Direction, Visit
from ramtorch_core.plan.schedule import Op, Schedule
from ramtorch_core.simulate.clock import Kind, Work
from ramtorch_core.simulate.costs import BOTH_WAYS, HOST_MEMORY, ChunkCost, Machine, resident_chunks
from ramtorch_core.simulate.knobs import Accumulate, check_pin
from ramtorch_core.simulate.lane import Lane
from ramtorch_core.simulate.timeline import Cause, Timeline, timeline

ISSUING = "issuing"
KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT, "W": Kind.WEIGHT}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The knobs of a pipeline besides its schedule.

    Attributes:
        window: slots per GPU; None keeps every stage resident.
        pin: chunks of each GPU that stay: a count, spread evenly, or indices.
        checkpoint: recompute activations in backward.
        weight_share: part of a backward, 0 to 1, that is the weight gradient, where the schedule splits it. Of
            checkpointed chunks nothing is split.
        send: seconds that an activation, or its gradient, is on the link between two GPUs.

    Raises:
        ConfigurationError: a share or time that cannot be, fewer than one slot, or a value of another type.
    """

    window: int | None = None
    pin: int | tuple[int, ...] = 0
    checkpoint: bool = False
    weight_share: float = 0.5
    send: float = 0.0
    accumulate: Accumulate = Accumulate.HOST

    def __post_init__(self) -> None:
        if self.window is not None:
            check_window(self.window)
        check_pin(self.pin)
        check_flag("checkpoint", self.checkpoint)
        check_number("weight_share", self.weight_share, most=1)
        check_number("send", self.send)
        if math.isinf(self.send):
            raise ConfigurationError(f"send={self.send} seconds: it must be finite; use 0 for no link")
        check_member("accumulate", self.accumulate, Accumulate)


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """One GPU's part of a step; parts are of the makespan, 0 to 1.

    Attributes:
        compute, h2d, d2h: part in which it computes and copies.
        both_ways: part of its PCIe in both directions that is used; 0 where no limit is known.
        bubble, stall: seconds in which it waits for other stages, and for its own copies.
        peak_microbatches: forwards whose activations are held at once; stages count separately.
        peak_chunks, weight_bytes, peak_bytes: as of a streamed model.
    """

    compute: float
    h2d: float
    d2h: float
    both_ways: float
    bubble: float
    stall: float
    peak_microbatches: int
    peak_chunks: int
    weight_bytes: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """A step of a pipeline, from cold; `bubble` and `stall` are parts of all GPUs' time, `link` of the busiest link's.

    Attributes:
        seconds: the makespan.
        compute: part of all GPUs' time in which they compute.
        shared: part of the host's memory, and of the busiest GPU's PCIe in both directions, that is used.
    """

    seconds: float
    compute: float
    bubble: float
    stall: float
    link: float
    shared: dict[str, float]
    devices: tuple[DeviceResult, ...]
    timeline: Timeline


def simulate_pipeline(
    schedule: Schedule, stages: Sequence[Sequence[ChunkCost]], plan: PipelinePlan, machine: Machine | None = None
) -> PipelineResult:
    """Run one step of `schedule` on a virtual clock; `stages[s]` are the chunks of stage `s`.

    Links carry one activation or gradient at a time in each direction of travel, beside compute, and share the wire
    where both kinds go the same way. The host issues one forward at a time, as the engine's turnstile does, since those
    run user code. Backwards it issues side by side, as autograd does with a thread for each GPU, but one at a time too
    where stages stream or a GPU has several. What it has issued it hands on without waiting for the GPU.

    Raises:
        PlanError: the schedule cannot run.
        ConfigurationError: a stage without chunks, or another number of stages than the schedule has.
    """
    check(schedule)
    if len(stages) != schedule.stages or not all(stages):
        raise ConfigurationError(
            f"chunks are given for {sum(map(bool, stages))} of {schedule.stages} stages: each needs at least one"
        )
    walk = _Walk(schedule, stages, plan, machine or Machine())
    walk.lay_out()
    times = walk.work.run()
    line = timeline(walk.work, times, [held for lane in walk.lanes for held in lane.holdings])
    held = peak_activations(schedule)
    results = []
    for device, lane in enumerate(walk.lanes):
        gaps = [gap for gap in line.gaps if gap.resource == lane.compute]
        waited = {cause: sum(gap.end - gap.start for gap in gaps if gap.cause is cause) for cause in Cause}
        results.append(
            DeviceResult(
                compute=line.busy(lane.compute),
                h2d=line.busy(lane.h2d),
                d2h=line.busy(lane.d2h),
                both_ways=line.used(lane.bus),
                bubble=waited[Cause.BUBBLE],
                stall=waited[Cause.STALL],
                peak_microbatches=held[device],
                peak_chunks=lane.peak_chunks(line.peaks),
                weight_bytes=lane.weight_bytes,
                peak_bytes=walk.resident_bytes(lane) + lane.peak_bytes(line.peaks),
            )
        )
    total = line.seconds * len(results)
    return PipelineResult(
        seconds=line.seconds,
        compute=sum(result.compute for result in results) / len(results),
        bubble=line.waited(Cause.BUBBLE) / total if total else 0.0,
        stall=line.waited(Cause.STALL) / total if total else 0.0,
        link=max((line.busy(link) for link in sorted(walk.links)), default=0.0),
        shared={HOST_MEMORY: line.used(HOST_MEMORY), BOTH_WAYS: max(result.both_ways for result in results)},
        devices=tuple(results),
        timeline=line,
    )


class _Walk:
    """Lays out the ops of a schedule, each once its dependencies are."""

    def __init__(
        self, schedule: Schedule, stages: Sequence[Sequence[ChunkCost]], plan: PipelinePlan, machine: Machine
    ) -> None:
        self.schedule, self.plan = schedule, plan
        self.names = [f"GPU {device}" for device in range(schedule.devices)]
        wires = {f"wire {a}>{b}": 1.0 for a, b in itertools.permutations(range(schedule.devices), 2)}
        self.work = Work(machine.capacities(*self.names) | wires, {ISSUING: self._first_come})
        self.links: set[str] = set()
        self.lanes: list[Lane] = []
        exclusive = plan.window is not None or schedule.devices < schedule.stages  # as in the engine
        shared = dict.fromkeys(Direction if exclusive else [Direction.FORWARD], ISSUING)
        self._chunks: list[list[int]] = [[] for _ in stages]  # stage -> indices of its chunks in its lane
        for device, name in enumerate(self.names):
            owned: list[ChunkCost] = []
            for stage in (s for s, home in enumerate(schedule.placement) if home == device):
                self._chunks[stage] = list(range(len(owned), len(owned) + len(stages[stage])))
                owned += stages[stage]
            resident = resident_chunks(len(owned) if plan.window is None else plan.pin, len(owned))
            window = 1 if plan.window is None else plan.window
            self.lanes.append(Lane(self.work, name, owned, window=window, resident=resident, shared=shared))
            self.lanes[-1].begin(visit for op in schedule.lanes[device] for visit in self._visits(op))
        self._first_tasks: list[int] = []  # of each op, in the order in which ops are laid out
        self._end: dict[Op, int] = {}  # op (a B under the name of its I) -> the task that ends it
        self._arrived: dict[Op, int] = {}  # the same -> the task after which the next stage's GPU has its result
        self._issued: dict[Op, int | None] = {}  # the same -> the task with which the host has issued it
        self._forward_of: dict[tuple[int, int, int], int] = {}  # stage, chunk, microbatch -> its forward visit
        self._gradient_since: dict[tuple[int, int], int] = {}  # device, chunk -> the first visit that left a gradient
        self._left: Counter[tuple[int, int]] = Counter()  # device, chunk -> how many did

    def lay_out(self) -> None:
        """All ops, in an order that their dependencies allow; `check` has shown that there is one."""
        at = [0] * self.schedule.devices
        while any(at[d] < len(lane) for d, lane in enumerate(self.schedule.lanes)):
            for device, lane in enumerate(self.schedule.lanes):
                while at[device] < len(lane) and all(
                    need in self._end for need in dependencies(lane[at[device]], self.schedule.stages)
                ):
                    last = self._op(device, lane[at[device]])
                    at[device] += 1
                    if at[device] == len(lane):
                        self.lanes[device].all_sent(last)

    def resident_bytes(self, lane: Lane) -> float:
        """Gradients and optimizer state of a lane's resident chunks."""
        trained = any(op.kind != "F" for op in self._end)
        return trained * sum(lane.chunks[i].own_gradient_bytes + lane.chunks[i].state_bytes for i in lane.resident)

    def _visits(self, op: Op) -> list[Visit]:
        """The visits of an op; W computes with activations alone."""
        if op.kind == "F":
            return [Visit(Direction.FORWARD, chunk) for chunk in self._chunks[op.stage]]
        return [Visit(Direction.BACKWARD, chunk) for chunk in reversed(self._chunks[op.stage]) if op.kind != "W"]

    def _op(self, device: int, op: Op) -> int:
        """Lay out one op; returns its last task."""
        lane = self.lanes[device]
        self._first_tasks.append(len(self.work.tasks))
        needed = dependencies(op, self.schedule.stages)
        after = [(self._end if need.stage == op.stage else self._arrived)[need] for need in needed]
        issued = [self._issued[need] for need in needed if self._issued[need] is not None]
        known = self.work.join(issued) if issued else None
        chunks = self._chunks[op.stage] if op.kind == "F" else self._chunks[op.stage][::-1]
        for position, chunk in enumerate(chunks):
            label = str(op) if len(chunks) == 1 else f"{op}.{chunk}"
            seconds = self._seconds(op, lane.chunks[chunk], resident=chunk in lane.resident)
            needs = after if position == 0 else []
            issue = self._issue_seconds(op, lane.chunks[chunk], resident=chunk in lane.resident)
            if op.kind == "W":
                begins = [lane.issue(issue, label, [known], Direction.BACKWARD)] if issue else []
                task = lane.issued_too(lane.step(Kind.WEIGHT, seconds, label, [*needs, *begins]), issue)
            else:
                direction = Direction.FORWARD if op.kind == "F" else Direction.BACKWARD
                task = lane.visit(chunk, direction, KINDS[op.kind], seconds, label, needs, issue=issue, known=known)
            self._keep_books(device, lane, op, chunk, task)
        result = Op("I", op.stage, op.microbatch) if op.kind == "B" else op
        self._end[result] = self._arrived[result] = task
        self._issued[result] = lane.issued
        self._send(op, device)
        return task

    def _seconds(self, op: Op, cost: ChunkCost, *, resident: bool) -> float:
        """Compute of an op on one chunk. Weights are cast once per step, gradients for each microbatch."""
        first = op.microbatch == 0
        if op.kind == "F":
            return cost.forward + cost.cast * (resident and first)
        collects = (cost.cast + cost.add * (not first)) * resident
        if self.plan.checkpoint:  # of a recomputed region, nothing is put off
            again = cost.backward_seconds(checkpoint=True, resident=False) + collects
            return 0.0 if op.kind == "W" else again
        weight = cost.backward * self.plan.weight_share
        whole = cost.backward + collects
        return {"B": whole, "I": cost.backward - weight, "W": weight + collects}[op.kind]

    def _issue_seconds(self, op: Op, cost: ChunkCost, *, resident: bool) -> float:
        """Seconds of the host to issue an op on one chunk."""
        if op.kind == "F":
            return cost.issue_seconds(backward=False, resident=resident)
        whole = cost.issue_seconds(backward=True, checkpoint=self.plan.checkpoint, resident=resident)
        weight = 0.0 if self.plan.checkpoint else whole * self.plan.weight_share
        return {"B": whole, "I": whole - weight, "W": weight}[op.kind]

    def _first_come(self, task: int, arrival: int, _ended: Callable[[int], bool]) -> tuple[int, ...]:
        """The host goes on with the op that it has begun; otherwise it takes what became possible first."""
        first = self._first_tasks[bisect.bisect_right(self._first_tasks, task) - 1]
        begun = any(need >= first and self.work.tasks[need].resource == ISSUING for need in self.work.tasks[task].after)
        return int(not begun), arrival

    def _keep_books(self, device: int, lane: Lane, op: Op, chunk: int, task: int) -> None:
        """What the visit leaves on the GPU: activations, and the gradients of streamed chunks."""
        cost, plan, home = lane.chunks[chunk], self.plan, (op.stage, chunk, op.microbatch)
        if op.kind == "F":
            self._forward_of[home] = task
            return
        if op.kind != "W" and plan.checkpoint:
            lane.hold(cost.made_bytes(checkpoint=True), task, task)
        if op.kind == "I":
            return
        lane.hold(cost.held_bytes(plan.checkpoint), self._forward_of[home], task)
        if chunk in lane.resident:
            return
        stays = plan.accumulate is Accumulate.GPU
        since = self._gradient_since.setdefault((device, chunk), task) if stays else task
        self._left[device, chunk] += 1
        count = self._left[device, chunk]
        if stays and count > 1:
            lane.hold(cost.adding_bytes, task, task)
        if not stays or count == self.schedule.microbatches:
            nbytes = cost.gradient_bytes if stays and count > 1 else None
            lane.send_gradient(chunk, task, add=not stays and count > 1, nbytes=nbytes, since=since)

    def _send(self, op: Op, device: int) -> None:
        """The result of `op` leaves for the stage that needs it next, if that is on another GPU."""
        stage = op.stage + (1 if op.kind == "F" else -1)
        if op.kind == "W" or not 0 <= stage < self.schedule.stages or self.schedule.placement[stage] == device:
            return
        target = self.schedule.placement[stage]
        result = Op("I", op.stage, op.microbatch) if op.kind == "B" else op
        link = f"link {device}>{target} {'activations' if op.kind == 'F' else 'gradients'}"
        uses, needs = {f"wire {device}>{target}": 1.0}, [self._end[result], self._issued[result]]
        self._arrived[result] = self.work.add(link, str(op), Kind.SEND, self.plan.send, needs, uses)
        self.links.add(link)
