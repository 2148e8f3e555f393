"""`python -m ramtorch_lightning.plan`: what fits, without values and without a GPU."""

import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from ramtorch_core import prediction
from ramtorch_core.planning import Subject, describe_machine, estimate, host_bytes
from ramtorch_core.prediction import Optimizer, Order, StreamingPlan, step_cost
from ramtorch_lightning import plan as plan_command
from ramtorch_lightning.plan import main
from ramtorch_lightning.plan_config import from_config

MACHINE = ["--gpu", "24GB", "--ram", "32GB", "--pcie", "25", "--tflops", "150"]


class Large(pl.LightningModule):
    """4.3 billion parameters in 16 blocks; the tests would not like to hold them."""

    def __init__(self, width: int = 16384, depth: int = 16, example: bool = True) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        if example:
            self.example_input_array = torch.zeros(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def configure_chunks(self) -> str:
        return "blocks.*"


class Late(Large):
    def __init__(self) -> None:
        super().__init__(depth=1)

    def configure_model(self) -> None:
        self.blocks.append(nn.Linear(16384, 16384, bias=False))


class Fails(Large):
    """It asks for a file that is not there."""

    def __init__(self) -> None:
        super().__init__(64, 2)

    def configure_model(self) -> None:
        raise FileNotFoundError("weights.bin")


class Tied(Large):
    """One weight twice, and somebody who looks at it from outside."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__(width, 3)
        self.blocks[1].weight = self.blocks[0].weight
        self.seen = weakref.ref(self.blocks[2].weight)


class Reads(Large):
    """Its forward depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.sum())


class Narrow(Large):
    def __init__(self, block: nn.Module, factor: float = 1.0) -> None:
        super().__init__(64, 2)
        self.extra, self.factor = block, factor


def here(name: str) -> str:
    """The class in this file, for the command line."""
    return f"{__name__}:{name}"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules["test_plan"])


def plan(*arguments: str, capsys: Any) -> tuple[int, str]:
    code = main(arguments)
    output = capsys.readouterr()
    return code, output.out + output.err


def test_a_model_larger_than_the_gpu_fits_by_streaming(capsys: Any) -> None:
    code, text = plan(here("Large"), *MACHINE, "--batch", "4096", capsys=capsys)
    assert "4,294,967,296 parameters" in text
    assert "16 chunks stream" in text
    assert "GPU      fits" in text
    assert "of 32.0 GB: does not fit" in text
    assert code == 1
    code, text = plan(here("Large"), *MACHINE, "--ram", "128GB", capsys=capsys)
    assert (code, "does not fit" in text) == (0, False)


def test_a_gpu_that_holds_no_chunk_is_too_small(capsys: Any) -> None:
    code, text = plan(here("Large"), "--gpu", "400MB", capsys=capsys)
    assert code == 1
    assert "does not fit: no window, pin and activation policy fits" in text


def test_estimates_count_parameters_arithmetic_and_activations() -> None:
    rates = describe_machine(device_bytes=24e9, pcie=25e9, host_memory=60e9)

    def build() -> Subject:
        module = Large(1024, 4)
        x = torch.zeros(8, 1024)
        return Subject(module, lambda: module(x), "blocks.*")

    found = estimate(build, rates, 1e12, autocast=torch.bfloat16)
    assert (found.parameters, found.trained, found.bytes) == (4 << 20, 4 << 20, 16 << 20)
    for chunk in found.calibration.chunks:
        assert chunk.forward == 2 * 8 * 1024**2 / 1e12
        assert chunk.backward == 2 * chunk.forward
        assert chunk.weight_bytes == 2 << 20
        assert chunk.kept_bytes == 8 * 1024 * 2  # the input, in bfloat16
    assert step_cost(found.calibration).loss_bytes == 12 * 8 * 1024
    assert step_cost(found.calibration).base_bytes == 8 * 1024 * 4  # the input
    masters, moments, shadows, staging = 16 << 20, 32 << 20, 8 << 20, 8 << 20
    assert host_bytes(found, StreamingPlan(optimizer=Optimizer.OVERLAPPED)) == masters + moments + shadows + staging
    assert host_bytes(found, StreamingPlan(pin=4)) == 0


