"""README.md and docs/: their code runs, their files and links exist, their tables and messages are those of the code.

Python blocks of one page run in order and share their names. A block marked `no-run` needs GPUs, a large model or the
reader's own: it runs with small ones in their place. The names of all blocks have to exist, and the arguments that they
pass to this project's classes too. YAML blocks go through LightningCLI. Pages with tests of their own are left to
these, and commands to `tests/examples/test_commands.py`.
"""

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import ramtorch_core
from ramtorch_core import OffloadModel, Pipeline, PipelineModel, attach, why_whole
from ramtorch_lightning import OffloadStrategy, PipelineStrategy, overlap

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
TESTED_ELSEWHERE = {
    "docs/simulators.md": "tests/simulate/test_docs.py",
    "docs/optimizers.md": "tests/optim/test_optimizers_docs.py",
}
IN_PLACE = {
    "devices=[0, 1]": "devices=['cpu', 'cpu']",
    "devices: [0, 1]": "devices: [cpu, cpu]",
    "calibrate(model, batch, ": "calibrate(model, batch, device='cpu', chunks='leaves', resident_below=0, ",
    "width=4096, depth=40": "width=16, depth=4",
    "width=4096, depth=24": "width=16, depth=4",
}
"""What blocks that do not run as they are get for their GPUs and large models."""
FENCE = re.compile(r"^( *)```(\w+)( no-run)?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[tuple[int, bool, str]]:
    """(line, whether it runs, text) of the page's blocks in one language."""
    text = PAGES[page].read_text(encoding="utf-8")
    return [
        (
            text.count("\n", 0, match.start()) + 2,
            match[3] is None and not any(large in match[4] for large in IN_PLACE),
            textwrap.dedent(match[4]),
        )
        for match in FENCE.finditer(text)
        if match[2] == language
    ]


def made_small(text: str) -> str:
    for large, small in IN_PLACE.items():
        text = text.replace(large, small)
    return text


class Reader(BoringModel):
    """Whatever the reader has, of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))


def the_readers() -> dict[str, Any]:
    """Names that stand for the reader's own, in blocks that do not run as they are."""
    return {
        "MyLightningModule": Reader,
        "model": Reader(),
        "data": torch.utils.data.DataLoader(torch.rand(32, 32), batch_size=8),
        "batch": torch.rand(8, 32),
        "targets": torch.rand(8, 2),
        "loss_function": torch.nn.functional.mse_loss,
    }


def with_blocks(language: str) -> list[str]:
    return [page for page in PAGES if page not in TESTED_ELSEWHERE and blocks(page, language)]


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", with_blocks("python"))
def test_the_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A text block that begins like the strategy's log is what the code logs; `...` ends a line that goes on."""
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for line, runs, code in blocks(page, "python"):
        known = names if runs else {**the_readers(), **names}
        tree = ast.parse("\n" * (line - 1) + made_small(code), page)
        problems = list(wrong_names(tree, known))
        assert not problems, f"{page}:{line}: {problems}"
        with monkeypatch.context() as patch:
            if not runs:
                patch.setenv("PL_TRAINER_ACCELERATOR", "cpu")
                patch.setenv("PL_TRAINER_MAX_EPOCHS", "1")
            exec(compile(tree, page, "exec"), known)
    for _, _, text in blocks(page, "text"):
        if text.startswith("OffloadStrategy on"):
            for line in text.splitlines():
                assert line.removesuffix("...") in caplog.text


def wrong_names(tree: ast.Module, known: dict[str, Any]) -> Iterator[str]:
    """Names that nothing defines, imports that do not exist, and arguments that this project does not take."""
    imported: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and find_spec(node.module.partition(".")[0]):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    yield f"{node.module} has no {alias.name}"
                imported[alias.asname or alias.name] = getattr(module, alias.name, None)
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    stored |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    stored |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            stored |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in stored | known.keys() | vars(builtins).keys():
            yield f"nothing defines {node.id}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = imported.get(node.func.id, known.get(node.func.id))
            if getattr(called, "__module__", "").startswith("ramtorch") and callable(called):
                taken = inspect.signature(called).parameters
                if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in taken.values()):
                    for keyword in node.keywords:
                        if keyword.arg is not None and keyword.arg not in taken:
                            yield f"{node.func.id} takes no {keyword.arg}"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print(undefined)", "nothing defines undefined"),
        ("from ramtorch_core import nothing", "ramtorch_core has no nothing"),
        (
            "from ramtorch_lightning import OffloadStrategy\nOffloadStrategy(windows=2)",
            "OffloadStrategy takes no windows",
        ),
    ],
)
def test_a_block_that_is_wrong_is_noticed(code: str, problem: str) -> None:
    assert list(wrong_names(ast.parse(code), {})) == [problem]


