"""`LocalCheckpointIO`: complete files or none, without a second copy of the model in memory."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import Classifier, Watched, loader, make_trainer
from stream_cases import assert_same

from ramtorch_lightning import LocalCheckpointIO, checkpoint


@pytest.fixture
def maps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAPPED_BYTES", 0)


def content(value: float = 1.0) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((1000,), value)}, "epoch": 3, "none": None}


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be written")


@pytest.mark.usefixtures("maps_everything")
@pytest.mark.parametrize("form", ["path", "text", "url"])
def test_what_is_written_is_read(tmp_path: Path, form: str) -> None:
    path: Any = tmp_path / "new" / "folder" / "a.ckpt"
    path = {"path": path, "text": str(path), "url": f"file://{path}"}[form]
    io = LocalCheckpointIO()
    io.save_checkpoint(content(), path)
    assert_same(io.load_checkpoint(path), content())
    assert_same(torch.load(tmp_path / "new" / "folder" / "a.ckpt", weights_only=True), content())
    io.remove_checkpoint(path)
    assert list((tmp_path / "new" / "folder").iterdir()) == []


@pytest.mark.usefixtures("maps_everything")
def test_an_error_while_writing_leaves_the_previous_file_and_nothing_else(tmp_path: Path) -> None:
    io, path = LocalCheckpointIO(), tmp_path / "a.ckpt"
    io.save_checkpoint(content(1.0), path)
    with pytest.raises(RuntimeError, match="cannot be written"):
        io.save_checkpoint({**content(2.0), "bad": Unpicklable()}, path)
    assert [one.name for one in tmp_path.iterdir()] == ["a.ckpt"]
    assert_same(io.load_checkpoint(path), content(1.0))


@pytest.mark.usefixtures("maps_everything")
def test_an_interrupt_while_writing_leaves_the_previous_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io, path = LocalCheckpointIO(), tmp_path / "a.ckpt"
    io.save_checkpoint(content(1.0), path)

    def interrupted(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        io.save_checkpoint(content(2.0), path)
    assert [one.name for one in tmp_path.iterdir()] == ["a.ckpt"]
    assert_same(io.load_checkpoint(path), content(1.0))


def test_a_process_killed_while_writing_leaves_the_previous_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    LocalCheckpointIO().save_checkpoint(content(1.0), path)
    script = f"""
        import os, signal, torch
        from ramtorch_lightning import LocalCheckpointIO
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        LocalCheckpointIO().save_checkpoint({{"weight": torch.zeros(1000)}}, {str(path)!r})
    """
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert_same(LocalCheckpointIO().load_checkpoint(path), content(1.0))


def test_checkpoints_never_exist_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = []
    save = torch.save

    def noted(what: Any, file: Any, **options: Any) -> None:
        targets.append(type(file).__name__)
        save(what, file, **options)

    monkeypatch.setattr(torch, "save", noted)
    LocalCheckpointIO().save_checkpoint(content(), tmp_path / "a.ckpt")
    assert targets == ["BufferedWriter"]
    assert [one.name for one in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.mark.usefixtures("maps_everything")
def test_files_are_mapped_and_not_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    LocalCheckpointIO().save_checkpoint(content(), path)
    options: dict[str, Any] = {}
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: (options.update(k), load(*a, **k))[1])
    loaded = LocalCheckpointIO().load_checkpoint(path, weights_only=True)
    assert options["mmap"] is True
    loaded["state_dict"]["weight"].zero_()  # private: the file does not change
    assert_same(LocalCheckpointIO().load_checkpoint(path), content())


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    torch.save(content(), tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert_same(LocalCheckpointIO().load_checkpoint(tmp_path / "old.ckpt"), content())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        LocalCheckpointIO().load_checkpoint(tmp_path / "nowhere.ckpt")


@pytest.mark.usefixtures("maps_everything")
def test_other_file_systems_are_left_to_lightning() -> None:
    io = LocalCheckpointIO()
    io.save_checkpoint(content(), "memory://folder/a.ckpt")
    assert_same(io.load_checkpoint("memory://folder/a.ckpt"), content())
    io.remove_checkpoint("memory://folder/a.ckpt")


@pytest.mark.usefixtures("maps_everything")
def test_training_goes_on_and_saves_over_the_file_that_it_was_resumed_from(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def states(strategy: Any) -> list[Any]:
        found = []
        for steps, resume in ((2, None), (4, path), (8, path)):
            torch.manual_seed(1)
            model = Classifier()
            trainer = make_trainer(strategy() if strategy is Watched else strategy, max_steps=steps)
            trainer.fit(model, loader(), ckpt_path=resume)
            trainer.save_checkpoint(path)
            found.append([model.state_dict(), trainer.optimizers[0].state_dict()])
        return found

    assert_same(states(Watched), states("auto"))


@pytest.mark.parametrize("sizes", [(1000, 100_000), (100_000, 1000), (100_000, 100_000), (1000, 1000)])
def test_what_was_read_from_a_file_stays_when_the_file_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    monkeypatch.setattr(checkpoint, "MAPPED_BYTES", 50_000)
    io, path = LocalCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"a": torch.full((sizes[0],), 1.0)}, path)
    loaded = io.load_checkpoint(path)["a"]
    io.save_checkpoint({"a": torch.full((sizes[1],), 2.0)}, path)
    assert (loaded == 1.0).all()
    assert (io.load_checkpoint(path)["a"] == 2.0).all()
