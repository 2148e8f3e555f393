"""Fits whose updates overlap backward, each update a random while later, against the plain Trainer."""

import random
import time
from typing import Any

import pytest
from offload_cases import Classifier, Run, Watched, fit
from stream_cases import assert_same

from ramtorch_core.optim import updater

OVERLAPPED = "chunks are updated while backward goes on"
RUNS_ON = ", and while the next forward goes on"
PUBLISHED = "optimizers step after backward, over published gradients: "


class Counting(Watched):
    """Keeps how many updates overlapped, past the end of a run."""

    updated = 0

    def _detach(self) -> None:
        if self._streamer is not None:
            self.updated += self.streamer.updates.updater.updated
        super()._detach()


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update begins a random while later."""
    update, times = updater.update, random.Random(5)

    def delayed(*args: Any, **kwargs: Any) -> None:
        time.sleep(times.random() * 0.002)
        update(*args, **kwargs)

    monkeypatch.setattr(updater, "update", delayed)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if OVERLAPPED in message or PUBLISHED in message]


def overlapped(found: Run, *, every: bool = True) -> None:
    assert found.strategy.updated > 0
    if every:
        assert found.strategy.updated == found.trainer.global_step * len(found.strategy.streamed)


def compare(build: Any = Classifier, *, every: bool = True, **options: Any) -> Run:
    """As `compare_fits`, and proves that updates overlapped."""
    expected = fit(build, **{key: value for key, value in options.items() if key != "strategy"})
    options.pop("strategy", None)
    found = fit(build, Counting(), **options)
    assert_same(found.record, expected.record)
    overlapped(found, every=every)
    return found


def with_optimizer(build: Any) -> Any:
    class Optimized(Classifier):
        def configure_optimizers(self) -> Any:
            return build(self.parameters())

    return Optimized
