"""Predicted against measured: seconds per step and peak memory of many plans, from one calibration.

    python benchmarks/prediction.py [--output predictions.json]     # a minute on an H200
    python benchmarks/prediction.py --quick                         # one window only
    python benchmarks/prediction.py --windows 2 --pins 0 --microbatches 1

The reference stack, small enough that a plan takes a second, is calibrated once and then trained for some steps under
each plan: every window, resident chunks, activation policy and number of microbatches, with AdamW overlapped on the
host. Steps follow each other without waiting, so updates run on into the next step, as in the simulator. With two
devices, pipelines of resident stages follow, each schedule without an optimizer. Prints a table, and one JSON object at
the end; its rows also tell how long the parts of a step took, as the engine's own ranges show them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reference import build, loss_function, tokens
from torch import Tensor, nn

from ramtorch_core import attach
from ramtorch_core.pipeline import PipelineRunner, plan_schedule
from ramtorch_core.prediction import (
    Calibration,
    Optimizer,
    PipelinePlan,
    Prediction,
    StreamingPlan,
    calibrate,
    predict,
    predict_pipeline,
)

WARM_UP = 2
DTYPE = torch.bfloat16


def synchronize() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], steps: int) -> float:
    """Seconds per step, of `steps` that follow others, and each other, without waiting in between."""
    for _ in range(WARM_UP):
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


@dataclasses.dataclass
class Measured:
    """Of one plan: seconds per step, bytes at the peak, and seconds of one step by kind of range."""

    seconds: float
    peak: int | None
    parts: dict[str, float]


def measure(
    model: nn.Module, plans: Sequence[StreamingPlan], options: argparse.Namespace
) -> Iterator[tuple[StreamingPlan, Measured]]:
    """Streamed runs of plans that differ in their microbatches only."""
    device, plan = options.device, plans[0]
    streamer = attach(
        model,
        device=device,
        chunks="*",
        window=plan.window,
        pin=plan.pin if isinstance(plan.pin, int) else list(plan.pin),
        activations="checkpoint" if plan.checkpoint else "keep",
        overlapped=True,
        resident_below=options.resident_below,
        host_memory=options.host_memory,
    )
    streamer.conservative, streamer.updates.run_on = False, True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = tokens(options.batch, options.seq, device)

    def step(count: int) -> None:
        for number in range(count):
            with torch.autocast(torch.device(device).type, DTYPE), streamer.scope():
                loss = loss_function(model(x), y) / count
            last = number == count - 1
            with streamer.updates.overlap(optimizer) if last else contextlib.nullcontext():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def finish() -> None:
        streamer.updates.wait()
        synchronize()

    on_gpu = torch.device(device).type == "cuda"
    try:
        for each in plans:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            once = partial(step, each.microbatches)
            seconds = timed(once, max(2, options.steps // each.microbatches))
            peak = torch.cuda.max_memory_allocated() if on_gpu else None
            yield each, Measured(seconds, peak, parts(streamer, once, finish))
    finally:
        streamer.close()
        for parameter in model.parameters():
            parameter.grad = None


def parts(streamer: Any, step: Callable[[], object], finish: Callable[[], object]) -> dict[str, float]:
    """Seconds that the ranges of each kind take in a step, added up."""
    finish()
    listener = streamer.device.ranges.listen()
    try:
        step()
        finish()
        found: dict[str, float] = defaultdict(float)
        for each in listener.collect():
            found[each.kind.value] += each.seconds
        return dict(found)
    finally:
        listener.close()


def streamed(model: nn.Module, calibration: Calibration, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    half = len(calibration.chunks) // 2
    for activations, pin, window in itertools.product(options.activations, options.pins, options.windows):
        plans = [
            StreamingPlan(
                window=window,
                pin=0 if pin == "0" else half,
                checkpoint=activations == "checkpoint",
                microbatches=microbatches,
                optimizer=Optimizer.OVERLAPPED,
            )
            for microbatches in options.microbatches
        ]
        for plan, measured in measure(model, plans, options):
            prediction = predict(calibration, plan)
            rows.append(
                {
                    "plan": f"window={window} pin={plan.pin} {activations} x{plan.microbatches}",
                    "predicted": prediction.seconds,
                    "measured": measured.seconds,
                    "error": prediction.seconds / measured.seconds - 1,
                    "predicted_peak": prediction.peak_bytes,
                    "measured_peak": measured.peak,
                    "peak_error": None if measured.peak is None else prediction.peak_bytes / measured.peak - 1,
                    "stall": prediction.result.stall,
                    "parts": measured.parts,
                    "predicted_parts": predicted_parts(prediction),
                }
            )
            show(rows[-1])
        gc.collect()
    return rows


def predicted_parts(prediction: Prediction) -> dict[str, float]:
    """The same as `parts`, simulated."""
    found: dict[str, float] = defaultdict(float)
    for span in prediction.result.timeline.spans:
        found[span.kind.name.lower()] += span.end - span.start
    return dict(found)


def link_seconds(nbytes: int, devices: Sequence[str]) -> float:
    """Seconds to move so many bytes from the first device to the second."""
    source = torch.empty(max(1, nbytes), dtype=torch.uint8, device=devices[0])

    def move() -> None:
        source.to(devices[1])
        synchronize()

    laps = []
    for _ in range(5):
        start = time.perf_counter()
        move()
        laps.append(time.perf_counter() - start)
    return min(laps)


def pipelined(model: nn.Module, calibration: Calibration, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each schedule with two stages, everything resident and kept, forward and backward alone."""
    rows = []
    cut = len(calibration.chunks) // 2
    devices = options.pipeline_devices
    send = link_seconds(calibration.chunks[cut].boundary_bytes, devices)
    for name in options.schedules:
        schedule = plan_schedule(name, 2, options.pipeline_microbatches)
        prediction = predict_pipeline(calibration, schedule, [cut], PipelinePlan(send=send))
        first = int(calibration.chunks[cut].name)
        runner = PipelineRunner(model, devices, schedule=name, stages=[str(first)])
        x, y = tokens(options.batch, options.seq)
        items = [(x.to(devices[0]), y.to(devices[1]))] * options.pipeline_microbatches

        def function(item: tuple[Tensor, Tensor]) -> Tensor:
            return loss_function(model(item[0]), item[1])

        def step(runner: PipelineRunner = runner, items: list[Any] = items) -> None:
            with torch.autocast(torch.device(devices[0]).type, DTYPE):
                runner.train(function, items, lambda loss, _: (loss / len(items), None))
            synchronize()

        seconds = timed(step, max(2, options.steps // 2))
        runner.close()
        rows.append(
            {
                "plan": f"{name}, 2 stages x{options.pipeline_microbatches}",
                "predicted": prediction.seconds,
                "measured": seconds,
                "error": prediction.seconds / seconds - 1,
                "bubble": prediction.bubble,
            }
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    line = f"{row['plan']:<34} {row['predicted']:9.4f} {row['measured']:9.4f} {row['error']:+8.1%}"
    if row.get("measured_peak"):
        line += f" {row['predicted_peak'] / 1e9:8.2f} {row['measured_peak'] / 1e9:8.2f} {row['peak_error']:+8.1%}"
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    begun = time.perf_counter()
    model = nn.Sequential(*build(options.layers, options.width))
    x, y = tokens(options.batch, options.seq, options.device)
    calibration = calibrate(
        model, x, loss_fn=lambda logits: loss_function(logits, y), device=options.device, chunks="*", autocast=DTYPE,
        resident_below=options.resident_below, host_memory=options.host_memory,
    )  # fmt: skip
    print(f"calibrated in {time.perf_counter() - begun:.1f} s")
    for chunk in calibration.chunks:
        print(
            f"  chunk {chunk.name}: forward {1e3 * chunk.forward:.2f} ms, backward {1e3 * chunk.backward:.2f} ms, "
            f"{chunk.weight_bytes / 1e6:.0f} MB of weights, {chunk.kept_bytes / 1e6:.0f} MB of activations"
        )
    print(
        f"  outside of them {1e3 * calibration.outside:.2f} ms; the host issues a forward in "
        f"{1e3 * calibration.issue_forward:.2f} ms, a backward in {1e3 * calibration.issue_backward:.2f} ms, the rest "
        f"in {1e3 * calibration.issue_outside:.2f} ms; {calibration.rates}"
    )
    print(f"{'plan':<34} {'predicted':>9} {'measured':>9} {'error':>8} {'GB pred.':>8} {'GB':>8} {'error':>8}")
    rows = streamed(model, calibration, options)
    if options.pipeline_devices:
        rows += pipelined(model, calibration, options)
    errors = [abs(row["error"]) for row in rows]
    report = {
        "arguments": vars(options),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "calibration": dataclasses.asdict(calibration),
        "rows": rows,
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "seconds": time.perf_counter() - begun,
    }
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n")
    print(f"median error {report['median_error']:.1%}, worst {report['worst_error']:.1%}, {report['seconds']:.0f} s")
    print(json.dumps(report))
    return report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = torch.cuda.device_count()
    two = [f"cuda:{i}" for i in range(2)] if available >= 2 else []
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4, help="sequences of one microbatch")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=6, help="timed microbatches per plan, at least two steps")
    parser.add_argument("--windows", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--pins", nargs="*", choices=["0", "half"], default=["0", "half"])
    parser.add_argument("--activations", nargs="*", choices=["keep", "checkpoint"], default=["keep", "checkpoint"])
    parser.add_argument("--microbatches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--schedules", nargs="*", default=["gpipe", "staggered_1b1f", "zb_h1"])
    parser.add_argument("--pipeline-microbatches", type=int, default=8)
    parser.add_argument("--pipeline-devices", nargs="*", default=two, help="two of them, or none for no pipelines")
    parser.add_argument("--device", default="cuda" if available else "cpu")
    parser.add_argument("--resident-below", type=int, default=1 << 20, help="bytes of tensors that do not stream")
    parser.add_argument("--host-memory", type=int, default=None, help="bytes of RAM that may be used")
    parser.add_argument("--output", default=None, help="file for the JSON object")
    parser.add_argument("--quick", action="store_true", help="a window of 2 only")
    options = parser.parse_args(arguments)
    if options.quick:
        options.windows = [2]
    return options


if __name__ == "__main__":
    main()
