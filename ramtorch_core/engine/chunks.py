"""How a module tree is divided into chunks, the modules whose weights move together.

- Automatic (`spec=None`): repeated blocks and large modules; the rule is in `automatic_chunks`.
- Leaves (`spec="leaves"`): every module that owns parameters, whatever its size.
- Named: names, globs, types, modules, or a callable. Here, as among leaves, a chunk may lie inside another.

In every mode a module whose forward is not what uses its parameters is replaced by the one whose forward is
(`ModuleTree.stand_in`): the attention for its `out_proj`, a `TransformerEncoderLayer` for what it holds, the
parametrized module for its parametrizations, the owner of a ParameterList for the list, a compiled wrapper for what it
wraps. The root is never a chunk: a LightningModule's own forward need not run. Modules of torchmetrics and scripted
modules never are.
"""

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard

from torch import nn

from ramtorch_core.engine.automatic_chunks import automatic_chunks
from ramtorch_core.engine.module_tree import ModuleTree, glob_regex, is_glob, is_never_called, owns_parameters, unwrap
from ramtorch_core.errors import ConfigurationError, suggest
from ramtorch_core.plan.partition import spread

__all__ = ["ChunkSpec", "choose_resident", "find_chunks", "named_chunks"]

ChunkSpec: TypeAlias = (
    str | Sequence[str | type[nn.Module] | nn.Module] | type[object] | Callable[[str, nn.Module], bool] | None
)


def find_chunks(root: nn.Module, spec: ChunkSpec, *, resident_below: int) -> list[tuple[str, nn.Module]]:
    """Divide `root` into chunks: (qualified name, module) in registration order, each module once.

    Args:
        root: the whole model; never a chunk itself.
        spec: None, "leaves", or: a name or glob ("blocks.*": `*` stays within one component, `**` crosses dots); a
            module type; a module of the tree; a list that may mix these; a callable that is asked `(name, module)` for
            every module but the root. Names work with and without the `_orig_mod` of compiled modules.
        resident_below: bytes, at least 0; only the automatic rule uses it.

    A pattern (glob, type, callable) passes over modules without parameters, and over modules that are never called
    (ModuleList and the like) when other chunks cover all their parameters.

    Raises:
        ConfigurationError: an entry that matches nothing, or nothing with parameters; an entry for a module that is
            never called, whose parent uses its weights, or that is the root or of another model; two entries that
            select the same module; an empty list.
        TypeError: an entry that is none of these.
    """
    if resident_below < 0:
        raise ConfigurationError(f"resident_below={resident_below} bytes is negative; use 0 to stream everything")
    tree = ModuleTree(root)
    if spec is None:
        chosen = automatic_chunks(tree, resident_below)
    elif isinstance(spec, str) and spec == "leaves":
        stands = (tree.stand_in(module) for module in tree.modules if owns_parameters(module))
        chosen = {stand for stand in stands if stand is not None}
    elif _is_list(spec):
        entries = list(spec)
        if not entries:
            raise ConfigurationError("chunks: an empty list selects nothing; use None to find chunks automatically")
        for entry in entries:
            if not isinstance(entry, str | type | nn.Module):
                raise TypeError(f"chunks: {entry!r} in a list is neither a name or glob, nor a type, nor a module")
        chosen = _named_chunks(tree, entries)
    else:
        if not isinstance(spec, str | type | nn.Module) and not callable(spec):
            raise TypeError(f"chunks: {spec!r} is no name, glob, module type, module, callable, or list of these")
        chosen = _named_chunks(tree, [spec])
    return [(name, module) for module, name in tree.modules.items() if module in chosen]


def choose_resident(pin: int | Sequence[int] | Sequence[str], names: Sequence[str]) -> frozenset[int]:
    """Indices into `names` of the chunks that `pin` keeps resident.

    Args:
        pin: a count k: of n chunks those at `floor(i * n / k)` for i = 0 ... k-1, so the first is always among them;
            k > n keeps all, with one warning. Or indices, or names and globs of chunks.
        names: the qualified names of all chunks, in order.

    Raises:
        ConfigurationError: a negative count or index, an index out of range, a name or glob that matches no chunk.
        TypeError: anything else.
    """
    n = len(names)
    if isinstance(pin, str) or _is_list(pin):
        chosen: set[int] = set()
        for entry in [pin] if isinstance(pin, str) else pin:
            chosen.update(named_chunks(entry, names, "pin") if isinstance(entry, str) else [_resident_index(entry, n)])
        return frozenset(chosen)
    k = _as_index(pin)
    if k < 0:
        raise ConfigurationError(f"pin={k}: the number of resident chunks cannot be negative; use 0 for none")
    if k > n:
        warnings.warn(f"pin={k} exceeds the number of chunks, {n}: all of them stay resident", stacklevel=2)
    return spread(k, n)


