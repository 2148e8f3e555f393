"""The knobs of a streamed model on one GPU, as simulators and predictions take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ramtorch_core.errors import (
    ConfigurationError,
    check_count,
    check_flag,
    check_member,
    check_number,
    check_window,
    shown,
)
from ramtorch_core.simulate.costs import ChunkCost


class Optimizer(Enum):
    """Where and when streamed chunks are updated. Resident chunks are updated on the GPU, after the last backward."""

    NONE = "none"
    """Never: forward and backward alone."""
    PUBLISHED = "published"
    """On the host, once the backward has ended; the next step begins afterwards."""
    JOINED = "joined"
    """On the host, each chunk once its gradient has arrived; the next step begins when all are done."""
    OVERLAPPED = "overlapped"
    """The same, but the next step's transfers wait only for the update of their own chunk."""
    GPU = "gpu"
    """On the GPU, after the chunk's last backward: master and moments come in and go back."""


class Order(Enum):
    """Which comes first: all chunks of a microbatch, or all microbatches of a chunk."""

    MICROBATCH = "microbatch"
    CHUNK = "chunk"

    @classmethod
    def of(cls, microbatches: int, batches: int) -> Order:
        """In a Trainer: microbatches of a batch go side by side; accumulated batches of one do not."""
        return cls.CHUNK if microbatches > 1 or batches == 1 else cls.MICROBATCH


class Accumulate(Enum):
    """Where gradients of several microbatches are added up, if a microbatch visits all chunks before the next does."""

    HOST = "host"
    """In host memory: each but the first takes what is there to the GPU, adds to it, and brings it back."""
    GPU = "gpu"
    """On the GPU, for all chunks at once; they leave after the last microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingPlan:
    """The knobs of a streamed model.

    Attributes:
        window: slots.
        pin: resident chunks: a count, spread evenly, or indices.
        checkpoint: recompute activations in backward instead of keeping them.
        microbatches: per batch.
        batches: per step, accumulated; the optimizer steps after the last.
        train: False for forwards alone.
        staging: how many chunks' gradients may wait on the host for an update that overlaps with backward; None for
            any number. A backward that is further ahead waits.
        recast: user code may have written masters, so the host casts each again before it is copied.
        clip: the norm of all gradients is wanted before any update.
        ahead: part, 0 to 1, of what updates overwrite for which the host has room for copies: these updates, the first
            whose gradients come, run ahead of that norm. Nothing is clipped then; where it is, all of them wait, as
            with 0. None: simulators take 0, and predictions what the engine makes of it, see `pricing.as_run`.

    Raises:
        ConfigurationError: fewer than one slot, batch, microbatch or staging buffer, no such part, or a value of
            another type.
    """

    window: int = 2
    pin: int | tuple[int, ...] = 0
    checkpoint: bool = True
    microbatches: int = 1
    batches: int = 1
    order: Order = Order.MICROBATCH
    optimizer: Optimizer = Optimizer.NONE
    accumulate: Accumulate = Accumulate.HOST
    train: bool = True
    staging: int | None = 4
    recast: bool = False
    clip: bool = False
    ahead: float | None = None

    @property
    def backwards(self) -> int:
        """Of a step: all microbatches of all its batches."""
        return self.microbatches * self.batches

    @property
    def together(self) -> int:
        """Microbatches side by side, all of them in a chunk before the next one."""
        return self.microbatches if self.order is Order.CHUNK else 1

    @property
    def updates(self) -> Optimizer:
        """Where and when updates happen, which may not be as wished: see `Updates` in the engine.

        Where gradients are clipped, updates on the GPU go to the host, and sums in host memory are published, since
        their norm is known there only.
        """
        if not self.clip or self.optimizer in (Optimizer.NONE, Optimizer.PUBLISHED):
            return self.optimizer
        if self.adds:
            return Optimizer.PUBLISHED
        return Optimizer.OVERLAPPED if self.optimizer is Optimizer.GPU else self.optimizer

    @property
    def held(self) -> bool:
        """Whether updates wait for the norm of all gradients, unless they run ahead of it."""
        return self.clip and self.updates in (Optimizer.JOINED, Optimizer.OVERLAPPED)

    @property
    def adds(self) -> bool:
        """Whether gradients are added to what is on the host."""
        on_host = self.order is Order.MICROBATCH and self.accumulate is Accumulate.HOST
        return self.train and self.backwards > 1 and on_host

    def bounces(self, streamed: Sequence[ChunkCost], *, others: bool) -> bool:
        """Whether gradients go through a buffer on the GPU, to be added to what is on the host, or to be cast.

        Args:
            streamed: the chunks that are not resident.
            others: tensors in no chunk get gradients too.
        """
        alone = self.microbatches == 1 and (self.batches == 1 or self.order is Order.CHUNK)
        casts = alone and any(chunk.left_bytes < chunk.gradient_bytes for chunk in streamed)
        published = others or self.batches > 1 or self.updates in (Optimizer.NONE, Optimizer.PUBLISHED)
        beside = any(chunk.sums_in_full for chunk in streamed)  # a sum in float32, and what is rounded from it
        wide = self.order is Order.CHUNK and beside
        return self.train and (casts or (self.adds and bool(others or streamed)) or (wide and published))

    def __post_init__(self) -> None:
        check_window(self.window)
        check_pin(self.pin)
        check_count("microbatches", self.microbatches)
        check_count("batches", self.batches)
        check_member("order", self.order, Order)
        check_member("optimizer", self.optimizer, Optimizer)
        check_member("accumulate", self.accumulate, Accumulate)
        for name in ("checkpoint", "train", "recast", "clip"):
            check_flag(name, getattr(self, name))
        if self.staging is not None:
            check_count("staging", self.staging)
        if self.ahead is not None:
            check_number("ahead", self.ahead, most=1)


def check_pin(pin: object) -> None:
    """Refuse what cannot be resident chunks; whether there are so many is not known here.

    Raises:
        ConfigurationError: `pin` is neither a whole number nor a sequence of them.
    """
    indices = pin if isinstance(pin, Sequence) else (pin,)
    if any(type(index) is not int for index in indices):
        raise ConfigurationError(f"pin={shown(pin)}: a number of chunks is needed, or their indices")
