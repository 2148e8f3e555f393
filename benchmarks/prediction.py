"""Predicted against measured: seconds per step, their parts, and peak memory of many plans, from one calibration.

    python benchmarks/prediction.py [--output predictions.json]     # some minutes on a GPU; several get pipelines too
    python benchmarks/prediction.py --quick                         # one window only
    python benchmarks/prediction.py --device cpu                    # the same, tiny, where the host computes
    python benchmarks/prediction.py --windows --no-auto             # pipelines only

The reference stack, small enough that a plan takes a second, is calibrated once and then trained for some steps under
each plan: every window, resident chunks, activation policy and number of microbatches, with AdamW overlapped on the
host. Steps follow each other without waiting, so updates run on into the next step, as in the simulator. Then `auto`
chooses for a limited memory, from steps that it measures itself. With several devices, pipelines of resident stages
follow, each schedule without an optimizer; with `--pipeline-devices cuda:0` all ops follow each other on one GPU, which
shows what they cost the host.

A row of the table has a second line: milliseconds of the parts of a step, predicted and measured, as the engine's own
ranges show them in further steps, and the part whose difference is largest, which is where to look when a row is off.

| part | what |
| --- | --- |
| compute | the device, or the mean of several, without waiting |
| in, out | copies to the device and to the host; on a CPU the thread that computes makes them |
| update | the optimizer on the host, beside the step |
| issue | the host, to launch what a step computes, beside the step; not on a CPU |
| idle | the rest of the step: the device waits for copies, updates, the host, or another device |
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from reference import VOCABULARY, build, loss_function, tokens
from timed_training import DTYPE, Spread, Training, between_steps, synchronize, timed
from torch import Tensor, nn

from ramtorch_core.parts import Part, pipeline_parts, predicted_parts
from ramtorch_core.pipeline import PipelineRunner, plan_schedule
from ramtorch_core.prediction import (
    Calibration,
    Optimizer,
    PipelinePlan,
    StreamingPlan,
    calibrate,
    even_stages,
    predict,
    predict_pipeline,
)
from ramtorch_core.tuning import TIMED, WARM_UP, Tuner

SIZES = {"cuda": (6, 2048, 4, 2048, 1 << 20), "cpu": (3, 128, 2, 64, 1 << 12)}
"""Layers, width, sequences of one microbatch, their length, and bytes of tensors that do not stream."""


def row(name: str, seconds: float, spread: Spread, predicted: dict[Part, float], measured: dict[Part, float]) -> Any:
    """One comparison, without memory."""
    off = max(Part, key=lambda part: abs(predicted.get(part, 0.0) - measured.get(part, 0.0)))
    return {
        "plan": name,
        "predicted": seconds,
        "measured": spread.median,
        "spread": dataclasses.asdict(spread),
        "error": seconds / spread.median - 1,
        "predicted_parts": {part.value: value for part, value in predicted.items()},
        "measured_parts": {part.value: value for part, value in measured.items()},
        "most_off": off.value,
    }


def with_memory(found: Any, predicted: float, measured: int | None) -> Any:
    error = None if measured is None else predicted / measured - 1
    return found | {"predicted_peak": predicted, "measured_peak": measured, "peak_error": error}


def streamed(model: nn.Module, calibration: Calibration, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    half = len(calibration.chunks) // 2
    for activations, pin, window in itertools.product(options.activations, options.pins, options.windows):
        count = 0 if pin == "0" else half
        training = Training(model, options, window=window, pin=count, activations=activations)
        try:
            for microbatches in options.microbatches:
                plan = StreamingPlan(
                    window=window,
                    pin=count,
                    checkpoint=activations == "checkpoint",
                    microbatches=microbatches,
                    optimizer=Optimizer.OVERLAPPED,
                )
                spread, peak, parts = training.measure(microbatches)
                found = predict(calibration, plan)
                name = f"window={window} pin={count} {activations} x{microbatches}"
                line = row(name, found.seconds, spread, predicted_parts(found.result.timeline), parts)
                yield with_memory(line, found.peak_bytes, peak)
        finally:
            training.close()


def chosen(model: nn.Module, calibration: Calibration, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What "auto" chooses for a part of the memory that everything would take, and how that goes."""
    most = StreamingPlan(window=1, pin=len(calibration.chunks), checkpoint=False, optimizer=Optimizer.OVERLAPPED)
    limit = int(options.gpu_memory or 0.6 * predict(calibration, most).peak_bytes)
    training = Training(model, options, window="auto", pin="auto", activations="auto", gpu_memory=limit)
    try:
        for _ in range(WARM_UP + TIMED + 1):
            training.step()
        tuner = training.streamer.tuning
        choice = tuner.choice if isinstance(tuner, Tuner) else None
        if choice is None:
            print(f"auto: nothing was chosen for {limit / 1e9:.2f} GB")
            return
        print(f"auto, for {limit / 1e9:.2f} GB: {choice}")
        spread, peak, parts = training.measure(1)
        line = row("auto", choice.seconds, spread, predicted_parts(choice.result.timeline), parts)
        yield with_memory(line, choice.peak_bytes, peak) | {"limit": limit, "fits": peak is None or peak <= limit}
    finally:
        training.close()


