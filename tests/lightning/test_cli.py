"""Both strategies from the command line and from files: every form, saved configurations, and what is refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning_pipeline_cases import Model, dataset
from torch.utils.data import DataLoader

import ramtorch_lightning.base  # noqa: F401  registers the strategies
from ramtorch_lightning import OffloadStrategy, PipelineStrategy

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
STRATEGY = "--trainer.strategy"


class Small(Model):
    """A model that the command line can build."""

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(), 8)


class Parsing(LightningCLI):
    """Reads the arguments and builds nothing."""

    def instantiate_classes(self) -> None: ...


def command_line(*arguments: str, kind: type[LightningCLI] = LightningCLI) -> LightningCLI:
    fixed = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    return kind(Small, args=[*arguments, *fixed], run=False, save_config_callback=None)


def found(cli: LightningCLI) -> tuple[str, int]:
    """The class of the strategy, and the argument that the tests set."""
    strategy = cli.trainer.strategy
    if type(strategy) is OffloadStrategy:
        return "offload", strategy._options["window"]
    assert type(strategy) is PipelineStrategy
    return "pipeline", strategy._microbatches


DEFAULT = {"offload": 2, "pipeline": 4}
ARGUMENT = {"offload": "window", "pipeline": "n_microbatches"}
CLASS = {"offload": "OffloadStrategy", "pipeline": "PipelineStrategy"}
either = pytest.mark.parametrize("name", ["offload", "pipeline"])


def forms(name: str) -> list[str]:
    """What may stand for the strategy."""
    return [name, CLASS[name], f"ramtorch_lightning.{CLASS[name]}"]


@either
@pytest.mark.parametrize("form", range(3))
def test_a_name_or_a_class_alone_takes_the_defaults(name: str, form: int, tmp_path: Path) -> None:
    assert found(command_line(f"{STRATEGY}={forms(name)[form]}")) == (name, DEFAULT[name])
    config = tmp_path / "config.yaml"
    config.write_text(f"trainer:\n  strategy: {forms(name)[form]}\n")
    assert found(command_line(f"--config={config}")) == (name, DEFAULT[name])


@either
@pytest.mark.parametrize("form", range(3))
def test_a_name_or_a_class_takes_arguments(name: str, form: int, tmp_path: Path) -> None:
    argument = ARGUMENT[name]
    given = forms(name)[form]
    assert found(command_line(f"{STRATEGY}={given}", f"{STRATEGY}.{argument}=3")) == (name, 3)
    long = [f"{STRATEGY}.class_path={given}", f"{STRATEGY}.init_args.{argument}=3"]
    assert found(command_line(*long)) == (name, 3)
    config = tmp_path / "config.yaml"
    config.write_text(f"trainer:\n  strategy:\n    class_path: {given}\n    init_args:\n      {argument}: 3\n")
    assert found(command_line(f"--config={config}")) == (name, 3)
    assert found(command_line(f"--config={config}", f"{STRATEGY}.{argument}=5")) == (name, 5)


def test_a_class_with_arguments_needs_no_import_of_the_package() -> None:
    code = """
import sys
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

def build(name, argument):
    given = [f"--trainer.strategy=ramtorch_lightning.{name}", f"--trainer.strategy.{argument}=3"]
    given += ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=given)
    print(type(cli.trainer.strategy).__name__)

assert "ramtorch_lightning" not in sys.modules
build("PipelineStrategy", "n_microbatches")
build("OffloadStrategy", "window")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["PipelineStrategy", "OffloadStrategy"], done.stderr


@either
def test_a_configuration_that_was_saved_can_be_read_again(name: str, tmp_path: Path) -> None:
    config = tmp_path / "saved.yaml"
    for given in forms(name):
        cli = command_line(f"{STRATEGY}={given}", f"{STRATEGY}.{ARGUMENT[name]}=3")
        config.write_text(cli.parser.dump(cli.config))
        assert found(command_line(f"--config={config}")) == (name, 3)


def test_knobs_may_be_left_to_be_chosen() -> None:
    given = [f"{STRATEGY}.{argument}=auto" for argument in ("window", "pin", "activations", "updates")]
    strategy = command_line(f"{STRATEGY}=offload", *given, f"{STRATEGY}.gpu_memory=20GB").trainer.strategy
    assert isinstance(strategy, OffloadStrategy)
    assert strategy._wish.open
    assert strategy._wish.gpu_memory == 20_000_000_000


