"""Several GPUs on the reference work: bits, and seconds per step of every way to use them.

    python benchmarks/pipeline.py                    # two GPUs: about four minutes on H200s
    python benchmarks/pipeline.py bits               # only the comparison with one GPU, on a small stack
    python benchmarks/pipeline.py single 1f1b zb_h1  # only these systems
    python benchmarks/pipeline.py --devices 4 --microbatches 8,16 --ramtorch PATH
    python benchmarks/pipeline.py --devices 4 --device cpu --width 128 --seq 32 --steps 4 --ramtorch PATH

Systems: `single` (one GPU, gradient accumulation); torch.distributed.pipelining, a process per GPU: `torch` (1F1B),
`torch_gpipe`, `torch_interleaved`, `torch_zb` (interleaved zero bubble), `torch_zbv`; `ramtorch` (staggered_1b1f) and
`ramtorch_gpipe`; and ours, in one process: `gpipe`, `1f1b`, `eager_1f1b`, `zb_h1`, `interleaved`, `zbv` (the bare
engine), `trainer` (PipelineStrategy with 1f1b through the Trainer) and `trainer_zb_h1`. `1f1b_streamed` (and so on)
keeps the weights in RAM, and `1f1b_streamed_gpu` has accumulate="gpu" besides; compare them with `--no-learn`, forward
and backward alone, since their optimizer steps on the host, and with a larger `--batch`, so that compute binds. Each
prints one JSON object: the median step of those after the warm-up, peak bytes per GPU, and losses. At the end there is
a table. Ratios are to be taken within one run. On CPUs everything runs, and no time means anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pipeline_peers import TORCH
from pipeline_work import Work, add_flags, forget_peaks, report, summarize, synchronize, works
from reference import build, loss_function, tokens
from torch import Tensor, nn

from ramtorch_core.pipeline import PipelineRunner, plan_schedule, sizes_of, split, stream_options

OURS = ["gpipe", "1f1b", "eager_1f1b", "zb_h1", "interleaved", "zbv"]
DEFAULT = ["bits", "single", "torch", "gpipe", "1f1b", "eager_1f1b", "zb_h1", "zbv", "trainer", "trainer_zb_h1"]
MORE = ["torch_interleaved", "torch_zb", "torch_zbv", "ramtorch", "interleaved"]
"""Added to these on more than two devices."""
LIMIT = 300
"""Seconds that a system in other processes may take: one that hangs shall not take the others' time."""


def single(work: Work) -> dict[str, Any]:
    device = work.names[0]
    model = nn.Sequential(*work.modules()).to(device)
    x, y = work.tokens(device)
    optimizer = work.adamw(model.parameters())

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        parts = zip(x.chunk(work.microbatches), y.chunk(work.microbatches), strict=True)
        for inputs, targets in parts:
            with torch.autocast(**work.autocast):
                loss = loss_function(model(inputs), targets) / work.microbatches
            loss.backward()
            total += loss.detach()
        if work.learn:
            optimizer.step()
        optimizer.zero_grad()
        return total

    return report("single", work, step)


def cuts(work: Work, schedule: str) -> list[str]:
    """The names of the modules that begin stages 1, 2, ..., in a Sequential."""
    stages = plan_schedule(schedule, work.devices, 1).stages
    return [str(part[0]) for part in work.parts(stages)[1:]]


def ours(name: str, work: Work) -> dict[str, Any]:
    model = nn.Sequential(*work.modules())
    schedule, streams, place = name.partition("_streamed")
    stream = stream_options(work.window, 0, "keep", place[1:] or "host", host_memory=200 << 30) if streams else None
    runner = PipelineRunner(model, work.names, schedule=schedule, stages=cuts(work, schedule), stream=stream)
    first, last = runner.stage_devices[0].torch, runner.root_device
    x, y = work.tokens()
    items = split((x.to(first), y.to(last)), sizes_of(work.batch, work.microbatches))
    optimizer = work.adamw(model.parameters())
    count = len(items)

    def training_step(item: tuple[Tensor, Tensor]) -> Tensor:
        return loss_function(model(item[0]), item[1])

    def step() -> Tensor:
        with torch.autocast(**work.autocast):
            result = runner.train(training_step, items, lambda loss, _: (loss / count, None))
        if work.learn:
            for parameter, gradient in result.gradients.items():
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(result.outputs).mean()

    for streamer in runner.streamed.streamers if runner.streamed is not None else ():
        streamer.conservative = False
    row = report(name, work, step)
    runner.close()
    return row


