"""Ours and the alternatives on the reference work, in one job: time per step, memory, rates, ratios, losses.

    python benchmarks/peers.py --tokens 2k,16k,64k --ramtorch-1.6.4 PATH --ramtorch-1.11.0 PATH --json out.json
    python benchmarks/peers.py --systems ours "ours:pin=2,window=3" resident fsdp --tokens 16k --rounds 3
    python benchmarks/peers.py --device cpu --layers 2 --width 128 --tokens 64,128 --batch-tokens 64 --length 64

Systems: `ours` (OffloadStrategy through the Trainer), `engine` (the same engine in a plain loop), `resident` (the
ordinary Trainer, everything on the device), `fsdp` (Lightning's FSDPStrategy with cpu_offload), `deepspeed`
(Lightning's stage 3 with optimizer and parameters offloaded), `ramtorch-1.6.4` and `ramtorch-1.11.0` (OffloadModel in a
plain loop). After a colon come keyword arguments for the system's own class, so variants can be compared:
`ours:n_microbatches=4` then gets four batches at once, and `ours:moments=torch.bfloat16` has our own AdamW;
`ours:clip=1e9` clips by a norm that is never reached, `ours:clip=1e9,ahead_bytes=0` lets all updates wait for it. All
checkpoint every block; `fsdp:inner=True` lets Lightning put the checkpoints inside FSDP's units, not around them.

Each run is a process of its own with a time limit, and the rounds go through all systems in turn, so that a drift of
the machine meets all alike. A run measures all sizes one after the other; steps of more than --batch-tokens accumulate
gradients over several batches. `feeds.py` says how steps are timed, and why that is fair; `limits.py` what the
machine's limits are, and which bytes a step needs. A system that is missing or fails is listed with its reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from feeds import Record, Size, size_of
from peers_chart import draw
from peers_table import summarize, table
from reference import count_parameters

HERE = Path(__file__).parent
RAMTORCH = ("1.6.4", "1.11.0")
DEFAULT = ["ours", "engine", "resident", "fsdp", "deepspeed", *(f"ramtorch-{version}" for version in RAMTORCH)]
GPU_ONLY = {"fsdp": "Lightning's FSDP needs a GPU", "deepspeed": "DeepSpeed's stage 3 needs a GPU"}
LIBRARIES = ("torch", "lightning", "ramtorch-lightning", "deepspeed")


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=DEFAULT, metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--tokens", default="2k,16k,64k", help="per optimizer step; k is 1024")
    parser.add_argument("--batch-tokens", type=count, default=count("16k"), help="of one batch, at most")
    parser.add_argument("--length", type=int, default=2048, help="of a sequence, at most")
    parser.add_argument("--steps", type=int, default=4, help="measured, per size")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them, per size")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--host-memory", type=float, help="GiB that ours may use, where the system reports too little")
    parser.add_argument("--time-limit", type=float, default=240, help="seconds for one run")
    parser.add_argument("--budget", type=float, help="seconds for everything")
    for version in RAMTORCH:
        parser.add_argument(f"--ramtorch-{version}", type=Path, dest=f"ramtorch-{version}", help="an unpacked wheel")
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    parser.add_argument("--chart", type=Path, help="where to draw it")
    arguments = parser.parse_args(given)
    names = {system.partition(":")[0] for system in arguments.systems}
    if not names <= set(DEFAULT):
        parser.error(f"unknown systems {sorted(names - set(DEFAULT))}: choose from {', '.join(DEFAULT)}")
    try:
        arguments.sizes = [
            size_of(count(t), arguments.length, arguments.batch_tokens) for t in arguments.tokens.split(",")
        ]
    except ValueError as error:
        parser.error(str(error))
    return arguments


def count(text: str) -> int:
    """2048 from "2048" or "2k"."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


