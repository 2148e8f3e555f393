"""Runs the cases on an emulated device in a process of their own: registering a device cannot be undone.

More random cases of that kind: `RAMTORCH_FUZZ_CASES=400 python -m pytest tests/engine/emulated_device_cases.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration as backends

CASES = [Path(__file__).with_name(f"emulated_{name}_cases.py") for name in ("device", "sums")]


@pytest.mark.slow
@pytest.mark.timeout(330)
@pytest.mark.skipif(
    not hasattr(backends, "_setup_privateuseone_for_python_backend"), reason="this torch has no backends in Python"
)
def test_no_order_that_the_events_allow_changes_a_result():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, CASES)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAMTORCH_FUZZ")}
    child = subprocess.run(command, cwd=CASES[0].parents[2], capture_output=True, text=True, timeout=300, env=env)
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
