"""Which chunks are updated on the device: shares, names, measured rates, and how that is shown."""

from typing import Any

import pytest
import torch
from stream_cases import Block, Stack, stack, stream, streaming
from torch import nn

from ramtorch_core import ConfigurationError, attach
from ramtorch_core.engine import updates as engine_updates
from ramtorch_core.engine.rates import Rates

RATES = Rates(
    h2d=50e9,
    d2h=50e9,
    both_ways=90e9,
    host_memory=110e9,
    host_update=0.3e-9,
    device_update=0.01e-9,
    device_bytes=10**10,
)
DEVICE = "streams through the window; updated on the device"
HOST = "streams through the window"


def on_device(model: nn.Module, updates: Any, **options: Any) -> list[int]:
    with streaming(model, updates=updates, **options) as engine:
        engine.prepare()
        rows = engine.chunk_table()
        assert {row.reason for row in rows} <= {DEVICE, HOST}
        return [index for index, row in enumerate(rows) if row.reason == DEVICE]


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ("host", []),
        (0.0, []),
        (0.1, []),
        (0.2, [0]),
        (0.5, [0, 1]),
        (0.6, [0, 1]),
        (0.7, [0, 1, 2]),
        (1.0, [0, 1, 2, 3]),
        (1, [0, 1, 2, 3]),
        (["blocks.2"], [2]),
        (["blocks.3", "blocks.[01]"], [0, 1, 3]),
        (["blocks.*"], [0, 1, 2, 3]),
        ([], []),
    ],
    ids=str,
)
def test_a_share_takes_the_first_chunks_and_a_list_those_it_names(updates: Any, expected: list[int]) -> None:
    assert on_device(stack(4), updates) == expected


def test_a_share_is_of_the_parameters_that_can_be_updated_there() -> None:
    def build() -> Stack:
        model = Stack(Block(), Block(64), Block(), Block().bfloat16())
        model.blocks[0].requires_grad_(False)
        return model

    assert on_device(build(), 0.99) == [1]
    assert on_device(build(), 1.0) == [1, 2]


def test_auto_takes_as_many_as_let_the_slowest_part_of_the_machine_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 bytes of host memory traffic per parameter an update there takes 28; on the device all 28 are copies."""
    monkeypatch.setattr(engine_updates, "known_rates", lambda _device: RATES)
    found = on_device(stack(10), "auto")
    assert found == list(range(len(found)))
    assert 0 < len(found) < 10
    slow = Rates(
        h2d=1e9, d2h=1e9, both_ways=1e9, host_memory=1e12, host_update=1e-10, device_update=1e-11, device_bytes=1
    )
    monkeypatch.setattr(engine_updates, "known_rates", lambda _device: slow)
    assert on_device(stack(10), "auto") == []


def test_rates_are_measured_for_auto_only_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(engine_updates, "known_rates", lambda device: asked.append(device) or RATES)
    on_device(stack(4), 0.5)
    assert asked == []
    with streaming(stack(4), updates="auto") as engine:
        for dtype in (torch.bfloat16, torch.float16, None):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                engine.prepare()
        assert len(asked) == 1


def test_what_was_chosen_is_logged_and_described(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with streaming(stack(4), updates=0.5) as engine:
        engine.prepare()
        where = "2 of 4 chunks (blocks.0 ... blocks.1, 50% of their parameters) on the device"
        assert [record.message for record in caplog.records] == [f"updates=0.5: {where}"]
        assert where in engine.updates.describe()
    with streaming(stack(4)) as engine:
        assert "on the device" not in engine.updates.describe()


def test_a_model_that_is_divided_anew_is_placed_anew() -> None:
    model = stack(4)
    with streaming(model, updates=["blocks.1"]) as engine:
        engine.prepare()
        model.blocks[1] = Block()
        with engine.scope():
            pass
        assert [row.reason for row in engine.chunk_table()] == [HOST, DEVICE, HOST, HOST]


@pytest.mark.parametrize(
    ("updates", "error", "message"),
    [
        ("gpu", ConfigurationError, "updates='gpu': use 'host', 'auto', a share, or a list"),
        (1.5, ConfigurationError, "updates=1.5: the share of parameters must be between 0 and 1"),
        (-0.1, ConfigurationError, "between 0 and 1"),
        (float("nan"), ConfigurationError, "between 0 and 1"),
        (True, TypeError, "updates=True"),
        (None, TypeError, "updates=None"),
        (["blocks.7"], ConfigurationError, "updates: no chunk is named 'blocks.7'; did you mean 'blocks.3'"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_attached(updates: Any, error: type[Exception], message: str) -> None:
    model = stack(4)
    with pytest.raises(error, match=message.replace("(", "\\(")):
        stream(model, updates=updates)
    attach(model, device="cpu").close()
