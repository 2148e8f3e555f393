"""Steps of a streamed model, laid out as work: passes over its chunks, gradients, and the optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ramtorch_core.plan.itinerary import Direction, Visit
from ramtorch_core.simulate.clock import Key, Kind, Work
from ramtorch_core.simulate.costs import HOST_MEMORY, ChunkCost, Machine, StepCost, resident_chunks, traffic
from ramtorch_core.simulate.knobs import Accumulate, Optimizer, Order, StreamingPlan
from ramtorch_core.simulate.lane import Lane

HOST = "host"


class Steps:
    """Lays out step after step.

    The host returns from a backward when every gradient has arrived, and from `optimizer.step()` as
    `StreamingPlan.optimizer` says; what it issues afterwards cannot begin before. Slots are planned anew for each pass
    over the chunks. Gradients of resident chunks stay until the backward of the next step begins.

    Args:
        merged: of microbatches side by side, take those after the second as one that is as long as all of them.

    Attributes:
        first: per step its first visit.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkCost],
        plan: StreamingPlan,
        machine: Machine,
        beside: StepCost | None = None,
        *,
        merged: bool = False,
    ) -> None:
        self.chunks, self.plan, self._beside = chunks, plan, beside or StepCost()
        self._merged = plan.together - 2 if merged and plan.together > 3 else 1  # microbatches in the last one
        self._where = plan.updates
        self._held = plan.held
        free: dict[str, Key] = {HOST: self._urgency}
        if self._where is Optimizer.GPU:
            free["H2D"] = self._weights_first
        self.work = Work(machine.capacities(), free)
        resident = resident_chunks(plan.pin, len(chunks))
        self.lane = Lane(
            self.work, "", chunks, window=plan.window, resident=resident, asynchronous=machine.asynchronous
        )
        self.first: list[int] = []
        self._last: dict[int, int] = {}  # step -> the end of its last backward: every gradient has arrived
        self._update: dict[int, tuple[int, int]] = {}  # update on the host, or copy for it -> step and chunk
        self._begun: set[int] = set()  # updates that follow such a copy
        self._runs_ahead = self._first_updates()
        self._left: dict[int, int] = {}  # resident chunk -> the visit that made its gradient
        self._over: int | None = None  # when a backward is over for the host
        self._since: int | None = None  # when the host went on

    @property
    def stays_bytes(self) -> float:
        """Bytes on the GPU at any time besides slots and weights: of the step, and optimizer state."""
        updated = self.plan.train and self.plan.optimizer is not Optimizer.NONE
        streamed = [chunk for i, chunk in enumerate(self.chunks) if i not in self.lane.resident]
        bounces = self.plan.bounces(streamed, others=self._beside.awaited)
        beside = self._beside.base_bytes + self._beside.bounce_bytes * bounces
        return beside + sum(self.chunks[i].state_bytes * updated for i in self.lane.resident)

    def end(self) -> None:
        """No step is to come."""
        self._drop_gradients(None)

    def lay_out(self) -> None:
        """Add one step."""
        plan, count = self.plan, len(self.chunks)
        self._number = len(self.first)
        self._forwards: dict[tuple[int, int], int] = {}  # chunk and microbatch -> its forward
        self._losses: dict[int, int] = {}  # microbatch -> its loss
        self._gradient_since: dict[int, int] = {}  # chunk -> the visit since which its gradient is on the GPU
        self._arrived: dict[int, int] = {}  # chunk -> the copy of its last gradient
        self._overlapping: list[int] = []  # updates on the host that the backward does not wait for
        self._saves: list[int] = []  # copies for updates that run ahead
        self._gpu_updates: list[tuple[int, int, int]] = []  # to come: chunk, its visit, the visit before
        if plan.recast:
            self.lane.stale = set(range(count)) - self.lane.resident
        for m in range(0, plan.backwards, plan.together):
            group = range(m, m + plan.together)
            self._pass(group if self._merged == 1 else (*group[:2], group[-1]))
        self.first.append(self._forwards[0, 0])
        known = self._latest if self._since is None else self._since  # the norm
        lowest_fits = len(self._saves) == len(self._arrived)  # it comes first when the backward is over
        over = self._last[self._number] = known if self._over is None or lowest_fits else self._over
        self.work.until |= dict.fromkeys(self._saves, (over, known))
        if plan.train and plan.optimizer is not Optimizer.NONE:
            self._optimize()

    def _pass(self, group: Sequence[int]) -> None:
        """Forward and backward of some microbatches, side by side."""
        plan, beside, count = self.plan, self._beside, len(self.chunks)
        down = [(chunk, m) for chunk in range(count) for m in group]
        up = [(chunk, m) for chunk in reversed(range(count)) for m in group] if plan.train else []
        visits = [Visit(Direction.FORWARD, chunk) for chunk, _ in down]
        self.lane.begin(visits + [Visit(Direction.BACKWARD, chunk) for chunk, _ in up], self._since)
        if not plan.train:  # forwards alone leave the first copies of the next one under way
            self.lane.copy_ahead()
        begin = beside.issue_begin + beside.between * (group[0] == 0)
        self.lane.spend(begin, "before a pass", [self._since])
        for chunk, m in down:
            self._forward(chunk, m)
        self._loss(group)
        for chunk, m in up:
            self._backward(chunk, m)
        if plan.train and self._where is not Optimizer.GPU:
            self.lane.all_sent(self._latest)
            end = self._latest if self._beside.awaited else None
            self._over = self.work.join([end, self.lane.issued, *self._arrived.values()])
            self._since = self.work.join([self._latest, self._over]) if plan.clip else self._over

    def _many(self, m: int) -> int:
        """How many microbatches are simulated as this one."""
        return self._merged if (m + 1) % self.plan.together == 0 else 1

    def _forward(self, chunk: int, m: int) -> None:
        cost, label = self.chunks[chunk], self._label("F", chunk, m)
        resident = chunk in self.lane.resident
        seconds = self._many(m) * cost.forward_seconds(resident)
        issue = self._many(m) * cost.issue_seconds(backward=False, resident=resident)
        self._latest = self.lane.visit(chunk, Direction.FORWARD, Kind.FORWARD, seconds, label, issue=issue)
        self._forwards[chunk, m] = self._latest
        if self.plan.checkpoint or not self.plan.train:
            self.lane.hold(self._beside.forward_bytes, self._latest, self._latest)

    def _loss(self, group: Sequence[int]) -> None:
        """What is between the forwards and the backwards of some microbatches."""
        plan, beside, lane = self.plan, self._beside, self.lane
        lane.let_host_write()
        for m in group:
            many = self._many(m)
            lane.spend(many * beside.issue_loss, "loss")
            if beside.loss or beside.loss_bytes or beside.turn_bytes:
                self._latest = lane.step(Kind.LOSS, many * beside.loss, self._label("L", "", m), [self._latest])
            if len(group) == 1 or not plan.train:
                lane.hold(beside.loss_bytes, self._latest, self._latest)
            self._losses[m] = self._latest
        if plan.checkpoint or not plan.train:  # otherwise they are saved for backward
            for chunk in lane.resident:  # autocast keeps what it has cast until the forward is over
                lane.hold(self.chunks[chunk].cast_bytes, self._forwards[chunk, group[0]], self._latest)
        if group[0] == 0:
            self._drop_gradients(self._latest)
        if beside.turn_bytes and plan.train:
            turn = lane.step(Kind.LOSS, 0.0, "", [self._latest])
            lane.hold(beside.turn_bytes, turn, turn)

    def _drop_gradients(self, until: int | None) -> None:
        """Those that the step before left on resident chunks."""
        for chunk, since in self._left.items():
            self.lane.hold(self.chunks[chunk].own_gradient_bytes, since, until)
        self._left = {}

    def _backward(self, chunk: int, m: int) -> None:
        cost, plan, before, lane = self.chunks[chunk], self.plan, self._latest, self.lane
        resident, many = chunk in lane.resident, self._many(m)
        seconds = many * cost.backward_seconds(checkpoint=plan.checkpoint, resident=resident, adds=m > 0)
        issue = many * cost.issue_seconds(backward=True, checkpoint=plan.checkpoint, resident=resident)
        visit = self._latest = lane.visit(
            chunk, Direction.BACKWARD, Kind.BACKWARD, seconds, self._label("B", chunk, m), issue=issue
        )
        forward = self._forwards[chunk, m]
        lane.hold(many * cost.held_bytes(plan.checkpoint), forward, visit)
        first = chunk == len(self.chunks) - 1
        if first and plan.together > 1:  # all microbatches' losses wait for the first backward
            lane.hold(many * self._beside.loss_bytes, self._losses[m], visit)
        work = self._beside.first_bytes if first else self._beside.work_bytes
        lane.hold(work + cost.made_bytes(plan.checkpoint), visit, visit)
        self._update_on_gpu()
        if resident:
            if plan.checkpoint:
                lane.hold(cost.cast_bytes, visit, visit)
            else:
                lane.hold(many * cost.cast_bytes, forward, visit)
            lane.hold(cost.passing_bytes, visit, visit)
            self._left.setdefault(chunk, visit)
        else:
            self._gradient(chunk, m, visit, before)

    def _gradient(self, chunk: int, m: int, visit: int, before: int) -> None:
        """What becomes of the gradient that a backward visit of a streamed chunk leaves."""
        cost, plan = self.chunks[chunk], self.plan
        together = plan.order is Order.CHUNK
        stays = together or plan.accumulate is Accumulate.GPU
        since = self._gradient_since.setdefault(chunk, visit) if stays else visit
        if stays and m:
            self.lane.hold(cost.adding_bytes, visit, visit)
        if together and chunk in self._arrived and m % plan.together == 0:
            visit = self._latest = self.lane.recall(chunk, visit, self._arrived[chunk])
        last = m == plan.backwards - 1
        leaves = last or not stays or (together and (m + 1) % plan.together == 0)
        if last and self._where is Optimizer.GPU:
            if m and not stays:
                visit = self.lane.send_gradient(chunk, visit, back=True)
            self._gradient_since[chunk] = since
            self._gpu_updates.append((chunk, visit, before))
        elif leaves:
            overlaps = last and not self._held and self._where in (Optimizer.JOINED, Optimizer.OVERLAPPED)
            add = bool(m and not stays)
            room = None
            if overlaps and not add and plan.staging is not None and len(self._overlapping) >= plan.staging:
                room = self._overlapping[-plan.staging]  # a sum on the host needs no buffer besides
            nbytes = cost.gradient_bytes if stays and m else None
            published = not last or self._where in (Optimizer.NONE, Optimizer.PUBLISHED)
            rounded = together and cost.sums_in_full and published
            arrived = self.lane.send_gradient(
                chunk, visit, add=add, room=room, rounded=rounded, nbytes=nbytes, since=since
            )
            self._arrived[chunk] = arrived
            self._gradient_since.pop(chunk, None)
            if overlaps:
                self._overlapping.append(self._update_on_host(chunk, arrived))
            elif last and chunk in self._runs_ahead:
                self._update_ahead(chunk, arrived)

    def _optimize(self) -> None:
        """`optimizer.step()`."""
        published = self._where is Optimizer.PUBLISHED
        self._update_on_gpu()
        if published or self._held:
            for chunk in sorted(self._arrived.keys() - self._runs_ahead):
                self._update_on_host(chunk, self._since)
        after = [self._since] if published or self._held else []
        for chunk in sorted(self.lane.resident):
            self._latest = self.lane.step(Kind.UPDATE, self.chunks[chunk].device_update, f"u{chunk}", after)
            self.lane.hold(self._beside.step_bytes, self._latest, self._latest)
        if self._where in (Optimizer.PUBLISHED, Optimizer.JOINED):
            self._since = self.work.join([self._since, *self.lane.updated.values()])

    def _update_on_host(self, chunk: int, after: int | None) -> int:
        cost = self.chunks[chunk]
        uses = traffic(cost.update_bytes, cost.update, HOST_MEMORY)
        task = self.work.add(HOST, f"u{chunk}", Kind.UPDATE, cost.update, [after], uses)
        self._update[task] = (self._number, chunk)
        self.lane.updated[chunk] = task
        return task

    def _first_updates(self) -> frozenset[int]:
        """The chunks whose updates may run ahead of the norm: the first whose gradients come, as far as there is room.

        Where no sizes are given, chunks are counted.
        """
        if not self._held:
            return frozenset()
        order = [chunk for chunk in reversed(range(len(self.chunks))) if chunk not in self.lane.resident]
        sizes = [self.chunks[chunk].saved_bytes or 1.0 for chunk in order]
        room = (self.plan.ahead or 0.0) * sum(sizes) * (1 + 1e-9)
        return frozenset(chunk for chunk, size in zip(order, itertools.accumulate(sizes), strict=True) if size <= room)

    def _update_ahead(self, chunk: int, arrived: int) -> None:
        """The same ahead of the norm; it begins with what copies take, unless that is known when its turn comes."""
        cost = self.chunks[chunk]
        uses = traffic(cost.saved_bytes, cost.save, HOST_MEMORY)
        save = self.work.add(HOST, f"k{chunk}", Kind.UPDATE, cost.save, [arrived], uses)
        self._update[save] = (self._number, chunk)
        self._saves.append(save)
        self._begun.add(self._update_on_host(chunk, save))

    def _update_on_gpu(self) -> None:
        """Lay out the updates whose backward visit is over; their state came in beside that visit."""
        for chunk, visit, before in self._gpu_updates:
            cost = self.chunks[chunk]
            moved = cost.master_bytes + cost.state_bytes
            came = traffic(moved, cost.state_in, HOST_MEMORY, self.lane.bus, self.lane.inward)
            state = self.work.add(self.lane.h2d, f"s{chunk}", Kind.STATE, cost.state_in, [before], came)
            update = self.lane.step(Kind.UPDATE, cost.device_update, f"u{chunk}", [state, visit])
            went = traffic(moved + cost.weight_bytes, cost.state_out, HOST_MEMORY, self.lane.bus)
            back = self.work.add(self.lane.d2h, f"s{chunk}", Kind.STATE, cost.state_out, [update], went)
            self.lane.hold(cost.gradient_bytes, self._gradient_since[chunk], update)
            self.lane.hold(moved, state, back)
            self.lane.updated[chunk] = back
        self._gpu_updates.clear()

    def _urgency(self, task: int, arrival: int, ended: Callable[[int], bool]) -> tuple[int, ...]:
        """While backward goes on, the gradient that came first; afterwards the lowest chunk, needed first.

        What is copied is updated at once.
        """
        step, chunk = self._update[task]
        return task not in self._begun, step, chunk if ended(self._last[step]) else arrival

    def _weights_first(self, task: int, _arrival: int, _ended: Callable[[int], bool]) -> tuple[int, ...]:
        """Visits wait for weights; optimizer state has a stream of its own, and lets them pass."""
        return int(self.work.tasks[task].kind is Kind.STATE), task

    def _label(self, letter: str, chunk: int | str, m: int) -> str:
        return f"{letter}{chunk}" if self.plan.backwards == 1 else f"{letter}{chunk}.{m}"
