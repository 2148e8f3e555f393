"""What cannot work is refused early, with the offender's name and the remedy."""

import re
import types
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from offload_cases import Classifier, Watched, fit, loader, make_trainer
from torch import nn

from ramtorch_core import ConfigurationError, HostMemoryError
from ramtorch_lightning import OffloadStrategy
from ramtorch_lightning.refusals import check_fused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0: at least 1 slot is needed; 2 let copies overlap compute"),
        ({"window": -1}, "window=-1: at least 1 slot"),
        ({"window": True}, "window=True: at least 1 slot"),
        ({"resident_below": "some"}, "resident_below='some': a number is needed"),
        ({"window": 1.5}, "window=1.5: at least 1 slot"),
        ({"pin": -1}, "pin=-1: the number of resident chunks cannot be negative; use 0"),
        ({"activations": "forget"}, "activations='forget': use one of 'keep', 'checkpoint', 'recompute'"),
        ({"stream_dtype": torch.int8}, "stream_dtype=torch.int8: use 'auto', a floating-point dtype"),
        ({"stream_dtype": "half"}, "stream_dtype='half': use 'auto', a floating-point dtype"),
        ({"resident_below": -1}, "resident_below=-1 bytes is negative; use 0"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        OffloadStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": "net.blocks.*", "pin": [3]}, r"pin: index 3 is out of range for 3 chunks; use 0 \.\.\. 2"),
        ({"chunks": "net.blocks.*", "pin": [-1]}, "pin: index -1 is out of range"),
        ({"chunks": "net.blocks.*", "pin": ["net.blok.1"]}, "pin: no chunk is named 'net.blok.1'; did you mean"),
        ({"chunks": "net.block"}, "chunks: no module is named 'net.block'; did you mean 'net.blocks'"),
        ({"chunks": "nets.*"}, r"chunks: 'nets\.\*' matches no module"),
        ({"chunks": ["net.blocks.*", "net.blocks.1"]}, "'net.blocks.1' both select 'net.blocks.1'; name it once"),
        ({"chunks": nn.Conv2d}, "chunks: type Conv2d matches no module"),
        ({"chunks": "net.blocks"}, r"a ModuleList, which is never called itself; use 'net\.blocks\.\*'"),
        ({"chunks": []}, "chunks: an empty list selects nothing"),
        ({"chunks": lambda name, module: False}, "let it return True for at least one module"),
    ],
)
def test_chunks_and_pins_that_do_not_exist_are_named(options: dict[str, Any], message: str) -> None:
    model = Classifier()
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(Watched(**options)).fit(model, loader())
    assert all("forward" not in vars(module) for module in model.modules())
    make_trainer(Watched()).fit(model, loader())


@pytest.mark.parametrize("strategy", ["offload", OffloadStrategy()])
def test_several_devices_are_refused(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"one device, and the Trainer was given 2: pass devices=1, or use"):
        make_trainer(strategy, devices=2)


def test_a_device_that_contradicts_the_accelerator_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="accelerator"):
        make_trainer(OffloadStrategy(device="cuda:0"), accelerator="cpu")


def test_the_device_of_the_strategy_is_that_of_the_trainer() -> None:
    strategy = OffloadStrategy(device="cpu")
    assert make_trainer(strategy, accelerator="auto", devices="auto").strategy.root_device == torch.device("cpu")


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "LOCAL_RANK"])
def test_being_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    trainer, model = make_trainer(Watched()), Classifier()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigurationError, match=r"one of 4 that a launcher started.*with plain python"):
        trainer.fit(model, loader())


def test_a_launcher_with_one_process_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert fit(Classifier, Watched()).strategy.copied_bytes > 0


@pytest.mark.parametrize("name", ["BitsandbytesPrecision", "TransformerEnginePrecision"])
@pytest.mark.parametrize("derived", [False, True])
def test_precisions_that_keep_weights_on_the_gpu_are_refused(name: str, derived: bool) -> None:
    kind = type(name, (Precision,), {})
    plugin = type("Mine", (kind,), {})() if derived else kind()
    with pytest.raises(
        ConfigurationError, match=rf"{type(plugin).__name__} does not work with weights in RAM.*bf16-mixed"
    ):
        make_trainer(Watched(), plugins=[plugin]).fit(Classifier(), loader())


@pytest.mark.parametrize("package", ["bitsandbytes", "apex", "deepspeed"])
@pytest.mark.parametrize("derived", [False, True])
def test_optimizers_that_run_on_the_gpu_only_are_refused(package: str, derived: bool) -> None:
    module = types.ModuleType(f"{package}.optim")
    kind = type("Adam8bit", (torch.optim.SGD,), {"__module__": module.__name__})
    if derived:
        kind = type("Mine", (kind,), {})

    class Special(Classifier):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=0.1)

    with pytest.raises(ConfigurationError, match=rf"{kind.__name__} cannot update weights in RAM.*torch\.optim"):
        fit(Special, Watched())


def test_a_capturable_optimizer_is_refused() -> None:
    class Capturable(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            optimizer.param_groups[0]["capturable"] = True
            return [torch.optim.SGD([nn.Parameter(torch.ones(1))]), optimizer]

        automatic_optimization = False

    with pytest.raises(ConfigurationError, match="AdamW cannot update weights in RAM: capturable=True needs"):
        fit(Capturable, Watched())


def test_parameters_without_values_are_named() -> None:
    class Empty(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.blocks[1][4] = nn.Linear(16, 8, device="meta")

    message = r"'net\.blocks\.1\.4\.weight' is on the meta device: give it values first"
    with pytest.raises(ConfigurationError, match=message):
        fit(Empty, Watched())


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_too_little_memory_is_told_before_anything_is_allocated(stage: str) -> None:
    model = Classifier()
    pointers = [p.data_ptr() for p in model.parameters()]
    trainer = make_trainer(Watched(host_memory=1), precision="bf16-mixed")
    with pytest.raises(HostMemoryError, match=r"GB of host memory.*pin=\), freeze weights.*host_memory="):
        getattr(trainer, stage)(model, loader())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all("forward" not in vars(module) for module in model.modules())


def test_chunks_inside_one_another_need_a_slot_each() -> None:
    class Nested(Classifier):
        def __init__(self) -> None:
            super().__init__()
            for index, block in enumerate(self.net.blocks):
                self.net.blocks[index] = nn.Sequential(block, nn.Linear(8, 8))

    fit(Nested, Watched(chunks=["net.blocks.*", "net.blocks.*.0"], window=1))


def test_a_forward_that_writes_its_own_streamed_weights_is_refused() -> None:
    class Writing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(input)

    class Writer(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.head = Writing(8, 4)

    with pytest.raises(RuntimeError, match=r"chunk 'net\.head' writes its own weights.*pin=\['net\.head'\]") as caught:
        fit(Writer, Watched())
    assert re.search("outside of forward", str(caught.value))
    assert fit(Writer, Watched(pin=["net.head"])).strategy.copied_bytes > 0


def test_a_fused_kernel_that_skips_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this torch does: a kernel that leaves weights as they are must not go unnoticed."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))], lr=0.1, fused=True)
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
    with pytest.raises(ConfigurationError, match=r"fused kernel of SGD for torch.bfloat16 .* Pass fused=False"):
        check_fused(optimizer)
    monkeypatch.undo()
    check_fused(torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], lr=0.1, fused=True))