def test_without_an_example_tokens_are_asked_for_and_enough(capsys: Any) -> None:
    arguments = [here("Large"), "--init", "example=False", *MACHINE, "--ram", "1TB"]
    code, text = plan(*arguments, capsys=capsys)
    assert code == 2
    assert "example_input_array" in text
    assert "--tokens" in text
    code, text = plan(*arguments, "--tokens", "4096", capsys=capsys)
    assert code == 0
    assert "activations and the loss are not counted: --tokens is given" in text
    code, text = plan(here("Large"), *MACHINE, "--ram", "1TB", "--tokens", "4096", capsys=capsys)
    assert "activations and the loss are not counted: --tokens is given" in text


def test_a_forward_that_reads_values_is_explained(capsys: Any) -> None:
    code, text = plan(here("Reads"), "--init", "width=2048", "depth=2", *MACHINE, capsys=capsys)
    assert code == 2
    assert "cannot run on shapes alone" in text


def test_the_host_has_to_hold_the_model_before_its_chunks_move_to_the_gpu(capsys: Any) -> None:
    arguments = [here("Large"), "--init", "width=1024", "depth=4", "--gpu", "24GB"]
    _, text = plan(*arguments, capsys=capsys)
    assert "window=1, pin=4" in text
    assert "RAM      16.8 MB (the model as it is built" in text
    for ram, fits in (("16MB", 1), ("17MB", 0)):
        assert plan(*arguments, "--ram", ram, capsys=capsys)[0] == fits


def test_arguments_of_the_class_may_be_given_one_by_one(capsys: Any) -> None:
    together = plan(here("Large"), "--init", "width=2048", "depth=2", *MACHINE, capsys=capsys)
    assert plan(here("Large"), "--init", "width=2048", "--init", "depth=2", *MACHINE, capsys=capsys) == together


def test_what_configure_model_adds_is_planned(capsys: Any) -> None:
    _, text = plan(here("Late"), *MACHINE, capsys=capsys)
    assert "2 chunks stream" in text


def write(path: Path, strategy: str = "offload", model: str | None = None, trainer: str = "") -> str:
    file = path / "config.yaml"
    file.write_text(
        f"""
trainer:
  precision: bf16-mixed
  accumulate_grad_batches: 4{trainer}
  strategy: {strategy}
model:
  class_path: {__name__}.{model or "Large"}
  init_args:
    width: 8192
    depth: 6
"""
    )
    return str(file)


def test_a_configuration_gives_model_precision_accumulation_and_knobs(tmp_path: Path, capsys: Any) -> None:
    knobs = "{class_path: ramtorch_lightning.OffloadStrategy, init_args: {window: 3, pin: 1, activations: keep}}"
    file = write(tmp_path, knobs)
    chosen = from_config(file)
    assert (chosen.name, chosen.precision, chosen.accumulate) == ("Large", "bf16-mixed", 4)
    code, text = plan("--config", file, *MACHINE, capsys=capsys)
    assert code == 0
    assert "given    window=3, pin=1, activations=keep" in text
    assert "8 accumulated batches instead of 4" in text
    code, text = plan("--config", file, "--gpu", "500MB", capsys=capsys)
    assert code == 1
    assert "GPU: does not fit" in text


