"""A pytest plugin that runs Lightning's own tests with another strategy, without editing them; see docs/conformance.md.

    STRATEGY=ramtorch_lightning:OffloadStrategy python -m pytest -p lightnings_own_tests ...

Wherever a Trainer would take the strategy for one CPU it gets the one named, with keyword arguments from `OPTIONS`.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

used = 0


def pytest_configure() -> None:
    module, _, name = os.environ.get("STRATEGY", "").partition(":")
    if not name:
        return
    kind: Any = getattr(importlib.import_module(module), name)
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    choose, setup = _AcceleratorConnector._choose_strategy, kind.setup

    def chosen(self: Any) -> Any:
        usual = choose(self)
        plain = type(usual) is SingleDeviceStrategy and usual.root_device.type == "cpu"
        return kind(**options) if plain else usual

    def counted(self: Any, trainer: Any) -> None:
        global used
        used += 1
        setup(self, trainer)

    _AcceleratorConnector._choose_strategy = chosen  # type: ignore[method-assign]
    kind.setup = counted


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each process adds how often the strategy was set up, so that a pass cannot mean that it was not used."""
    if "USED" in os.environ:
        with Path(os.environ["USED"]).open("a", encoding="utf-8") as file:
            file.write(f"{used}\n")
