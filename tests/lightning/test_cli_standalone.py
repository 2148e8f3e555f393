"""The strategies work where `pytorch_lightning` is installed and `lightning` is not."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

WITHOUT_LIGHTNING = """
import importlib.util, sys
from importlib.abc import MetaPathFinder

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "lightning" else find(name, package)

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lightning":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
"""

CHECK = """
import pytorch_lightning as pl
import ramtorch_lightning
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel
from ramtorch_lightning import OffloadStrategy, PipelineStrategy

quiet = dict(
    accelerator="cpu", max_epochs=1, limit_train_batches=3, limit_val_batches=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
for strategy in ("offload", OffloadStrategy(resident_below=0), PipelineStrategy(devices=["cpu"], n_microbatches=2)):
    trainer = pl.Trainer(strategy=strategy, **quiet)
    trainer.fit(BoringModel())
    assert trainer.global_step == 3
    assert isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy)
for name, argument in (("offload", "window"), ("PipelineStrategy", "n_microbatches")):
    arguments = [f"--trainer.strategy={name}", f"--trainer.strategy.{argument}=3", "--trainer.accelerator=cpu"]
    LightningCLI(BoringModel, args=arguments, run=False, save_config_callback=None)
assert not [name for name in sys.modules if name.partition(".")[0] == "lightning"]
print("works")
"""


@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")
def test_both_strategies_train_and_are_configured_without_lightning() -> None:
    code = WITHOUT_LIGHTNING + CHECK
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("works"), done.stderr


BOTH = """
import sys
import {first}
import ramtorch_lightning
import lightning.pytorch, pytorch_lightning
from ramtorch_lightning import OffloadStrategy

for package in (lightning.pytorch, pytorch_lightning):
    for strategy in ("offload", OffloadStrategy()):
        try:
            package.Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False)
        except ValueError as error:
            assert "You selected an invalid strategy name" in str(error)
        else:
            print(package.__name__)
"""


@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")
@pytest.mark.parametrize(
    ("first", "taken"),
    [("sys", "lightning.pytorch"), ("lightning", "lightning.pytorch"), ("pytorch_lightning", "pytorch_lightning")],
)
def test_with_both_installed_it_is_lightning_unless_the_other_alone_was_imported(first: str, taken: str) -> None:
    """As docs/faq.md says, with the message of the Trainer that is not the right one."""
    done = subprocess.run([sys.executable, "-c", BOTH.format(first=first)], capture_output=True, text=True)
    assert done.stdout.split() == [taken, taken], done.stderr
