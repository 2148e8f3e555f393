"""benchmarks/host_waits.py finds the calls that wait, in the thread and in the range where they are made."""

from pathlib import Path
from typing import Any

import host_waits
import pytest


def event(cat: str, name: str, thread: int, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, "ts": start, "dur": duration}


TRACE = [
    event("user_annotation", "F0", 1, 0, 100),
    event("user_annotation", "stall for an update", 1, 20, 50),
    event("user_annotation", "B0", 2, 200, 100),
    event("user_annotation", "u0", 3, 210, 100),
    event("user_annotation", "Optimizer.step#AdamW.step", 1, 400, 100),  # not the engine's
    event("cuda_runtime", "cudaEventSynchronize", 1, 30, 10),
    event("cuda_runtime", "cudaLaunchKernel", 1, 75, 5),
    event("cuda_runtime", "cudaMemcpyAsync", 2, 210, 5),
    event("cuda_runtime", "cudaStreamSynchronize", 2, 250, 20),
    event("cuda_runtime", "cudaStreamSynchronize", 2, 280, 40),  # reaches over the end of B0
    event("cuda_runtime", "cudaEventSynchronize", 3, 220, 30),
    event("cuda_runtime", "cudaEventSynchronize", 3, 260, 10),
    event("cuda_runtime", "cudaMalloc", 4, 10, 7),
    event("cuda_driver", "cuMemFree_v2", 1, 410, 3),
    {"ph": "i", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "tid": 1, "ts": 0},
]


def test_calls_that_wait_are_found_in_their_threads_and_ranges() -> None:
    assert host_waits.waits(TRACE) == {
        ("cudaEventSynchronize", "updates", "u"): [30, 10],
        ("cudaEventSynchronize", "forward", "stall for an update"): [10],
        ("cudaStreamSynchronize", "backward", "B"): [20],
        ("cudaStreamSynchronize", "backward", "-"): [40],
        ("cudaMalloc", "another", "-"): [7],
        ("cuMemFree_v2", "forward", "-"): [3],
    }


def test_the_table_counts_per_step() -> None:
    lines = host_waits.table(host_waits.waits(TRACE), steps=2).splitlines()
    assert lines[1].split() == ["cudaEventSynchronize", "updates", "u", "1.0", "0.020", "0.030"]


def test_steps_are_traced_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.json"
    small = ["--layers", "1", "--width", "128", "--batch", "1", "--length", "16", "--device", "cpu"]
    host_waits.main([*small, "--options", "resident_below=0", "--trace", str(path)])
    assert "nothing ran on a GPU" in capsys.readouterr().out
    names = [each["name"] for each in host_waits.read(path) if each.get("cat") == "user_annotation"]
    assert names.count("F0") == names.count("B0") == host_waits.TRACED
    host_waits.main(["--read", str(path)])
    assert "nothing ran on a GPU" in capsys.readouterr().out
