"""examples/train_gpt.py learns, writes what it promises, and resumes bit for bit."""

import math
from pathlib import Path

import lightning as L
import matplotlib.image
import pytest
import torch
import train_gpt
from lightning.pytorch.strategies import SingleDeviceStrategy

SMALL = ["--steps", "12", "--epochs", "3", "--batch", "2", "--sample-bytes", "16"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class PowerCut(L.Callback):
    """Ends the run with an error in the middle of its second epoch."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 6:
            raise OSError("power cut")


def train(out: Path, *more: str) -> dict:
    """Runs the example and returns its newest checkpoint."""
    train_gpt.main([*SMALL, "--out", str(out), *more])
    return torch.load(out / "last.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """One uninterrupted run: its folder and its last checkpoint."""
    out = tmp_path_factory.mktemp("run")
    return out, train(out)


def assert_equal_state(mine: object, other: object) -> None:
    """Both are equal to the last bit, through nested dictionaries and lists."""
    if isinstance(mine, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(mine, other)
    elif isinstance(mine, dict):
        assert isinstance(other, dict)
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert_equal_state(value, other[key])
    elif isinstance(mine, list | tuple):
        assert isinstance(other, list | tuple)
        assert len(mine) == len(other)
        for first, second in zip(mine, other, strict=True):
            assert_equal_state(first, second)
    else:
        assert mine == other


def test_validation_loss_falls_from_guessing(run: tuple[Path, dict]) -> None:
    """It starts at 8 bits per byte, where all bytes are equally likely, and loses a quarter in twelve steps."""
    out, _ = run
    losses = list(train_gpt.read_history(out / "metrics")["validation_loss"].values())
    assert len(losses) == 4
    assert losses[0] == pytest.approx(math.log(256), abs=1e-4)
    assert losses[-1] < 0.75 * losses[0]


def test_sample_and_curve_are_written(run: tuple[Path, dict]) -> None:
    out, _ = run
    sample = (out / "sample.txt").read_bytes().decode()
    assert sample.startswith("class ")
    assert len(sample) > len("class ")
    picture = matplotlib.image.imread(out / "loss.png")
    assert picture.shape[1] > 600
    assert picture.std() > 0.01, "the chart is blank"


def test_resumed_run_equals_uninterrupted_one(
    run: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments, learning rate and loss curve are the same after an error and `--resume last`."""
    build = train_gpt.build_trainer

    def build_with_power_cut(options: object) -> L.Trainer:
        trainer = build(options)
        trainer.callbacks.append(PowerCut())
        return trainer

    with monkeypatch.context() as patched:
        patched.setattr(train_gpt, "build_trainer", build_with_power_cut)
        with pytest.raises(OSError, match="power cut"):
            train(tmp_path)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4

    resumed = train(tmp_path, "--resume", "last")
    out, uninterrupted = run
    assert resumed["global_step"] == uninterrupted["global_step"] == 12
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_equal_state(resumed[part], uninterrupted[part])
    validation = train_gpt.read_history(tmp_path / "metrics")["validation_loss"]
    assert validation == train_gpt.read_history(out / "metrics")["validation_loss"]


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_streamed_run_equals_plain_one(
    run: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    """The strategy changes where weights live, not one bit of the result."""
    if activations == "keep":
        streamed = train(tmp_path / "streamed", "--activations", "keep", "--window", "1", "--pin", "1")
    else:
        streamed = run[1]
    monkeypatch.setattr(train_gpt, "OffloadStrategy", lambda **_: SingleDeviceStrategy("cpu"))
    plain = train(tmp_path / "plain")
    assert_equal_state(streamed["state_dict"], plain["state_dict"])
    assert_equal_state(streamed["optimizer_states"], plain["optimizer_states"])


def test_mixed_precision_learns(tmp_path: Path) -> None:
    """What a GPU run does by default: autocast, a fused optimizer and gradient clipping together."""
    train(tmp_path, "--precision", "bf16-mixed")
    losses = list(train_gpt.read_history(tmp_path / "metrics")["validation_loss"].values())
    assert losses[-1] < 0.75 * losses[0]


def test_second_run_in_a_folder_replaces_the_first(tmp_path: Path) -> None:
    """Otherwise `--resume last` would go on from a forgotten run."""
    train(tmp_path, "--seed", "1")
    train(tmp_path, "--seed", "2", "--steps", "6")
    assert sorted(file.name for file in tmp_path.glob("*.ckpt")) == ["best.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6
    assert list(train_gpt.read_history(tmp_path / "metrics")["validation_loss"]) == [0, 1, 3, 5]


def test_checkpoint_opens_without_the_strategy(run: tuple[Path, dict]) -> None:
    """It is an ordinary Lightning checkpoint with the plain model's keys."""
    out, checkpoint = run
    model = train_gpt.GPT(train_gpt.SIZES["tiny"])
    assert [f"model.{name}" for name in model.state_dict()] == list(checkpoint["state_dict"])
    module = train_gpt.LanguageModel.load_from_checkpoint(out / "best.ckpt")
    assert module.hparams.size == "tiny"


def test_own_text_is_learned(tmp_path: Path) -> None:
    """A text that repeats itself is soon predicted better than the library's sources in as many steps."""
    file = tmp_path / "text"
    file.write_bytes(b"abcd" * 10_000)
    train(tmp_path / "out", "--text", str(file), "--prompt", "ab", "--steps", "24", "--learning-rate", "5e-3")
    losses = list(train_gpt.read_history(tmp_path / "out" / "metrics")["validation_loss"].values())
    assert losses[-1] < 0.5
    assert (tmp_path / "out" / "sample.txt").read_text().startswith("abcdabcd")


def test_text_is_the_same_every_time() -> None:
    text = train_gpt.standard_library()
    assert text == train_gpt.standard_library()
    assert len(text) > 1_000_000
    assert b"def " in text


def test_text_shorter_than_its_windows_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has 2579 bytes; a context of 128 needs 2580"):
        train_gpt.TextData(b"a" * 2579, "a", context=128, batch=1, epoch_steps=1, seed=0)


def test_steps_that_epochs_do_not_divide_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_gpt.parse(["--steps", "10", "--epochs", "3"])
    assert "--steps 10 is not a multiple of --epochs 3" in capsys.readouterr().err


def test_history_of_a_resumed_run_replaces_what_came_after_its_start(tmp_path: Path) -> None:
    for version, rows in {0: ["4,3.0,", "9,2.0,", "9,,2.5"], 10: ["7,1.0,", "9,,1.5"], 2: ["6,9.0,"]}.items():
        folder = tmp_path / f"version_{version}"
        folder.mkdir()
        (folder / "metrics.csv").write_text("\n".join(["step,training_loss,validation_loss", *rows]))
    history = train_gpt.read_history(tmp_path)
    assert history == {"training_loss": {4: 3.0, 6: 9.0, 7: 1.0}, "validation_loss": {9: 1.5}}
