"""Settings that contradict each other are refused when the Trainer is built, and `schedule="auto"` of a Trainer."""

import logging
from typing import Any

import pytest
import torch
from lightning_pipeline_cases import CPU, Model, assert_same_weights, fit, make_trainer, pipeline

from ramtorch_core import ConfigurationError
from ramtorch_lightning import OffloadStrategy, PipelineStrategy


@pytest.mark.parametrize(
    "build",
    [lambda: pipeline(devices=["cpu", "cpu"]), lambda: OffloadStrategy(device="cpu")],
    ids=["pipeline", "offload"],
)
@pytest.mark.parametrize("devices", [4, "4"])
def test_other_devices_of_the_trainer_are_refused(build: Any, devices: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Trainer\(devices='?4'?\) and \w+\(devices?=\), which names cpu.*leave"
    ):
        make_trainer(build(), devices=devices)


@pytest.mark.parametrize("devices", [1, 2, "2", "auto"])
def test_devices_that_agree_are_taken(devices: Any) -> None:
    trainer = make_trainer(pipeline(devices=["cpu", "cpu"]), devices=devices)
    assert [device.type for device in trainer.strategy.parallel_devices] == ["cpu", "cpu"]


@pytest.mark.parametrize("build", [lambda: pipeline(), lambda: OffloadStrategy(), lambda: "pipeline"])
def test_several_machines_are_refused(build: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Trainer\(num_nodes=2\): this strategy runs in one process"):
        make_trainer(build(), num_nodes=2)


@pytest.mark.parametrize("options", [{"pin": 2}, {"activations": "keep"}, {"chunks": "leaves"}, {"host_memory": 1}])
def test_knobs_of_streaming_without_a_window_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="pass window=2"):
        PipelineStrategy(devices=CPU, **options)


def test_other_contradictions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="gpu_memory='8GB' limits what schedule='auto' chooses"):
        PipelineStrategy(devices=CPU, gpu_memory="8GB")
    with pytest.raises(ConfigurationError, match=r"gradients='published' leaves no updates to updates=0.5"):
        OffloadStrategy(gradients="published", updates=0.5)


def test_a_trainer_takes_the_fastest_schedule_and_the_same_weights(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    auto, plain = Model(), Model()
    plain.load_state_dict(auto.state_dict())
    fit(auto, pipeline("auto", devices=["cpu", "cpu"]), 8, max_epochs=2)
    fit(plain, pipeline("gpipe", devices=["cpu", "cpu"]), 8, max_epochs=2)
    assert_same_weights(auto, plain)
    (message,) = [text for text in caplog.messages if "s per step of 4 microbatches" in text]
    assert message.startswith("PipelineStrategy: schedule='")


def test_a_fit_too_short_to_choose_a_schedule_warns_and_one_that_fails_does_not(recwarn: Any) -> None:
    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise OSError("no data")

    told = lambda: [str(each.message) for each in recwarn if "schedule='auto' was chosen" in str(each.message)]
    with pytest.raises(OSError, match="no data"):
        fit(Fails(), pipeline("auto", devices=["cpu", "cpu"]), 8)
    fit(Model(), pipeline("gpipe", devices=["cpu", "cpu"]), 8, limit_train_batches=1)
    fit(Model(), pipeline("auto", devices=["cpu", "cpu"]), 8, max_epochs=2)
    assert not told()
    fit(Model(), pipeline("auto", devices=["cpu", "cpu"]), 8, limit_train_batches=1)
    (message,) = told()
    assert message.startswith("PipelineStrategy: training ended before schedule='auto' was chosen, and took 'stag")


def test_a_device_out_of_memory_names_what_to_lower() -> None:
    class Full(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with pytest.raises(
        torch.OutOfMemoryError, match=r"20\.00 MiB\.\n\(ramtorch: stage \d .*n_microbatches=8 instead of 4"
    ):
        fit(Full(), pipeline("gpipe"), 8)
