"""How large a schedule may be."""

from ramtorch_core.errors import ConfigurationError, check_count

__all__ = ["MAX_OPS", "check_size"]

MAX_OPS = 1_000_000
"""Of a schedule that is built by name. Steps have some hundreds; the proof of a million takes a quarter of a minute."""


def check_size(
    devices: int,
    microbatches: int,
    stages_per_device: int = 1,
    *,
    names: tuple[str, str, str] = ("devices", "microbatches", "stages per device"),
) -> None:
    """Refuse schedules that cannot be, and those that would be too large to write down.

    Raises:
        ConfigurationError: counts below one, or too many ops.
    """
    counts = dict(zip(names, (devices, microbatches, stages_per_device), strict=True))
    ops = 2
    for name, count in counts.items():
        ops *= check_count(name, count)
    if ops > MAX_OPS:
        said = ", ".join(f"{name}={count}" for name, count in counts.items())
        raise ConfigurationError(f"{said}: a schedule of {ops:,} ops is too large; at most {MAX_OPS:,} are possible")
