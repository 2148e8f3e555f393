"""The commands in README.md, docs/ and examples/README.md are those of the scripts, which take fewer steps here."""

import importlib
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
FEWER = {
    "examples/configs/train.py": ["--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.logger=false"],
    "examples/train_gpt.py": ["--size=tiny", "--steps=2", "--epochs=1", "--batch=2", "--sample-bytes=4"],
    "ramtorch_lightning.plan": ["--init", "size=1b"],
}
"""Options after which a script is done soon."""
ELSEWHERE = ("cd ", "./run ", "pip install ", "python examples/finetune_safetensors.py ")
"""Commands that need the network, all tests, or a folder of weights, as `test_finetune_safetensors.py` has."""


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if not line.startswith(ELSEWHERE)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        python, script, *words = shlex.split(command)
        assert python == "python"
        if script == "-m":
            script = words.pop(0)
            run: Any = importlib.import_module(script).main
        else:
            run = runpy.run_path(str(ROOT / script))["main"]
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        assert run([*words, *FEWER[script]]) not in (1, 2), command  # of commands that return a status
