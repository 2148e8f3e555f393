"""What a run leaves when it is killed, when the disk is full, and when it is told to stop: something to go on from."""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import robustness_cases
from robustness_cases import STRATEGIES, contents, saving_trainer, train, watching_files
from stream_cases import assert_same

from ramtorch_lightning import LocalCheckpointIO

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
two_strategies = pytest.mark.parametrize("strategy", ["offload", "pipeline-streamed"])


def start(*arguments: object) -> "subprocess.Popen[str]":
    """`robustness_cases.py` as a process of its own."""
    tests = Path(robustness_cases.__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    command = [sys.executable, robustness_cases.__file__, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(180)
@two_strategies
def test_a_run_killed_in_the_middle_of_a_checkpoint_goes_on_from_the_one_before(tmp_path: Path, strategy: str) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    train(saving_trainer(strategy, whole), whole)
    with start(strategy, killed, "--kill-in-file", 6) as process:  # last.ckpt, of the third epoch
        said = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, said
    epochs = ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]
    assert names(killed) == [*epochs, "last.ckpt", f"last.ckpt.{process.pid}.partial"]
    assert_same(contents(killed / "last.ckpt"), contents(whole / "epoch=1-step=8.ckpt"))
    train(saving_trainer(strategy, killed), killed)
    assert_same(contents(killed / "last.ckpt"), contents(whole / "last.ckpt"))
    assert names(killed)[-1] == "last.ckpt"  # what the killed process left is gone


@contextmanager
def small_files(_folder: Path) -> Iterator[Callable[[], None]]:
    """A limit of this process, for where no small disk can be had; gives a function that sets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """Gives a function that fills the disk, but for some bytes; there is room again afterwards."""
    filling = folder / "filling"

    def fill() -> None:
        free = os.statvfs(folder)
        filling.write_bytes(bytes(free.f_bavail * free.f_bsize - 8192))

    try:
        yield fill
    finally:
        filling.unlink(missing_ok=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def check_that_training_survives_a_full_disk(
    strategy: str, folder: Path, whole: Path, shortage: Any, code: int
) -> None:
    train(saving_trainer(strategy, whole), whole)
    trainer = saving_trainer(strategy, folder)
    told = pytest.raises(OSError, match=r"the checkpoint, of about .* was not written")
    with shortage(folder) as begin:
        at_last_of_third_epoch = lambda file, written: begin() if (file, written) == (6, 0) else None
        with watching_files(at_last_of_third_epoch), told as caught:
            train(trainer, folder)
    assert (caught.value.errno, caught.value.filename) == (code, str(folder / "last.ckpt"))
    assert [name for name in names(folder) if "partial" in name] == []
    assert_same(contents(folder / "last.ckpt"), contents(whole / "epoch=1-step=8.ckpt"))
    trainer.save_checkpoint(folder / "last.ckpt")
    assert_same(contents(folder / "last.ckpt"), contents(whole / "epoch=2-step=12.ckpt"))
    train(saving_trainer(strategy, folder), folder)
    assert_same(contents(folder / "last.ckpt"), contents(whole / "last.ckpt"))


@every_strategy
def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, small_disk: Path, strategy: str) -> None:
    check_that_training_survives_a_full_disk(strategy, small_disk, tmp_path / "whole", full_disk, errno.ENOSPC)


@two_strategies
def test_a_limit_on_files_is_told_and_loses_nothing(tmp_path: Path, strategy: str) -> None:
    check_that_training_survives_a_full_disk(strategy, tmp_path / "a", tmp_path / "whole", small_files, errno.EFBIG)


def test_what_other_running_processes_write_is_left_alone(tmp_path: Path) -> None:
    theirs = [tmp_path / f"a.ckpt.{process}.partial" for process in (os.getppid(), "mine", 2**70)]
    for path in theirs:
        path.touch()
    LocalCheckpointIO().save_checkpoint({"epoch": 1}, tmp_path / "a.ckpt")
    assert all(path.exists() for path in theirs)


@pytest.mark.slow
@pytest.mark.timeout(120)
@two_strategies
def test_a_process_that_is_told_to_end_does_so_and_can_be_resumed(tmp_path: Path, strategy: str) -> None:
    with start(strategy, tmp_path, "--endless") as process:
        assert process.stdout is not None
        assert any("ready" in line for line in process.stdout)
        process.terminate()
        said = process.communicate()[0]
    assert process.returncode == 0, said  # Lightning's, whatever the strategy
    assert [name for name in names(tmp_path) if "partial" in name] == []
    epochs = int(names(tmp_path)[0].partition("=")[2].partition("-")[0]) + 5
    trainer = saving_trainer(strategy, tmp_path, epochs)
    train(trainer, tmp_path)
    assert trainer.current_epoch == epochs
