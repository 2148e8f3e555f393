"""Chunks given as names, globs, types, modules or a callable, and their errors."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ramtorch_core.engine.chunks import find_chunks
from ramtorch_core.errors import ConfigurationError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.dropout = nn.Dropout()
        self.head = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def names(spec: Any, root: nn.Module | None = None) -> list[str]:
    return [name for name, _ in find_chunks(Net() if root is None else root, spec, resident_below=2**20)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("head", ["head"]),
        (["head", "embedding"], ["embedding", "head"]),
        (("head",), ["head"]),
        ("blocks.*", BLOCKS),
        ("blocks.[!1]", ["blocks.0", "blocks.2"]),
        ("bl*.?.mlp.0", [f"{block}.mlp.0" for block in BLOCKS]),
        ("**.mlp", [f"{block}.mlp" for block in BLOCKS]),
        ("**.head", ["head"]),
        (Block, BLOCKS),
        ([nn.Embedding, "blocks.*", nn.modules.linear.Bilinear][:2], ["embedding", *BLOCKS]),
        (["blocks.0", "blocks.0.mlp"], ["blocks.0", "blocks.0.mlp"]),
        (["blocks.0", Block, "head"][1:], [*BLOCKS, "head"]),
        (lambda name, module: name.count(".") == 1 and isinstance(module, Block), BLOCKS),
        (lambda name, module: isinstance(module, nn.Dropout | nn.Linear) and "blocks" not in name, ["head"]),
    ],
)
def test_names_globs_types_and_callables_select_in_registration_order(spec: Any, expected: list[str]) -> None:
    assert names(spec) == expected


def test_modules_of_the_tree_select_themselves() -> None:
    net = Net()
    assert names([net.head, net.blocks[1]], net) == ["blocks.1", "head"]
    assert names(net.head, net) == ["head"]
    assert names(list(net.blocks), net) == BLOCKS


def test_a_glob_for_everything_passes_over_containers_and_modules_without_parameters() -> None:
    parts = ["attention", "mlp", "mlp.0", "mlp.2"]
    inside = [name for block in BLOCKS for name in [block, *[f"{block}.{part}" for part in parts]]]
    assert names("**") == names(nn.Module) == names(lambda name, module: True) == ["embedding", *inside, "head"]


def test_a_pattern_that_matches_inside_attention_selects_the_attention() -> None:
    mlps = [f"{block}.mlp.{i}" for block in BLOCKS for i in (0, 2)]
    assert names(nn.Linear) == [*sorted([*[f"{block}.attention" for block in BLOCKS], *mlps]), "head"]


def test_a_pattern_that_matches_inside_an_encoder_layer_selects_the_layer() -> None:
    encoder = nn.Sequential(nn.TransformerEncoderLayer(4, 1, 8), nn.Linear(4, 4))
    assert names([nn.Linear, nn.LayerNorm], encoder) == ["0", "1"]


def test_a_compiled_wrapper_is_selected_by_its_name_its_type_and_the_module_in_it() -> None:
    net = Net()
    inner = net.blocks[1]
    net.blocks[1] = torch.compile(inner)
    for spec in ("blocks.*", Block, lambda name, module: isinstance(module, Block), list(net.blocks)):
        assert names(spec, net) == BLOCKS
    for spec in ([inner], "blocks.1._orig_mod"):
        assert names(spec, net) == ["blocks.1"]
    assert names("blocks.1.*", net) == ["blocks.1._orig_mod.attention", "blocks.1._orig_mod.mlp"]


def test_parametrizations_select_the_parametrized_module() -> None:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), nn.ReLU())
    assert names(nn.Linear, net) == names("0.*.*", net) == ["0"]
    for name in ("0.parametrizations", "0.parametrizations.weight"):
        with pytest.raises(ConfigurationError, match="name '0' instead"):
            names(name, net)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("block.0", "no module is named 'block.0'; did you mean 'blocks.0'"),
        ("leafs", "did you mean 'leaves'"),
        (["head", "zzzzzz"], "'zzzzzz'; there are 'embedding', 'blocks'"),
        ("block.*", r"'block\.\*' matches no module; did you mean 'blocks"),
        (nn.Conv2d, "type Conv2d matches no module"),
        ([nn.Dropout], "type Dropout matches only modules without parameters .*'dropout'"),
        ("dropou[t]", "matches only modules without parameters"),
        (lambda name, module: False, "lambda> matches no module; let it return True"),
        ("dropout", "'dropout' has no parameters"),
        (["head", "head"], "'head' and 'head' both select 'head'; name it once"),
        (["blocks.*", "blocks.0"], r"'blocks\.\*' and 'blocks\.0' both select 'blocks\.0'"),
        ("blocks", r"'blocks' is a ModuleList, which is never called itself; use 'blocks\.\*'"),
        (nn.ModuleList, r"type ModuleList selects 'blocks', a ModuleList.* use 'blocks\.\*'"),
        ("*", r"'\*' selects 'blocks', a ModuleList"),
        ("blocks.0.attention.out_proj", r"'blocks\.0\.attention' \(MultiheadAttention\) uses .*; name 'blocks\.0\.att"),
        ("", "the model itself cannot be a chunk"),
        ([], "an empty list selects nothing"),
        ([nn.Linear(2, 2)], "'Linear' is no module of this model"),
    ],
)
def test_a_bad_entry_is_named_with_the_remedy(spec: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        names(spec)


@pytest.mark.parametrize("spec", [3, [3], [lambda name, module: True], [None], b"head"])
def test_an_entry_of_another_type_is_a_type_error(spec: Any) -> None:
    with pytest.raises(TypeError, match="chunks: "):
        names(spec)


def test_the_root_is_no_chunk() -> None:
    for root in (Net(), torch.compile(Net())):
        with pytest.raises(ConfigurationError, match="the model itself"):
            names([root], root)
    with pytest.raises(ConfigurationError, match="the model itself"):
        names("_orig_mod", root)


def test_nested_containers_are_pointed_through() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2)])
    with pytest.raises(ConfigurationError, match=r"use 'layers\.\*\.\*'"):
        names("layers", model)
    assert names("layers.*.*", model) == ["layers.0.0", "layers.1.0"]


def test_a_parameter_list_of_the_root_stays_resident() -> None:
    model = nn.Module()
    model.table, model.head = nn.ParameterList([torch.ones(2)]), nn.Linear(2, 2)
    assert names("*", model) == ["head"]
    with pytest.raises(ConfigurationError, match="'table' is a ParameterList whose parameters the model itself uses"):
        names("table", model)


def test_a_module_with_two_names_cannot_be_named_by_both() -> None:
    model = nn.Module()
    model.first = model.second = nn.Linear(2, 2)
    assert names("second", model) == ["first"]
    with pytest.raises(ConfigurationError, match="'first' and 'second' both select 'first'"):
        names(["first", "second"], model)
