"""Constructors, their arguments, and values that hardly any of them allows."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from offload_cases import Classifier, loader, make_trainer
from torch import Tensor, nn

from ramtorch_core import (
    AdamW,
    HostMemoryError,
    OffloadAdamW,
    OffloadModel,
    Pipeline,
    PipelineModel,
    PlanError,
    attach,
)
from ramtorch_core.plan.schedule import SCHEDULES, build
from ramtorch_lightning import OffloadMonitor, OffloadStrategy, PipelineMonitor, PipelineStrategy

WIDTH = 4
ALLOWED = (TypeError, ValueError, PlanError, HostMemoryError, MisconfigurationException)
"""`ConfigurationError` is a ValueError."""


ALIASES = {"params": ["parameter"], "stages": ["cut"], "split_spec": ["cut", "stages"], "name": ["schedule"]}
"""What messages may call an argument besides its name."""


class Odd:
    """Nothing that any argument is."""

    def __repr__(self) -> str:
        return "Odd()"


def answers(value: Any) -> Callable[..., Any]:
    """A function of anything."""

    def function(*_: Any, **__: Any) -> Any:
        return value

    return function


NUMBERS: list[Any] = [-1, 0, 1, 2, 3, 10**6, 2**63, -(2**63), 10**30, -1.5, 0.5, 1.0, 2.0, 1e30]
NUMBERS += [float("nan"), float("inf"), -float("inf"), True, False, 1 + 2j]
WORDS: list[Any] = [
    "",
    " ",
    "auto",
    "nonsense",
    "0",
    "-1",
    "1e9",
    "24GB",
    "-3GB",
    "0GB",
    "9" * 400 + "GB",
    "leaves",
    "*",
    "**",
    "[",
    "\0",
]
WORDS += ["cpu", "cuda:99", "meta", "published", "keep", "gpipe", "zbv", "interleaved", "memory", b"auto"]
WORDS += ["blocks.0", "net.blocks.0", "net.blocks.*", "net", "net.head"]
SEQUENCES: list[Any] = [[], (), set(), {}, [0], [-1], [99], [1.5], [True], [""], ["nonsense"], [None], [float("nan")]]
SEQUENCES += [[0, 0], [1, 2], (0.9, 0.999), (0.9,), (2.0, 0.9), ("a", "b"), ["cpu", "cpu"], ["cpu"], ["meta", "cpu"]]
SEQUENCES += [range(2), [Odd()], {"*": "x"}, {"*": torch.bfloat16}, {0: 1}, [[]], ["net.blocks.1"], ["net.blocks.0", 1]]
OBJECTS: list[Any] = [None, torch.float32, torch.bfloat16, torch.int8, torch.device("cpu"), torch.device("meta")]
OBJECTS += [Odd(), int, nn.Linear, nn.Conv2d, nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH), torch.tensor(1)]
FUNCTIONS: list[Any] = [answers(value) for value in (None, [], [None], True, 3, "blocks", ["net.head"])]
USED: dict[str, list[Any]] = {"tokens": [], "split_fn": [*FUNCTIONS[:2], *FUNCTIONS[3:5]]}
"""Functions that these arguments get: what others return, a model's own step fails on."""
VALUES = [*NUMBERS, *WORDS, *SEQUENCES, *OBJECTS, *FUNCTIONS]


