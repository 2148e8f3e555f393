"""examples/fabric_offload.py is short and learns; under Fabric streaming changes no bit, and checkpoints are plain."""

import contextlib
import re
from pathlib import Path
from typing import Any

import fabric_offload
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from stream_cases import assert_same, data, stack

from ramtorch_core import attach


def test_it_learns_and_its_checkpoint_is_plain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fabric_offload.main(steps=41, out=str(tmp_path / "a.ckpt"))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 2
    assert losses[-1] < losses[0] / 10
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert list(state["model"])[:3] == ["0.weight", "0.bias", "1.layers.0.weight"]
    assert len(state["optimizer"]["state"]) == len(state["model"])


def test_it_fits_on_a_page() -> None:
    assert len(Path(fabric_offload.__file__).read_text().splitlines()) < 45


def train(precision: Any, streamed: bool, overlap: bool, clip: bool) -> list[Any]:
    """Losses, weights and optimizer state after three steps of Fabric."""
    torch.manual_seed(0)
    fabric, model = Fabric(accelerator="cpu", devices=1, precision=precision), stack()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    streamer = attach(model, device="cpu", resident_below=0, kernel="torch", poison=True) if streamed else None
    module, optimizer = fabric.setup(model, adam, move_to_device=streamer is None)
    losses = []
    for step in range(3):
        loss = F.mse_loss(module(data(step)), data(9))
        with contextlib.nullcontext() if streamer is None or not overlap else streamer.updates.overlap(adam):
            fabric.backward(loss)
        if clip:
            fabric.clip_gradients(module, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    state = [losses, module.state_dict(), optimizer.state_dict()["state"]]
    if streamer is not None:
        assert streamer.window.copied_bytes > 0
        streamer.close()
    return state


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("overlap", "clip"), [(False, True), (True, False)], ids=["published", "overlapped"])
def test_under_fabric_a_streamed_model_trains_as_a_resident_one(precision: str, overlap: bool, clip: bool) -> None:
    assert_same(train(precision, True, overlap, clip), train(precision, False, overlap, clip))
