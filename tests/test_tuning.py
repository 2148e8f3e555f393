"""`attach(window="auto", ...)`: chosen after some steps, or from an example; and the tuner itself."""

import contextlib
import logging
from typing import Any

import pytest
import torch
from stream_cases import assert_same, data, descend, stack, state_of
from torch import nn

from ramtorch_core import ConfigurationError, Streamer, attach, tuning
from ramtorch_core.engine.rates import Rates
from ramtorch_core.engine.rearrange import Knobs, knobs_of, rearrange
from ramtorch_core.engine.visits import Activations
from ramtorch_core.prediction import Optimizer
from ramtorch_core.tuning import TIMED, WARM_UP, Wish, bytes_of

RATES = Rates(1e4, 1e4, 1.5e4, 1e6, 1e-4, 1e-9, None)
"""Copies and updates on the host are so slow that it does not matter how long the tests' compute takes."""
AUTO = {"window": "auto", "pin": "auto", "activations": "auto"}
BLOCK = sum(p.nbytes for p in stack(1).parameters())


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is known."""
    monkeypatch.setattr(tuning, "known_rates", lambda device: RATES)
    monkeypatch.setattr("ramtorch_core.prediction.known_rates", lambda device: RATES)


def attached(model: nn.Module, **options: Any) -> Streamer:
    return attach(model, device="cpu", chunks="blocks.*", resident_below=0, poison=True, **options)


def test_after_the_first_steps_the_choice_is_made_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ramtorch_core")
    model = stack(4)
    optimizer = torch.optim.AdamW(model.parameters())
    streamer = attached(model, **AUTO)
    first = Knobs(2, frozenset(), Activations.CHECKPOINT)
    for index in range(WARM_UP + TIMED):
        assert knobs_of(streamer) == first
        descend(model, optimizer, index)
    assert knobs_of(streamer) == Knobs(1, frozenset(range(4)), Activations.KEEP)  # there is room for everything
    told = [message for message in caplog.messages if "s per step" in message]
    assert len(told) == 1
    assert told[0].startswith("window=1, pin=range(4), activations=keep: ")
    for part in ("B of GPU memory", "limited by: ", "% busy", "2 microbatches instead of 1", "precision='bf16-mixed'"):
        assert part in told[0]
    descend(model, optimizer, 9)
    streamer.close()


def test_the_chosen_plan_keeps_to_the_memory_that_is_given() -> None:
    model = stack(4)
    optimizer = torch.optim.AdamW(model.parameters())
    streamer = attached(model, **AUTO, gpu_memory=8 * BLOCK)
    for index in range(WARM_UP + TIMED):
        descend(model, optimizer, index)
    found = knobs_of(streamer)
    assert len(found.resident) < 4
    tuner = streamer.tuning
    assert isinstance(tuner, tuning.Tuner)
    assert tuner.choice is not None
    assert tuner.choice.peak_bytes <= 8 * BLOCK
    streamer.close()


def test_from_the_choice_on_results_are_those_of_the_same_knobs_given() -> None:
    total = WARM_UP + TIMED + 3

    def run(auto: bool) -> list[Any]:
        torch.manual_seed(0)
        model = stack(4, dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        streamer = attached(model, **(AUTO | {"gpu_memory": 10 * BLOCK} if auto else {}))
        losses = []
        for index in range(total):
            losses.append(descend(model, optimizer, index))
            if auto and index == WARM_UP + TIMED - 1:
                chosen.append(knobs_of(streamer))
            elif not auto and index == WARM_UP + TIMED - 1:
                streamer.close()
                (knobs,) = chosen
                streamer = attached(
                    model,
                    window=knobs.window,
                    pin=sorted(knobs.resident),
                    activations=knobs.activations.value,
                )
        streamer.close()
        return [losses, state_of(model), optimizer.state_dict(), torch.get_rng_state()]

    chosen: list[Knobs] = []
    assert_same(run(True), run(False))


@pytest.mark.parametrize("given", [{"window": 3}, {"pin": 1}, {"activations": "checkpoint"}, {"window": 2, "pin": 2}])
def test_knobs_that_are_given_stay(given: dict[str, Any]) -> None:
    model = stack(4)
    optimizer = torch.optim.AdamW(model.parameters())
    streamer = attached(model, **(AUTO | given))
    for index in range(WARM_UP + TIMED):
        descend(model, optimizer, index)
    found = knobs_of(streamer)
    assert isinstance(streamer.tuning, tuning.Tuner)
    assert streamer.tuning.choice is not None
    if "window" in given:
        assert found.window == given["window"]
    if "pin" in given:
        assert len(found.resident) == given["pin"]
    if "activations" in given:
        assert found.activations is Activations.CHECKPOINT
    streamer.close()


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("overlapped", [False, True])
def test_what_is_not_chosen_is_as_the_measured_steps_were(accumulated: int, overlapped: bool) -> None:
    model = stack(4)
    optimizer = torch.optim.AdamW(model.parameters())
    streamer = attached(model, **AUTO)
    for index in range(WARM_UP + TIMED):
        optimizer.zero_grad()
        for part in range(accumulated):
            loss = model(data(index)).square().mean()
            last = overlapped and part == accumulated - 1
            with streamer.updates.overlap(optimizer) if last else contextlib.nullcontext():
                loss.backward()
        optimizer.step()
    assert isinstance(streamer.tuning, tuning.Tuner)
    assert streamer.tuning.choice is not None
    plan = streamer.tuning.choice.plan
    assert plan.microbatches == accumulated
    assert plan.optimizer is (Optimizer.JOINED if overlapped else Optimizer.PUBLISHED)
    assert plan.recast
    assert streamer.tuning.measured > 0
    streamer.close()


def test_a_graph_that_is_alive_puts_the_choice_off() -> None:
    model = stack(3)
    optimizer = torch.optim.AdamW(model.parameters())
    streamer = attached(model, **AUTO)
    for index in range(WARM_UP + TIMED - 1):
        descend(model, optimizer, index)
    other = model(data(50)).sum()
    optimizer.step()
    assert knobs_of(streamer).window == 2
    del other
    descend(model, optimizer, 5)
    assert len(knobs_of(streamer).resident) == 3
    streamer.close()


def test_two_engines_may_choose_in_one_step() -> None:
    """Each by a hook of its own, which torch calls one after the other."""
    models = [stack(3), stack(3)]
    optimizer = torch.optim.AdamW([parameter for model in models for parameter in model.parameters()])
    streamers = [attached(model, **AUTO) for model in models]
    for index in range(WARM_UP + TIMED + 1):
        sum(model(data(index)).square().mean() for model in models).backward()
        optimizer.step()
        optimizer.zero_grad()
    for streamer in streamers:
        assert streamer.tuning.choice is not None
        streamer.close()


def test_an_engine_that_is_closed_before_the_choice_is_measured_no_more() -> None:
    model = stack(3)
    optimizer = torch.optim.AdamW(model.parameters())
    streamer = attached(model, **AUTO)
    for index in range(WARM_UP + 1):
        descend(model, optimizer, index)
    assert streamer.device.ranges._listeners
    streamer.close()
    descend(model, optimizer, 9)
    assert not streamer.device.ranges._listeners
    assert isinstance(streamer.tuning, tuning.Tuner)
    assert streamer.tuning.done
    assert streamer.tuning.choice is None


def test_other_models_optimizers_are_no_steps() -> None:
    model, other = stack(2), nn.Linear(2, 2)
    streamer = attached(model, **AUTO)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(WARM_UP + TIMED):
        other(torch.ones(2)).sum().backward()
        optimizer.step()
    assert isinstance(streamer.tuning, tuning.Tuner)
    assert not streamer.tuning.done
    streamer.close()


def test_memory_in_which_nothing_fits_leaves_the_first_knobs_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = stack(3)
    optimizer = torch.optim.AdamW(model.parameters())
    streamer = attached(model, **AUTO, gpu_memory=100)
    for index in range(WARM_UP + TIMED + 1):
        descend(model, optimizer, index)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = warning.getMessage()
    assert text.startswith("goes on with window=2, pin=0, activations=checkpoint: ")
    assert "0.098 KB of GPU memory" in text
    assert knobs_of(streamer) == Knobs(2, frozenset(), Activations.CHECKPOINT)
    streamer.close()


def test_a_plan_that_finds_no_memory_is_taken_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Knobs] = []

    def fails_first(streamer: Streamer, knobs: Knobs, optimizers: Any = ()) -> None:
        tried.append(knobs)
        rearrange(streamer, knobs, optimizers)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(tuning, "rearrange", fails_first)
    model = stack(3)
    optimizer = torch.optim.AdamW(model.parameters())
    streamer = attached(model, **AUTO)
    for index in range(WARM_UP + TIMED + 1):
        descend(model, optimizer, index)
    assert knobs_of(streamer) == tried[-1] == Knobs(2, frozenset(), Activations.CHECKPOINT)
    assert len(tried) == 2
    assert any("found no memory (CUDA out of memory.)" in message for message in caplog.messages)
    streamer.close()


# ------------------------------------------------------------------ examples, refusals, sizes


@pytest.mark.parametrize("training", [True, False])
def test_with_an_example_the_choice_is_made_at_once(training: bool) -> None:
    model = stack(4)
    before = state_of(model)
    streamer = attached(model, **AUTO, example=data(), training=training, gpu_memory="1GB")
    assert streamer.tuning is None
    assert_same(state_of(model), before)
    assert knobs_of(streamer).window in (1, 2, 3, 4)
    if training:
        assert len(knobs_of(streamer).resident) == 4
    streamer.close()


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"gpu_memory='1GB' limits what is chosen"):
        attached(stack(1), gpu_memory="1GB")
    with pytest.raises(ConfigurationError, match="pass example="):
        attached(stack(1), window="auto", training=False)
    with pytest.raises(ConfigurationError, match="window='automatic'"):
        attached(stack(1), window="automatic")


def test_sizes_are_read() -> None:
    assert bytes_of("20GB") == 20 * 10**9
    assert bytes_of(" 1.5 GiB ") == 3 << 29
    assert bytes_of(17) == 17
    assert bytes_of(24e9) == bytes_of("24000000000") == 24 * 10**9
    for wrong in ("20", "20 gigs", "GB", "", 0, -1, 1.5, float("nan"), float("inf"), True, None, "0GB"):
        with pytest.raises(ConfigurationError, match="gpu_memory="):
            bytes_of(wrong)  # type: ignore[arg-type]


def test_what_is_open_is_started_conservatively() -> None:
    wish = Wish.of("auto", 3, "auto", "2GB")
    assert wish.open
    assert wish.first() == {"window": 2, "pin": 3, "activations": "checkpoint"}
    assert not Wish.of(2, ["blocks.0"], "keep", None).open