SENSIBLE: dict[str, list[Any]] = {
    "window": [1, 2, 9, "auto", None],
    "pin": [0, 1, 9, "auto", [0], ["net.blocks.0"]],
    "chunks": [None, "leaves", "**.0", nn.Linear],
    "activations": ["keep", "checkpoint", "recompute", "auto"],
    "gradients": ["auto", "published"],
    "kernel": ["auto", "torch"],
    "updates": ["host", "auto", 0.5, 1.0, ["net.head"]],
    "stream_dtype": ["auto", torch.bfloat16, torch.float32],
    "resident_below": [0, 100, 2**20],
    "host_memory": [None, 1, 10**10],
    "gpu_memory": [None, 1, "1GB"],
    "n_microbatches": [1, 2, 9],
    "devices": [["cpu"], ["cpu"] * 2, ["cpu"] * 3],
    "schedule": [*SCHEDULES, "auto", *SCHEDULES.values(), build("gpipe", 2, 2)],
    "stages": [None, ["net.blocks.1"], ["net.blocks.2", "net.blocks.1"], ["net.blocks.1", "net.head"]],
    "split_spec": [None, ["0.1"], ["1"], ["0.1", "1"]],
    "balance": ["parameters", "memory", "time"],
    "device_weights": [None, [1.0, 2.0], [1.0]],
    "evaluate": ["pipelined", "whole"],
    "device": ["cpu"],
    "keep_activations": [True, False, "checkpoint"],
    "pin_layers": [None, [0], [1, 0]],
    "autocast": [None, "bf16", "fp16"],
    "example": [None, torch.ones(1, WIDTH), (torch.ones(2, WIDTH),)],
    "betas": [(0.0, 0.5)],
    "moments": [torch.float32, torch.bfloat16],
    "piece_bytes": [256, 1024],
    "every_n_steps": [None, 1, 5],
    "microbatches": [1, 9],
    "name": [*SCHEDULES],
}
"""Values that an argument allows, though not all of them together."""


def net() -> nn.Module:
    """Four blocks in a tree with the names of `VALUES`."""
    torch.manual_seed(0)
    module = nn.Module()
    module.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    module.head = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(module.blocks, module.head)


def learn(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer | None = None) -> None:
    F.mse_loss(model(torch.ones(2, WIDTH)), torch.zeros(2, WIDTH)).backward()
    if optimizer is not None:
        optimizer.step()


def use_offload_strategy(given: Mapping[str, Any]) -> None:
    strategy = OffloadStrategy(**given)
    make_trainer(strategy, max_epochs=1).fit(Classifier(), loader(8), loader(4))


def use_pipeline_strategy(given: Mapping[str, Any]) -> None:
    strategy = PipelineStrategy(**{"devices": ["cpu", "cpu"], **given})
    make_trainer(strategy, max_epochs=1).fit(Classifier(), loader(8), loader(4))


def use_attach(given: Mapping[str, Any]) -> None:
    module = net()
    streamer = attach(module, **{"device": "cpu", **given})
    try:
        learn(module, torch.optim.SGD(module.parameters(), 0.1))
    finally:
        streamer.close()


def use_offload_model(given: Mapping[str, Any]) -> None:
    with OffloadModel(**{"chunks": list(net()), "device": "cpu", **given}) as model:
        model.step(torch.ones(2, WIDTH), loss_fn=torch.sum)
        model.flush_grads()


STEPS = ("schedule", "n_microbatches")


def use_pipeline(given: Mapping[str, Any]) -> None:
    made = {"devices": ["cpu", "cpu"], **{key: value for key, value in given.items() if key not in STEPS}}
    if "chunk_modules" not in made:
        made.setdefault("stage_modules", list(net()))
    pipeline = Pipeline(**made)
    _step(pipeline, given)


def use_pipeline_model(given: Mapping[str, Any]) -> None:
    made = {"devices": ["cpu", "cpu"], **{key: value for key, value in given.items() if key not in STEPS}}
    _step(PipelineModel(net(), **made), given)


def _step(pipeline: Pipeline | PipelineModel, given: Mapping[str, Any]) -> None:
    chosen = {key: value for key, value in given.items() if key in STEPS}
    try:
        scaler = torch.amp.GradScaler("cpu")
        pipeline.step(torch.ones(4, WIDTH), loss_fn=lambda out, _: out.float().sum(), scaler=scaler, **chosen)
        pipeline.flush_grads()
    finally:
        pipeline.close()


def use_adamw(given: Mapping[str, Any]) -> None:
    module = net()
    learn(module, AdamW(**{"params": module.parameters(), **given}))


def use_offload_adamw(given: Mapping[str, Any]) -> None:
    module = net()
    learn(module, OffloadAdamW(**{"params": module.parameters(), "device": "cpu", **given}))


