"""Chunks found automatically: repeated blocks, and large modules outside of them.

Sizes are bytes of distinct parameters. Names and sizes alone decide; nothing is run.

1. *Repeated.* A module with parameters in at least two modules is repeated when the tree has another module of its
   class. `nn.Sequential` says nothing about what it holds: it is repeated when another Sequential in the same container
   has the same parameter names and shapes. A container is a Sequential, or a ModuleList or ModuleDict that has no
   forward; one without a forward, directly inside another container, counts as part of that one.
2. *Block.* From the root down, the first repeated module on each path is a block, and what is below belongs to it. But
   a repeated module is passed over, in favour of what is below, when a container in it (or it itself) lines up modules
   of one class that hold at least half of its bytes, and either it holds more than a quarter of the root's bytes, or
   nowhere do two modules of its class, with the same parameter names and shapes, lie in one container.
   So: transformer blocks, not their linears; the blocks of stages, of encoder and decoder, and of two equal towers; a
   mixture-of-experts block as a whole, unless it holds more than a quarter of the weights.
3. *Block chunks.* The blocks of a class are chunks if the largest of them takes at least `resident_below` bytes.
4. *Large modules.* Any other module is a chunk if the parameters that it owns itself take at least `resident_below`
   bytes and, where there are block chunks, also at least 1/16 of the largest or 64 MiB; but not if another chunk is
   inside it. These are embeddings, heads, and the layers of a network without repeats.
5. The rest stays resident, and so do parameters of the root. No chunk lies inside another.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from ramtorch_core.engine.module_tree import (
    COMPILED,
    ModuleTree,
    is_container,
    is_never_called,
    owns_parameters,
    parameter_bytes,
    parameter_shape,
    unwrap,
)

__all__ = ["automatic_chunks"]

LARGE_SHARE = 1 / 4  # of the root's bytes: a block above it is split if it can be
COMPARABLE = 1 / 16  # of the largest block
SIMPLY_LARGE = 64 * 2**20  # bytes


def automatic_chunks(tree: ModuleTree, resident_below: int) -> set[nn.Module]:
    """The chunks of `tree` by the rule above; `resident_below` in bytes."""
    blocks = _Blocks(tree)
    families: dict[Hashable, list[nn.Module]] = defaultdict(list)
    inside: set[nn.Module] = set()
    for module in tree.modules:
        if module not in inside and blocks.is_block(module):
            families[blocks.kind(module)].append(module)
            inside.update(module.modules())
    sizes = {kind: max(map(blocks.size, family)) for kind, family in families.items()}
    kept = {kind: size for kind, size in sizes.items() if size >= max(resident_below, 1)}
    chosen = {block for kind in kept for block in families[kind]}
    # A block that is also registered inside a later block goes with that one.
    chosen -= {part for block in chosen for part in block.modules() if part is not block}

    enough = max(resident_below, 1, min(COMPARABLE * max(kept.values(), default=0), SIMPLY_LARGE))
    owned: dict[nn.Module, list[nn.Parameter]] = defaultdict(list)
    for module in tree.modules:
        stand = tree.stand_in(module)
        if stand is not None and stand not in inside and owns_parameters(module):
            owned[stand].extend(module.parameters(recurse=False))
    chosen |= {stand for stand, parameters in owned.items() if parameter_bytes(parameters) >= enough}
    return {module for module in chosen if not any(part in chosen for part in module.modules() if part is not module)}


class _Blocks:
    """Tells blocks from what is around them and inside them."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._sizes: dict[nn.Module, int] = {}
        self._kinds: dict[nn.Module, Hashable] = {}
        self._total = self.size(tree.root)
        # Modules that a chunk may be and that have something inside; by kind, and the kinds with equals side by side.
        self._candidates = {m for m in tree.modules if tree.stand_in(m) is m and _is_composite(m)}
        self._numbers = Counter(map(self.kind, self._candidates))
        self._with_equals: set[Hashable] = set()
        for container in [tree.root, *tree.modules]:
            if is_container(container):
                equals = Counter((self.kind(child), _shapes(child)) for child in self._lined_up(container))
                self._with_equals.update(kind for (kind, _), number in equals.items() if number > 1)

    def size(self, module: nn.Module) -> int:
        if module not in self._sizes:
            self._sizes[module] = parameter_bytes(module.parameters())
        return self._sizes[module]

    def kind(self, module: nn.Module) -> Hashable:
        """The class of a module, and what it holds if the class does not tell."""
        if module not in self._kinds:
            inner = unwrap(module)
            cls = type_before_parametrizations(inner)
            self._kinds[module] = (cls, _shapes(inner)) if cls is nn.Sequential else cls
        return self._kinds[module]

    def is_block(self, module: nn.Module) -> bool:
        kind = self.kind(module)
        if module not in self._candidates or not self._is_repeated(kind):
            return False
        may_be_split = self.size(module) > LARGE_SHARE * self._total or kind not in self._with_equals
        return not (may_be_split and self._is_made_of_blocks(module))

    def _is_repeated(self, kind: Hashable) -> bool:
        return kind in self._with_equals or (isinstance(kind, type) and self._numbers[kind] > 1)

    def _lined_up(self, container: nn.Module) -> Iterator[nn.Module]:
        for child in container.children():
            if is_container(child) and is_never_called(child):
                yield from self._lined_up(child)
            elif child in self._candidates:
                yield child

    def _is_made_of_blocks(self, module: nn.Module) -> bool:
        parameters: list[nn.Parameter] = []
        for container in filter(is_container, module.modules()):
            kinds: dict[Hashable, list[nn.Module]] = defaultdict(list)
            for child in self._lined_up(container):
                kinds[self.kind(child)].append(child)
            parameters += [p for same in kinds.values() if len(same) > 1 for child in same for p in child.parameters()]
        return 2 * parameter_bytes(parameters) >= self.size(module)


def _is_composite(module: nn.Module) -> bool:
    return sum(map(owns_parameters, module.modules())) > 1


def _shapes(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """Names and shapes of the parameters, the same whether or not parts are compiled."""
    return tuple(
        (name.replace(f"{COMPILED}.", ""), parameter_shape(parameter))
        for name, parameter in module.named_parameters(remove_duplicate=False)
    )
