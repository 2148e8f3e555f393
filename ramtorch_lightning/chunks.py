"""How a LightningModule's chunks are found or named."""

from __future__ import annotations

from ramtorch_core import ChunkSpec, ConfigurationError, Streamer
from ramtorch_lightning._lightning import pl, rank_zero_warn


def chunk_spec(module: pl.LightningModule, given: ChunkSpec) -> ChunkSpec:
    """The strategy's `chunks=` if there is one, else what the module's `configure_chunks()` returns, else None.

    Raises:
        ConfigurationError: `configure_chunks` exists and is no method.
    """
    if given is not None:
        return given
    configure = getattr(module, "configure_chunks", None)
    if configure is None:
        return None
    if not callable(configure):
        raise ConfigurationError(
            f"{type(module).__name__}.configure_chunks is a {type(configure).__name__}: make it a method that returns "
            f"names, globs, module types or modules"
        )
    spec: ChunkSpec = configure()
    return spec


def warn_of_unused_chunks(streamer: Streamer) -> None:
    """Name the chunks that the first training batch has not called."""
    never = streamer.never_visited()
    if never:
        rank_zero_warn(
            f"chunks that the first training batch never called: {', '.join(never)}. If they are used in another way "
            f"than by calling them, make the module that uses them the chunk."
        )
