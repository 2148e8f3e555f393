"""Every tensor of these models is on the right device: forwards with masters on the host and slots on a fake device.

A device without kernels stands for the GPU under `FakeTensorMode`, where an operation that mixes devices raises.
"""

from typing import Any

import pytest
import torch
from model_cases import CASES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from ramtorch_core import attach

DEPENDS_ON_DATA = "mixtral"  # which experts run is not known without values


@pytest.fixture(autouse=True)
def device() -> None:
    if torch._C._get_privateuse1_backend_name() != "twin":
        backends = pytest.importorskip("torch.utils.backend_registration")
        if not hasattr(backends, "_setup_privateuseone_for_python_backend"):
            pytest.skip("this torch has no backends in Python")
        backends._setup_privateuseone_for_python_backend("twin")


def fake(net: nn.Module, mode: FakeTensorMode) -> None:
    """Replace all tensors by fake ones; shared ones stay shared."""
    for module in net.modules():
        for tensors in (module._parameters, module._buffers):
            tensors |= {name: mode.from_tensor(t) for name, t in tensors.items() if t is not None}


@pytest.mark.parametrize(("activations", "resident_below"), [("checkpoint", 0), ("keep", 1 << 20)])
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.module is None and name != DEPENDS_ON_DATA]
)
def test_every_tensor_of_a_forward_is_on_the_device(name: str, activations: Any, resident_below: int) -> None:
    case = CASES[name]
    net, batch = case.task().net, case.data(2)
    for part in net.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False  # it makes tensors from lists, for which this device has no kernel
    with FakeTensorMode() as mode:
        fake(net, mode)
        streamer = attach(net, device="twin", activations=activations, resident_below=resident_below)
        batch = tree_map_only(Tensor, lambda tensor: mode.from_tensor(tensor).to("twin"), batch)
        for _ in range(2):
            assert case.loss(net, batch).device.type == "twin"
        streamer.close()
