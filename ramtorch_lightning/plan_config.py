"""Which model is planned: from a name, or from a configuration file of LightningCLI."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ramtorch_core import ConfigurationError
from ramtorch_core.errors import check_choice, check_count, check_number, shown, suggest
from ramtorch_lightning._lightning import is_overridden, pl
from ramtorch_lightning.offload import OffloadStrategy

__all__ = ["Configuration", "from_config", "from_name"]

_DEFAULTS = {name: each.default for name, each in inspect.signature(OffloadStrategy).parameters.items()}
_UNUSED = ("device", "split_fn", "weight_fn", "accelerator", "checkpoint_io", "precision_plugin")
"""Arguments on which a plan does not depend; in a file they may be names of objects that are not here."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model that is not built yet, and what a Trainer would be told.

    Attributes:
        make: builds it.
        strategy: arguments of OffloadStrategy, all of them; none where what can be chosen is.
        resident_below: bytes, as for OffloadStrategy.
        microbatches: per batch, side by side.
        accumulate: batches per step of the optimizer.
        clips: gradients are clipped; `by_value`: not by norm.
    """

    name: str
    make: Callable[[], pl.LightningModule]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "bf16-mixed"
    resident_below: int = _DEFAULTS["resident_below"]
    microbatches: int = _DEFAULTS["n_microbatches"]
    accumulate: int = 1
    clips: bool = False
    by_value: bool = False

    def build(self) -> pl.LightningModule:
        """The model, with what `configure_model` adds.

        Raises:
            ConfigurationError: it cannot be built, or is no LightningModule.
        """
        try:
            module = self.make()
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(f"{self.name} cannot be built: {type(error).__name__}: {error}") from error
        if not isinstance(module, pl.LightningModule):
            raise ConfigurationError(f"{self.name} is no LightningModule, but a {type(module).__name__}")
        if is_overridden("configure_model", module, pl.LightningModule):
            try:
                module.configure_model()
            except ConfigurationError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"configure_model of {self.name} fails: {type(error).__name__}: {error}"
                ) from error
        return module


def from_name(name: str, init: Sequence[str]) -> Configuration:
    """`module:Class`, with arguments as `name=value`; values are Python literals, or else strings.

    Raises:
        ConfigurationError: there is no such class, or an argument without `=`.
    """
    options = {}
    for pair in init:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigurationError(f"--init {pair}: write NAME=VALUE")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    cls = _find(name)
    return Configuration(cls.__name__, lambda: cls(**options))


def from_config(path: str) -> Configuration:
    """A YAML file as LightningCLI writes it, with `model: {class_path: ..., init_args: ...}`.

    Raises:
        ConfigurationError: the file is no YAML, names no model, a strategy that is not planned here, or settings that
            cannot be.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"--config {path}: there is no such file")
    saving: Any = importlib.import_module(f"{pl.__name__}.core.saving")
    try:
        config = saving.load_hparams_from_yaml(path)
    except Exception as error:  # whatever the parser has: what it cannot read is no configuration
        raise ConfigurationError(f"--config {path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    trainer = (config.get("trainer") or {}) if isinstance(config, Mapping) else None
    if not isinstance(trainer, Mapping):
        raise ConfigurationError(f"--config {path}: it must be a mapping, with `trainer` another one, or none")
    model = config.get("model")
    if not isinstance(model, Mapping) or "class_path" not in model:
        raise ConfigurationError(
            f"{path} names no model (model: class_path: ...): LightningCLI leaves it out where the program fixes the "
            f"class. Pass module:Class instead of --config, with --init"
        )
    strategy = trainer.get("strategy")
    given = (strategy.get("init_args") or {}) if isinstance(strategy, Mapping) else {}
    kind = str(strategy.get("class_path") if isinstance(strategy, Mapping) else strategy).rpartition(".")[2].lower()
    if kind.startswith("pipeline"):
        raise ConfigurationError(
            f"{path}: plans are for one GPU with OffloadStrategy; for a pipeline, give what its stages cost to "
            f"python -m ramtorch_core.pipeline_offload_simulator"
        )
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{path}: the strategy's init_args={given!r} must be a mapping")
    clip, algorithm = trainer.get("gradient_clip_val") or 0, str(trainer.get("gradient_clip_algorithm") or "norm")
    check_number("gradient_clip_val", clip)
    check_choice("gradient_clip_algorithm", algorithm.lower(), ("norm", "value"))
    accumulate = trainer.get("accumulate_grad_batches")  # None is how LightningCLI writes the default
    strategy = _with_defaults(given) if kind in ("offload", "offloadstrategy") else given
    return Configuration(
        str(model["class_path"]).rpartition(".")[2],
        lambda: _instantiate(model),
        strategy=strategy,
        precision=str(trainer.get("precision") or "32-true"),
        resident_below=check_count("resident_below", given.get("resident_below", _DEFAULTS["resident_below"]), 0),
        microbatches=check_count("n_microbatches", given.get("n_microbatches", _DEFAULTS["n_microbatches"])),
        accumulate=1 if accumulate is None else check_count("accumulate_grad_batches", accumulate),
        clips=bool(clip),
        by_value=algorithm.lower() == "value",
    )


def _with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of OffloadStrategy, refused as it refuses them."""
    for name in given:
        if name not in _DEFAULTS:
            raise ConfigurationError(f"OffloadStrategy has no argument {name!r}: {suggest(name, _DEFAULTS)}")
    if given.get("stream_dtype", "auto") != "auto":
        raise ConfigurationError(f"stream_dtype={given['stream_dtype']!r} is not planned for: leave it out of the file")
    chunks = given.get("chunks")
    if chunks is not None and not all(isinstance(name, str) for name in (chunks if type(chunks) is list else [chunks])):
        raise ConfigurationError(f"chunks={shown(chunks)}: names or globs of modules are needed")
    try:
        OffloadStrategy(**{name: value for name, value in given.items() if name not in _UNUSED})
    except TypeError as error:
        raise ConfigurationError(str(error)) from error
    return {**_DEFAULTS, **given}


def _instantiate(value: Any) -> Any:
    """Objects for what has a `class_path`, inside of lists and mappings too."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            cls = _find(value["class_path"])
            return cls(**{key: _instantiate(item) for key, item in (value.get("init_args") or {}).items()})
        return {key: _instantiate(item) for key, item in value.items()}
    return [_instantiate(item) for item in value] if isinstance(value, list) else value


def _find(name: str) -> Any:
    """The class, as `module:Class` or `module.Class`; modules in the working folder are found too."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{name}: {error}; name a class as module:Class") from error