def use_monitors(given: Mapping[str, Any]) -> None:
    for kind, strategy in (
        (OffloadMonitor, OffloadStrategy()),
        (PipelineMonitor, PipelineStrategy(devices=["cpu", "cpu"])),
    ):
        make_trainer(strategy, max_epochs=1, callbacks=[kind(**given)]).fit(Classifier(), loader(8))


def use_schedule(given: Mapping[str, Any]) -> None:
    build(**{"name": "gpipe", "devices": 2, "microbatches": 2, **given})


@dataclass(frozen=True)
class Target:
    """What is called, and the arguments that get bad values."""

    name: str
    use: Callable[[Mapping[str, Any]], None]
    arguments: Sequence[str]


STREAM = ["window", "pin", "chunks", "activations", "resident_below", "host_memory", "gpu_memory"]
PIPELINE = ["devices", "schedule", "n_microbatches", "stages", "balance", "device_weights"]
UPDATES = ["kernel", "updates", "stream_dtype"]
PLUGINS = ["accelerator", "checkpoint_io", "precision_plugin"]
TORCH = ["params", "lr", "betas", "eps", "weight_decay"]
TARGETS = [
    Target(
        "OffloadStrategy",
        use_offload_strategy,
        [*STREAM, *UPDATES, "n_microbatches", "gradients", "device", "split_fn", "weight_fn", *PLUGINS],
    ),
    Target(
        "PipelineStrategy",
        use_pipeline_strategy,
        [*PIPELINE, *STREAM, "split_fn", "weight_fn", "evaluate", *PLUGINS],
    ),
    Target("attach", use_attach, [*STREAM, *UPDATES, "device", "example"]),
    Target(
        "OffloadModel",
        use_offload_model,
        ["chunks", "device", "window", "pin", "pin_layers", "keep_activations", "resident_below", *UPDATES],
    ),
    Target(
        "Pipeline",
        use_pipeline,
        ["stage_modules", "chunk_modules", "devices", "window", "pin", "activations", "autocast", *STEPS],
    ),
    Target(
        "PipelineModel",
        use_pipeline_model,
        ["example", "devices", "device_weights", "split_spec", "window", "pin", "activations", "autocast", *STEPS],
    ),
    Target("AdamW", use_adamw, [*TORCH, "moments", "seed", "kernel"]),
    Target("OffloadAdamW", use_offload_adamw, [*TORCH, "device", "piece_bytes"]),
    Target("monitors", use_monitors, ["every_n_steps", "tokens"]),
    Target("build", use_schedule, ["name", "devices", "microbatches"]),
]


def values(name: str) -> SearchStrategy[Any]:
    """What the argument `name` is given; no function whose own error would come out, as it should."""
    fits = [value for value in VALUES if not (name in USED and callable(value) and value not in USED[name])]
    if name == "piece_bytes":
        return st.sampled_from([*fits, *SENSIBLE[name]])  # a large one is memory that is asked for
    return st.one_of(
        st.sampled_from(SENSIBLE.get(name, fits)),
        st.sampled_from(SENSIBLE.get(name, fits)),
        st.sampled_from(SENSIBLE.get(name, fits)),
        st.sampled_from(fits),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.lists(st.integers(-2, 9), max_size=3),
    )


def calls() -> SearchStrategy[tuple[Target, dict[str, Any]]]:
    """One to four arguments of one target, bad or in bad company."""
    return st.sampled_from(TARGETS).flatmap(
        lambda target: st.tuples(
            st.just(target),
            st.lists(st.sampled_from(target.arguments), min_size=1, max_size=4, unique=True).flatmap(
                lambda names: st.fixed_dictionaries({name: values(name) for name in names})
            ),
        )
    )


def problem(error: BaseException, names: Sequence[str]) -> str | None:
    """What is wrong with an error; None if it is one that a user can do something with."""
    message = str(error)
    if not isinstance(error, ALLOWED):
        return f"{type(error).__name__} is not what users are told to expect: {message}"
    called = [other for name in names for other in (name, *ALIASES.get(name, ()))]
    if not any(re.search(rf"\b{word}s?\b", message, re.IGNORECASE) for word in called):
        return f"{type(error).__name__} names none of {', '.join(names)}: {message}"
    return None
