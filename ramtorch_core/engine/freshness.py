"""Whether what was copied from the masters is still what they are."""

from __future__ import annotations

from ramtorch_core.engine.updates import Updates
from ramtorch_core.memory.weights import WeightGroup


class Freshness:
    """Decides how closely masters are looked at before a group is copied to the device.

    An epoch ends whenever user code ran that may have written masters. Within an epoch version counters tell. At the
    first use in a new epoch samples of the values are compared too, because writes through `.data` and fused kernels do
    not count versions; or, if `conservative` or after `invalidate`, everything is taken as written.
    """

    def __init__(self, updates: Updates) -> None:
        self.conservative = True
        self._updates = updates
        self.suspect = False
        self._epoch = 0
        self._forced = 0  # a group last seen before this epoch is taken as written
        self._seen: dict[WeightGroup, int] = {}

    def is_pending(self, group: WeightGroup) -> bool:
        """Whether an update of the group is under way."""
        return self._updates.is_pending(group)

    def wait(self, group: WeightGroup) -> None:
        """Wait for the group's update, if there is one."""
        self._updates.wait(group)

    def refresh(self, group: WeightGroup) -> bool:
        """Bring the group's arena up to date; whether anything in it had been written."""
        seen = self._seen.get(group, self._epoch)
        self._seen[group] = self._epoch
        if seen == self._epoch:
            return bool(group.refresh())
        return bool(group.refresh(force=self.conservative or seen < self._forced, look=True))

    def built(self, group: WeightGroup) -> None:
        """The group was laid out just now."""
        self._seen[group] = self._epoch

    def advance(self) -> None:
        """User code ran."""
        self._epoch += 1
        self.suspect = False

    def invalidate(self) -> None:
        """Masters may have been written in ways that leave no trace."""
        self.suspect = True
        self._epoch += 1
        self._forced = self._epoch

    def forget(self) -> None:
        """The groups are others now."""
        self._seen = {}
