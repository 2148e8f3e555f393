"""The CPU twin of a device does nothing, and does it with the same calls."""

import pytest
import torch

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import COMPLETE, Device, device_count


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


def test_a_gpu_that_does_not_exist_is_refused_with_the_number_of_those_that_do():
    with pytest.raises(ConfigurationError, match=f"this machine has {device_count()} CUDA devices"):
        Device(torch.device("cuda", 99))
