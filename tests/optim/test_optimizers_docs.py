"""docs/optimizers.md: its code runs, its tables agree with the code, and its Lion can be updated chunk by chunk."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_cases import assert_same, data, stack

from ramtorch_core import AdamW, OffloadAdamW, attach, why_whole

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page's code defines, all of it run in order."""
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "docs/optimizers.md", "exec"), found)
    return found


def test_the_page_s_code_runs(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert {row.place.value for row in names["placement"].rows} == {"resident", "gpu", "host"}
    assert isinstance(names["optimizer"], OffloadAdamW)


def test_its_table_of_bytes_is_that_of_the_class() -> None:
    def rows(text: str) -> list[list[str]]:
        lines = [line.strip() for line in text.splitlines() if re.match(r"\s*\| (b?float\d+)", line)]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]

    stated = {(row[0], row[1]): (int(row[2]) + int(row[3]), int(row[6])) for row in rows(str(AdamW.__doc__))}
    page = {(row[0], row[1]): (int(row[2].split(",")[0]), int(row[3])) for row in rows(TEXT)}
    assert page == stated
    assert all(int(row[4]) == int(row[3]) + 6 for row in rows(TEXT))


def test_lion_is_updated_chunk_by_chunk_with_the_bits_of_a_whole_step(names: dict[str, Any]) -> None:
    torch.manual_seed(0)
    resident = stack()
    streamed = copy.deepcopy(resident)
    engine = attach(streamed, device="cpu", chunks="leaves", resident_below=0)
    try:
        optimizers = [names["Lion"](net.parameters(), lr=1e-2, weight_decay=0.1) for net in (resident, streamed)]
        assert why_whole(optimizers[0]) is None
        for step in range(3):
            for net, optimizer in zip((resident, streamed), optimizers, strict=True):
                optimizer.zero_grad()
                loss = net(data(step)).square().mean()
                if net is resident:
                    loss.backward()
                else:
                    with engine.updates.overlap(optimizer):
                        loss.backward()
                optimizer.step()
        engine.updates.wait()
        assert engine.updates.updater.updated == 3 * len(engine.groups)
        assert_same(dict(streamed.named_parameters()), dict(resident.named_parameters()))
        assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())
    finally:
        engine.close()