# --- YAML -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_the_configurations_of_a_page_are_accepted(page: str, tmp_path: Path) -> None:
    for line, _, text in blocks(page, "yaml"):
        assert "trainer" in yaml.safe_load(text), f"{page}:{line}"
        config = tmp_path / "config.yaml"
        config.write_text(made_small(text))
        fixed = ["--trainer.accelerator=cpu", "--trainer.logger=false"]
        cli = LightningCLI(BoringModel, args=[f"--config={config}", *fixed], run=False, save_config_callback=None)
        assert type(cli.trainer.strategy) in (OffloadStrategy, PipelineStrategy)


# --- files and links --------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


MARKDOWN = [*PAGES, "ARCHITECTURE.md", "CHANGELOG.md", "examples/README.md"]


@pytest.mark.parametrize("page", MARKDOWN)
def test_links_and_files_exist(page: str) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page} links to {target}"
    for script in re.findall(r"(?:python |`|\()((?:examples|benchmarks|tests|docs)/[\w/]+\.(?:py|yaml|md))", text):
        assert (ROOT / script).exists(), f"{page} names {script}"


def test_every_page_is_in_the_index() -> None:
    index = PAGES["docs/README.md"].read_text(encoding="utf-8")
    missing = [page for page in PAGES if f"({page.removeprefix('docs/')})" not in index]
    assert missing == ["README.md", "docs/README.md"]
    assert all((ROOT / test).exists() for test in TESTED_ELSEWHERE.values())


# --- tables of arguments ----------------------------------------------------------------------------------------------

SIGNATURES = {
    "OffloadStrategy": OffloadStrategy,
    "PipelineStrategy": PipelineStrategy,
    "attach": attach,
    "OffloadModel": OffloadModel,
    "Pipeline": Pipeline,
    "PipelineModel": PipelineModel,
    "A step of Pipeline and PipelineModel": Pipeline.step,
}


def table(page: str, heading: str) -> dict[str, str]:
    """First and second column of the table under a heading."""
    section = PAGES[page].read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line[:3] == "| `"
    ]
    return {row[0].strip("| `"): row[1] for row in rows}


@pytest.mark.parametrize("heading", SIGNATURES)
def test_every_argument_is_explained_with_its_default(heading: str) -> None:
    stated = {
        name: {parameter.empty: "required"}.get(parameter.default, f"`{parameter.default!r}`".replace("'", '"'))
        for name, parameter in inspect.signature(SIGNATURES[heading]).parameters.items()
        if name != "self"
    }
    if "options" in stated:
        stated["options"] = "none"
    assert table("docs/knobs.md", heading) == stated


def test_the_steps_of_both_pipelines_take_the_same() -> None:
    assert inspect.signature(Pipeline.step).parameters.keys() == inspect.signature(PipelineModel.step).parameters.keys()


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def messages() -> str:
    """Every text in the code of both packages, one a line, with … for what is filled in."""
    found = []
    for package in ("ramtorch_core", "ramtorch_lightning"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%(\.\d+)?[sdrf]", "…", node.value))
    return "\n".join(found)


@pytest.mark.parametrize("page", ["docs/troubleshooting.md", "docs/updates.md"])
def test_messages_are_those_of_the_code(page: str, messages: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    column = 0 if page.endswith("troubleshooting.md") else 1
    quoted = []
    for section in re.findall(r"^\| (?:message|reason) \|.*?\n\n", text, re.DOTALL | re.MULTILINE):
        quoted += [row.strip("|").split(" | ")[column].strip().strip("`") for row in section.strip().splitlines()[2:]]
    assert len(quoted) > 8
    missing = [quote for quote in quoted if quote not in messages]
    assert not missing


def test_every_reason_to_publish_is_listed() -> None:
    text = PAGES["docs/updates.md"].read_text(encoding="utf-8")
    returned = []
    for function in (overlap.why_published, why_whole):
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr | ast.Constant) and node.value:
                parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
                constants = [part.value for part in parts if isinstance(part, ast.Constant) and part.value]
                returned += [max(constants, key=len).strip(" '")] if constants else []
    assert len(returned) > 8
    assert not [reason for reason in returned if reason not in text]
    for hook in overlap._HOOKS_THAT_SEE_GRADIENTS:
        assert f"`{hook}`" in text


def test_the_public_names_of_the_pages_exist() -> None:
    for page, path in PAGES.items():
        for name in re.findall(r"`ramtorch_core\.(\w+)[(`]", path.read_text(encoding="utf-8")):
            exists = hasattr(ramtorch_core, name) or find_spec(f"ramtorch_core.{name}") is not None
            assert exists, f"{page} names ramtorch_core.{name}"
