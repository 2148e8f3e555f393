"""`OffloadStrategy` in fit, validate, test and predict: what the same Trainer gives without it, bit for bit."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from offload_cases import Classifier, Net, Watched, compare_fits, fit, loader, make_trainer
from stream_cases import assert_same
from torch import nn

from ramtorch_core import ConfigurationError

LEAVES = {"net.embed", "net.head"} | {f"net.blocks.{i}.{j}" for i in range(3) for j in (0, 1, 4)}
BLOCKS = {f"net.blocks.{i}" for i in range(3)}


def is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize(
    ("chunks", "streamed"),
    [
        (None, BLOCKS | {"net.embed", "net.head"}),
        ("leaves", LEAVES),
        ("net.blocks.*", BLOCKS),
        (["net.blocks.0", "net.head"], {"net.blocks.0", "net.head"}),
        ([nn.Sequential], BLOCKS),
        (nn.Linear, {name for name in LEAVES if not name.endswith(".0")}),
        (is_linear, {name for name in LEAVES if not name.endswith(".0")}),
    ],
)
def test_every_way_to_choose_chunks_trains_the_same(chunks: Any, streamed: set[str]) -> None:
    found = compare_fits(Classifier, strategy={"chunks": chunks})
    assert found.strategy.streamed == streamed
    assert found.strategy.conservative == [False]


def test_the_module_may_configure_its_chunks() -> None:
    class Configured(Classifier):
        def configure_chunks(self) -> Any:
            return [self.net.blocks[1], "net.head"]

    assert compare_fits(Configured, strategy={"chunks": None}).strategy.streamed == {"net.blocks.1", "net.head"}


def test_chunks_given_to_the_strategy_win_over_those_of_the_module() -> None:
    class Configured(Classifier):
        def configure_chunks(self) -> Any:
            return "net.head"

    assert compare_fits(Configured, strategy={"chunks": "net.embed"}).strategy.streamed == {"net.embed"}


def test_configure_chunks_that_is_no_method_is_refused() -> None:
    class Configured(Classifier):
        configure_chunks = ("net.head",)

    with pytest.raises(ConfigurationError, match=r"Configured\.configure_chunks is a tuple: make it a method"):
        fit(Configured, Watched(chunks=None))


@pytest.mark.parametrize(
    ("pin", "resident"),
    [
        (0, set()),
        (2, {"net.blocks.0", "net.blocks.1"}),
        ([2], {"net.blocks.2"}),
        (["net.blocks.1"], {"net.blocks.1"}),
        (["net.blocks.*"], BLOCKS),
    ],
)
def test_pinned_chunks_train_the_same(pin: Any, resident: set[str]) -> None:
    options = {"chunks": "net.blocks.*", "pin": pin}
    found = fit(Classifier, Watched(**options))
    assert_same(found.record, fit(Classifier).record)
    assert {row.name for row in found.strategy.tables[-1] if row.placement == "resident"} == resident
    assert (found.strategy.copied_bytes > 0) == (resident != BLOCKS)


def test_a_count_of_pinned_chunks_beyond_the_chunks_keeps_all_and_warns_once() -> None:
    with pytest.warns(UserWarning, match="pin=9 exceeds the number of chunks, 3") as caught:
        found = fit(Classifier, Watched(chunks="net.blocks.*", pin=9))
    assert len([one for one in caught if "exceeds" in str(one.message)]) == 1
    assert_same(found.record, fit(Classifier).record)


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("activations", ["keep", "checkpoint", "recompute"])
def test_windows_and_activation_policies_train_the_same(window: int, activations: str) -> None:
    compare_fits(lambda: Classifier(Net(dropout=0.3)), strategy={"window": window, "activations": activations})


def test_a_foreign_callback_makes_the_engine_careful_and_changes_nothing() -> None:
    found = compare_fits(Classifier, callbacks=lambda: [type("Foreign", (pl.Callback,), {})()])
    assert found.strategy.conservative == [True]


@pytest.mark.parametrize("options", [{}, {"chunks": "net.blocks.*", "pin": 1}, {"precision": "bf16-mixed"}], ids=str)
def test_validate_test_and_predict_equal_the_resident_run(options: dict[str, Any]) -> None:
    precision = {"precision": options.get("precision")}
    streaming = {key: value for key, value in options.items() if key != "precision"}
    model = Classifier()

    def results(strategy: Any) -> list[Any]:
        trainer = make_trainer(strategy, **precision)
        return [
            trainer.validate(model, loader(), verbose=False),
            trainer.test(model, loader(), verbose=False),
            trainer.predict(model, loader()),
        ]

    strategy = Watched(**streaming)
    assert_same(results(strategy), results("auto"))
    assert strategy.copied_bytes > 0
    assert len(strategy.tables) == 3


def test_fit_validate_fit_test_predict_with_one_trainer() -> None:
    def results(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        model, trainer = Classifier(), make_trainer(strategy, max_epochs=1)
        trainer.fit(model, loader())
        first = trainer.validate(model, loader(), verbose=False)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, loader(), loader())
        test = trainer.test(model, loader(), verbose=False)
        return [first, test, trainer.predict(model, loader()), model.seen, model.state_dict()]

    strategy = Watched()
    assert_same(results(strategy), results("auto"))
    assert len(strategy.tables) == 5


def test_two_trainers_alternate_on_two_models() -> None:
    def results(strategies: list[Any]) -> list[Any]:
        torch.manual_seed(1)
        models = [Classifier(), Classifier()]
        trainers = [make_trainer(strategy, max_epochs=1) for strategy in strategies]
        for epochs in (1, 2):
            for trainer, model in zip(trainers, models, strict=True):
                trainer.fit_loop.max_epochs = epochs
                trainer.fit(model, loader())
        return [model.state_dict() for model in models]

    assert_same(results([Watched(), Watched(window=1)]), results(["auto", "auto"]))


def test_one_strategy_object_serves_a_second_trainer() -> None:
    """As in Lightning, the object brings its accelerator along, so the second Trainer is not told one."""

    def results(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        models = [Classifier(), Classifier()]
        for model, accelerator in zip(models, ("cpu", "auto"), strict=True):
            make_trainer(strategy, max_epochs=1, accelerator=accelerator).fit(model, loader())
        return [model.state_dict() for model in models]

    strategy = Watched()
    assert_same(results(strategy), results(SingleDeviceStrategy("cpu")))
    assert len(strategy.tables) == 2


def test_a_model_trained_once_trains_on_under_another_strategy() -> None:
    def result(strategies: list[Any]) -> Any:
        torch.manual_seed(1)
        model = Classifier()
        for strategy in strategies:
            make_trainer(strategy, max_epochs=1).fit(model, loader())
        return model.state_dict()

    assert_same(result([Watched(), "auto", Watched(pin=2)]), result(["auto", "auto", "auto"]))


def test_after_a_run_the_model_is_plain_and_on_the_host() -> None:
    found = fit(Classifier, Watched(pin=3))
    assert all("forward" not in vars(module) for module in found.model.modules())
    assert all(not vars(module).keys() & module._parameters.keys() for module in found.model.modules())
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in found.model.parameters())


def test_the_log_shows_the_chunk_table(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(Classifier, Watched(chunks="net.blocks.*", pin=1))
    text = next(record.getMessage() for record in caplog.records if "OffloadStrategy on cpu" in record.getMessage())
    assert re.search(r"net\.blocks\.0 .*resident +pinned on the device", text)
    assert re.search(r"net\.blocks\.1 \.\. net\.blocks\.2 .*streamed", text)
    assert re.search(r"net\.embed\.weight and 3 more .*copy stays +outside of every chunk", text)


def test_before_and_after_a_run_there_is_no_engine() -> None:
    strategy = Watched()
    with pytest.raises(RuntimeError, match="nothing streams yet"):
        strategy.chunk_table()
    fit(Classifier, strategy)
    with pytest.raises(RuntimeError, match="nothing streams yet"):
        strategy.chunk_table()


def test_a_chunk_that_the_first_batch_never_called_is_named_once() -> None:
    class Partial(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)

    with pytest.warns(UserWarning, match="never called: unused") as caught:
        compare_fits(Partial)
    assert len([one for one in caught if "never called" in str(one.message)]) == 1
