"""Arenas are exact, share no storage with their neighbours, and live as long as their last tensor."""

import gc
import os
import warnings
from pathlib import Path

import pytest
import torch

from ramtorch_core.errors import HostMemoryError
from ramtorch_core.memory import host
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.host import ALIGNMENT, Arena, aligned, available_bytes, last_cache_bytes

CPU = Device("cpu")


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("power", [10, 16, 20, 24])
def test_an_arena_for_a_tensor_just_past_a_power_of_two_wastes_less_than_one_percent(power):
    nbytes = aligned(4 * ((1 << power) + 1))
    assert Arena(nbytes, CPU).nbytes == nbytes
    assert nbytes <= 1.01 * 4 * ((1 << power) + 1) or power < 16  # 256-byte alignment shows in tiny tensors only


@pytest.mark.skipif("sys.platform != 'linux'")
def test_an_arena_occupies_its_size_and_no_more():
    before = resident_bytes()
    arena = Arena((64 << 20) + 4, CPU)
    grown = resident_bytes() - before
    assert (60 << 20) < grown < (66 << 20)
    del arena
    gc.collect()
    assert resident_bytes() - before < (8 << 20)


def test_tensors_have_a_storage_of_their_own_and_start_as_zero():
    arena = Arena(4 * ALIGNMENT, CPU)
    first = arena.tensor(0, torch.float32, (3, 5), (5, 1))
    second = arena.tensor(ALIGNMENT, torch.bfloat16, (4, 2), (1, 4))
    assert (first == 0).all()
    assert first.untyped_storage().nbytes() == 3 * 5 * 4
    assert second.untyped_storage().nbytes() == 4 * 2 * 2
    assert second.stride() == (1, 4)
    second.fill_(1)
    assert (first == 0).all()
    assert arena.flat[ALIGNMENT : ALIGNMENT + 2].view(torch.bfloat16).item() == 1


def test_tensors_stay_valid_after_their_arena_is_gone():
    arena = Arena(1 << 20, CPU)
    tensor = arena.tensor(0, torch.float32, (1 << 18,), (1,))
    tensor.fill_(3)
    del arena
    gc.collect()
    assert (tensor == 3).all()


def test_an_arena_knows_how_many_of_its_tensors_are_alive_also_by_views():
    arena = Arena(1 << 12, CPU)
    assert arena.tensors_alive() == 0
    first, second = (arena.tensor(offset, torch.float32, (8,), (1,)) for offset in (0, 256))
    assert arena.tensors_alive() == 2
    view = first[2:]
    del first
    assert arena.tensors_alive() == 2
    del view, second
    assert arena.tensors_alive() == 0


def test_an_empty_arena_is_allowed():
    arena = Arena(0, CPU)
    assert arena.flat.numel() == 0
    assert not arena.page_locked
    arena.unlock()


def test_memory_that_cannot_be_had_is_an_error_of_its_own_kind():
    with pytest.raises(HostMemoryError, match="cannot be had"):
        Arena(1 << 60, CPU)


def test_the_available_memory_is_positive_or_unknown():
    available = available_bytes()
    assert available is None or available > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_reads_the_arena_and_leaves_its_lock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    unlocked = []
    monkeypatch.setattr(Device, "page_lock", lambda *_: True)
    monkeypatch.setattr(Device, "page_unlock", lambda *_: unlocked.append(os.getpid()))
    arena = Arena(1024, Device("cpu"))
    tensor = arena.tensor(256, torch.float32, (4,), (1,))
    tensor.fill_(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of torch exist in this process
        child = os.fork()
    if child == 0:
        right = bool(tensor.sum().item() == 12.0)
        del tensor, arena
        os._exit(0 if right and not unlocked else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del tensor, arena
    assert unlocked == [os.getpid()]


def test_memory_is_what_the_tightest_control_group_leaves(tmp_path: Path) -> None:
    membership, mount = tmp_path / "cgroup", tmp_path / "mount"

    def limit(folder: str, **files: str) -> None:
        (mount / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (mount / folder / name.replace("__", ".")).write_text(content + "\n")

    def left() -> list[int]:
        return list(host._room_in_groups(membership, mount))

    assert left() == []
    membership.write_text("0::/jobs/one/task\n")
    limit("", memory__stat="inactive_file 0")  # the root has no limit
    limit("jobs", memory__max="max", memory__current="7", memory__stat="inactive_file 0")
    assert left() == []
    limit("jobs/one", memory__max="1000", memory__current="700", memory__stat="anon 600\ninactive_file 100")
    limit("jobs/one/task", memory__max="900", memory__current="700", memory__stat="inactive_file 100\nshmem 3")
    limit("jobs/two", memory__max="1", memory__current="1", memory__stat="inactive_file 0")
    assert left() == [300, 400]
    (mount / "jobs/one/memory.stat").unlink()
    assert left() == [300, 300]
    membership.write_text("12:cpu,cpuacct:/jobs\n4:hugetlb,memory:/slurm/job_1\n0::/nowhere\n")
    usage = {"memory__usage_in_bytes": "30", "memory__stat": "inactive_file 1\ntotal_inactive_file 10"}
    limit("memory/slurm", memory__limit_in_bytes="9223372036854771712", **usage)
    limit("memory/slurm/job_1", memory__limit_in_bytes="100", **usage)
    assert left() == [80, 9223372036854771712 - 20]


def test_memory_that_a_group_has_used_up_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_room_in_groups", lambda: iter([10, -5]))
    assert available_bytes() == 0
    monkeypatch.setattr(host, "_room_in_groups", lambda: iter([10, 20]))
    assert available_bytes() == 10


def test_the_last_caches_of_all_processors_that_may_be_used_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(processor: int, index: int, level: str, size: str, shared: str) -> None:
        folder = tmp_path / f"cpu{processor}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, content in {"level": level, "size": size, "shared_cpu_list": shared}.items():
            (folder / name).write_text(content + "\n")

    for processor, neighbours in enumerate(["0-1", "0-1", "2-3", "2-3", "4"]):
        describe(processor, 0, "1", "48K", str(processor))
        describe(processor, 1, "2", "2048K", str(processor))
        describe(processor, 2, "3", "300M", neighbours)
        describe(processor, 3, "?", "1G", neighbours)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert last_cache_bytes(tmp_path) == 2 * (300 << 20)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4})
    assert last_cache_bytes(tmp_path) == 300 << 20
    assert last_cache_bytes(tmp_path / "none") == 0
