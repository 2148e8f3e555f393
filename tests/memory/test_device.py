"""The CPU twin of a device does nothing, and does it with the same calls."""

import contextlib

import pytest
import torch

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import COMPLETE, Device, device_count, parse_device


def test_on_the_cpu_streams_are_none_and_events_are_complete():
    device = Device("cpu")
    assert device.stream() is None
    assert device.current_stream() is None
    event = device.record()
    assert event is COMPLETE
    assert event.query()
    event.synchronize()
    device.wait(event)
    with device.on(None):
        device.activate()
        device.synchronize()
    assert device.free_bytes() is None
    assert not device.page_lock(0, 4096)
    device.page_unlock(0)


@pytest.mark.parametrize("name", ["meta", "mps", "xpu:0"])
def test_kinds_of_devices_that_are_not_supported_are_refused(name):
    with pytest.raises(ConfigurationError, match="use 'cpu' or 'cuda:<index>'"):
        Device(name)


@pytest.mark.parametrize("given", [True, -1, 256, "cuda:256", "cuda:128", "gpu", "", " ", None, 1.5, torch.ones(2)])
def test_what_torch_takes_for_no_device_or_for_another_one_is_refused(given):
    """To torch `cuda:256` is `cuda:0`."""
    with pytest.raises(ConfigurationError, match=r"device=.*: use 'cpu', 'cuda', 'cuda:<index>'"):
        parse_device(given)
    assert parse_device(3) == parse_device("cuda:3") == torch.device("cuda", 3)


def test_a_gpu_that_does_not_exist_is_refused_with_the_number_of_those_that_do():
    with pytest.raises(ConfigurationError, match=f"this machine has {device_count()} CUDA devices"):
        Device(torch.device("cuda", 99))


def test_memory_is_locked_in_the_context_of_the_device_whatever_the_threads_current_one(monkeypatch):
    """A context on another GPU would take half a gigabyte there."""
    calls, current = [], [0]

    class Runtime:
        def cudaHostRegister(self, *arguments):
            calls.append(("lock", current[0], arguments))
            return 0

        def cudaHostUnregister(self, *arguments):
            calls.append(("unlock", current[0], arguments))

    @contextlib.contextmanager
    def using(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", using)
    device = Device("cpu")
    device.torch, device.asynchronous = torch.device("cuda", 1), True
    assert device.page_lock(64, 4096)
    device.page_unlock(64)
    assert calls == [("lock", 1, (64, 4096, 0)), ("unlock", 1, (64,))]
