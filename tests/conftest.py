"""What every test gets: one compute thread, fixed seeds, and proof that no thread outlives it."""

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; child processes inherit it

import pytest
import torch

# One thread: results do not depend on the number of cores, and two workers do not fight over them.
torch.set_num_threads(1)

# Libraries whose threads live as long as the process, or end when they please.
FOREIGN_LIBRARIES = {
    "execnet",
    "lightning",
    "pytorch_lightning",
    "pytest_timeout",
    "rich",
    "tensorboard",
    "torch",
    "tqdm",
}
GRACE_SECONDS = 2.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    present = torch.cuda.device_count()
    for item in items:
        for mark in item.iter_markers("gpu"):
            needed = mark.args[0] if mark.args else 1
            if needed > present:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), {present} present"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(0)


@pytest.fixture(autouse=True)
def logs_as_usual() -> Iterator[None]:
    """What a test does to Lightning's loggers, as by running a benchmark, ends with it."""
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]
    before = [(logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield
    for logger, (level, propagate, disabled) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled


@pytest.fixture(autouse=True)
def signals_as_usual() -> None:
    """Interrupts arrive, though a shell that starts tests in the background, or Lightning after one, ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Operations that have a deterministic implementation use it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A test fails when a thread that it started is still alive shortly after its end."""
    before = set(threading.enumerate())
    yield
    left = threads_left(before, GRACE_SECONDS)
    assert not left, f"threads outlive the test: {', '.join(thread.name for thread in left)}"


def threads_left(before: set[threading.Thread], grace_seconds: float) -> list[threading.Thread]:
    """The threads started since `before`, foreign ones apart, that do not end within `grace_seconds`."""
    started = [thread for thread in threading.enumerate() if thread not in before and not is_foreign(thread)]
    deadline = time.monotonic() + grace_seconds
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in started if thread.is_alive()]


def is_foreign(thread: threading.Thread) -> bool:
    """Whether a known library started this thread, told by its class or by the function that it runs."""
    if isinstance(thread, threading._DummyThread):  # autograd's own, seen because a hook asked for its name
        return True
    if thread.name.startswith("ThreadPoolExecutor-"):  # the default name: ours all have one (test_architecture)
        return True
    modules = [type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None) or ""]
    return any(module.partition(".")[0] in FOREIGN_LIBRARIES for module in modules)
