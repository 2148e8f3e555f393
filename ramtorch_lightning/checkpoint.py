"""Checkpoint files written and read without a second copy of the model in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from ramtorch_lightning._lightning import TorchCheckpointIO, get_filesystem

IN_MEMORY_BYTES = 64 << 20


class LocalCheckpointIO(TorchCheckpointIO):
    """Ordinary Lightning checkpoints; local files are written through a temporary file, and read memory-mapped.

    A local checkpoint is written next to its final place and renamed when it is complete and on disk, so a crash
    leaves the previous one whole, and tensors that are still read from it keep their values. Tensors are read from the
    mapped file as they are needed. Small checkpoints (which Lightning serialises into memory first, and may write over
    the previous ones) and other file systems are handled as Lightning does.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        local = storage_options is None and _is_local(path)
        small = local and _tensor_bytes(checkpoint) < IN_MEMORY_BYTES and not _may_be_mapped(Path(_local(path)))
        if not local or small:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        target = Path(_local(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if _is_local(path) and _may_be_mapped(Path(_local(path))):
            loaded: dict[str, Any] = torch.load(_local(path), map_location="cpu", weights_only=weights_only, mmap=True)
            return loaded
        return super().load_checkpoint(path, map_location, weights_only)


def _tensor_bytes(checkpoint: dict[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(checkpoint) if isinstance(leaf, torch.Tensor))


def _is_local(path: str | Path) -> bool:
    protocol: str | tuple[str, ...] = get_filesystem(path).protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def _local(path: str | Path) -> str:
    text = str(path)
    return text.removeprefix("file://") if text.startswith("file://") else text


def _may_be_mapped(path: Path) -> bool:
    """Whether the file is large, and torch can map it; its format before version 1.6 cannot be mapped."""
    if not path.is_file() or path.stat().st_size < IN_MEMORY_BYTES:
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
