"""The strategy by name, in LightningCLI and in YAML; wrong values are rejected where they are written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from offload_cases import Classifier, fit, loader, make_trainer
from torch import nn

import ramtorch_lightning
from ramtorch_lightning import OffloadStrategy


class Small(Classifier):
    """A model that the command line can build."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__(lr=lr)

    def train_dataloader(self) -> Any:
        return loader()


def command_line(*arguments: str) -> LightningCLI:
    fixed = ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    return LightningCLI(Small, args=[*arguments, *fixed], run=False, save_config_callback=None)


def options(cli: LightningCLI) -> dict[str, Any]:
    strategy = cli.trainer.strategy
    assert type(strategy) is OffloadStrategy
    return strategy._options


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return f"--config={path}"


@pytest.mark.parametrize("name", ["offload", "OFFLOAD"])
def test_the_name_gives_the_strategy_with_its_defaults(name: str) -> None:
    trainer = make_trainer(name)
    assert type(trainer.strategy) is OffloadStrategy
    assert trainer.strategy._options["window"] == 2
    trainer.fit(Small())


def test_registering_twice_is_harmless_and_the_registry_describes_the_strategy() -> None:
    OffloadStrategy.register_strategies(StrategyRegistry)
    OffloadStrategy.register_strategies(StrategyRegistry)
    assert StrategyRegistry["offload"]["strategy"] is OffloadStrategy
    assert StrategyRegistry["offload"]["description"].startswith("Train and run a model larger than the GPU's memory")


def test_public_names_are_there() -> None:
    for name in ramtorch_lightning.__all__:
        assert getattr(ramtorch_lightning, name).__doc__


@pytest.mark.parametrize("form", ["--trainer.strategy=offload", "--trainer.strategy=Offload"])
def test_the_command_line_takes_the_name(form: str) -> None:
    assert options(command_line(form))["window"] == 2


def test_the_command_line_takes_the_class_and_its_arguments() -> None:
    cli = command_line(
        "--trainer.strategy=OffloadStrategy",
        "--trainer.strategy.window=3",
        "--trainer.strategy.pin=[0,2]",
        "--trainer.strategy.activations=keep",
        "--trainer.strategy.resident_below=0",
    )
    found = options(cli)
    assert (found["window"], found["pin"], found["activations"], found["resident_below"]) == (3, [0, 2], "keep", 0)


@pytest.mark.parametrize("form", ["OffloadStrategy", "ramtorch_lightning.OffloadStrategy"])
def test_the_class_alone_takes_its_defaults(form: str) -> None:
    cli = command_line(f"--trainer.strategy={form}")
    assert options(cli)["window"] == 2


def test_a_file_takes_the_name(tmp_path: Path) -> None:
    assert options(command_line(yaml_file(tmp_path, "trainer:\n  strategy: offload\n")))["window"] == 2


@pytest.mark.parametrize("class_path", ["ramtorch_lightning.OffloadStrategy", "OffloadStrategy"])
@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ("leaves", "leaves"),
        ("net.blocks.*", "net.blocks.*"),
        ("[net.blocks.*, net.head]", ["net.blocks.*", "net.head"]),
        ("null", None),
    ],
)
def test_a_file_takes_the_class_and_its_arguments(tmp_path: Path, class_path: str, chunks: str, expected: Any) -> None:
    text = f"""
trainer:
  max_epochs: 1
  enable_checkpointing: false
  strategy:
    class_path: {class_path}
    init_args:
      window: 3
      pin: [net.head]
      chunks: {chunks}
      stream_dtype: auto
      resident_below: 0
"""
    cli = command_line(yaml_file(tmp_path, text))
    found = options(cli)
    assert (found["window"], found["pin"], found["resident_below"]) == (3, ["net.head"], 0)
    assert cli.trainer.strategy._chunks == expected
    if expected is None or "net.head" in expected or expected == "leaves":
        cli.trainer.fit(cli.model)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("torch.bfloat16", torch.bfloat16), ("torch.float32", torch.float32), ("auto", "auto")],
)
def test_a_file_names_dtypes(tmp_path: Path, text: str, expected: Any) -> None:
    init = f"init_args: {{stream_dtype: {text}}}"
    config = f"trainer:\n  strategy:\n    class_path: ramtorch_lightning.OffloadStrategy\n    {init}\n"
    assert options(command_line(yaml_file(tmp_path, config)))["stream_dtype"] == expected


WRONG = [
    "window=two",
    "window=[1]",
    "activations=forget",
    "pin=x",
    "stream_dtype=half",
    "resident_below=1.5",
    "unknown=1",
]


@pytest.mark.parametrize("argument", WRONG)
def test_a_wrong_value_is_rejected_with_its_name(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line("--trainer.strategy=OffloadStrategy", f"--trainer.strategy.{argument}")
    assert argument.partition("=")[0] in capsys.readouterr().err


def test_types_and_callables_are_given_in_code() -> None:
    found = fit(Classifier, OffloadStrategy(chunks=[nn.Linear], resident_below=0))
    assert found.trainer.state.finished
