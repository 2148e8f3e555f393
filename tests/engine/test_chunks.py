"""The chunks that are found automatically, on small models of each kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ramtorch_core.engine.chunks import find_chunks
from ramtorch_core.errors import ConfigurationError


def names(root: nn.Module, spec: Any = None, resident_below: int = 0) -> list[str]:
    chunks = find_chunks(root, spec, resident_below=resident_below)
    order = [name for name, _ in root.named_modules()]
    assert all(root.get_submodule(name) is module for name, module in chunks)
    assert [name for name in order if name in dict(chunks)] == [name for name, _ in chunks], "registration order"
    if spec is None:
        parts = [part for _, module in chunks for part in module.modules()]
        assert len(parts) == len(set(parts)), "no chunk lies inside another"
    return [name for name, _ in chunks]


class Called(nn.Module):
    """A module with a forward; what it computes does not matter here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Attention(Called):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))


class Block(Called):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(d), Attention(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))


class DecoderBlock(Block):
    def __init__(self, d: int = 8) -> None:
        super().__init__(d)
        self.cross = Attention(d)


class GPT(Called):
    def __init__(self, layers: int = 4, d: int = 8, make: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(50, d), nn.Embedding(6, d)
        self.blocks = nn.ModuleList([make(d) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 50)


class Stack(Called):
    """Encoder and decoder of one class, the decoder's blocks larger."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


class Bottleneck(Called):
    def __init__(self, c_in: int, c: int) -> None:
        super().__init__()
        self.conv1, self.conv2, self.norm = nn.Conv2d(c_in, c, 1), nn.Conv2d(c, c, 3), nn.BatchNorm2d(c)
        self.downsample = nn.Sequential(nn.Conv2d(c_in, c, 1), nn.BatchNorm2d(c)) if c_in != c else None


class Stage(Called):
    def __init__(self, c_in: int, c: int, depth: int) -> None:
        super().__init__()
        self.downsample = nn.Conv2d(c_in, c, 2)
        self.blocks = nn.Sequential(*[Bottleneck(c, c) for _ in range(depth)])


class Expert(Called):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 8 * d), nn.Linear(8 * d, d)


class MixtureBlock(Called):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.attention, self.gate = Attention(d), nn.Linear(d, 4)
        self.experts = nn.ModuleList([Expert(d) for _ in range(4)])


def of(prefix: str, n: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(n)]


def test_gpt_streams_its_blocks_embedding_and_head_and_keeps_what_is_small() -> None:
    assert names(GPT()) == ["embedding", *of("blocks.", 4), "head"]
    assert names(GPT(layers=2)) == ["embedding", "blocks.0", "blocks.1", "head"]


def test_gpt_inside_a_lightning_module_has_the_same_chunks() -> None:
    lightning = pytest.importorskip("lightning")
    metrics = pytest.importorskip("torchmetrics")

    class Learned(metrics.MeanMetric):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(64, 64)

    module = lightning.LightningModule()
    module.model = GPT()
    module.metric, module.metrics = Learned(), metrics.MetricCollection([Learned()])
    inside = ["embedding", *of("blocks.", 4), "head"]
    assert names(module) == [f"model.{name}" for name in inside]
    assert not any("metric" in name for name in names(module, "leaves"))
    module.inner = lightning.LightningModule()
    module.inner.scale, module.inner.head = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)
    assert names(module, "leaves")[-1] == "inner.head", "without a forward of its own it is never called"
    with pytest.raises(ConfigurationError, match="'metric' belongs to torchmetrics"):
        names(module, "metric")
    with pytest.raises(ConfigurationError, match="belongs to torchmetrics"):
        names(module, [module.metric])


def test_a_tied_embedding_and_head_are_both_listed() -> None:
    model = GPT()
    model.head.weight = model.embedding.weight
    assert {"embedding", "head"} <= set(names(model))


def test_encoder_and_decoder_are_divided_into_their_blocks() -> None:
    model = nn.ModuleDict(
        {"encoder": Stack([Block() for _ in range(3)]), "decoder": Stack([DecoderBlock() for _ in range(2)])}
    )
    assert names(model) == [*of("encoder.blocks.", 3), *of("decoder.blocks.", 2)]
    model = nn.Transformer(16, 2, 2, 2, 32)
    assert names(model) == [*of("encoder.layers.", 2), *of("decoder.layers.", 2)]


def test_equal_towers_are_divided_into_their_blocks() -> None:
    towers = nn.ModuleDict({"student": GPT(), "teacher": GPT()})
    assert names(towers)[:3] == ["student.embedding", "student.blocks.0", "student.blocks.1"]
    model = nn.Module()
    model.student, model.teacher = GPT(), GPT()
    assert names(model) == names(towers)
    for i in range(6):
        setattr(model, f"teacher{i}", GPT())
    assert "teacher5.blocks.0" in names(model), "also when each holds little"


def test_stages_are_divided_into_blocks_but_one_with_a_single_block_is_a_chunk() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 7), Stage(4, 8, 2), Stage(8, 16, 3), Stage(16, 32, 1), nn.Linear(32, 10))
    assert names(model) == ["1.blocks.0", "1.blocks.1", *of("2.blocks.", 3), "3"]


def test_stages_that_are_sequentials_are_divided_into_blocks() -> None:
    model = nn.Module()
    model.layer1 = nn.Sequential(Bottleneck(4, 8), Bottleneck(8, 8))
    model.layer2 = nn.Sequential(Bottleneck(8, 16))
    assert names(model) == ["layer1.0", "layer1.1", "layer2.0"]
    small = sum(p.nbytes for p in model.layer1[0].parameters())
    assert names(model, resident_below=small + 1) == ["layer1.0", "layer1.1", "layer2.0"], "a class stays together"
    assert names(model, resident_below=10**6) == []


def test_a_mixture_block_is_a_chunk_unless_it_holds_more_than_a_quarter() -> None:
    assert names(GPT(4, make=MixtureBlock)) == ["embedding", *of("blocks.", 4), "head"]
    experts = [name for name in names(GPT(2, make=MixtureBlock)) if "expert" in name]
    assert experts == [*of("blocks.0.experts.", 4), *of("blocks.1.experts.", 4)]


def test_a_dense_first_block_among_mixture_blocks_is_one_chunk_too() -> None:
    class Layer(Called):
        def __init__(self, feed_forward: nn.Module) -> None:
            super().__init__()
            self.attention, self.feed_forward = Attention(8), feed_forward

    layers = [Layer(Expert(8)), *(Layer(MixtureBlock(8)) for _ in range(5))]
    assert names(nn.Sequential(*layers)) == of("", 6)


def test_blocks_that_are_lists_of_parts_give_the_parts() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleList([Attention(8), Expert(8)]) for _ in range(3)])
    assert names(model) == [f"layers.{i}.{j}" for i in range(3) for j in range(2)]


def test_blocks_under_plain_attributes_are_found() -> None:
    model = nn.Module()
    model.down1, model.down2, model.up = Bottleneck(4, 8), Bottleneck(8, 16), nn.Conv2d(16, 16, 3)
    assert names(model) == ["down1", "down2", "up"]


def test_without_repeats_each_large_layer_is_a_chunk() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 2))
    assert names(model, resident_below=2048) == ["0", "2"]
    assert names(model) == ["0", "2", "3", "4"]
    assert names(model, resident_below=2**20) == []
    assert names(nn.Linear(4, 4)) == [] == names(nn.Sequential())


def test_a_large_module_outside_of_blocks_is_measured_against_the_blocks() -> None:
    model = GPT(d=32)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    model.below, model.above = nn.Linear(1, block // 16 // 8 - 1), nn.Linear(1, block // 16 // 8 + 1)
    assert names(model)[-1] == "above"
    with torch.device("meta"):
        huge = nn.Module()
        huge.blocks = nn.ModuleList([nn.Sequential(*(nn.Linear(2**14, 2**14) for _ in range(2))) for _ in range(2)])
        huge.large, huge.small = nn.Linear(2**12, 2**12, bias=False), nn.Linear(2**12, 2**12 - 1, bias=False)
    assert names(huge, resident_below=2**20) == ["blocks.0", "blocks.1", "large"], "64 MiB is simply large"


def test_own_parameters_of_a_module_around_chunks_do_not_make_it_a_chunk() -> None:
    model = nn.Module()
    model.net = GPT()
    model.net.table = nn.Parameter(torch.zeros(1000, 8))
    assert "net" not in names(model)
    assert "net" in names(model, "leaves")


def test_a_module_under_two_names_is_one_chunk_with_the_first() -> None:
    model = nn.Module()
    model.model = GPT(2)
    model.alias = model.model
    model.last = model.model.blocks[1]
    assert names(model) == ["model.embedding", "model.blocks.0", "model.blocks.1", "model.head"]
    assert names(model, "last") == names(model, "alias.blocks.1") == ["model.blocks.1"]


def test_parameters_without_a_shape_are_no_reason_to_stream() -> None:
    assert names(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))) == ["1"]


def test_negative_resident_below_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="resident_below=-1"):
        names(GPT(), resident_below=-1)
