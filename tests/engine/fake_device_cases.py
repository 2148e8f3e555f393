"""Every tensor is on the right device: forwards with masters on the host and slots on another, fake device.

A CPU cannot see a misplaced tensor, and `FakeTensorMode` can: an operation that mixes devices raises, on any machine. A
build of torch without CUDA aborts in autograd for fake tensors on "cuda", so the device here is "twin", registered as a
backend without kernels.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from stream_cases import WIDTH, Block, Stack
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ramtorch_core import attach


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    if torch._C._get_privateuse1_backend_name() != "twin":
        backends = pytest.importorskip("torch.utils.backend_registration")
        if not hasattr(backends, "_setup_privateuseone_for_python_backend"):
            pytest.skip("this torch has no backends in Python")
        backends._setup_privateuseone_for_python_backend("twin")
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.lin = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.scale + self.offset, self.lin.weight, self.lin.bias)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.position = nn.Parameter(torch.zeros(5, WIDTH))
        self.blocks = nn.ModuleList([Block(), Raw()])
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.abs().long()[:, 0]) + self.position[:3]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def attention() -> nn.Module:
    return Stack(*(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True) for _ in range(2)))


def normalised() -> nn.Module:
    lin = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return Stack(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), nn.Sequential(lin, nn.Tanh()))


MODELS = {
    "blocks": lambda: Stack(Block(), Block(), Block()),
    "raw": lambda: Stack(Raw(), Raw()),
    "language model": LanguageModel,
    "attention": attention,
    "normalised": normalised,
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("options", [{"chunks": "blocks.*"}, {"chunks": "leaves"}])
@pytest.mark.parametrize("resident_below", [0, 1 << 20])
def test_every_tensor_of_a_forward_is_on_the_device(build, activations, options, resident_below):
    model = build()
    streamer = attach(model, device="twin", activations=activations, resident_below=resident_below, **options)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                output = model(torch.ones(3, WIDTH, device="twin"))
                assert output.device.type == "twin"
    streamer.close()
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert model(torch.ones(3, WIDTH)).device.type == "cpu"


class Borrows(Stack):
    """The root uses a weight that a chunk owns, or only a view of it."""

    view = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[0].lin.weight
        return F.linear(super().forward(x), weight.t() if self.view else weight)


def test_a_parameter_used_outside_of_its_chunk_is_found_and_stays_on_the_device(caplog):
    model = Borrows(Raw(), Block())
    streamer = attach(model, device="twin", chunks="blocks.*", resident_below=0)
    x = torch.ones(3, WIDTH, device="twin")
    for _ in range(3):
        with torch.no_grad():
            assert model(x).device.type == "twin"
    assert "'blocks.0.lin.weight' is used outside of its chunk's forward" in caplog.text
    reasons = {weight.name: reason for weight, reason in streamer.census.reasons.items()}
    assert reasons == {"blocks.0.lin.weight": "used outside of its chunk's forward"}


def test_a_view_of_a_parameter_used_outside_of_its_chunk_raises_with_the_remedy():
    model = Borrows(Raw(), Block())
    model.view = True
    attach(model, device="twin", chunks="blocks.*", resident_below=0)
    with pytest.raises(RuntimeError, match="make the module that uses it the chunk, or pin it"):
        model(torch.ones(3, WIDTH, device="twin"))


def test_a_tensor_created_on_the_device_of_a_parameter_raises_with_the_remedy():
    class Creates(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.ones(WIDTH, device=next(self.parameters()).device)

    model = Creates(Block(), Block())
    attach(model, device="twin", chunks="blocks.*", resident_below=0)
    with pytest.raises(RuntimeError, match="masters are on the host"):
        model(torch.ones(3, WIDTH, device="twin"))


def test_an_input_on_the_host_raises_with_the_remedy():
    model = Stack(Block(), Block())
    attach(model, device="twin", chunks="blocks.*", resident_below=0)
    with pytest.raises(RuntimeError, match="device"):
        model(torch.ones(3, WIDTH))
