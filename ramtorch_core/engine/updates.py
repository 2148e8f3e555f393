"""Overlapped updates: gradients of streamed weights go to the updater instead of `.grad`, while backward runs."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ramtorch_core.engine.rates import Rates, known_rates
from ramtorch_core.engine.update_places import HOST, UpdateSpec, choose_places
from ramtorch_core.engine.watching import Watching
from ramtorch_core.errors import ConfigurationError, RamtorchError
from ramtorch_core.memory.device import Device, Event
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.host import aligned
from ramtorch_core.memory.staging import Stagings
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.optim.ahead import Ahead
from ramtorch_core.optim.compiled import adam_kernel
from ramtorch_core.optim.device_updates import DeviceUpdater, updates_on_device
from ramtorch_core.optim.norms import Norms
from ramtorch_core.optim.steps import Recipe, WeightUpdate, why_whole
from ramtorch_core.optim.updater import GroupUpdate, Updater, processors

if TYPE_CHECKING:
    from ramtorch_core.engine.inventory import Inventory

log = logging.getLogger(__name__)

WHY_HOST = "updates on the device are for Adam and AdamW of torch, in float32"


class Updates:
    """Steps streamed weights while backward goes on, on the host or, with their state, through the device.

    Args:
        gradients: what it does not take goes there.
        kernel: "auto" uses the compiled kernel where it applies, "torch" the optimizers' own code.
        where: which chunks are updated on the device, where their optimizer allows that.

    Attributes:
        inventory: whose groups are updated; set before the first use.
        updater: the updating thread, and what it has done.
        on_device: the same for what is updated on the device.
        watching: sees user code use masters.
        ahead: whether held updates run ahead.
        ahead_bytes: of host memory, for those that do; see `room_for`. 0 lets all of them wait.
        run_on: let updates run on into the next forward when the optimizer has stepped. Only if no code outside of
            scopes reads weights before `wait` was called.
    """

    inventory: Inventory

    def __init__(
        self,
        device: Device,
        gradients: Gradients,
        kernel: Literal["auto", "torch"] = "auto",
        where: UpdateSpec = "host",
    ) -> None:
        self._device, self._gradients, self._kernel, self._where = device, gradients, kernel, where
        self.run_on = False
        self.updater = Updater(max(1, processors() - 1), device.ranges)
        transfer = weakref.WeakMethod(self._transfer)  # a thread must not keep the engine alive
        self.on_device = DeviceUpdater(device, lambda: None if (method := transfer()) is None else method())
        self._both = (self.updater, self.on_device)
        self._places = HOST
        self._rates: Rates | None = None
        self._fell_back = False
        self._norms = Norms()
        self._staging = Stagings(device)
        self.ahead_bytes: int | None = None
        self.ahead = Ahead()
        self._recipes: dict[nn.Parameter, Recipe] | None = None
        self._held = False
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose steps the last updates are of
        self._handed: dict[WeightGroup, set[nn.Parameter]] = {}
        self.watching = Watching(self)

    def describe(self) -> str:
        """Who computes updates, for the log."""
        text = "the optimizer's own code"
        if self._kernel == "auto" and adam_kernel() is not None:
            text = f"a compiled kernel for Adam and AdamW ({self.updater.threads} threads), or {text}"
        if self._places.device:
            text += f"; but Adam and AdamW update {self._places.text}, unless gradients are clipped"
        return text

    @property
    def updated(self) -> int:
        """Groups whose updates have finished, over the whole life."""
        return sum(each.updated for each in self._both)

    def place(self) -> None:
        """The groups are others, or cross in other dtypes: decide anew which are updated on the device.

        Raises:
            ConfigurationError: a name that no streamed chunk has.
        """
        inventory, before = self.inventory, self._places
        self._places = choose_places(self._where, inventory.streamed, self._known_rates, built=inventory.built)
        if self._places.text != before.text:
            log.info("updates=%r: %s", self._where, self._places.text)

    # ------------------------------------------------------------------ around a backward

    @contextlib.contextmanager
    def overlap(self, *optimizers: Optimizer, hold: bool = False) -> Iterator[None]:
        """The one backward inside is followed by a step of these optimizers: begin that step while it runs.

        Updates use the options that the optimizers have at the beginning, such as learning rates. Afterwards `.grad` of
        the weights that were taken is None, and `optimizer.step()`, which is called as always, leaves them alone. It
        steps the others, whose gradients are published.

        Args:
            hold: finish nothing before `clip` or `release`, because gradients may be scaled. After a step in which they
                were not, some updates run ahead, and are undone if they have to be.

        Raises:
            ConfigurationError: an optimizer that has to step all its parameters at once.
            RamtorchError: the updates of the step before are still held.
        """
        self.begin(*optimizers, hold=hold)
        try:
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            self.end()

    def begin(self, *optimizers: Optimizer, hold: bool = False) -> None:
        """Enter `overlap`."""
        for optimizer in optimizers:
            if (reason := why_whole(optimizer)) is not None:
                raise ConfigurationError(f"updates cannot overlap with backward: {reason}")
        self.wait()
        kernel = adam_kernel() if self._kernel == "auto" else None
        self.updater.begin(kernel, self.ahead.room(self.inventory.groups, self.ahead_bytes) if hold else None)
        self.on_device.begin(kernel)
        self._handed.clear()
        self._held, self._optimizers = hold, weakref.WeakSet(optimizers)
        self._norms.clear()
        self._recipes = {p: recipe for recipe in map(Recipe, optimizers) for p in recipe.options}

    def end(self) -> None:
        """Leave `overlap`. Idempotent."""
        if self._recipes is not None:
            self._recipes = None
            self.watching.steps += 1

    def take(self, group: WeightGroup, bucket: dict[Weight, Tensor], *, whole: bool) -> None:
        """Backward has left gradients: remove from `bucket` those that are taken.

        Args:
            whole: no visit of the group is to come that would add to them.

        Raises:
            RamtorchError: the group was updated in this step already.
        """
        recipes = self._recipes
        if recipes is None or group.index < 0:
            return
        if group in self._handed:
            raise RamtorchError(
                f"chunk '{group.name}' got gradients again after its update had begun: there was more than one "
                f"backward in this step. Pass gradients='published', and the optimizer steps when all of them are over."
            )
        if not whole:
            return
        added = any(self._gradients.is_published(group, weight) for weight in bucket)
        chosen = {weight: grad for weight, grad in bucket.items() if self._may_take(group, weight, added)}
        if not chosen:
            return
        self._handed[group] = {weight.parameter for weight in chosen}
        for weight in chosen:
            del bucket[weight]
        if group in self._places.device and not self._held:
            if all(updates_on_device(recipes[weight.parameter], weight) for weight in chosen):
                self._update_on_device(group, chosen, recipes)
                return
            if not self._fell_back:
                self._fell_back = True
                log.warning("chunk '%s' is updated on the host: %s", group.name, WHY_HOST)
        self._norms.note(chosen, self._held)  # before the copies, for which the end of the backward waits
        if added:
            self._gradients.receive(group, [chosen.get(weight) for weight in group.weights])
            arrived = self._device.record(self._gradients.stream, blocking=True)
            grads, finished = self._gradients.withdraw(group, chosen), lambda: None
        else:
            needed = sum(aligned(grad.nbytes) for grad in chosen.values())
            staging = self._staging.of(group, needed, self.inventory.groups, apart=self._held)
            buffer = staging.take()
            finished = partial(staging.give, buffer)
            try:
                arrived, grads = self._gradients.stage(group, chosen, buffer)
            except BaseException:
                finished()
                raise
        updates = [WeightUpdate(weight, grad, recipes[weight.parameter]) for weight, grad in grads.items()]
        self.updater.submit(GroupUpdate(group, updates, arrived, finished, held=self._held))

    def _update_on_device(
        self, group: WeightGroup, chosen: dict[Weight, Tensor], recipes: dict[nn.Parameter, Recipe]
    ) -> None:
        """Gradients stay where they are; to those that were published before they are added there."""
        updates = []
        with torch.inference_mode(False), torch.no_grad():
            for weight, grad in chosen.items():
                earlier = None
                if self._gradients.is_published(group, weight):
                    weight.parameter.grad = None
                    earlier = self._gradients.withdraw(group, [weight])[weight]
                updates.append(WeightUpdate(weight, weight.flatten(grad), recipes[weight.parameter], earlier))
        self._norms.note(chosen, held=False)
        self.on_device.submit(GroupUpdate(group, updates, self._device.record(), finished=lambda: None))

    def backward_over(self) -> None:
        """The backward is over: the next forward needs the lowest chunk first.

        Raises:
            RamtorchError: a gradient came from outside of its chunk when the update had begun.
        """
        if self._recipes is None:
            return
        for each in self._both:
            each.backward_over()
        for group, parameters in self._handed.items():
            for weight in group.weights:
                if weight.parameter in parameters and weight.parameter.grad is not None:
                    raise RamtorchError(
                        f"parameter '{weight.name}' got a gradient from outside of its chunk's forward (a penalty on "
                        f"the weights?) after its update had begun: pass gradients='published'"
                    )

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip the norm of all gradients of the step, published or taken, and let held updates begin.

        Returns the norm before. As `torch.nn.utils.clip_grad_norm_`, to 1e-6.

        Raises:
            RamtorchError: updates were not held, or are of parameters that are not among these.
        """
        total, scale = self._norms.clip(parameters, max_norm)
        self._release(scale)
        return total

    def release(self, scale: float = 1.0) -> None:
        """Let the updates that `hold` held begin, with gradients times `scale`. The optimizer's step does the same."""
        self._norms.clear()
        self._release(scale)

    def stepped(self, optimizer: Optimizer) -> None:
        """This optimizer has stepped: what is held of its step may begin."""
        if optimizer in self._optimizers:
            self.release()

    def _release(self, scale: float) -> None:
        if self._held:
            self._held = False
            self.ahead.released(scale)
            self.updater.release(scale)

    # ------------------------------------------------------------------ who waits

    def wait(self, group: WeightGroup | None = None) -> None:
        """Wait until the group, or everything, is updated.

        Raises:
            RamtorchError: the group is needed again in the step whose gradients it is updated with.
        """
        unfinished = self._recipes is not None or (self._held and torch.is_grad_enabled())
        if unfinished and group is not None and group in self._handed:
            raise RamtorchError(
                f"chunk '{group.name}' is used again after its gradients were taken for its update: step the optimizer "
                f"first, or pass gradients='published', and it steps when all backwards are over"
            )
        for each in self._both:
            each.wait(group)

    def is_pending(self, group: WeightGroup) -> bool:
        """Whether the group's update is not finished."""
        return self.updater.is_pending(group) or self.on_device.is_pending(group)

    @property
    def overlapping(self) -> bool:
        """Whether gradients are taken now, that is, between `begin` and `end`."""
        return self._recipes is not None

    def taken(self) -> set[nn.Parameter]:
        """The parameters whose gradients were taken in this step, or the last one."""
        return set().union(*self._handed.values())

    # ------------------------------------------------------------------ failures and the end

    def drop(self) -> None:
        """The step failed: forget the updates that have not begun."""
        self.end()
        for each in self._both:
            each.drop()
        self._handed.clear()
        self._held = False
        self._norms.clear()

    def forget(self) -> None:
        """The groups will be others: finish what is under way."""
        self.wait()
        self._handed.clear()
        self._staging.clear()
        self.ahead.forget()

    def close(self) -> None:
        """Finish what is under way and end the threads. Idempotent."""
        for each in self._both:
            each.close()
        self._staging.clear()
        self.ahead.forget()

    def host_bytes(self) -> int:
        """Bytes of host memory that gradients on their way occupy, and copies of what runs ahead."""
        return self.ahead.host_bytes() + self._staging.host_bytes()

    def _transfer(self) -> Event | None:
        return self.inventory.window.under_way() if self.inventory.built else None

    def _known_rates(self) -> Rates:
        self._rates = self._rates or known_rates(self._device)
        return self._rates

    def _may_take(self, group: WeightGroup, weight: Weight, added: bool) -> bool:
        parameter = weight.parameter
        assert self._recipes is not None
        if parameter not in self._recipes or parameter in self.watching.outside:
            return False
        if not added:
            return parameter.grad is None
        if self._held or parameter.dtype.itemsize < 4:
            return False  # the norm of the sum is known on the host only; in half precision the sum is kept apart
        return parameter.grad is None or self._gradients.is_published(group, weight)
