"""Modules that are not their own chunk: compiled, parametrized, scripted, and used by their parent; "leaves"."""

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from ramtorch_core.engine.chunks import find_chunks


def names(root: nn.Module, spec: Any = None) -> list[str]:
    chunks = find_chunks(root, spec, resident_below=0)
    assert all(root.get_submodule(name) is module for name, module in chunks)
    return [name for name, _ in chunks]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def of(prefix: str, n: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(n)]


def test_compiled_blocks_are_chunks_as_wrappers() -> None:
    model = GPT(3)
    model.blocks[1] = torch.compile(model.blocks[1])
    assert names(model) == ["embedding", "head", *of("blocks.", 3)]
    model.head = torch.compile(model.head)
    assert names(model, "leaves")[:2] == ["embedding", "head"]


def test_a_compiled_model_is_divided_like_the_plain_one() -> None:
    inside = ["embedding", "head", *of("blocks.", 4)]
    assert names(torch.compile(GPT())) == [f"_orig_mod.{name}" for name in inside]
    model = nn.Module()
    model.model = torch.compile(GPT())
    assert names(model) == [f"model._orig_mod.{name}" for name in inside]
    assert names(model, "model.blocks.*") == [f"model._orig_mod.blocks.{i}" for i in range(4)]


def test_what_is_compiled_but_also_called_plainly_is_chosen_itself() -> None:
    model = nn.Module()
    model.net = nn.Linear(8, 8)
    model.fast = torch.compile(model.net)
    assert names(model) == names(model, "leaves") == names(model, "fast") == ["net"]


def test_leaves_are_the_modules_whose_forward_uses_the_parameters() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scales[0]

    model = nn.Module()
    model.raw, model.table = nn.Parameter(torch.ones(1)), nn.ParameterList([torch.ones(2)])
    model.attention, model.encoder = nn.MultiheadAttention(4, 1), nn.TransformerEncoderLayer(4, 1, 8)
    model.decoder = nn.TransformerDecoderLayer(4, 1, 8)
    model.linear, model.owner = parametrizations.weight_norm(nn.Linear(2, 2)), Owner()
    model.seq, model.relu = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ReLU()
    decoder = ["self_attn", "multihead_attn", "linear1", "linear2", "norm1", "norm2", "norm3"]
    inside = [f"decoder.{name}" for name in decoder]
    assert names(model, "leaves") == ["attention", "encoder", *inside, "linear", "owner", "seq.0"]
    assert names(nn.TransformerEncoderLayer(4, 1, 8), "leaves") == []


def test_parametrized_blocks_are_of_the_class_they_were() -> None:
    model = GPT(3)
    for block in model.blocks:
        parametrizations.weight_norm(block.mlp[0])
    assert names(model) == ["embedding", "head", *of("blocks.", 3)]


def test_scripted_modules_stay_resident() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    assert names(model) == names(model, "leaves") == ["0"]
