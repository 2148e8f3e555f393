"""`PipelineStrategy(window=)` keeps weights in RAM and trains like one device, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_pipeline_cases import Model, assert_same_weights, fit, pipeline

from ramtorch_core import ConfigurationError, Pipeline, PipelineModel
from ramtorch_lightning import PipelineStrategy

STREAMED = {"window": 2, "chunks": "layers.*", "resident_below": 0}


def trained(strategy: Any, batch: int, **options: Any) -> Any:
    torch.manual_seed(1)
    model = Model()
    trainer = fit(model, strategy, batch, **options)
    return model, trainer


def assert_trains_the_same(
    streaming: dict[str, Any], schedule: str = "staggered_1b1f", batches: int = 1, **options: Any
) -> None:
    strategy = pipeline(schedule, devices=["cpu", "cpu"], **(STREAMED | streaming))
    found, _ = trained(strategy, 16, accumulate_grad_batches=batches, **options)
    expected, _ = trained("auto", 4, accumulate_grad_batches=4 * batches, **options)
    assert_same_weights(found, expected)


@pytest.mark.parametrize("schedule", ["gpipe", "staggered_1b1f", "zb_h1", "interleaved"])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_training_equals_accumulation_on_one_device(schedule: str, activations: str) -> None:
    assert_trains_the_same({"activations": activations}, schedule)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions_train_the_same(precision: Any) -> None:
    assert_trains_the_same({}, precision=precision)


@pytest.mark.parametrize("pin", [1, 2, ["layers.1"]])
def test_pinned_chunks_train_the_same(pin: Any) -> None:
    assert_trains_the_same({"pin": pin})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", ["host", "gpu"])
def test_accumulated_batches_train_the_same(accumulate: str, precision: Any) -> None:
    """Sums on the GPU contain what the batches before have left, which was added to them once more."""
    assert_trains_the_same({"accumulate": accumulate}, batches=2, precision=precision)


def test_sums_of_half_precision_masters_are_rounded_once_wherever_they_are() -> None:
    def run(accumulate: Any) -> Any:
        strategy = pipeline("1f1b", devices=["cpu", "cpu"], accumulate=accumulate, **STREAMED)
        return trained(strategy, 16, accumulate_grad_batches=3, precision="bf16-true", gradient_clip_val=0.5)[0]

    assert_same_weights(run("gpu"), run("host"))


def test_clipping_trains_the_same() -> None:
    assert_trains_the_same({}, gradient_clip_val=0.1)


def test_a_checkpoint_loads_into_a_plain_trainer_and_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved = [ModelCheckpoint(tmp_path / name, save_last=True) for name in ("streamed", "plain")]
    streamed = pipeline(devices=["cpu", "cpu"], **STREAMED)
    trained(streamed, 16, max_epochs=1, callbacks=[saved[0]], enable_checkpointing=True)
    trained("auto", 4, accumulate_grad_batches=4, max_epochs=1, callbacks=[saved[1]], enable_checkpointing=True)
    mine, other = (torch.load(tmp_path / name / "last.ckpt", weights_only=False) for name in ("streamed", "plain"))
    assert mine["state_dict"].keys() == other["state_dict"].keys()
    for key, value in mine["state_dict"].items():
        assert torch.equal(value, other["state_dict"][key])
        assert value.device.type == "cpu"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 0}, "window=0"), ({"window": 2, "pin": -1}, "pin=-1"), ({"window": 2, "activations": "x"}, "activ")],
)
def test_arguments_that_cannot_work_are_refused_early(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PipelineStrategy(devices=["cpu", "cpu"], **options)


def layer() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())


def test_chunk_modules_stream_like_stages_that_do_not() -> None:
    torch.manual_seed(0)
    layers = [layer() for _ in range(6)]
    plain = torch.nn.Sequential(*(layer() for _ in range(6)))
    plain.load_state_dict(torch.nn.Sequential(*layers).state_dict())
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipe = Pipeline(chunk_modules=[layers[:3], layers[3:]], devices=["cpu", "cpu"], window=1)
    optimizers = [torch.optim.AdamW(m, lr=0.01) for m in (pipe.parameters(), plain.parameters())]
    for _ in range(3):
        pipe.step(x, y, loss_fn=torch.nn.functional.mse_loss, n_microbatches=4).flush_grads()
        for part, target in zip(x.split(2), y.split(2), strict=True):
            (torch.nn.functional.mse_loss(plain(part), target) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(torch.nn.Sequential(*layers).parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(pipe.infer(x), torch.cat([plain(part) for part in x.split(2)]))
    pipe.close()
    with pytest.raises(ConfigurationError, match="either stage_modules or chunk_modules"):
        Pipeline(devices=["cpu"])


def test_a_model_with_a_window_streams() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    x = torch.randn(4, 512)
    with torch.no_grad():
        expected = torch.cat([model(part) for part in x.split(1)])  # the microbatches
    pipe = PipelineModel(model, x, devices=["cpu", "cpu"], window=1)
    assert torch.equal(pipe(x), expected)
    assert pipe._steps.runner.streamed is not None
    assert all(streamer.window.copied_bytes > 0 for streamer in pipe._steps.runner.streamed.streamers)
    pipe.close()