def test_a_number_is_read_as_one_where_text_is_allowed_too() -> None:
    given = ["device=1", "window=auto", "gpu_memory=20000000000"]
    cli = command_line(f"{STRATEGY}=offload", *(f"{STRATEGY}.{each}" for each in given), kind=Parsing)
    init = cli.config.trainer.strategy.init_args
    assert (init.device, init.gpu_memory) == (1, 20_000_000_000)


def test_devices_come_from_the_strategy_or_the_trainer() -> None:
    given = command_line(f"{STRATEGY}=pipeline", f"{STRATEGY}.devices=[cpu,cpu,cpu]").trainer.strategy
    assert given.parallel_devices == [torch.device("cpu")] * 3
    asked = command_line(f"{STRATEGY}=pipeline", "--trainer.devices=2").trainer.strategy
    assert asked.parallel_devices == [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["offload", "resident_below=0", "chunks=[layers.*]", "pin=[layers.1]", "activations=keep"],
        ["offload", "resident_below=0", "chunks=leaves", "gradients=published", "kernel=torch"],
        ["offload", "resident_below=0", "updates=0.5"],
        ["offload", "resident_below=0", "chunks=[layers.*]", "updates=[layers.1]"],
        ["offload", "resident_below=0", "stream_dtype=torch.float32", "host_memory=10000000"],
        ["pipeline", "devices=[cpu,cpu]", "schedule=gpipe", "stages=[layers.3]", "evaluate=whole"],
        ["pipeline", "devices=[cpu,cpu]", "window=2", "pin=[layers.1]", "chunks=[layers.*]", "activations=keep"],
        ["pipeline", "devices=[cpu,cpu]", "device_weights=[2,1]", "balance=time", "n_microbatches=2"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_what_the_command_line_builds_trains(arguments: list[str]) -> None:
    name, *rest = arguments
    given = [f"{STRATEGY}={name}", *(f"{STRATEGY}.{each}" for each in rest)]
    cli = command_line(*given, "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false")
    cli.trainer.fit(cli.model)
    assert cli.trainer.global_step == 4


WRONG = [
    ("offload", "window=two", "int"),
    ("offload", "window=0", "at least 1 slot is needed"),
    ("offload", "pin=-1", "use 0 for none"),
    ("offload", "pin=block", "list[str]"),
    ("offload", "activations=forget", "'checkpoint', 'keep', 'recompute'"),
    ("offload", "n_microbatches=0", "at least 1 is needed"),
    ("offload", "gradients=none", "'auto', 'published'"),
    ("offload", "kernel=triton", "'auto', 'torch'"),
    ("offload", "updates=gpu", "'host', 'auto'"),
    ("offload", "updates=2", "between 0 and 1"),
    ("offload", "stream_dtype=half", "Literal['auto'], <class 'torch.dtype'>"),
    ("offload", "resident_below=-1", "use 0 to stream everything"),
    ("offload", "host_memory=lots", "int"),
    ("offload", "gpu_memory=20GB", "pass window='auto', pin='auto' or activations='auto'"),
    ("pipeline", "schedule=2f2b", "staggered_1b1f"),
    ("pipeline", "devices=2", "list[int], list[str]"),
    ("pipeline", "devices=[mps:0]", "use 'cpu' or 'cuda:<index>'"),
    ("pipeline", "balance=speed", "'parameters', 'memory'"),
    ("pipeline", "device_weights=fast", "list[float]"),
    ("pipeline", "n_microbatches=none", "int"),
    ("pipeline", "window=0", "at least 1 slot is needed"),
    ("pipeline", "evaluate=never", "'pipelined', 'whole'"),
]


@pytest.mark.parametrize(("name", "argument", "allowed"), WRONG, ids=[f"{name} {value}" for name, value, _ in WRONG])
def test_a_wrong_value_is_refused_with_what_is_allowed(
    name: str, argument: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = [] if name == "offload" or argument.startswith("devices") else [f"{STRATEGY}.devices=[cpu,cpu]"]
    with pytest.raises((SystemExit, ValueError)) as caught:
        command_line(f"{STRATEGY}={name}", f"{STRATEGY}.{argument}", *extra)
    text = str(caught.value) + capsys.readouterr().err
    assert argument.partition("=")[0] in text
    assert allowed in text


@either
def test_an_argument_that_does_not_exist_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(f"{STRATEGY}={name}", f"{STRATEGY}.windows=2", kind=Parsing)
    assert "'windows' is not accepted" in capsys.readouterr().err
