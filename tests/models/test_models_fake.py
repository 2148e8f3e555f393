"""Runs the cases on a fake device in a process of their own: registering a device cannot be undone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration as backends

CASES = Path(__file__).with_name("fake_device_model_cases.py")


@pytest.mark.timeout(240)
@pytest.mark.skipif(
    not hasattr(backends, "_setup_privateuseone_for_python_backend"), reason="this torch has no backends in Python"
)
def test_every_tensor_is_on_the_right_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    child = subprocess.run(command, cwd=CASES.parents[2], capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