class Peers:
    """Runs everything, and keeps what came of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.start = time.monotonic()
        self.runs: list[Record] = []
        self.probe: dict[str, Any] = {}

    def measure(self) -> None:
        chosen = self.arguments
        command = [str(HERE / "limits.py"), "--device", chosen.device]
        if chosen.device == "cpu":
            command += ["--elements", str(1 << 22)]
        output, reason = self.run(command, {})
        if reason:
            print(f"the machine's limits could not be measured: {reason}", flush=True)
        else:
            self.probe = json.loads(output.splitlines()[-1])
        for index in range(chosen.rounds):
            for system in chosen.systems:
                for sizes in jobs(system, chosen.sizes):
                    self.system(index, system, sizes)
                    if chosen.json is not None:
                        chosen.json.write_text(json.dumps(self.report(), indent=1), encoding="utf-8")

    def system(self, index: int, system: str, sizes: list[Size]) -> None:
        """One run: a record per size, and for sizes that have none, the reason."""
        chosen, name, begun = self.arguments, system.partition(":")[0], time.monotonic()
        path = getattr(chosen, name, None)
        found: list[Record] = []
        reason = self.unavailable(name, path)
        if not reason:
            job = {
                "system": system,
                "sizes": [(size.rows, size.length, size.batches) for size in sizes],
                "steps": chosen.warm_up + chosen.steps,
                "host_memory": None if chosen.host_memory is None else int(chosen.host_memory * 2**30),
                **{key: getattr(chosen, key) for key in ("layers", "width", "device")},
            }
            with tempfile.TemporaryDirectory() as folder:
                results = Path(folder) / "results.jsonl"
                results.touch()
                command = [str(HERE / "systems.py"), json.dumps(job), str(results)]
                _, reason = self.run(command, environment(name), path)
                found = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        common = {"system": system, "round": index, "warm_up": chosen.warm_up}
        self.runs += [common | record for record in found]
        self.runs += [common | {"tokens": size.tokens, "reason": reason} for size in sizes[len(found) :]]
        done = f"{len(found)} of {len(sizes)} sizes in {time.monotonic() - begun:.0f} s"
        print(f"round {index + 1}, {system}: {done}{f'; {reason}' if reason else ''}", flush=True)

    def unavailable(self, name: str, path: Path | None) -> str:
        """Why this system cannot run here; empty if it may."""
        if self.arguments.device == "cpu" and name in GPU_ONLY:
            return GPU_ONLY[name]
        if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            return "deepspeed is not installed"
        if name.startswith("ramtorch-"):
            wanted, there = name.removeprefix("ramtorch-"), ramtorch_version(path)
            if there is None:
                return f"ramtorch is not installed: pass --{name} PATH" if path is None else f"no ramtorch in {path}"
            if there != wanted:
                return f"ramtorch {there} is there instead: pass --{name} PATH"
        return ""

    def run(self, command: list[str], extra: dict[str, str], path: Path | None = None) -> tuple[str, str]:
        """Standard output of a Python process that imports from `path` first, and why it failed, if it did."""
        chosen = self.arguments
        paths = [str(path.resolve()) if path else "", str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        limit = chosen.time_limit
        if chosen.budget is not None:
            limit = min(limit, chosen.budget - (time.monotonic() - self.start))
            if limit <= 0:
                return "", f"the budget of {chosen.budget:.0f} s was used up"
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | extra,
            )  # fmt: skip
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return "", f"it took longer than {limit:.0f} s"
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            errors.seek(0)
            return output, failure(process.returncode, errors.read())

    def report(self) -> dict[str, Any]:
        given = {key: value for key, value in vars(self.arguments).items() if key != "sizes"}
        stack = count_parameters(self.arguments.layers, self.arguments.width)
        return {
            "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in given.items()},
            "parameters": stack,
            "versions": {name: version(name) for name in LIBRARIES},
            "seconds": time.monotonic() - self.start,
            **self.probe,
            "runs": self.runs,
            "summary": summarize(self.runs, self.probe.get("limits", {}), stack),
        }


def jobs(system: str, sizes: list[Size]) -> list[list[Size]]:
    """The sizes of each run: one run, but DeepSpeed cannot change how many batches it accumulates."""
    if system.partition(":")[0] != "deepspeed":
        return [sizes]
    return [[size for size in sizes if size.batches == batches] for batches in dict.fromkeys(s.batches for s in sizes)]


def environment(name: str) -> dict[str, str]:
    """What a system needs in its environment: a process group of one needs an address."""
    if name not in ("fsdp", "deepspeed"):
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def failure(status: int, errors: str) -> str:
    """Why a process failed: its last line that names an error, or else its last line; empty if it did not fail."""
    if status == 0:
        return ""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    last = (named or lines or ["it printed nothing"])[-1]
    return f"killed by signal {-status}; {last}" if status < 0 else last


def ramtorch_version(path: Path | None) -> str | None:
    """The version in an unpacked wheel or, without a path, the installed one; None if there is none."""
    if path is None:
        return version("ramtorch") if importlib.util.find_spec("ramtorch") else None
    source = path / "ramtorch" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"', source.read_text(encoding="utf-8"), re.M) if source.is_file() else None
    return found[1] if found else None


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(given: list[str] | None = None) -> None:
    peers = Peers(parse(given))
    peers.measure()
    report = peers.report()
    print(table(report))
    if peers.arguments.json is not None:
        peers.arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if peers.arguments.chart is not None:
        draw(report, peers.arguments.chart)


if __name__ == "__main__":
    main()
