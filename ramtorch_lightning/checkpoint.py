"""Checkpoint files written and read without a second copy of the model in memory."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from ramtorch_lightning._lightning import TorchCheckpointIO, get_filesystem

MAPPED_BYTES = 64 << 20
"""Files of this size and above are mapped when they are read."""

_PARTIAL = ".partial"


class LocalCheckpointIO(TorchCheckpointIO):
    """Ordinary Lightning checkpoints; local files are written through a temporary file, and read memory-mapped.

    A local checkpoint is written next to its final place and renamed when it is complete and on disk, so a crash or a
    full disk leaves the previous one whole, and tensors that are still read from it keep their values. What a killed
    process left behind is removed when the same checkpoint is saved again. Tensors of large files are read from the
    mapped file as they are needed. Other file systems are handled as Lightning does.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            OSError: the system refused; what was at `path` is still there.
        """
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        target = Path(_local(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_partials(target)
        partial = target.with_name(f"{target.name}.{os.getpid()}{_PARTIAL}")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            refusal = _refusal(error)
            if refusal is None:
                raise
            free = shutil.disk_usage(target.parent).free
            message = (
                f"{refusal.strerror}: the checkpoint, of about {_tensor_bytes(checkpoint) / 1e9:.3g} GB, was not "
                f"written, and what was saved before is as it was ({free / 1e9:.3g} GB are free now)"
            )
            raise OSError(refusal.errno, message, str(target)) from error

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


def _remove_partials(target: Path) -> None:
    """Remove what processes that are no more have left of `target`."""
    for partial in target.parent.glob(f"{glob.escape(target.name)}.*{_PARTIAL}"):
        process = partial.name.removesuffix(_PARTIAL).rpartition(".")[2]
        if process.isdecimal() and not _runs(int(process)):
            with contextlib.suppress(OSError):
                partial.unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _refusal(error: BaseException | None) -> OSError | None:
    """The system's error behind `error`: torch's writer raises another one on its way out."""
    while isinstance(error, Exception) and not isinstance(error, OSError):
        error = error.__context__
    return error if isinstance(error, OSError) and error.errno is not None else None


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
    if not path.is_file() or path.stat().st_size < MAPPED_BYTES:
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
