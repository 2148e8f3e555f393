"""In which dtype each weight crosses to the device."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from ramtorch_core.engine.observe import Use, guess_casts
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.weights import Weight


class StreamDtypes:
    """Decides per weight, from the user's override, from what was observed, and from a first guess, in this order.

    Args:
        override: "auto"; a dtype; or a mapping from name patterns to dtypes, where the first match counts.

    Attributes:
        compute: autocast's dtype, or None when the model runs without.
        changed: an observation contradicts the present layout.
        asked: weights that would cross in `compute`, if there were not this code that asked for their dtype.
        inside: autocast's dtypes in the visits of the step, noted while `compute` is None.

    Raises:
        ConfigurationError: the override is something else, or not a floating-point dtype.
    """

    def __init__(self, override: torch.dtype | str | Mapping[str, torch.dtype] = "auto") -> None:
        chosen = override.values() if isinstance(override, Mapping) else [override]
        for dtype in chosen:
            if dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ConfigurationError(
                    f"stream_dtype={override!r}: use 'auto', a floating-point dtype such as torch.bfloat16, or a "
                    f"mapping from parameter names to dtypes"
                )
        self.override = override
        self.compute: torch.dtype | None = None
        self.changed = False
        self.asked: dict[Weight, str] = {}
        self.inside: set[torch.dtype | None] = set()
        self.warned = False
        self._casts: dict[Weight, bool] = {}

    def at_beginning(self, ambient: torch.dtype | None) -> torch.dtype | None:
        """Autocast's dtype for the step that begins; if it begins outside of autocast, that of all visits before."""
        inside, self.inside = self.inside, set()
        if ambient is None and self.compute is None and len(inside) == 1:
            return inside.pop()
        return ambient

    def wanted(self, weight: Weight) -> torch.dtype:
        """The dtype in which `weight` should cross now."""
        master = weight.parameter.dtype
        if self.compute is None or master != torch.float32:
            return master
        fixed = self._fixed(weight)
        if fixed is not None:
            return fixed
        return self.compute if self._casts.get(weight, guess_casts(weight)) else master

    def is_fixed(self, weight: Weight) -> bool:
        """Whether the user chose the dtype of `weight`."""
        return self._fixed(weight) is not None

    def may_be_half(self, weight: Weight) -> bool:
        """Whether `weight` may need a shadow besides its master."""
        return weight.parameter.dtype == torch.float32 and self._fixed(weight) != torch.float32

    def note(self, weight: Weight, use: Use) -> None:
        """A visit used `weight` like this."""
        if use.count == 0 or self.compute is None or self._fixed(weight) is not None:
            return
        before = self.wanted(weight)
        self._casts[weight] = use.cast and self._casts.get(weight, True)
        changed = self.wanted(weight) != before
        self.changed |= changed
        if changed and use.asked is not None:
            self.asked[weight] = use.asked

    def _fixed(self, weight: Weight) -> torch.dtype | None:
        if isinstance(self.override, torch.dtype):
            return self.override
        if isinstance(self.override, Mapping):
            return next((dtype for pattern, dtype in self.override.items() if fnmatchcase(weight.name, pattern)), None)
        return None
