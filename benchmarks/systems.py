"""One system on the reference work, in one process, at several sizes in a row. `peers.py` starts it.

    python benchmarks/systems.py '{"system": "ours:pin=2", "sizes": [[8, 2048, 1]], ...}' results.jsonl

Appends one JSON object per size to the file, as soon as the size is done. A system is a name and, after a colon,
keyword arguments for its own class: `ours:pin=[0, 3],activations=keep`. All sizes are epochs of one fit, since a fit
costs much more to set up than a few steps take; the weights go on learning from size to size. The process ends without
tearing down, which is not measured and takes long with tens of gigabytes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from feeds import Feed, Record, Size
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from reference import Block, Head, build, loss_function
from torch import Tensor, nn
from workload import RATE, Stack, make_trainer

import ramtorch_core
from ramtorch_lightning import OffloadStrategy


@dataclass
class Job:
    """What `peers.py` asks for. `sizes` are (rows, length, batches); `host_memory` is in bytes."""

    system: str
    sizes: list[tuple[int, int, int]]
    layers: int
    width: int
    steps: int
    device: str
    host_memory: int | None
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        name, _, given = self.system.partition(":")
        self.system, self.options = name, parse_options(given)

    def feeds(self, merged: int, facts: Callable[[], Record], results: Path) -> list[Feed]:
        """One feed per size; each, when done, writes its record with `facts`. The last one ends the process.

        `merged` batches are handed out as one, for a system that splits them itself.
        """
        feeds = []
        for rows, length, batches in self.sizes:
            factor = min(merged, batches)
            if batches % factor:
                raise ValueError(f"{batches} batches cannot be handed out {factor} at a time: choose a divisor")
            feeds.append(Feed(Size(rows * factor, length, batches // factor), self.steps, self.device))

        def write(feed: Feed) -> None:
            record = feed.close() | facts() | {"steps_before": feeds.index(feed) * self.steps}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

        def end() -> None:
            write(feeds[-1])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

        for feed, following in itertools.pairwise(feeds):
            following.on_start = functools.partial(write, feed)
        feeds[-1].on_end = end
        return feeds


def parse_options(text: str) -> dict[str, Any]:
    """Keyword arguments as Python writes them; a bare name is a string, `torch.bfloat16` a dtype.

    Raises:
        ValueError: not keyword arguments.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"options must look like key=value,key=value, not {text!r}") from error
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"options must look like key=value,key=value, not {text!r}")
    return {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return getattr(torch, node.attr)
    return ast.literal_eval(node)


class Fed(Stack):
    """The stack, one feed per epoch; `moments` other than None are the dtype of our own AdamW's."""

    feeds: list[Feed]
    moments: torch.dtype | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.moments is None:
            return super().configure_optimizers()
        return ramtorch_core.AdamW(self.parameters(), lr=RATE, moments=self.moments)

    def train_dataloader(self) -> Feed:
        return self.feeds[self.trainer.current_epoch]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.feeds[self.trainer.current_epoch].losses[-1].append(loss.detach())
        return loss


class FedDeepSpeed(Fed):
    """DeepSpeed shards modules while they are made, and has an optimizer of its own for the host."""

    def make(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.ModuleList(build(self.layers, self.width, "cuda"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        make = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        optimizer: torch.optim.Optimizer = make(self.parameters(), lr=RATE, adamw_mode=True, weight_decay=1e-2)
        return optimizer


def fit(module: Fed, strategy: Any, device: str, clip: float | None = None) -> None:
    """Train on all feeds; batches per step may change between epochs."""
    batches = [feed.size.batches for feed in module.feeds]
    options: dict[str, Any] = {"accumulate_grad_batches": batches[0]}
    if len(set(batches)) > 1:
        options = {"callbacks": [GradientAccumulationScheduler(dict(enumerate(batches)))]}
    options |= {"max_epochs": len(batches), "reload_dataloaders_every_n_epochs": 1, "gradient_clip_val": clip}
    trainer = make_trainer(device, strategy, **options)
    trainer.fit(module)


def ours(job: Job, results: Path) -> None:
    if job.host_memory is not None:
        job.options.setdefault("host_memory", job.host_memory)
    moments, clip, ahead = (job.options.pop(key, None) for key in ("moments", "clip", "ahead_bytes"))
    strategy = OffloadStrategy(**job.options)

    class Ours(Fed):
        def on_fit_start(self) -> None:
            strategy.streamer.updates.ahead_bytes = ahead

    module = Ours(job.layers, job.width, checkpointed=False)
    module.moments = moments

    def facts() -> Record:
        rows = strategy.chunk_table()
        streamed = sum(row.parameters for row in rows if row.placement == "streamed")
        return {"streamed": streamed, "moment_bytes": (moments or torch.float32).itemsize}

    module.feeds = job.feeds(job.options.get("n_microbatches", 1), facts, results)
    fit(module, strategy, job.device, clip)


def engine(job: Job, results: Path) -> None:
    """The engine of `ours` in a plain loop: what Lightning and the strategy add is the difference."""
    if job.host_memory is not None:
        job.options.setdefault("host_memory", job.host_memory)
    net = nn.ModuleList(build(job.layers, job.width))
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, fused=True)
    streamer = ramtorch_core.attach(net, device=job.device, overlapped=True, **job.options)
    streamer.updates.run_on, streamer.conservative = True, False  # as the strategy has it, since nothing else writes
    streamed = sum(row.parameters for row in streamer.chunk_table() if row.placement == "streamed")

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(job.device, dtype=torch.bfloat16, cache_enabled=False):
            for module in net:
                x = module(x)
            return loss_function(x, y)

    for feed in job.feeds(1, lambda: {"streamed": streamed}, results):
        for index, (x, y) in enumerate(feed, 1):
            steps = index % feed.size.batches == 0
            loss = forward(x.to(job.device), y.to(job.device))
            with streamer.updates.overlap(optimizer) if steps else contextlib.nullcontext():
                (loss / feed.size.batches).backward()
            if steps:
                optimizer.step()
                optimizer.zero_grad()
            feed.losses[-1].append(loss.detach())


def resident(job: Job, results: Path) -> None:
    if job.options:
        raise ValueError(f"resident takes no options, not {', '.join(job.options)}")
    module = Fed(job.layers, job.width, checkpointed=True)
    module.feeds = job.feeds(1, lambda: {"streamed": 0}, results)
    fit(module, "auto", job.device)


def fsdp(job: Job, results: Path) -> None:
    """The user's checkpoints are around FSDP's units; with `inner=True` Lightning puts them inside."""
    from lightning.pytorch.strategies import FSDPStrategy

    units: set[type[nn.Module]] = {nn.Embedding, Block, Head}
    inner = job.options.pop("inner", False)
    policy = {"activation_checkpointing_policy": {Block, Head}} if inner else {}
    strategy = FSDPStrategy(**{"cpu_offload": True, "auto_wrap_policy": units, **policy, **job.options})
    module = Fed(job.layers, job.width, checkpointed=not inner)
    module.feeds = job.feeds(1, dict, results)
    fit(module, strategy, job.device)


def deepspeed(job: Job, results: Path) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    strategy = DeepSpeedStrategy(**{"stage": 3, "offload_optimizer": True, "offload_parameters": True, **job.options})
    module = FedDeepSpeed(job.layers, job.width, checkpointed=True)
    module.feeds = job.feeds(1, dict, results)
    fit(module, strategy, job.device)


def ramtorch(job: Job, results: Path) -> None:
    """RamTorch's OffloadModel in a plain loop; `peers.py` chooses the version by the path of imports."""
    options = {"window": 2, "pin": 0, "keep_activations": "checkpoint", **job.options}
    make = importlib.import_module("ramtorch").OffloadModel
    model = make(build(job.layers, job.width), device=job.device, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    for feed in job.feeds(1, dict, results):
        for index, (x, y) in enumerate(feed, 1):
            with torch.autocast(job.device, dtype=torch.bfloat16):
                result = model.step(x.to(job.device), targets=y.to(job.device), loss_fn=loss_function)
            feed.losses[-1].append(result.loss.detach())
            if index % feed.size.batches == 0:
                model.flush_grads(scale=1 / feed.size.batches)
                optimizer.step()
                optimizer.zero_grad()


SYSTEMS: dict[str, Callable[[Job, Path], None]] = {
    "ours": ours,
    "engine": engine,
    "resident": resident,
    "fsdp": fsdp,
    "deepspeed": deepspeed,
    "ramtorch-1.6.4": ramtorch,
    "ramtorch-1.11.0": ramtorch,
}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    SYSTEMS[job.system](job, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