def planned_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is recommended, from what."""
    asked: list[Any] = []

    def recommend(calibration: Any, on: Any, base: StreamingPlan, **from_what: Any) -> Any:
        asked.append((on, base, from_what))
        return prediction.recommend(calibration, on, base, **from_what)

    monkeypatch.setattr(plan_command, "recommend", recommend)
    return asked


def offload(knobs: str) -> str:
    return f"{{class_path: ramtorch_lightning.OffloadStrategy, init_args: {{{knobs}}}}}"


def test_knobs_that_are_auto_are_chosen_and_the_others_stay(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = planned_of(monkeypatch)
    for knobs, expected in (
        ("window: auto, pin: auto, activations: auto", (None, None, (False, True))),
        ("window: 3, pin: auto, activations: keep", ((3,), None, (False,))),
        ("window: auto, pin: auto, activations: recompute", (None, None, (True,))),
        ("window: auto, pin: [blocks.1], activations: auto", (None, ((1,),), (False, True))),
        ("window: auto", (None, (0,), (True,))),
        ("pin: auto", ((2,), None, (True,))),
    ):
        code, text = plan("--config", write(tmp_path, offload(knobs)), *MACHINE, capsys=capsys)
        assert code == 0
        assert "given " not in text
        from_what = asked.pop()[2]
        assert (from_what["windows"], from_what["resident"], from_what["checkpoint"]) == expected


def test_knobs_that_are_left_out_are_those_of_the_run(tmp_path: Path, capsys: Any) -> None:
    full = "window: 2, pin: 0, activations: checkpoint"
    told = [plan("--config", write(tmp_path, offload(knobs)), *MACHINE, capsys=capsys) for knobs in (full, "pin: 0")]
    told.append(plan("--config", write(tmp_path, "offload"), *MACHINE, capsys=capsys))
    assert told[0] == told[1] == told[2]
    assert "given    window=2, pin=0, activations=checkpoint" in told[0][1]


def test_in_place_of_another_strategy_everything_is_chosen(tmp_path: Path, capsys: Any) -> None:
    code, text = plan("--config", write(tmp_path, "ddp"), *MACHINE, capsys=capsys)
    assert code == 0
    assert "given " not in text


def test_arguments_on_which_no_plan_depends_may_be_objects(tmp_path: Path) -> None:
    file = write(tmp_path, offload("device: 'cuda:0', split_fn: my.split, checkpoint_io: {class_path: my.IO}"))
    assert from_config(file).strategy["window"] == 2


def test_what_the_trainer_and_the_strategy_are_told_is_planned_for(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = planned_of(monkeypatch)
    plan("--config", write(tmp_path, offload("n_microbatches: 3, gradients: published")), *MACHINE, capsys=capsys)
    _, base, _ = asked.pop()
    assert (base.microbatches, base.batches, base.order) == (3, 4, Order.CHUNK)
    assert (base.optimizer, base.clip) == (Optimizer.PUBLISHED, False)
    clips = "\n  gradient_clip_val: 1.0"
    plan("--config", write(tmp_path, offload("window: 2"), trainer=clips), *MACHINE, capsys=capsys)
    _, base, _ = asked.pop()
    assert (base.microbatches, base.batches, base.order) == (1, 4, Order.MICROBATCH)
    assert (base.optimizer, base.clip) == (Optimizer.OVERLAPPED, True)
    value = clips + "\n  gradient_clip_algorithm: value"
    _, text = plan("--config", write(tmp_path, offload("window: 2"), trainer=value), *MACHINE, capsys=capsys)
    assert asked.pop()[1].optimizer is Optimizer.PUBLISHED
    assert "copies to undo" not in text
    plan("--config", write(tmp_path, offload("window: 2")), *MACHINE, "--precision", "16", capsys=capsys)
    assert asked.pop()[1].optimizer is Optimizer.PUBLISHED  # a scaler looks at gradients


def test_an_update_comes_after_several_batches_of_microbatches(tmp_path: Path, capsys: Any) -> None:
    def seconds(*flags: str) -> tuple[float, float]:
        file = write(tmp_path, offload("window: 2, pin: 0, activations: checkpoint, n_microbatches: 2"))
        _, text = plan("--config", file, *MACHINE, *flags, capsys=capsys)
        (line,) = [line for line in text.splitlines() if line.startswith("given")]
        found = re.search(r": ([\d.e+-]+) s per batch in the mean, ([\d.e+-]+) s per step .* \((\d) batches\)", line)
        assert found is not None
        assert float(found[1]) == pytest.approx(float(found[2]) / int(found[3]), rel=1e-3)
        return float(found[1]), float(found[2])

    batch, step = seconds()  # of 4 batches
    least = 6 * 8192**2 * 28 / 60e9  # what the host's memory moves in one update
    assert step > least > batch
    assert seconds("--accumulate", "2")[0] > batch  # the same update after half of them


def test_more_microbatches_are_offered_as_they_would_run(capsys: Any) -> None:
    """Side by side, as `n_microbatches=` has them."""
    seconds, offered = [], [""]
    for count in ("1", "2"):
        _, text = plan(here("Large"), *MACHINE, "--batch", "4096", "--microbatches", count, capsys=capsys)
        (found,) = re.findall(r"([\d.]+) s per step", text)
        seconds.append(float(found))
        offered = re.findall(r"2 microbatches instead of 1 would buy (\d+) % less", text) or offered
    assert float(offered[0]) == pytest.approx(100 * (1 - seconds[1] / 2 / seconds[0]), abs=0.6)


def test_updates_run_ahead_of_the_norm_as_far_as_the_rest_of_the_host_allows(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = planned_of(monkeypatch)
    clips = "\n  gradient_clip_val: 1.0"
    file = write(tmp_path, offload("window: 2, n_microbatches: 2"), trainer=clips)
    parts = []
    for ram in ("1TB", "10GB", "8GB", "1GB"):
        plan("--config", file, *MACHINE[:2], "--ram", ram, capsys=capsys)
        parts.append(asked.pop()[1].ahead)
    parameters = 6 * 8192**2
    needed = parameters * (4 + 8 + 2 + 4 + 4)  # masters, moments, shadows, sums, and those on their way to updates
    assert parts[0] == pytest.approx(3 / 12)
    assert parts[1] == pytest.approx((10e9 - needed) / 4 / (12 * parameters), rel=1e-3)
    assert parts[2:] == [0.0, 0.0]


def test_a_part_of_the_gpu_is_left_to_cuda_and_the_allocator(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = planned_of(monkeypatch)
    _, text = plan(here("Large"), *MACHINE, capsys=capsys)
    assert "24.0 GB on the GPU, of which a plan may take 22.3" in text
    assert asked.pop()[0].gpu_bytes == pytest.approx(0.95 * (24e9 - 0.5e9))
    for given, expected in (("20GB", 0.98 * 20e9), ("30GB", 0.95 * (24e9 - 0.5e9))):
        file = write(tmp_path, offload(f"window: auto, gpu_memory: {given}"))
        plan("--config", file, *MACHINE, capsys=capsys)
        assert asked.pop()[0].gpu_bytes == pytest.approx(expected)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("pipeline", "pipeline_offload_simulator"),
        ("{class_path: ramtorch_lightning.PipelineStrategy, init_args: {}}", "pipeline_offload_simulator"),
        (offload("pin: [nowhere]"), "no chunk is named 'nowhere'"),
        (offload("window: 0"), "window=0"),
        (offload("window: two"), "window='two': at least 1 slot"),
        (offload("window: null"), "window=None"),
        (offload("pin: 1.5"), "pin: 1.5 is neither a count"),
        (offload("chunks: 5"), "chunks=5: names or globs"),
        (offload("chunks: [5]"), "chunks=[5]: names or globs"),
        (offload("pin: null"), "pin: None is neither a count"),
        (offload("pin: true"), "pin=True"),
        ("{class_path: ramtorch_lightning.OffloadStrategy, init_args: [3]}", "init_args=[3] must be a mapping"),
        (offload("activations: sometimes"), "activations='sometimes'"),
        (offload("windw: 3"), "OffloadStrategy has no argument 'windw': did you mean 'window'"),
        (offload("stream_dtype: float32"), "stream_dtype='float32' is not planned for"),
        (offload("window: 2, gpu_memory: 20GB"), "gpu_memory='20GB' limits what is chosen, and nothing is"),
        (offload("updates: 2"), "updates=2: the share of parameters"),
        (offload("updates: true"), "updates=True: use 'host'"),
        (offload("gradients: none"), "gradients='none'"),
        (offload("n_microbatches: -1"), "n_microbatches=-1: at least 1 is needed"),
        (offload("resident_below: some"), "resident_below='some'"),
        (offload("window: auto, gpu_memory: 20 cats"), "gpu_memory='20 cats'"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    strategy: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    code, text = plan("--config", write(tmp_path, strategy), *MACHINE, capsys=capsys)
    assert code == 2
    assert text.startswith("plan: ")
    assert message in text


def test_objects_inside_of_a_configuration_are_made_too(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"""
model:
  class_path: {__name__}.Narrow
  init_args:
    block: {{class_path: torch.nn.Linear, init_args: {{in_features: 3, out_features: 5}}}}
    factor: 0.5
