"""What the Trainer's own arguments mean does not depend on the strategy."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from both_cases import Descent, assert_agree, either, outcome, strategy_of
from offload_cases import fit, loader

FLAGS: dict[str, dict[str, Any]] = {
    "detect_anomaly": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "benchmark": {"benchmark": True},
    "sync_batchnorm": {"sync_batchnorm": True},
    "no inference mode": {"inference_mode": False},
    "two batches to overfit": {"overfit_batches": 2, "max_epochs": 2},
    "half of them to overfit": {"overfit_batches": 0.5},
    "validation in a part of the epoch": {"val_check_interval": 0.5},
    "validation every three batches": {
        "val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": -1, "max_steps": 6,
    },
    "validation every other epoch": {"check_val_every_n_epoch": 2, "max_epochs": 2},
    "parts of the data": {"limit_train_batches": 0.5, "limit_val_batches": 1},
    "no validation": {"limit_val_batches": 0, "num_sanity_val_steps": 0},
    "all of the sanity check": {"num_sanity_val_steps": -1},
    "fast_dev_run": {"fast_dev_run": 2},
    "data reloaded": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "a time limit": {"max_time": "00:01:00:00"},
    "logs now and then": {"log_every_n_steps": 3},
    "clipping by norm": {"gradient_clip_val": 0.05},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 3},
}  # fmt: skip


@pytest.fixture(autouse=True)
def settings_restored() -> Iterator[None]:
    """Two of the flags set what outlives the Trainer."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


@cache
def plain(flag: str) -> dict[str, Any]:
    return outcome(fit(Descent, **({"max_epochs": 1} | FLAGS[flag])))


@either
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_means_the_same(name: str, flag: str) -> None:
    found = fit(Descent, strategy_of(name), **({"max_epochs": 1} | FLAGS[flag]))
    assert found.trainer.global_step > 0
    assert_agree(name, outcome(found), plain(flag))


@either
def test_a_trainer_without_extras_trains_the_same(name: str) -> None:
    def trained(strategy: Any) -> Any:
        torch.manual_seed(1)
        model = Descent()
        pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, barebones=True, max_epochs=1).fit(model, loader())
        return model.state_dict()

    assert_agree(name, trained(strategy_of(name)), trained("auto"))
