"""examples/configs: every file runs as it is, or, where it asks for GPUs, with the devices replaced."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from ramtorch_lightning import OffloadStrategy, PipelineStrategy

FOLDER = Path(__file__).parents[2] / "examples" / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
QUICK = ["--trainer.max_steps=6", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "train.py"))


def on_cpu(config: Path) -> list[str]:
    """The options with which the file runs without GPUs."""
    options = ["--trainer.accelerator=cpu"]
    devices = yaml.safe_load(config.read_text())["trainer"]["strategy"]["init_args"].get("devices")
    if devices is not None:
        options.append(f"--trainer.strategy.devices=[{','.join(['cpu'] * len(devices))}]")
    return options


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_trains(config: Path, script: dict[str, Any]) -> None:
    cli: LightningCLI = script["main"](["fit", "--config", str(config), *on_cpu(config), *QUICK])
    assert cli.trainer.global_step == 6
    assert type(cli.trainer.strategy) in (OffloadStrategy, PipelineStrategy)
    assert torch.isfinite(cli.trainer.callback_metrics["loss"])
    init = yaml.safe_load(config.read_text())["trainer"]["strategy"]["init_args"]
    for name in init.keys() - {"devices"}:
        assert name in cli.config.fit.trainer.strategy.init_args


def test_both_strategies_are_shown() -> None:
    names = {path.stem for path in CONFIGS}
    assert names >= {"offload", "offload_microbatches", "pipeline", "pipeline_gpu"}
    for path in CONFIGS:
        assert f"--config {path.relative_to(FOLDER.parents[1]).as_posix()}" in path.read_text()


def test_the_example_learns(script: dict[str, Any]) -> None:
    config = FOLDER / "offload.yaml"
    quiet = [*QUICK[1:], "--trainer.max_steps=60"]
    cli = script["main"](["fit", "--config", str(config), *on_cpu(config), *quiet])
    assert cli.trainer.callback_metrics["loss"] < 0.04  # 0.083 is the variance of the numbers
