"""docs/simulators.md: every command prints what the page shows, and its pictures are those that the commands draw."""

import re
import shlex
from pathlib import Path

import pytest

from ramtorch_core.simulate import offload_command, pipeline_offload_command, schedule_command

DOCUMENT = Path(__file__).parents[2] / "docs" / "simulators.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
CHUNKS = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
RUNS = re.findall(r"```text\n\$ python -m ramtorch_core\.((?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", TEXT, re.DOTALL)
PICTURES = re.findall(r"!\[[^\]]+\]\(images/([^)]+)\)", TEXT)
COMMANDS = {
    "offload_simulator": offload_command.main,
    "schedule_simulator": schedule_command.main,
    "pipeline_offload_simulator": pipeline_offload_command.main,
}


@pytest.mark.parametrize(("command", "expected"), RUNS, ids=[command[:60] for command, _ in RUNS])
def test_a_command_prints_what_the_page_shows(command: str, expected: str, tmp_path, monkeypatch, capsys) -> None:
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("gpt.json").write_text(CHUNKS[0])
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    COMMANDS[program](arguments)
    output = capsys.readouterr()
    assert (output.out + output.err).rstrip() == expected.rstrip()
    if "--plot" in arguments:
        assert arguments[arguments.index("--plot") + 1] in PICTURES


def test_the_page_has_commands_pictures_and_code_that_runs(capsys) -> None:
    assert len(RUNS) >= 10
    for picture in PICTURES:
        assert 5_000 < (DOCUMENT.parent / "images" / picture).stat().st_size < 100_000
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, str(DOCUMENT), "exec"), {})
    assert "busy" in capsys.readouterr().out
