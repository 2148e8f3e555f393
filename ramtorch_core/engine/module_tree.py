"""A module tree seen as possible chunks: names, what may stand for what, sizes, and patterns over names."""

import re
from collections.abc import Iterable
from inspect import getattr_static

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

__all__ = [
    "ModuleTree",
    "glob_regex",
    "is_container",
    "is_glob",
    "is_never_called",
    "owns_parameters",
    "parameter_bytes",
    "parameter_shape",
    "unwrap",
]

# Their forward, or a fused kernel behind it, reads the weights of their children without calling them.
READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
READS_CHILDREN_BY_NAME = {
    "timm.models.beit.Attention",
    "timm.models.eva.EvaAttention",
    "timm.models.swin_transformer_v2.WindowAttention",
    "torchvision.models.swin_transformer.ShiftedWindowAttention",
}
COMPILED = "_orig_mod"  # where torch.compile's wrapper registers the module that it wraps


def is_glob(pattern: str) -> bool:
    """Whether `pattern` has wildcards; otherwise it is one name."""
    return any(character in pattern for character in "*?[")


def glob_regex(pattern: str) -> re.Pattern[str]:
    """A qualified-name glob as a regular expression, for `fullmatch`.

    `*` matches within one component (no dot), `**` across dots, `**.` also no component at all, `?` one character that
    is no dot, `[ab]` and `[!ab]` one character of a set.
    """
    parts = []
    for token in re.split(r"((?:(?<=\.)|^)\*\*\.|\*\*|\*|\?|\[[^\]]+\])", pattern):
        known = {"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}.get(token)
        if known is None:
            known = "[" + re.sub("^!", "^", token[1:-1]) + "]" if re.match(r"\[.+\]$", token) else re.escape(token)
        parts.append(known)
    return re.compile("".join(parts))


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, or `module` itself."""
    inner = module._modules.get(COMPILED)
    return module if inner is None else unwrap(inner)


def is_never_called(module: nn.Module) -> bool:
    """Whether `module` has no forward: ModuleList, ModuleDict, ParameterList and the like only hold others."""
    static = getattr_static(type(module), "forward")  # reading it from the class of a scripted module would fail
    inherited = static is nn.Module.forward or getattr(static, "__qualname__", "") == "LightningModule.forward"
    return inherited and "forward" not in vars(module)


def is_container(module: nn.Module) -> bool:
    """Whether `module` only lines up its children: a Sequential, or a ModuleList or ModuleDict without a forward."""
    return isinstance(module, nn.Sequential) or (
        isinstance(module, nn.ModuleList | nn.ModuleDict) and is_never_called(module)
    )


def owns_parameters(module: nn.Module) -> bool:
    """Whether `module` has parameters of its own, not counting its children's."""
    return any(parameter is not None for parameter in module._parameters.values())


def parameter_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of distinct parameters; one whose shape is not known yet counts as nothing."""
    return sum(p.numel() * p.element_size() for p in dict.fromkeys(parameters) if not is_lazy(p))


def parameter_shape(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The shape, or None while it is not known."""
    return None if is_lazy(parameter) else tuple(parameter.shape)


def _is_metric(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(module).__mro__)


def _reads_children(module: nn.Module) -> bool:
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__}
    return isinstance(module, READS_CHILDREN) or not names.isdisjoint(READS_CHILDREN_BY_NAME)


class ModuleTree:
    """The modules below `root`, each once, in registration order (that of `named_modules`); the root is left out.

    Modules of torchmetrics, scripted modules and all that is below them are left out too; `refused` has them by name,
    with the reason. `modules` has each module's first name. `by_name` has every name: also the second one of a module
    that is registered twice, and each name without the `_orig_mod` of compiled modules.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules: dict[nn.Module, str] = {}
        self.by_name: dict[str, nn.Module] = {}
        self.refused: dict[str, tuple[nn.Module, str]] = {}
        self._owners: dict[nn.Module, list[nn.Module]] = {}
        self._stand_ins: dict[nn.Module, nn.Module | None] = {}
        self._walk("", [root])
        for name, module in list(self.by_name.items()):
            short = ".".join(part for part in name.split(".") if part != COMPILED)
            if short:
                self.by_name.setdefault(short, module)

    def _walk(self, prefix: str, line: list[nn.Module]) -> None:
        parent = line[-1]
        for key, module in parent._modules.items():
            if module is None or any(module is outer for outer in line):  # by identity: metrics redefine ==
                continue
            name = prefix + key
            if _is_metric(module):
                self.refused[name] = module, "belongs to torchmetrics and stays resident"
            elif isinstance(module, torch.jit.ScriptModule):
                self.refused[name] = module, "is scripted, so its parameters stay resident"
            else:
                self.modules.setdefault(module, name)
                self.by_name[name] = module
                self._owners.setdefault(module, []).append(parent)
                self._walk(f"{name}.", [*line, module])

    def matching(self, pattern: str) -> list[nn.Module]:
        """The modules with a name that the glob matches; what a compiled wrapper wraps goes by the wrapper's name."""
        regex = glob_regex(pattern)
        inner = COMPILED in pattern
        found = (
            module
            for name, module in self.by_name.items()
            if regex.fullmatch(name) and (inner or name.rpartition(".")[2] != COMPILED)
        )
        return list(dict.fromkeys(found))

    def stand_in(self, module: nn.Module) -> nn.Module | None:
        """The module whose forward uses `module`'s parameters, so that it can be a chunk; None if only the root does.

        `module` itself, except: for what torch.compile wraps, the wrapper (the other way round if what it wraps is also
        registered elsewhere, and may be called there); for
        a ModuleList, ParameterList or the like the nearest module around it that has a forward; for parametrizations
        the parametrized module; and for all that is inside a module that reads its children's weights itself, the
        outermost such module.
        """
        if module not in self._stand_ins:
            self._stand_ins[module] = self._find_stand_in(module)
        return self._stand_ins[module]

    def _find_stand_in(self, module: nn.Module) -> nn.Module | None:
        line = [module]
        while line[-1] is not self.root:
            line.append(self._owners[line[-1]][0])
        chosen: nn.Module | None = None
        for step in reversed(line):
            if isinstance(step, parametrize.ParametrizationList):
                break
            if step is not self.root and not is_never_called(step):
                chosen = chosen if self._is_only_wrapped(step) else step
            if _reads_children(step):
                break
        if chosen is None or unwrap(chosen) is chosen or self._is_only_wrapped(unwrap(chosen)):
            return chosen
        return unwrap(chosen)

    def _is_only_wrapped(self, module: nn.Module) -> bool:
        return all(owner._modules.get(COMPILED) is module for owner in self._owners[module])