def link_seconds(nbytes: int, devices: Sequence[str]) -> float:
    """Seconds to move so many bytes from the first device to the second; none from one to itself."""
    if len(devices) < 2:
        return 0.0
    source = torch.empty(max(1, nbytes), dtype=torch.uint8, device=devices[0])

    def move() -> None:
        source.to(devices[1])
        synchronize()

    return timed(move, 5).least


def pipelined(model: nn.Module, calibration: Calibration, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each schedule, everything resident and kept, forward and backward alone; stages are cut to compute as long."""
    devices, chunks = options.pipeline_devices, calibration.chunks
    send = link_seconds(chunks[len(chunks) // 2].boundary_bytes, devices)
    x, y = tokens(options.batch, options.seq, vocabulary=options.vocabulary)
    for name in options.schedules:
        schedule = plan_schedule(name, len(devices), options.pipeline_microbatches)
        cuts = even_stages(calibration, schedule.stages)
        prediction = predict_pipeline(calibration, schedule, cuts, PipelinePlan(send=send))
        runner = PipelineRunner(model, devices, schedule=name, stages=[chunks[cut].name for cut in cuts])
        items = [(x.to(devices[0]), y.to(runner.root_device))] * options.pipeline_microbatches

        def function(item: tuple[Tensor, Tensor]) -> Tensor:
            return loss_function(model(item[0]), item[1])

        def step(runner: PipelineRunner = runner, items: Sequence[Any] = items) -> None:
            with torch.autocast(torch.device(devices[0]).type, DTYPE):
                runner.train(function, items, lambda loss, _: (loss / len(items), None))
            synchronize()

        try:
            spread = timed(step, max(4, options.steps // 2))
            measured = pipeline_parts(runner, step)
        finally:
            runner.close()
        expected = {
            Part.COMPUTE: prediction.compute * prediction.seconds,
            Part.ISSUE: predicted_parts(prediction.timeline)[Part.ISSUE],
            Part.IDLE: (1 - prediction.compute) * prediction.seconds,
        }
        yield row(f"{name}, {schedule.stages} stages x{len(items)}", prediction.seconds, spread, expected, measured)


def show(found: dict[str, Any]) -> None:
    line = f"{found['plan']:<34} {found['predicted']:9.4f} {found['measured']:9.4f} {found['error']:+8.1%}"
    if found.get("measured_peak"):
        line += f" {found['predicted_peak'] / 1e9:8.2f} {found['measured_peak'] / 1e9:8.2f} {found['peak_error']:+8.1%}"
    ours, theirs = found["predicted_parts"], found["measured_parts"]
    parts = [f"{p.value} {1e3 * ours.get(p.value, 0):.1f}/{1e3 * theirs.get(p.value, 0):.1f}" for p in Part]
    print(f"{line}\n    {', '.join(parts)}; most off: {found['most_off']}", flush=True)


def describe(calibration: Calibration) -> None:
    for chunk in calibration.chunks:
        print(
            f"  chunk {chunk.name}: forward {1e3 * chunk.forward:.2f} ms, backward {1e3 * chunk.backward:.2f} ms, "
            f"recompute {1e3 * chunk.recompute:.2f} ms, {chunk.weight_bytes / 1e6:.0f} MB of weights, "
            f"{chunk.kept_bytes / 1e6:.0f} MB of activations, {chunk.boundary_bytes / 1e6:.0f} MB of inputs"
        )
    issue = {name: f"{1e3 * seconds:.2f}" for name, seconds in dataclasses.asdict(calibration.issue).items()}
    print(
        f"  outside of them {1e3 * calibration.outside:.2f} ms; the host issues, in ms: {issue}; it steps the "
        f"optimizer in {1e3 * calibration.between:.2f} ms"
    )
    print(f"  {calibration.peaks}; {calibration.rates}")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    begun = time.perf_counter()
    model = nn.Sequential(*build(options.layers, options.width, vocabulary=options.vocabulary))
    x, y = tokens(options.batch, options.seq, options.device, options.vocabulary)
    calibration = calibrate(
        model, x, loss_fn=lambda logits: loss_function(logits, y), device=options.device, chunks="*", autocast=DTYPE,
        resident_below=options.resident_below, host_memory=options.host_memory,
    )  # fmt: skip
    print(f"calibrated in {time.perf_counter() - begun:.1f} s")
    calibration = dataclasses.replace(calibration, between=between_steps(model, options))
    describe(calibration)
    print(f"{'plan':<34} {'predicted':>9} {'measured':>9} {'error':>8} {'GB pred.':>8} {'GB':>8} {'error':>8}")
    kinds: list[Callable[..., Iterator[dict[str, Any]]]] = [streamed]
    kinds += [chosen] * options.auto + [pipelined] * bool(options.pipeline_devices)
    rows = []
    for kind in kinds:
        for found in kind(model, calibration, options):
            rows.append(found)
            show(found)
    report = {
        "arguments": vars(options),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "calibration": dataclasses.asdict(calibration),
        "rows": rows,
        **errors(rows, "error"),
        **{f"peak_{key}": value for key, value in errors(rows, "peak_error").items()},
        "seconds": time.perf_counter() - begun,
    }
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n")
    if rows:
        print(
            f"time: median error {report['median_error']:.1%}, worst {report['worst_error']:.1%}; within 10 %: "
            f"{report['within_10_percent']} of {len(rows)}; {report['seconds']:.0f} s"
        )
    print(json.dumps(report))
    return report


def errors(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    found = [abs(each[key]) for each in rows if each.get(key) is not None]
    return {
        "median_error": statistics.median(found) if found else None,
        "worst_error": max(found, default=None),
        "within_10_percent": sum(each <= 0.1 for each in found),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = torch.cuda.device_count()
    several = [f"cuda:{i}" for i in range(available)] if available >= 2 else []
    for flag, text in {"layers": "", "width": "", "batch": "sequences of one microbatch", "seq": ""}.items():
        parser.add_argument(f"--{flag}", type=int, default=None, help=text)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--steps", type=int, default=8, help="timed microbatches per plan, at least four steps")
    parser.add_argument("--windows", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--pins", nargs="*", choices=["0", "half"], default=["0", "half"])
    parser.add_argument("--activations", nargs="*", choices=["keep", "checkpoint"], default=["keep", "checkpoint"])
    parser.add_argument("--microbatches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--no-auto", dest="auto", action="store_false", help="leave out what 'auto' chooses")
    parser.add_argument("--gpu-memory", type=float, default=None, help="bytes for 'auto'; by default too few for all")
    parser.add_argument("--schedules", nargs="*", default=["gpipe", "staggered_1b1f", "zb_h1"])
    parser.add_argument("--pipeline-microbatches", type=int, default=8)
    parser.add_argument("--pipeline-devices", nargs="*", default=several, help="none for no pipelines")
    parser.add_argument("--device", default="cuda" if available else "cpu")
    parser.add_argument("--resident-below", type=int, default=None, help="bytes of tensors that do not stream")
    parser.add_argument("--host-memory", type=int, default=None, help="bytes of RAM that may be used")
    parser.add_argument("--output", default=None, help="file for the JSON object")
    parser.add_argument("--quick", action="store_true", help="a window of 2 only")
    options = parser.parse_args(arguments)
    names = ("layers", "width", "batch", "seq", "resident_below")
    for name, size in zip(names, SIZES[torch.device(options.device).type], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, size)
    if options.quick:
        options.windows = [2]
    return options


if __name__ == "__main__":
    main()
