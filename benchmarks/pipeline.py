"""Two GPUs on the reference work: bits, and seconds per step of every way to use them.

    python benchmarks/pipeline.py                    # everything, about four minutes on two H200s
    python benchmarks/pipeline.py bits               # only the comparison with one GPU, on a small stack
    python benchmarks/pipeline.py single 1f1b zb_h1  # only these systems

Systems: `single` (one GPU, gradient accumulation), `torch` (torch.distributed.pipelining's 1F1B, two processes), and
ours, in one process: `gpipe`, `1f1b`, `eager_1f1b`, `zb_h1`, `interleaved`, `zbv` (the bare engine), `trainer`
(PipelineStrategy with 1f1b through the Trainer) and `trainer_zb_h1`. `1f1b_streamed` (and so on) keeps the weights in
RAM, and `1f1b_streamed_gpu` has accumulate="gpu" besides; compare them with `--no-learn`, forward and backward alone,
since their optimizer steps on the host, and with a larger `--batch`, so that compute binds. Each prints one
JSON object: the median step of those after the warm-up, peak bytes per GPU, and losses. Ratios are to be taken within
one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # bits: cuBLAS must not choose by chance

import torch
from reference import build, loss_function, tokens
from torch import Tensor, nn

from ramtorch_core.pipeline import PipelineRunner, sizes_of, split, stream_options

OURS = ["gpipe", "1f1b", "eager_1f1b", "zb_h1", "interleaved", "zbv"]
DEFAULT = ["bits", "single", "torch", "gpipe", "1f1b", "eager_1f1b", "zb_h1", "zbv", "trainer", "trainer_zb_h1"]
AUTOCAST = {"device_type": "cuda", "dtype": torch.bfloat16}
WARM_UP = 3


def synchronize() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def report(name: str, step: Callable[[], Tensor], steps: int, quiet: bool = False) -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)
    laps, losses = [], []
    for _ in range(steps):
        synchronize()
        start = time.perf_counter()
        loss = step()
        synchronize()
        laps.append(time.perf_counter() - start)
        losses.append(round(float(loss), 4))
    summarize(name, laps, losses, quiet)


def summarize(name: str, laps: list[float], losses: list[float], quiet: bool = False) -> None:
    peaks = [round(torch.cuda.max_memory_allocated(d) / 1e9, 2) for d in range(torch.cuda.device_count())]
    result = {
        "system": name,
        "seconds": round(statistics.median(laps[WARM_UP:]), 4),
        "laps": [round(lap, 4) for lap in laps],
        "peak_gb": peaks,
        "losses": losses,
    }
    if not quiet:
        print(json.dumps(result), flush=True)


def single(options: argparse.Namespace) -> None:
    model = nn.Sequential(*build(options.layers, options.width)).to("cuda:0")
    x, y = tokens(options.batch, options.seq, "cuda:0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        total = torch.zeros((), device="cuda:0")
        parts = zip(x.chunk(options.microbatches), y.chunk(options.microbatches), strict=True)
        for inputs, targets in parts:
            with torch.autocast(**AUTOCAST):
                loss = loss_function(model(inputs), targets) / options.microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    report("single", step, options.steps)


def ours(schedule: str, options: argparse.Namespace) -> None:
    model = nn.Sequential(*build(options.layers, options.width))
    name, (schedule, streams, place) = schedule, schedule.partition("_streamed")
    cut = None if schedule in ("interleaved", "zbv") else [str(1 + options.layers // 2)]
    stream = stream_options(options.window, 0, "keep", place[1:] or "host", host_memory=200 << 30) if streams else None
    runner = PipelineRunner(model, ["cuda:0", "cuda:1"], schedule=schedule, stages=cut, stream=stream)
    first, last = runner.stage_devices[0].torch, runner.root_device
    x, y = tokens(options.batch, options.seq)
    items = split((x.to(first), y.to(last)), sizes_of(options.batch, options.microbatches))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    count = len(items)

    def training_step(item: tuple[Tensor, Tensor]) -> Tensor:
        return loss_function(model(item[0]), item[1])

    def step() -> Tensor:
        with torch.autocast(**AUTOCAST):
            result = runner.train(training_step, items, lambda loss, _: (loss / count, None))
        for parameter, gradient in result.gradients.items():
            parameter.grad = gradient if options.learn else None
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(result.outputs).mean()

    for streamer in runner.streamed.streamers if runner.streamed is not None else ():
        streamer.conservative = False
    report(name, step, options.steps)
    runner.close()


def trainer(name: str, options: argparse.Namespace) -> None:
    import lightning as L
    from torch.utils.data import DataLoader, TensorDataset

    from ramtorch_lightning import PipelineStrategy

    class Stack(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*build(options.layers, options.width))

        def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
            return loss_function(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

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
    for device in range(2):
        torch.cuda.reset_peak_memory_stats(device)
    x, y = tokens(options.batch, options.seq)
    data = TensorDataset(x.repeat(options.steps, 1), y.repeat(options.steps, 1))
    strategy = PipelineStrategy(
        devices=[0, 1],
        schedule=name.removeprefix("trainer_") if "_" in name else "1f1b",
        n_microbatches=options.microbatches,
        stages=[f"net.{1 + options.layers // 2}"],
    )
    L.Trainer(
        strategy=strategy, precision="bf16-mixed", max_epochs=1, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Stack(), DataLoader(data, options.batch))  # fmt: skip
    summarize(name, clock.laps, clock.losses)


def torch_worker(options: argparse.Namespace) -> None:
    """One of the two processes of `torch`."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)

    class Stage(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(**AUTOCAST):
                return super().forward(x)

    modules, cut = build(options.layers, options.width), 1 + options.layers // 2
    model = Stage(*(modules[:cut] if rank == 0 else modules[cut:])).to(device)
    x, y = tokens(options.batch, options.seq, device)
    schedule = Schedule1F1B(PipelineStage(model, rank, 2, device), options.microbatches, loss_fn=loss_function)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        dist.barrier()
        return torch.stack(losses).mean() if losses else torch.zeros(())

    report(f"torch rank {rank}", step, options.steps)
    dist.destroy_process_group()


def bits(options: argparse.Namespace) -> None:
    """Gradients and losses of a small stack under every schedule, against accumulation on one GPU."""
    torch.use_deterministic_algorithms(True)
    layers, width, seq, count = 4, 512, 128, 6
    for mixed in (False, True):
        reference = nn.Sequential(*build(layers, width)).to("cuda:0")
        batches = [tokens(2 * count, seq, "cuda:0") for _ in range(2)]
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        expected: list[tuple[list[Tensor], list[Tensor]]] = []
        for x, y in batches:
            optimizer.zero_grad()
            losses = []
            for inputs, targets in zip(x.chunk(count), y.chunk(count), strict=True):
                with torch.autocast(**AUTOCAST, enabled=mixed, cache_enabled=False):
                    loss = loss_function(reference(inputs), targets)
                (loss / count).backward()
                losses.append(loss.detach().cpu())
            expected.append((losses, [p.grad.cpu() for p in reference.parameters() if p.grad is not None]))
            optimizer.step()
        for schedule in ["sequential", *OURS]:
            model = nn.Sequential(*build(layers, width))
            runner = PipelineRunner(model, ["cuda:0", "cuda:1"], schedule=schedule)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            worst, same = 0.0, True
            for (x, y), (losses, gradients) in zip(batches, expected, strict=True):
                items = split((x, y.to(runner.root_device)), sizes_of(len(x), count))
                with torch.autocast(**AUTOCAST, enabled=mixed, cache_enabled=False):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", default=DEFAULT)
    flags = {"layers": 12, "width": 4096, "batch": 16, "seq": 2048, "microbatches": 8, "steps": 8, "window": 2}
    for flag, default in flags.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--learn", action=argparse.BooleanOptionalAction, default=True, help="step the optimizer")
    options = parser.parse_args()
    for system in options.systems:
        if system == "bits":
            bits(options)
        elif system == "single":
            single(options)
        elif system == "torch":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
            command += ["torch_worker", *(f"--{flag}={getattr(options, flag)}" for flag in flags)]
            subprocess.run(command, check=False)
        elif system == "torch_worker":
            torch_worker(options)
        elif system.startswith("trainer"):
            trainer(system, options)
        else:
            ours(system, options)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
