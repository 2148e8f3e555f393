"""Models that are built late, empty, on the host, or compiled."""

from typing import Any

import pytest
import torch
from offload_cases import WIDTH, Classifier, Net, Watched, compare_fits, fit, loader, make_trainer
from stream_cases import assert_same
from torch import nn


class Late(Classifier):
    """Builds its network in `configure_model`, and notes where."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.built: list[tuple[torch.device, torch.device]] = []

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = Net()
            self.built.append((self.net.embed.weight.device, torch.get_default_device()))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true", "bf16-mixed"])
def test_configure_model_trains_the_same_and_builds_once(precision: Any) -> None:
    found = compare_fits(Late, precision=precision)
    assert len(found.model.built) == 1


def test_models_are_built_on_the_host_whatever_the_device() -> None:
    """The device here is one on which building would show: `meta`."""
    strategy = Watched()
    trainer = make_trainer(strategy)
    strategy._root_device = torch.device("meta")
    with trainer.init_module():
        built = Classifier()
    assert {p.device.type for p in built.parameters()} == {"cpu"}
    late = Late()
    with strategy.tensor_init_context(), strategy.model_sharded_context():
        late.configure_model()
    assert late.built == [(torch.device("cpu"), torch.device("cpu"))]


def test_a_model_that_is_built_empty_has_host_memory_and_trains_after_loading() -> None:
    torch.manual_seed(1)
    weights = Classifier().state_dict()

    def result(strategy: Any) -> Any:
        trainer = make_trainer(strategy)
        with trainer.init_module(empty_init=True):
            model = Classifier()
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        model.load_state_dict(weights)
        trainer.fit(model, loader())
        return model.state_dict()

    assert_same(result(Watched()), result("auto"))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_init_module_builds_in_the_dtype_of_the_precision(precision: Any) -> None:
    with make_trainer(Watched(), precision=precision).init_module():
        dtype = nn.Linear(2, 2).weight.dtype
    assert dtype == {"bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]


def test_buffers_metrics_and_batches_are_on_the_root_device_and_masters_on_the_host() -> None:
    class Looking(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.device == batch[0].device == self.net.blocks[0][0].running_mean.device
            assert all(type(p) is nn.Parameter for p in self.parameters())
            return super().training_step(batch, batch_idx)

    compare_fits(lambda: Looking(Net(norm=nn.BatchNorm1d)))


class Counting:
    """A compiler backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend() -> Any:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_compiled_blocks_stay_compiled_and_train_the_same(backend: Counting, activations: str) -> None:
    def build() -> Classifier:
        model = Classifier()
        for index, block in enumerate(model.net.blocks):
            model.net.blocks[index] = torch.compile(block, backend=backend)
        return model

    found = fit(build, Watched(chunks="net.blocks.*", activations=activations))
    assert backend.graphs > 0
    assert_same(found.record, fit(build).record)
    assert found.strategy.copied_bytes > 0


def test_blocks_compiled_in_place_stay_compiled(backend: Counting) -> None:
    def build() -> Classifier:
        model = Classifier()
        for block in model.net.blocks:
            block.compile(backend=backend)
        return model

    found = fit(build, Watched(chunks="net.blocks.*"))
    assert backend.graphs > 0
    assert_same(found.record, fit(build).record)
    assert found.strategy.copied_bytes > 0


def test_a_compiled_lightning_module_compiles_frames_and_trains_the_same(backend: Counting) -> None:
    class Silent(Classifier):  # torch 2.13 cannot compile `self.log` of lightning 2.6, with or without the strategy
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    def weights(strategy: Any) -> Any:
        torch.manual_seed(1)
        model = Silent(Net(depth=2))
        compiled = torch.compile(model, backend=backend)
        torch.manual_seed(2)
        make_trainer(strategy, max_epochs=1, limit_train_batches=2).fit(compiled, loader())
        return model.state_dict()

    expected = weights("auto")
    backend.graphs = 0
    strategy = Watched(chunks="net.blocks.*")
    assert_same(weights(strategy), expected)
    assert strategy.copied_bytes > 0
    assert backend.graphs > 0


def test_a_module_with_a_lazy_layer_says_what_to_do() -> None:
    class Lazy(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, 4)))

    with pytest.raises(Exception, match=r"'net\.0\.weight' is not initialised.*run one forward"):
        fit(Lazy, Watched())
