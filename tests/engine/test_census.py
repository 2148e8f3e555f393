"""Who holds which parameter, what that costs on the device, and how the table says so."""

import pytest
import torch
from stream_cases import WIDTH, Block, Stack, data, stack, streaming
from torch import Tensor, nn

from ramtorch_core.engine.census import format_rows


class Model(nn.Module):
    """Every reason for a copy that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.rnn = nn.GRU(64, 64)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.abs().long() % 64)
        for block in self.blocks:
            x = block(x)
        return self.head(self.rnn(x)[0] * self.scale)


CHUNKS = ["embedding", "head", "blocks.*", "rnn"]


def reasons(streamer) -> dict[str, str]:
    return {weight.name: reason for weight, reason in streamer.census.reasons.items()}


def test_every_tensor_that_does_not_stream_has_its_reason():
    with streaming(Model(), chunks=CHUNKS, resident_below=512) as streamer:
        found = reasons(streamer)
    assert found["embedding.weight"] == "shared between chunks"
    assert found["scale"] == "outside of every chunk"
    assert found["blocks.0.bias"] == "small"
    assert found["rnn.weight_ih_l0"] == "recurrent weights keep cuDNN's layout"
    assert not any(name.endswith("0.weight") and "blocks" in name for name in found)


def test_what_a_chunk_that_contains_chunks_owns_itself_stays():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.weight)

    with streaming(Stack(Outer()), chunks=["blocks.0", "blocks.0.inner"]) as streamer:
        assert reasons(streamer) == {"blocks.0.weight": "owned by a chunk that contains chunks"}


def test_a_module_under_two_parents_is_one_weight_with_two_sites():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Stack(Twice())
    with streaming(model) as streamer:
        (group,) = streamer.groups
        assert [weight.name for weight in group.weights] == ["blocks.0.first.weight", "blocks.0.first.bias"]


@pytest.mark.parametrize("window", [1, 2, 3, 9])
@pytest.mark.parametrize("pin", [0, 1, 2])
def test_device_weight_bytes_are_slots_times_the_largest_chunk_plus_resident_plus_small(window, pin):
    model = Model()
    with streaming(model, chunks=CHUNKS, window=window, pin=pin, resident_below=512) as streamer:
        with torch.no_grad():
            model(data(0, 4))
        resident = sum(p.nbytes for chunk in streamer.census.chunks if chunk.resident for p in chunk.parameters)
        copies = sum(-(-weight.parameter.nbytes // 256) * 256 for weight in streamer.census.copies)
        streamed = [group.nbytes for group in streamer.groups]
        assert streamed == [64 * 64 * 4] * len(streamed)
        expected = min(window, len(streamed)) * max(streamed, default=0) + resident + copies
        assert streamer.device_weight_bytes() == expected


def test_slots_fit_the_largest_chunk():
    model = Stack(nn.Linear(8, 8, bias=False), nn.Linear(8, 300, bias=False), nn.Linear(300, 8, bias=False))
    with streaming(model, window=2) as streamer:
        model(data())
        assert streamer.device_weight_bytes() == 2 * (-(-300 * 8 * 4 // 256) * 256)


def test_the_table_counts_every_parameter_once_and_says_where_it_is():
    model = Model()
    with streaming(model, chunks=CHUNKS, pin=["blocks.1"], resident_below=512) as streamer:
        rows = streamer.chunk_table()
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in model.parameters())
    placements = {row.name: row.placement for row in rows}
    assert placements["blocks.0"] == "streamed"
    assert placements["blocks.1"] == "resident"
    assert placements["rnn"] == "copy stays"
    text = format_rows(rows)
    assert "pinned on the device" in text
    assert "shared between chunks" in text


def test_equal_neighbours_share_a_line_of_the_table():
    with streaming(stack(4)) as streamer:
        lines = format_rows(streamer.chunk_table()).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("blocks.0 .. blocks.3  4 x ")


def test_a_fully_resident_model_honours_the_activation_policy():
    calls = []

    class Counted(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(self)
            return super().forward(x)

    for activations, expected in (("checkpoint", 4), ("keep", 2)):
        model = Stack(Counted(), Counted())
        with streaming(model, pin=2, activations=activations):
            calls.clear()
            model(data()).sum().backward()
            assert len(calls) == expected
