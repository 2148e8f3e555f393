"""`--help` shows every knob of both strategies, with its meaning and its default."""

import inspect
import re

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from ramtorch_lightning import OffloadStrategy, PipelineStrategy

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, args=[f"--trainer.strategy.help={name}"], run=False, save_config_callback=None)
    return capsys.readouterr().out


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"\s+", " ", printed(name, capsys))


@pytest.mark.parametrize("strategy", [OffloadStrategy, PipelineStrategy])
def test_help_shows_every_knob_with_its_meaning(strategy: type, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(strategy.__name__, capsys)
    documented = re.sub(r"\s+", " ", inspect.getdoc(strategy) or "")
    for name, parameter in inspect.signature(strategy).parameters.items():
        shown = re.search(rf"--trainer\.strategy\.{name} [^-]*?(?:, --trainer\S+ \S+)? ([^(]*\()", text)
        assert shown, name
        meaning = re.search(rf" {name}: (.{{30}})", documented)
        assert meaning, f"{name} is not documented"
        assert meaning.group(1).strip() in text, name
        default = {None: "null"}.get(parameter.default, str(parameter.default))
        assert re.search(rf"--trainer\.strategy\.{name} .*?default: {re.escape(default)}[,)]", text), name


@pytest.mark.parametrize("name", ["offload", "pipeline"])
def test_the_short_name_has_the_same_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = {"offload": "OffloadStrategy", "pipeline": "PipelineStrategy"}[name]

    def shown(text: str) -> list[str]:
        return re.findall(r"--trainer\.strategy\.\w+ ", text)

    assert shown(help_of(name, capsys)) == shown(help_of(kind, capsys)) != []


@pytest.mark.parametrize("strategy", [OffloadStrategy, PipelineStrategy])
def test_no_knob_takes_more_than_a_few_lines_of_help(
    strategy: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a knob's type named `Module`, its help was a list of every module that is loaded."""
    monkeypatch.setenv("COLUMNS", "80")
    usage, *knobs = printed(strategy.__name__, capsys).split("\n  --trainer.strategy.")
    knobs = [knob for knob in knobs if ".help" not in knob.partition("\n")[0]]  # such as Lightning's Precision has
    assert len(knobs) == len(inspect.signature(strategy).parameters)
    for knob in knobs:
        assert knob.count("\n") <= 15, knob
        assert "torch.nn" not in knob
    assert usage.count("\n") <= len(knobs) + 5