def _is_list(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether it is a collection of entries, and neither an entry itself nor a number (a tensor may be one)."""
    entry = isinstance(value, str | type | nn.Module) or hasattr(value, "__index__")
    return isinstance(value, Iterable) and not entry


def _as_index(value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # it raises TypeError for anything else
    except TypeError:
        raise TypeError(f"pin: {value!r} is neither a count, nor indices, nor names of chunks") from None


def _resident_index(entry: object, n: int) -> int:
    index = _as_index(entry)
    if not 0 <= index < n:
        remedy = f"use 0 ... {n - 1}" if n else "leave pin at 0"
        raise ConfigurationError(f"pin: index {index} is out of range for {n} chunks; {remedy}")
    return index


def named_chunks(entry: str, names: Sequence[str], option: str) -> list[int]:
    """Indices into `names` of the chunks that a name or glob means.

    Args:
        option: for whose sake, for the error.

    Raises:
        ConfigurationError: none.
    """
    regex = glob_regex(entry)
    found = [i for i, name in enumerate(names) if name == entry or (is_glob(entry) and regex.fullmatch(name))]
    if not found:
        raise ConfigurationError(f"{option}: no chunk is named {entry!r}; {suggest(entry, names)}")
    return found


def _named_chunks(tree: ModuleTree, entries: Sequence[object]) -> set[nn.Module]:
    selected: dict[nn.Module, str] = {}  # by which entry
    replaced: set[nn.Module] = set()
    never_called: dict[nn.Module, str] = {}
    for entry in entries:
        if isinstance(entry, nn.Module) or (isinstance(entry, str) and not is_glob(entry)):
            shown, module = _find_one(tree, entry)
            found = [module]
        else:
            shown, matches = _find_matches(tree, entry)
            never_called |= {module: shown for module in matches if is_never_called(module)}
            stands = [(module, tree.stand_in(module)) for module in matches if not is_never_called(module)]
            found = [stand for module, stand in stands if stand is not None and _is_same(stand, module)]
            replaced.update(stand for module, stand in stands if stand is not None and not _is_same(stand, module))
        for module in dict.fromkeys(found):
            if module in selected:
                both = f"{selected[module]} and {shown} both select {tree.modules[module]!r}"
                raise ConfigurationError(f"chunks: {both}; name it once")
            selected[module] = shown
    chosen = replaced.union(selected)
    covered = {parameter for module in chosen for parameter in module.parameters()}
    for container, shown in never_called.items():
        for part in container.modules():
            if (
                part in tree.modules
                and tree.stand_in(part) is not None
                and not covered.issuperset(part.parameters(recurse=False))
            ):
                raise ConfigurationError(
                    f"chunks: {shown} selects {tree.modules[container]!r}, {_why_not(tree, container)}"
                )
    if not chosen:
        raise ConfigurationError(f"chunks: {entries!r} select nothing whose forward can be wrapped; name other modules")
    return chosen


def _is_same(stand: nn.Module, module: nn.Module) -> bool:
    return stand is module or unwrap(stand) is unwrap(module)


def _find_one(tree: ModuleTree, entry: str | nn.Module) -> tuple[str, nn.Module]:
    """The one module that a name or a module stands for, and how to show it."""
    for name, (refused, reason) in tree.refused.items():
        if entry is refused or (isinstance(entry, str) and entry == name):
            raise ConfigurationError(f"chunks: {name!r} {reason}; leave it out")
    if isinstance(entry, str):
        module, shown = tree.by_name.get(entry) if entry else tree.root, repr(entry)
    else:
        module, shown = entry, f"module {tree.modules.get(entry, type(entry).__name__)!r}"
    if module is tree.root or module is unwrap(tree.root):
        raise ConfigurationError("chunks: the model itself cannot be a chunk; name modules inside it")
    if module is None:
        hint = suggest(str(entry), [*tree.by_name, "leaves"])
        raise ConfigurationError(f"chunks: no module is named {shown}; {hint}")
    if module not in tree.modules:
        raise ConfigurationError(f"chunks: {shown} is no module of this model; pass one of its own modules")
    if not any(True for _ in module.parameters()):
        raise ConfigurationError(f"chunks: {shown} has no parameters, nothing in it would stream; leave it out")
    stand = tree.stand_in(module)
    if stand is None or not _is_same(stand, module):
        raise ConfigurationError(f"chunks: {shown} is {_why_not(tree, module)}")
    return shown, stand


def _find_matches(tree: ModuleTree, entry: object) -> tuple[str, list[nn.Module]]:
    """The modules with parameters that a glob, type or callable matches, and how to show it."""
    if isinstance(entry, str):
        shown, hint = repr(entry), suggest(entry, tree.by_name)
        matches = tree.matching(entry)
    elif isinstance(entry, type):
        shown = f"type {entry.__name__}"
        hint = suggest(entry.__name__, (type(unwrap(module)).__name__ for module in tree.modules))
        matches = [m for m in tree.modules if isinstance(m, entry) or isinstance(unwrap(m), entry)]
    else:
        assert callable(entry)
        shown = f"callable {getattr(entry, '__qualname__', repr(entry))}"
        hint = "let it return True for at least one module"
        matches = [module for module, name in tree.modules.items() if entry(name, module)]
    if not matches:
        raise ConfigurationError(f"chunks: {shown} matches no module; {hint}")
    streaming = [module for module in matches if any(True for _ in module.parameters())]
    if not streaming:
        names = ", ".join(repr(tree.modules[module]) for module in matches[:3])
        raise ConfigurationError(f"chunks: {shown} matches only modules without parameters ({names}); leave it out")
    return shown, streaming


def _holds_chunks(tree: ModuleTree, container: nn.Module) -> bool:
    parts = (part for part in container.modules() if part in tree.modules and owns_parameters(part))
    return any(tree.stand_in(part) is not tree.stand_in(container) for part in parts)


def _why_not(tree: ModuleTree, module: nn.Module) -> str:
    """Why `module` cannot be a chunk, and the remedy."""
    name, kind = tree.modules[module], type(module).__name__
    stand = tree.stand_in(module)
    if is_never_called(module) and _holds_chunks(tree, module):
        pattern, held = f"{name}.*", list(module.children())
        while held and all(map(is_never_called, held)):
            pattern, held = f"{pattern}.*", [part for container in held for part in container.children()]
        return f"a {kind}, which is never called itself; use {pattern!r} for what it holds"
    if stand is None:
        return f"a {kind} whose parameters the model itself uses, so they stay resident; leave it out"
    user = tree.modules[stand]
    return f"a {kind} whose parameters {user!r} ({type(stand).__name__}) uses without calling it; name {user!r} instead"