"""
    )
    module: Any = from_config(str(file)).build()
    assert (module.extra.in_features, module.extra.out_features, module.factor) == (3, 5, 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the model"),
        (["nowhere.at_all:Model"], "nowhere"),
        (["torch.nn:Linear", "--init", "in_features=2", "out_features=2", *MACHINE], "is no LightningModule"),
        (["torch.nn:Linear", "--init", "2"], "write NAME=VALUE"),
        (["--config", "missing.yaml"], "no such file"),
        ([here("Large"), "--init", "colour=2", *MACHINE], "Large cannot be built: TypeError: "),
        ([here("Fails"), *MACHINE], "configure_model of Fails fails: FileNotFoundError: weights.bin"),
        ([here("Large"), "--pcie", "50"], "--pcie is of a GPU that --gpu describes"),
        ([here("Large"), *MACHINE, "--accumulate", "1000000"], "plan: 16 chunks (layers), batches=1000000"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: Any) -> None:
    code, text = plan(*arguments, capsys=capsys)
    assert code == 2
    assert message in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it must be a mapping"),
        ("- 1", "it must be a mapping"),
        ("trainer: 5", "it must be a mapping"),
        ("[1, 2", "cannot be read as YAML"),
        ("trainer: {accumulate_grad_batches: x}\nmodel: {class_path: a.B}", "accumulate_grad_batches='x'"),
        ("trainer: {gradient_clip_val: x}\nmodel: {class_path: a.B}", "gradient_clip_val='x': a number"),
        ("trainer: {gradient_clip_val: -1}\nmodel: {class_path: a.B}", "gradient_clip_val=-1: a number"),
        ("trainer: {gradient_clip_val: .nan}\nmodel: {class_path: a.B}", "gradient_clip_val=nan: a number"),
        (
            "trainer: {gradient_clip_algorithm: valu}\nmodel: {class_path: a.B}",
            "gradient_clip_algorithm='valu': use one of 'norm', 'value'",
        ),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    content: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    code, text = plan("--config", str(file), *MACHINE, capsys=capsys)
    assert code == 2
    assert text.startswith("plan: ")
    assert text.count("\n") == 1
    assert message in text


def test_a_configuration_without_the_models_class_is_explained(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {width: 3}\n")
    code, text = plan("--config", str(file), capsys=capsys)
    assert code == 2
    assert "Pass module:Class" in text


def test_without_a_gpu_one_has_to_be_described(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    code, text = plan(here("Late"), capsys=capsys)
    assert code == 2
    assert "--gpu 24GB" in text


@pytest.mark.parametrize(
    ("precision", "slot", "bytes_per_parameter"),
    [("bf16-mixed", "536.9", 4 + 8 + 2), ("bf16-true", "536.9", 2 + 4), ("16", "536.9", 14), ("32", "1,073.7", 4 + 8)],
)
def test_weights_and_moments_take_what_the_precision_says(
    precision: str, slot: str, bytes_per_parameter: int, tmp_path: Path, capsys: Any
) -> None:
    file = write(tmp_path, offload("window: 2"))
    Path(file).write_text(Path(file).read_text().replace("8192", "16384").replace("batches: 4", "batches: 1"))
    _, text = plan("--config", file, *MACHINE, "--precision", precision, capsys=capsys)
    assert f"with {slot} MB" in text
    gradients = 4 * float(slot.replace(",", "")) / 1e3
    if precision == "16":  # those that are scaled are published, all of them in float32
        gradients = 6 * 16384**2 * 4 / 1e9
    gigabytes = 6 * 16384**2 * bytes_per_parameter / 1e9 + gradients
    assert f"RAM      {gigabytes:.1f} GB" in text


def test_an_unknown_precision_is_refused(capsys: Any) -> None:
    code, text = plan(here("Large"), *MACHINE, "--precision", "fp99", capsys=capsys)
    assert code == 2
    assert "'fp99' is not planned for; use one of bf16-mixed" in text


@pytest.mark.parametrize("flag", ["--tflops", "--pcie", "--ram-speed", "--batch", "--tokens", "--microbatches"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_amounts_that_cannot_be_are_refused(flag: str, value: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([here("Large"), *MACHINE, f"{flag}={value}"])
    assert f"argument {flag}: {value}: it must be " in capsys.readouterr().err


def test_sizes_need_units(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["x:Y", "--gpu", "24"])
    assert "as in '24GB'" in capsys.readouterr().err


def test_sizes_may_be_bytes_and_small_ones_are_shown_in_megabytes(capsys: Any) -> None:
    arguments = [here("Large"), "--init", "width=1024", "depth=2"]
    in_bytes, in_words = (plan(*arguments, "--gpu", size, capsys=capsys) for size in ("24000000000", "24GB"))
    assert in_bytes == in_words
    code, text = plan(*arguments, "--gpu", "502MB", capsys=capsys)
    assert code == 1
    assert "of which a plan may take 1.9 MB" in text
    assert "fits into 1.9 MB of GPU memory" in text


def test_weights_are_cast_once_whoever_looks_at_them(capsys: Any) -> None:
    code, text = plan(here("Tied"), *MACHINE, "--precision", "bf16-true", capsys=capsys)
    assert code == 0
    assert f"{2 * 2048**2:,} parameters" in text
    assert "with 8.4 MB" in text


def test_the_command_runs() -> None:
    command = [sys.executable, "-m", "ramtorch_lightning.plan", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--tflops" in done.stdout
