"""The import arrows of ARCHITECTURE.md and the other rules that the sources' text can show, checked with `ast`.

    plan <- simulate
    plan <- memory <- optim <- engine <- ramtorch_core's public names <- ramtorch_lightning <- examples

An arrow points at what is imported. `errors` may be imported by all.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ramtorch_core", "ramtorch_lightning")
OTHER_FOLDERS = ("examples", "benchmarks")

# layer -> layers of this project that it may import besides itself
ARROWS = {
    "errors": set(),
    "plan": {"errors"},
    "simulate": {"errors", "plan"},
    "memory": {"errors", "plan"},
    "optim": {"errors", "plan", "memory"},
    "engine": {"errors", "plan", "memory", "optim"},
    "public": {"errors", "plan", "memory", "optim", "engine", "simulate"},
    "lightning": {"errors", "public"},
    "examples": {"errors", "public", "lightning"},
    "benchmarks": {"errors", "public", "lightning"},
}
# layer -> what it may import besides the standard library; layers not named here are free
LIBRARIES = {
    "errors": set(),
    "plan": set(),
    "simulate": set(),
    "memory": {"torch", "typing_extensions"},
    "optim": {"torch", "typing_extensions"},
    "engine": {"torch", "typing_extensions"},
    "public": {"torch", "typing_extensions"},
    "lightning": {"lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics", "typing_extensions"},
}
# layer -> optional libraries, imported inside the function that needs them
OPTIONAL_LIBRARIES = {"simulate": {"matplotlib"}}

DEVICE_FILE = "ramtorch_core/memory/device.py"

MAX_LINES = 350
# path -> why this file is longer than MAX_LINES
LONG_FILES: dict[str, str] = {
    "ramtorch_core/engine/stream.py": "the public engine: its parts are in other files, its interface is one class",
}

Sources = dict[str, str]  # path relative to the repository, with forward slashes -> text


def project_sources() -> Sources:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in (*PACKAGES, *OTHER_FOLDERS)
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


# --- the arrows -------------------------------------------------------------------------------------------------------


def layer_of(module: str) -> str | None:
    """The layer of a dotted module name of this project; None when it belongs to none."""
    top, *rest = module.split(".")
    if top == "ramtorch_lightning":
        return "lightning"
    if top in OTHER_FOLDERS:
        return top
    if top != "ramtorch_core":
        return None
    if rest and rest[0] in ARROWS:
        return rest[0]
    return "public" if len(rest) <= 1 else None


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str, str, bool]]:
    """Every import as (line, module, imported name or "", whether at module level), relative ones resolved."""
    inside = {
        id(node)
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(f)
    }
    for node in ast.walk(tree):
        top_level = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "", top_level) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.split("/")[: -node.level]
                base = ".".join([*package, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found = (submodule, "") if submodule in modules else (base, alias.name)
                yield node.lineno, *found, top_level


def broken_arrows(sources: Sources) -> list[str]:
    """Imports that break an arrow, as "path:line: what is wrong"."""
    modules = {module_of(path) for path in sources}
    modules |= {module.rpartition(".")[0] for module in modules}  # folders without an __init__.py
    problems = []
    for path, text in sources.items():
        layer = layer_of(module_of(path))
        if layer is None:
            problems.append(f"{path}:1: belongs to no layer; give its folder a place among the arrows")
            continue
        for line, module, name, top_level in imports(path, ast.parse(text), modules):
            problem = import_problem(layer, module, name, top_level)
            if problem:
                problems.append(f"{path}:{line}: {problem}")
    return problems


def import_problem(layer: str, module: str, name: str, top_level: bool) -> str | None:
    top = module.partition(".")[0]
    if top in (*PACKAGES, *OTHER_FOLDERS, "tests"):
        target = layer_of(module)
        if target != layer and target not in ARROWS[layer]:
            return f"{layer} must not import {module} ({target or 'no layer'})"
        if target != layer and layer in ("lightning", *OTHER_FOLDERS) and is_private(module, name):
            return f"{layer} imports public names only, not {module}{'.' * bool(name)}{name}"
        return None
    if layer not in LIBRARIES or top in sys.stdlib_module_names or top in LIBRARIES[layer]:
        return None
    if top in OPTIONAL_LIBRARIES.get(layer, set()):
        return f"{layer} may import {top} only inside a function" if top_level else None
    return f"{layer} must not import the library {top}"


def is_private(module: str, name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return not dunder and any(part.startswith("_") for part in (*module.split("."), name))


# --- torch.cuda -------------------------------------------------------------------------------------------------------


def cuda_uses(sources: Sources) -> list[str]:
    """Places outside DEVICE_FILE, in the packages, that name torch.cuda."""
    problems = []
    for path, text in sources.items():
        if path == DEVICE_FILE or not path.startswith(PACKAGES):
            continue
        tree = ast.parse(text)
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "torch"
        }
        names.add("torch")
        problems += [f"{path}:{node.lineno}: names torch.cuda" for node in ast.walk(tree) if names_cuda(node, names)]
    return problems


def names_cuda(node: ast.AST, torch_names: set[str]) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr="cuda"):
            return name in torch_names
        case ast.Import(names=aliases):
            return any(f"{alias.name}.".startswith("torch.cuda.") for alias in aliases)
        case ast.ImportFrom(module="torch", names=aliases, level=0):
            return any(alias.name == "cuda" for alias in aliases)
        case ast.ImportFrom(module=str(module), level=0):
            return f"{module}.".startswith("torch.cuda.")
    return False


# --- threads and lengths ----------------------------------------------------------------------------------------------


def unnamed_threads(sources: Sources) -> list[str]:
    """Places in the packages that start a thread without naming it; tests and stack dumps tell threads by name."""
    keyword_of = {"Thread": "name", "ThreadPoolExecutor": "thread_name_prefix"}
    problems = []
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)) if path.startswith(PACKAGES) else ():
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                keyword = keyword_of.get(called)
                if keyword and keyword not in {k.arg for k in node.keywords}:
                    problems.append(f"{path}:{node.lineno}: {called}(...) without {keyword}=")
    return problems


def wrong_lengths(sources: Sources, reasons: dict[str, str]) -> list[str]:
    """Files longer than MAX_LINES without a reason, and reasons that no file needs any more."""
    long = {path: lines for path, text in sources.items() if (lines := len(text.splitlines())) > MAX_LINES}
    problems = [
        f"{path}: {lines} lines, more than {MAX_LINES}: split it, or give a reason in LONG_FILES"
        for path, lines in long.items()
        if not reasons.get(path)
    ]
    return problems + [f"{path}: needs no reason in LONG_FILES" for path in reasons if path not in long]


# --- this project -----------------------------------------------------------------------------------------------------


def test_imports_follow_the_arrows() -> None:
    assert broken_arrows(project_sources()) == []


def test_only_the_device_file_names_torch_cuda() -> None:
    assert cuda_uses(project_sources()) == []


def test_every_thread_has_a_name() -> None:
    assert unnamed_threads(project_sources()) == []


def test_long_files_have_a_reason() -> None:
    assert wrong_lengths(project_sources(), LONG_FILES) == []


# --- the checks themselves, on small sources --------------------------------------------------------------------------

TREE: Sources = {
    "ramtorch_core/__init__.py": "from .offload import OffloadModel",
    "ramtorch_core/errors.py": "class PlanError(RuntimeError): ...",
    "ramtorch_core/offload.py": "from .engine.driver import run\nfrom .errors import PlanError",
    "ramtorch_core/offload_simulator.py": "from .simulate import cli",
    "ramtorch_core/plan/__init__.py": "from .check import check",
    "ramtorch_core/plan/check.py": "import dataclasses\nfrom ..errors import PlanError",
    "ramtorch_core/simulate/cli.py": "def draw():\n    import matplotlib.pyplot\n",
    "ramtorch_core/memory/device.py": "import torch\nstream = torch.cuda.Stream",
    "ramtorch_core/memory/window.py": "import torch\nfrom ramtorch_core.plan import check\nfrom . import device",
    "ramtorch_core/optim/step.py": "from ..memory import window",
    "ramtorch_core/engine/driver.py": "from .. import errors\nfrom ..optim import step\nfrom ..memory import window",
    "ramtorch_lightning/offload.py": "import lightning\nfrom ramtorch_core import OffloadModel\nfrom . import chunks",
    "ramtorch_lightning/chunks.py": "from ramtorch_core.errors import PlanError",
    "examples/quickstart.py": "import numpy\nimport ramtorch_lightning\nfrom ramtorch_core import OffloadModel",
}


def test_a_tree_that_keeps_every_rule_has_no_problem() -> None:
    assert broken_arrows(TREE) == []
    assert cuda_uses(TREE) == []
    assert unnamed_threads(TREE) == []
    assert wrong_lengths(TREE, {}) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("ramtorch_core/errors.py", "import torch"),
        ("ramtorch_core/errors.py", "from .plan import check"),
        ("ramtorch_core/plan/check.py", "import torch"),
        ("ramtorch_core/plan/check.py", "def f():\n    from torch import nn"),
        ("ramtorch_core/plan/check.py", "from ..memory import window"),
        ("ramtorch_core/plan/check.py", "from .. import memory"),
        ("ramtorch_core/plan/check.py", "import ramtorch_core"),
        ("ramtorch_core/plan/check.py", "from .. import OffloadModel"),
        ("ramtorch_core/simulate/cli.py", "import torch"),
        ("ramtorch_core/simulate/cli.py", "import matplotlib"),
        ("ramtorch_core/simulate/cli.py", "from ..engine import driver"),
        ("ramtorch_core/memory/window.py", "from ..optim.step import Step"),
        ("ramtorch_core/memory/window.py", "from ..simulate import cli"),
        ("ramtorch_core/memory/window.py", "import lightning"),
        ("ramtorch_core/optim/step.py", "import ramtorch_core.engine.driver"),
        ("ramtorch_core/engine/driver.py", "from ..simulate import cli"),
        ("ramtorch_core/engine/driver.py", "from ..offload import OffloadModel"),
        ("ramtorch_core/engine/driver.py", "from ramtorch_core import offload"),
        ("ramtorch_core/offload.py", "import ramtorch_lightning"),
        ("ramtorch_core/offload.py", "from tests.conftest import GRACE_SECONDS"),
        ("ramtorch_core/extra/new.py", "import os"),
        ("ramtorch_lightning/offload.py", "from ramtorch_core.engine import driver"),
        ("ramtorch_lightning/offload.py", "from ramtorch_core import engine, plan"),
        ("ramtorch_lightning/offload.py", "if TYPE_CHECKING:\n    from ramtorch_core.memory.window import Slot"),
        ("ramtorch_lightning/offload.py", "from ramtorch_core import _private"),
        ("ramtorch_lightning/offload.py", "import sklearn"),
        ("examples/quickstart.py", "from ramtorch_core.memory import window"),
        ("examples/quickstart.py", "from ramtorch_lightning._hidden import name"),
    ],
)
def test_an_import_against_an_arrow_is_found(path: str, text: str) -> None:
    problems = broken_arrows({**TREE, path: text})
    assert problems
    assert all(problem.startswith(f"{path}:") for problem in problems)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.cuda.synchronize()",
        "import torch as t\nx: t.cuda.Stream",
        "def f():\n    import torch.cuda",
        "import torch.cuda.nvtx as nvtx",
        "from torch import cuda",
        "from torch.cuda import Stream",
    ],
)
def test_torch_cuda_outside_the_device_file_is_found(text: str) -> None:
    assert len(cuda_uses({**TREE, "ramtorch_core/engine/driver.py": text})) == 1
    assert cuda_uses({**TREE, DEVICE_FILE: text}) == []


@pytest.mark.parametrize(
    "text",
    [
        "import threading\nthreading.Thread(target=f)",
        "from threading import Thread\nThread(target=f, daemon=True)",
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1)",
    ],
)
def test_a_thread_without_a_name_is_found(text: str) -> None:
    assert len(unnamed_threads({"ramtorch_core/engine/driver.py": text})) == 1


def test_a_long_file_without_a_reason_and_a_reason_without_a_long_file_are_found() -> None:
    long = {"ramtorch_core/offload.py": "\n" * (MAX_LINES + 1)}
    assert len(wrong_lengths(long, {})) == 1
    assert wrong_lengths(long, {"ramtorch_core/offload.py": "one table"}) == []
    assert len(wrong_lengths(TREE, {"ramtorch_core/offload.py": "one table"})) == 1
