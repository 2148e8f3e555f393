"""Where the host waits for the GPU in steady steps: from a trace of the reference stack through the Trainer.

    python benchmarks/host_waits.py [--layers 12 --width 4096 --options "n_microbatches=2"] [--trace steps.json.gz]
    python benchmarks/host_waits.py --read steps.json.gz     # of a trace that was written before

Lists every call of the CUDA runtime that waits, or that may wait for the whole device (synchronisations, allocations
and releases of device memory, page-locking, copies that are not asynchronous), with the innermost range of the engine
around it: `F` and `B` are visits of a chunk in forward and backward, `g` gradients on their way, `u` updates,
`stall ...` waits on purpose. What is traced are some steps after the warm-up, which recording makes slower.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reference import tokens
from systems import parse_options
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from workload import Stack, make_trainer

from ramtorch_lightning import OffloadStrategy, TraceCallback

WARM_UP, TRACED = 6, 3
WAITING = re.compile(
    r"cu(da)?(\w*Synchronize|Malloc|Free|MemAlloc|MemFree|HostAlloc|FreeHost|HostRegister|HostUnregister|Memcpy)(_v\d+)?"
)
RANGE = re.compile(r"([FBtgu])\d+|(stall .+)|(update) of .+")

Event = dict[str, Any]
Wait = tuple[str, str, str]
"""A call, the thread that makes it, and the range around it."""


def read(path: Path) -> list[Event]:
    """The events of a trace file."""
    raw = path.read_bytes()
    events: list[Event] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    return events


def waits(events: Iterable[Event]) -> dict[Wait, list[float]]:
    """Microseconds of each call that waits; the most frequent ones first."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = [event for event in complete if event.get("cat") == "user_annotation" and RANGE.fullmatch(event["name"])]
    roles = {thread: role(r["name"] for r in ranges if r["tid"] == thread) for thread in {r["tid"] for r in ranges}}
    found: dict[Wait, list[float]] = {}
    for event in complete:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and WAITING.fullmatch(event["name"]):
            around = [r for r in ranges if r["tid"] == event["tid"] and _encloses(r, event)]
            inside = kind(min(around, key=lambda r: float(r["dur"]))["name"]) if around else "-"
            found.setdefault((event["name"], roles.get(event["tid"], "another"), inside), []).append(event["dur"])
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def kind(name: str) -> str:
    """`F` for `F3`; a stall is named in full."""
    match = RANGE.fullmatch(name)
    return next(filter(None, match.groups())) if match else name


def role(names: Iterable[str]) -> str:
    """What a thread is for, by the kind of range that it has most of."""
    most = Counter(map(kind, names)).most_common(1)[0][0]
    return {"F": "forward", "B": "backward", "u": "updates", "update": "updates"}.get(most, most)


def _encloses(outer: Event, inner: Event) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


def table(found: dict[Wait, list[float]], steps: int) -> str:
    """One line per kind of wait, per step."""
    head = ("call", "thread", "inside", "per step", "ms per step", "longest ms")
    rows = [
        (*wait, f"{len(times) / steps:.1f}", f"{sum(times) / steps / 1e3:.3f}", f"{max(times) / 1e3:.3f}")
        for wait, times in found.items()
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def record(options: argparse.Namespace, path: Path) -> None:
    """Train the stack, and trace steps after the warm-up."""
    chosen = parse_options(options.options)
    if options.host_memory is not None:
        chosen.setdefault("host_memory", int(options.host_memory * 2**30))
    rows = options.batch * chosen.get("n_microbatches", 1)
    data = TensorDataset(*tokens(rows, options.length))
    loader: DataLoader[Any] = DataLoader(ConcatDataset([data] * (WARM_UP + TRACED + 1)), batch_size=rows)
    callback = TraceCallback(path, steps=range(WARM_UP, WARM_UP + TRACED))
    trainer = make_trainer(options.device, OffloadStrategy(**chosen), max_epochs=1, callbacks=[callback])
    trainer.fit(Stack(options.layers, options.width, checkpointed=False), loader)


def main(given: Sequence[str] | None = None) -> None:
    options = parse(given)
    with tempfile.TemporaryDirectory() as folder:
        path = options.read or options.trace or Path(folder) / "steps.json.gz"
        if options.read is None:
            record(options, path)
        events = read(path)
    found = waits(events)
    if found:
        print(table(found, TRACED))
    elif any(event.get("cat") in ("cuda_runtime", "cuda_driver") for event in events):
        print("The host never waits.")
    else:
        print("The trace has no call of CUDA: nothing ran on a GPU.")


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8, help="rows of one microbatch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--options", default="", help="of OffloadStrategy: key=value,key=value")
    parser.add_argument("--host-memory", type=float, help="GiB that may be used, where the system reports too little")
    parser.add_argument("--trace", type=Path, help="where to keep the trace; .gz compresses it")
    parser.add_argument("--read", type=Path, help="read this trace of as many steps, and train nothing")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
