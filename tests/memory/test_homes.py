"""Homes: what streams to a device and back is page-locked, has storage of its own, and is nobody else's."""

import torch

from ramtorch_core.memory.device import Device
from ramtorch_core.memory.homes import Homes

PARAMETER = torch.arange(6.0).view(2, 3)


def test_zeros_are_made_where_there_is_nothing() -> None:
    home = Homes(Device("cpu")).bring(PARAMETER, "a", None, (1, 2))
    assert torch.equal(home, torch.zeros(2, 3))
    assert home.stride() == (1, 2)
    assert home.untyped_storage().nbytes() == 24


def test_what_is_at_home_stays_and_what_is_not_is_copied_there() -> None:
    homes = Homes(Device("cpu"))
    home = homes.bring(PARAMETER, "a", PARAMETER, (3, 1))
    assert torch.equal(home, PARAMETER)
    assert home.data_ptr() != PARAMETER.data_ptr()
    assert homes.bring(PARAMETER, "a", home, (3, 1)) is home
    assert homes.bring(PARAMETER, "b", home, (3, 1)) is not home
    turned = homes.bring(PARAMETER, "a", home, (1, 2))
    assert torch.equal(turned, home)
    assert turned.stride() == (1, 2)
    assert turned.data_ptr() != home.data_ptr()


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    homes = Homes(Device("cpu"))
    home = homes.bring(PARAMETER, "a", PARAMETER, (3, 1))
    held, address = home, home.data_ptr()
    del home
    other = homes.bring(PARAMETER, "a", PARAMETER + 1, (3, 1))
    assert other.data_ptr() != address
    assert torch.equal(held, PARAMETER)
    address = other.data_ptr()
    del other
    assert homes.bring(PARAMETER, "a", None, (3, 1)).data_ptr() == address


def test_tensors_stay_valid_after_release() -> None:
    homes = Homes(Device("cpu"))
    home = homes.bring(PARAMETER, "a", PARAMETER, (3, 1))
    homes.release()
    assert torch.equal(home, PARAMETER)