def trainer(name: str, work: Work) -> dict[str, Any]:
    import lightning as L
    from torch.utils.data import DataLoader, TensorDataset

    from ramtorch_lightning import PipelineStrategy

    class Stack(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*work.modules())

        def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
            return loss_function(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.adamw(self.parameters())

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.laps: list[float] = []
            self.losses: list[float] = []
            self.start = 0.0

        def on_train_batch_start(self, *_: Any) -> None:
            synchronize()
            self.start = time.perf_counter()

        def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            synchronize()
            self.laps.append(time.perf_counter() - self.start)
            self.losses.append(round(float(outputs["loss"]), 4))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock()
    forget_peaks()
    x, y = work.tokens()
    data = TensorDataset(x.repeat(work.steps, 1), y.repeat(work.steps, 1))
    schedule = name.removeprefix("trainer_") if "_" in name else "1f1b"
    strategy = PipelineStrategy(
        devices=work.names,
        schedule=schedule,
        n_microbatches=work.microbatches,
        stages=[f"net.{cut}" for cut in cuts(work, schedule)],
    )
    L.Trainer(
        strategy=strategy, accelerator="cpu" if work.device == "cpu" else "auto", precision="bf16-mixed", max_epochs=1,
        callbacks=[clock], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Stack(), DataLoader(data, work.batch))  # fmt: skip
    return summarize(name, work, clock.laps, clock.losses)


def elsewhere(system: str, work: Work, path: Path | None) -> dict[str, Any]:
    """A system in processes of its own; its row, or the reason why there is none."""
    script = str(Path(__file__).with_name("pipeline_peers.py"))
    command = [sys.executable]
    if system in TORCH:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work.devices)]
    elif path is None:
        return failed(system, work, "pass --ramtorch PATH, an unpacked wheel")
    try:
        done = subprocess.run(
            [*command, script, system, str(work), str(path)], capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return failed(system, work, f"took more than {LIMIT} s")
    rows: list[str] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return failed(system, work, (errors or ["no result"])[0].strip())
    print(rows[-1], flush=True)
    row: dict[str, Any] = json.loads(rows[-1])
    return row


def run(system: str, work: Work, path: Path | None) -> dict[str, Any]:
    """Its row; one that fails does not take the others with it."""
    if system in TORCH or system.startswith("ramtorch"):
        return elsewhere(system, work, path)
    try:
        if system == "single":
            return single(work)
        return trainer(system, work) if system.startswith("trainer") else ours(system, work)
    except Exception as error:
        return failed(system, work, f"{type(error).__name__}: {error}".splitlines()[0])


def failed(system: str, work: Work, reason: str) -> dict[str, Any]:
    row = {"system": system, "microbatches": work.microbatches, "reason": reason}
    print(json.dumps(row), flush=True)
    return row


def bits(work: Work) -> None:
    """Gradients and losses of a small stack under every schedule, against accumulation on one device."""
    torch.use_deterministic_algorithms(True)
    layers, width, seq, count = 2 * work.devices, min(512, work.width), min(128, work.seq), 6
    for mixed in (False, True):
        device = work.names[0]
        reference = nn.Sequential(*build(layers, width)).to(device)
        batches = [tokens(2 * count, seq, device) for _ in range(2)]
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        expected: list[tuple[list[Tensor], list[Tensor]]] = []
        for x, y in batches:
            optimizer.zero_grad()
            losses = []
            for inputs, targets in zip(x.chunk(count), y.chunk(count), strict=True):
                with torch.autocast(**work.autocast, enabled=mixed, cache_enabled=False):
                    loss = loss_function(reference(inputs), targets)
                (loss / count).backward()
                losses.append(loss.detach().cpu())
            expected.append((losses, [p.grad.cpu() for p in reference.parameters() if p.grad is not None]))
            optimizer.step()
        for schedule in ["sequential", *OURS]:
            model = nn.Sequential(*build(layers, width))
            runner = PipelineRunner(model, work.names, schedule=schedule)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            worst, same = 0.0, True
            for (x, y), (losses, gradients) in zip(batches, expected, strict=True):
                items = split((x, y.to(runner.root_device)), sizes_of(len(x), count))
                with torch.autocast(**work.autocast, enabled=mixed, cache_enabled=False):
                    result = runner.train(
                        lambda item, model=model: loss_function(model(item[0]), item[1]),
                        items,
                        lambda loss, _: (loss / count, None),
                    )
                same &= all(torch.equal(a.cpu(), b) for a, b in zip(result.outputs, losses, strict=True))
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    got = result.gradients[parameter].cpu()
                    same &= torch.equal(got, gradient)
                    worst = max(worst, float((got - gradient).abs().max()))
                    parameter.grad = result.gradients[parameter]
                optimizer.step()
            runner.close()
            print(json.dumps({"bits": schedule, "bf16": mixed, "equal": same, "worst": worst}), flush=True)
    torch.use_deterministic_algorithms(False)


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds, ratios to one GPU, and memory."""
    single = {row["microbatches"]: row["seconds"] for row in rows if row["system"] == "single"}
    lines = [f"{'system':<20} {'microbatches':>12} {'s per step':>10} {'over single':>11}  peak GB"]
    for row in rows:
        start = f"{row['system']:<20} {row['microbatches']:>12}"
        if "reason" in row:
            lines.append(f"{start} {'-':>10} {'-':>11}  {row['reason']}")
            continue
        one = single.get(row["microbatches"])
        ratio = f"{one / row['seconds']:.2f}" if one else "-"
        lines.append(f"{start} {row['seconds']:>10.4f} {ratio:>11}  {', '.join(map(str, row['peak_gb']))}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*")
    parser.add_argument("--ramtorch", type=Path, help="an unpacked wheel of RamTorch")
    add_flags(parser)
    options = parser.parse_intermixed_args(arguments)
    systems = options.systems or DEFAULT + (MORE if options.devices > 2 else [])
    rows: list[dict[str, Any]] = []
    for index, work in enumerate(works(options)):
        for system in systems:
            if system == "bits":
                if index == 0:
                    bits(work)
            else:
                rows.append(run(system, work, options.ramtorch))
            gc.collect()
            torch.cuda.empty_cache()
    if rows:
        print(table(rows))
    return rows


if __name__ == "__main__":
    main()
