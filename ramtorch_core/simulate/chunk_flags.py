"""The flags that describe chunks and a machine, and the costs that follow from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.simulate.costs import ChunkCost, Machine, chunk_cost
from ramtorch_core.simulate.options import amounts, check_amounts, count, listed, number, refuse_beside

TIMES = {
    "tf": ("forward", "forward of a chunk"),
    "tb": ("backward", "backward, without recompute"),
    "th2d": ("transfer", "copy of a chunk's weights into a slot"),
    "td2h": ("gradient", "copy of its gradient to the host"),
    "tupdate": ("update", "its optimizer update on the host"),
    "tsave": ("save", "what that takes longer where it runs ahead of the norm, and copies what it overwrites"),
}
MAX_CHUNKS = 20_000
DEFAULTS = {"tf": 1.0, "tb": 2.0}
BYTES = {
    "weight_bytes": "of a slot, as weights cross PCIe",
    "kept_bytes": "of a chunk's activations, per microbatch",
    "boundary_bytes": "of what stays of them where it is checkpointed",
}
SWEPT = (*TIMES, *BYTES, "layers")


def add_chunk_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for chunks, as times or by their parameters, and for the machine."""
    group = parser.add_argument_group("chunks; a time or size is one number, or one per chunk, as in 1:1:4")
    group.add_argument("--layers", type=listed(count), default=(24,), metavar="N", help="chunks (default: 24)")
    for flag, (_, text) in TIMES.items():
        default = f" (default: {DEFAULTS[flag]:g})" if flag in DEFAULTS else ""
        group.add_argument(f"--{flag}", type=listed(amounts), default=(None,), help=f"seconds: {text}{default}")
    for flag, text in BYTES.items():
        group.add_argument(f"--{flag.replace('_', '-')}", type=listed(amounts), default=(None,), help=f"bytes {text}")
    group.add_argument(
        "--parameters",
        type=amounts,
        help="per chunk: bytes, and times of copies and updates, follow from the machine's flags (float32 masters, "
        "bf16 copies, AdamW)",
    )
    group.add_argument("--chunks", metavar="FILE.json", help="a list of objects with count, parameters, forward, ...")
    machine = parser.add_argument_group("machine; what is left out is unlimited, or takes no time")
    machine.add_argument("--h2d", type=number, metavar="GB/s", help="host to GPU, page-locked")
    machine.add_argument("--d2h", type=number, metavar="GB/s", help="GPU to host")
    machine.add_argument(
        "--both-ways", type=number, metavar="GB/s", help="PCIe when both directions are busy, added up"
    )
    machine.add_argument("--host-memory", type=number, metavar="GB/s", help="host memory, all traffic together")
    machine.add_argument("--gpu-memory", type=number, metavar="GB", help="GPU memory that may be used")
    machine.add_argument("--host-update", type=number, metavar="NS", help="nanoseconds per parameter on the host")
    machine.add_argument("--gpu-update", type=number, metavar="NS", help="nanoseconds per parameter on the GPU")


def machine_of(arguments: argparse.Namespace) -> Machine:
    """The machine that the flags describe.

    Raises:
        ConfigurationError: a rate or size that is not positive and finite.
    """
    scales = {"h2d": 1e9, "d2h": 1e9, "both_ways": 1e9, "host_memory": 1e9, "host_update": 1e-9, "gpu_update": 1e-9}
    given = {name: getattr(arguments, name) for name in scales}
    for name, value in {**given, "gpu_memory": arguments.gpu_memory}.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigurationError(f"{name}={value:g}: it must be positive and finite; leave it out for no limit")
    known = {name: value * scales[name] for name, value in given.items() if value is not None}
    return Machine(gpu_bytes=None if arguments.gpu_memory is None else arguments.gpu_memory * 1e9, **known)


def chunks_of(arguments: argparse.Namespace, machine: Machine, knobs: Mapping[str, Any]) -> list[ChunkCost]:
    """The chunks of one combination of the flags `SWEPT`.

    Raises:
        ConfigurationError: no chunk, a list of another length, a file that cannot be read, an impossible amount, or
            flags that say otherwise than a file.
    """
    refuse_beside("chunks", (*SWEPT, "parameters"), arguments)
    if arguments.chunks:
        return _from_file(arguments.chunks, machine)
    layers = knobs["layers"]
    if layers < 1:
        raise ConfigurationError(f"layers={layers}: there is nothing to simulate; give at least 1")
    if layers > MAX_CHUNKS:
        raise ConfigurationError(f"layers={layers:,}: at most {MAX_CHUNKS:,} are simulated")

    def each(flag: str, values: Sequence[float] | None) -> Sequence[float | None]:
        if values is not None:
            check_amounts(flag.replace("_", "-"), values)
        if values is None or len(values) == 1:
            return [None if values is None else values[0]] * layers
        if len(values) != layers:
            raise ConfigurationError(f"--{flag} has {len(values)} values for {layers} chunks: give 1, or one for each")
        return values

    columns = {TIMES[flag][0]: each(flag, knobs[flag]) for flag in TIMES} | {
        flag: each(flag, knobs[flag]) for flag in BYTES
    }
    rows: list[dict[str, Any]] = [
        {name: column[i] for name, column in columns.items() if column[i] is not None} for i in range(layers)
    ]
    for row, parameters in zip(rows, each("parameters", arguments.parameters), strict=True):
        row.setdefault("forward", DEFAULTS["tf"])
        row.setdefault("backward", DEFAULTS["tb"])
        if parameters is not None:
            row["parameters"] = parameters
    return [_cost(row, machine) for row in rows]


def _cost(row: Mapping[str, Any], machine: Machine) -> ChunkCost:
    """A chunk from its parameters, if they are given, and from whatever else is; that comes first."""
    given = {name: value for name, value in row.items() if name != "parameters"}
    if "parameters" not in row:
        return ChunkCost(**given)
    if row["parameters"] < 0:
        raise ConfigurationError(f"parameters={row['parameters']}: the number cannot be negative")
    cost = chunk_cost(row["parameters"], machine, forward=row["forward"], backward=row["backward"])
    return replace(cost, **given)


def _from_file(path: str, machine: Machine) -> list[ChunkCost]:
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    allowed = {field.name for field in fields(ChunkCost)} | {"parameters", "count", "name"}
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError(f"{path} must hold a list of objects, one per chunk or kind of chunk")
    chunks: list[ChunkCost] = []
    for position, entry in enumerate(entries):
        for name, value in entry.items():
            if name not in allowed:
                known = ", ".join(sorted(allowed))
                raise ConfigurationError(f"{path}, entry {position}: {name!r} is unknown; there are {known}")
            if name != "name" and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ConfigurationError(f"{path}, entry {position}: {name}={value!r} is no number")
        if entry.get("count", 1) < 1 or entry.get("count", 1) % 1:
            raise ConfigurationError(
                f"{path}, entry {position}: count={entry['count']}; it must be a whole number, 1 or more"
            )
        if entry.get("count", 1) + len(chunks) > MAX_CHUNKS:
            raise ConfigurationError(f"{path}, entry {position}: these are more than {MAX_CHUNKS:,} chunks")
        missing = [name for name in ("forward", "backward") if name not in entry]
        if missing:
            raise ConfigurationError(f"{path}, entry {position}: {missing[0]} is missing, in seconds per microbatch")
        row = {name: value for name, value in entry.items() if name not in ("count", "name")}
        chunks += [_cost(row, machine)] * int(entry.get("count", 1))
    return chunks
