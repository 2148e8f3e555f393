"""Random training runs: models, knobs, optimizers, and what happens between steps."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz_models import KINDS

from ramtorch_core.optim import adamw as own

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "own AdamW": lambda p: own.AdamW(p, lr=0.01, moments=torch.bfloat16, kernel="torch"),
}
ON_DEVICE = ("fused AdamW", "fused Adam")
ONLY_FLOAT32 = ("own AdamW",)


@dataclass
class Case:
    """One random training run. A field's default is what most cases have."""

    seed: int
    kinds: list[str] = field(default_factory=list)
    tied: tuple[int, int] | None = None
    again: int | None = None
    """This chunk is called twice in a step."""
    skipped: dict[int, int] = field(default_factory=dict)
    """By step, a chunk that is not called."""
    window: int = 2
    pin: list[str] = field(default_factory=list)
    activations: str = "checkpoint"
    resident_below: int = 0
    chunks: str = "blocks.*"
    amp: bool = False
    optimizer: str = "AdamW"
    groups: int = 1
    left_out: bool = False
    """One parameter in seven belongs to no optimizer."""
    scheduled: bool = False
    batches: int = 1
    together: bool = False
    """Microbatches go through one chunk after the other."""
    clip: float | None = None
    updates: Any = "host"
    run_on: bool = True
    conservative: bool = False
    evaluated: list[int] = field(default_factory=list)
    written: dict[int, str] = field(default_factory=dict)
    """After these steps weights are written: in place, or through `.data`."""
    reloaded: int | None = None
    """After this step the state of model and optimizer is saved, and loaded again."""
    fails: int | None = None
    """Before this step a forward fails."""
    set_to_none: bool = True
    two: bool = False
    """The second half of the parameters has an optimizer of its own."""
    idle: int | None = None
    """Before this step there is a forward whose graph dies."""
    hooked: bool = False
    """A parameter has a hook that changes its gradient."""
    penalty: int | None = None
    """The loss reads a weight of this chunk, too."""
    frozen: tuple[int, int] | None = None
    """From this step on, this chunk is not trained."""
    rearranged: dict[int, tuple[int, str, frozenset[int]]] = field(default_factory=dict)
    """After these steps the engine goes on with another window, activation policy, and other resident chunks."""
    steps: int = 3

    @property
    def shared(self) -> bool:
        """Whether several visits use one weight."""
        leaf = self.chunks == "leaves" and "Twice" in self.kinds
        return self.again is not None or self.tied is not None or leaf

    @property
    def remembers(self) -> bool:
        """Whether autocast may remember casts: no weight is used twice, whose gradients it would add in bfloat16."""
        return self.penalty is None and not (self.shared or {"Twice", "Recurrent", "Reused"} & set(self.kinds))

    @property
    def like_plain(self) -> bool:
        """Whether the plain run must leave the same bits; docs/numerics.md tells where it need not."""
        inside = {"Twice", "Recurrent", "Reused"} & set(self.kinds)
        if self.together and (self.shared or "Dropping" in self.kinds or self.left_out):
            return False
        outside = self.penalty is not None or (self.chunks == "leaves" and {"Raw", "Reused"} & set(self.kinds))
        several = inside or self.batches > 1 or self.shared
        return not (self.shared and inside) and not (outside and several)


def draw(seed: int, *, emulated: bool = False) -> Case:
    """The case of this seed; the same on every machine.

    Args:
        emulated: for the emulated device, which has no resident chunks, and mixes no devices.
    """
    dice = random.Random(seed)

    def chance(share: float) -> bool:
        return dice.random() < share

    case = Case(seed, steps=dice.choice((3, 3, 4)))
    case.optimizer = dice.choice((*OPTIMIZERS, *ON_DEVICE, *ON_DEVICE))
    case.batches = dice.choice((1, 1, 1, 2, 3))
    case.left_out = chance(0.15)
    unfit = {"Half"} if case.batches > 1 or case.left_out or case.optimizer in ON_DEVICE else set()
    unfit |= {"Double"} if case.optimizer in ONLY_FLOAT32 else set()
    unfit |= {"Half", "Double"} if case.optimizer == "Adafactor" else set()
    unfit |= {"Attention", "Recurrent", "Half", "Images"} if emulated else set()
    case.kinds = [dice.choice([kind for kind in KINDS if kind not in unfit]) for _ in range(dice.choice((2, 3, 4, 5)))]
    alike = [i for i, kind in enumerate(case.kinds) if kind in ("Plain", "Raw", "Normed", "Unused", "InPlace")]
    if len(alike) > 1 and chance(0.2):
        first, second = dice.sample(alike, 2)
        case.tied = (first, second)
    if chance(0.15):
        case.again = dice.randrange(len(case.kinds))
    if chance(0.2):
        case.skipped = {dice.randrange(case.steps): dice.randrange(len(case.kinds))}
    case.window = dice.choice((1, 2, 2, 3, 4))
    case.activations = dice.choice(("checkpoint", "keep"))
    case.resident_below = dice.choice((0, 0, 40, 100, 1 << 20))
    case.chunks = dice.choice(("blocks.*", "blocks.*", "leaves"))
    if case.chunks == "blocks.*" and not emulated and chance(0.2):
        case.pin = [f"blocks.{i}" for i in range(len(case.kinds)) if chance(0.4)]
    case.amp = chance(0.3)
    case.groups = dice.choice((1, 1, 2, 3))
    case.scheduled = chance(0.3)
    case.together = case.batches > 1 and case.chunks == "blocks.*" and chance(0.5)
    if case.together and case.again is not None:
        case.skipped = {}  # the order of calls may not change then
    if not case.together and chance(0.25):
        case.clip = dice.choice((0.01, 1.0, 1e6))
        case.kinds = ["Plain" if kind == "Transposed" else kind for kind in case.kinds]  # norms differ by rounding
    if case.optimizer in ON_DEVICE:
        case.updates = dice.choice(("host", 0.5, 1.0, 1.0))
    case.run_on, case.conservative = chance(0.7), chance(0.3)
    case.evaluated = [step for step in range(case.steps) if chance(0.1)]
    if chance(0.2):
        case.written = {dice.randrange(case.steps): dice.choice(("in place", "data"))}
    if chance(0.15):
        case.reloaded = dice.randrange(case.steps)
    if chance(0.1):
        case.fails = dice.randrange(case.steps)
    case.set_to_none = chance(0.85)
    case.two = chance(0.1)
    case.idle = dice.randrange(case.steps) if chance(0.1) else None
    case.hooked = chance(0.1)
    case.frozen = (dice.randrange(1, case.steps), dice.randrange(len(case.kinds))) if chance(0.1) else None
    case.penalty = dice.randrange(len(case.kinds)) if not case.together and chance(0.1) else None
    if chance(0.15):
        resident = frozenset(i for i in range(len(case.kinds)) if chance(0.3) and case.pin)
        knobs = dice.choice((1, 2, 3)), dice.choice(("checkpoint", "keep")), resident
        case.rearranged = {dice.randrange(case.steps): knobs}
    case.set_to_none |= bool(case.skipped) or case.frozen is not None  # zeros are gradients, to the plain run
    if emulated and case.chunks == "leaves":  # what is no leaf may not read a weight of one, or not before a step
        case.kinds = ["Plain" if kind in ("Raw", "Reused") else kind for kind in case.kinds]
    return case
