"""`OffloadStrategy(window="auto", pin="auto", activations="auto")`: chosen between two batches of a fit."""

import io
import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from offload_cases import Classifier, Metrics, Watched, dataset, fit, loader, make_trainer
from stream_cases import assert_same
from torch.utils.data import DataLoader

from ramtorch_core import ConfigurationError, pricing
from ramtorch_core import tuning as core_tuning
from ramtorch_core.engine.rates import Rates
from ramtorch_core.engine.rearrange import Knobs, knobs_of
from ramtorch_core.engine.visits import Activations
from ramtorch_core.prediction import StreamingPlan
from ramtorch_core.tuning import TIMED, WARM_UP
from ramtorch_lightning import OffloadStrategy, tuning

RATES = Rates(1e4, 1e4, 1.5e4, 1e6, 1e-4, 1e-9, None)
"""Copies and updates on the host are so slow that it does not matter how long the tests' compute takes."""
AUTO: dict[str, Any] = {"window": "auto", "pin": "auto", "activations": "auto"}
FIRST = Knobs(2, frozenset(), Activations.CHECKPOINT)
SOME_MEMORY = 10_000
"""Bytes in which some chunks of the classifier can be resident, and not all."""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is known, and buffers are as small as the models."""
    monkeypatch.setattr(tuning, "rates_of", lambda device: RATES)
    monkeypatch.setattr(pricing, "BOUNCE_BYTES", 0)


class Noting(Watched):
    """Keeps the knobs of each training batch, and the state with which batch `at` begins."""

    def __init__(self, at: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.at, self.knobs, self.saved = at, [], None  # type: ignore[var-annotated]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.knobs.append(knobs_of(self.streamer))
        return super().training_step(*args, **kwargs)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "s per step" in message]


def test_a_fit_chooses_once_and_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = fit(Classifier, Noting(**AUTO), max_epochs=2)
    plain = fit(Classifier, max_epochs=2)
    chunks = len(found.strategy.tables[-1])
    chosen = Knobs(1, frozenset(range(chunks)), Activations.KEEP)
    before = WARM_UP + TIMED
    assert found.strategy.knobs == [FIRST] * before + [chosen] * (8 - before)
    assert_same(found.record["weights"], plain.record["weights"])  # on this device every plan has the same bits
    assert_same(found.record["seen"], plain.record["seen"])
    (message,) = told(caplog)
    assert message.startswith(f"OffloadStrategy: window=1, pin=range({chunks}), activations=keep: ")
    for part in ("B of GPU memory", "limited by: ", "% busy", "microbatches instead of 1", "precision='bf16-mixed'"):
        assert part in message


def test_a_fit_that_ends_before_the_choice_warns_and_one_that_fails_does_not(recwarn: Any) -> None:
    class Fails(Classifier):
        def training_step(self, *args: Any) -> Any:
            raise OSError("no data")

    told = lambda: [str(each.message) for each in recwarn if "before what is 'auto' was chosen" in str(each.message)]
    with pytest.raises(OSError, match="no data"):
        fit(Fails, OffloadStrategy(**AUTO), max_epochs=1)
    fit(Classifier, OffloadStrategy(**AUTO), max_epochs=2)
    assert not told()
    fit(Classifier, OffloadStrategy(**AUTO), max_epochs=1)
    assert len(told()) == 1
    assert "OffloadStrategy: training ended before" in told()[0]


@pytest.mark.parametrize("gradients", ["auto", "published"])
def test_from_the_choice_on_a_fit_equals_one_with_these_knobs_given(gradients: str) -> None:
    batches, at = 10, WARM_UP + TIMED

    def run(strategy: OffloadStrategy, rows: range, state: Any = None) -> tuple[pl.Trainer, Classifier]:
        torch.manual_seed(1)
        model = Classifier()
        trainer = make_trainer(strategy, max_epochs=1, logger=Metrics())
        part = torch.utils.data.Subset(dataset(4 * batches), range(4 * rows.start, 4 * rows.stop))
        if state is not None:
            model.load_state_dict(state["weights"])
            model.configure_optimizers = restored(model, state["optimizer"])  # type: ignore[method-assign]
        trainer.fit(model, DataLoader(part, 4))
        return trainer, model

    def restored(model: Classifier, state: Any) -> Any:
        def configure() -> Any:
            optimizer = type(model).configure_optimizers(model)
            optimizer.load_state_dict(state)
            return optimizer

        return configure

    def state_of(trainer: pl.Trainer, model: Classifier) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save({"weights": model.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}, buffer)
        buffer.seek(0)
        return torch.load(buffer)

    auto = Noting(**AUTO, gpu_memory=SOME_MEMORY, gradients=gradients)
    whole = state_of(*run(auto, range(batches)))
    knobs = auto.knobs[-1]
    assert knobs != FIRST
    assert 0 < len(knobs.resident) < len(auto.tables[-1])
    half = state_of(*run(Watched(gradients=gradients), range(at)))
    given = Watched(
        window=knobs.window, pin=sorted(knobs.resident), activations=knobs.activations.value, gradients=gradients
    )
    assert_same(state_of(*run(given, range(at, batches), half)), whole)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}]
)
def test_fits_with_other_settings_equal_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], microbatches: int
) -> None:
    bases: list[StreamingPlan] = []

    def choose_for(calibration: Any, wish: Any, base: StreamingPlan, *args: Any, **kwargs: Any) -> Any:
        bases.append(base)
        return original(calibration, wish, base, *args, **kwargs)

    original = core_tuning.choose_for
    monkeypatch.setattr(core_tuning, "choose_for", choose_for)
    auto = Noting(**AUTO, gpu_memory=SOME_MEMORY, n_microbatches=microbatches)
    found = fit(Classifier, auto, max_epochs=4, **options)
    plain = fit(Classifier, Watched(n_microbatches=microbatches), max_epochs=4, **options)
    changed = [i for i, knobs in enumerate(found.strategy.knobs) if knobs != FIRST]
    every = options.get("accumulate_grad_batches", 1)
    assert changed[0] == (WARM_UP + TIMED) * every  # a multiple: gradients that add up stay where they are
    (base,) = bases
    assert (base.microbatches, base.batches, base.clip) == (microbatches, every, "gradient_clip_val" in options)
    assert_same(found.record["weights"], plain.record["weights"])


def test_microbatches_are_cut_anew_where_other_chunks_stream() -> None:
    found = fit(Classifier, Noting(**AUTO, gpu_memory=SOME_MEMORY, n_microbatches=2), max_epochs=2)
    plain = fit(Classifier, Watched(n_microbatches=2), max_epochs=2)
    assert found.strategy.knobs[-1] != FIRST
    assert_same(found.record["weights"], plain.record["weights"])


def test_a_prediction_chooses_too() -> None:
    model = Classifier()
    expected = make_trainer().predict(model, loader(40))

    class Predicting(Noting):
        def predict_step(self, *args: Any, **kwargs: Any) -> Any:
            output = super().predict_step(*args, **kwargs)
            self.knobs.append(knobs_of(self.streamer))
            return output

    strategy = Predicting(**AUTO)
    assert_same(make_trainer(strategy).predict(model, loader(40)), expected)
    before = WARM_UP + TIMED
    assert strategy.knobs[:before] == [FIRST] * before
    assert len(strategy.knobs[before].resident) > 0


def test_memory_in_which_nothing_fits_is_told_and_changes_nothing() -> None:
    with pytest.warns(UserWarning, match=r"goes on with window=2, pin=0, activations=checkpoint: no window, pin and"):
        found = fit(Classifier, Noting(**AUTO, gpu_memory=10))
    assert set(found.strategy.knobs) == {FIRST}


def test_memory_without_anything_to_choose_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="gpu_memory='20GB' limits what is chosen, and nothing is"):
        OffloadStrategy(gpu_memory="20GB")
    with pytest.raises(ConfigurationError, match="gpu_memory='20 giga': give bytes"):
        OffloadStrategy(window="auto", gpu_memory="20 giga")


# ------------------------------------------------------------------ out of memory


def test_an_error_of_the_device_in_backward_names_the_knobs() -> None:
    class Full(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)

            def fail(_: Any) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

            loss.register_hook(fail)
            return loss

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(Full, Watched(window=3, pin=1))
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.\n(ramtorch: weights hold ")
    assert "pass window=2 instead of 3" in text
    assert "pin 0 chunks instead of 1" in text
