"""The compiled Adam kernel, against torch's fused one, bit for bit; and what happens where it cannot be built."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ramtorch_core.optim import compiled
from ramtorch_core.optim.compiled import AdamKernel, AdamWeight, adam_kernel

OPTIONS: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
THREADS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

typedef int Create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
__thread char large[1 << 20] __attribute__((tls_model("initial-exec")));
int refuse, started;

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    large[0] = 1;
    int error = refuse ? EAGAIN : ((Create *)dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, run, argument);
    started += !error;
    return error;
}
"""
UPDATE = """
import ctypes, sys, torch
from ramtorch_core.optim.compiled import AdamWeight, adam_kernel

threads, kernel = ctypes.CDLL(sys.argv[1]), adam_kernel()
refuse, started = (ctypes.c_int.in_dll(threads, name) for name in ("refuse", "started"))
options = dict(lr=0.5, beta1=0.9, beta2=0.99, eps=0.0, weight_decay=0.0)
for refuse.value in range(2):
    before = started.value
    master, *state, grad = (torch.full((1 << 20,), float(value)) for value in (1, 0, 0, 1))
    kernel([AdamWeight(master, *state, grad, None, step=1, decoupled=True, **options)], 4)
    print(started.value - before, master.unique().tolist())
"""
SIZES = [*range(1, 200), *range(201, 4097, 61), 4095, 4096, 4097, 65535, 65536, 65537, 3 * 65536 + 5]


@pytest.fixture(scope="module")
def kernel() -> AdamKernel:
    if not compiled.compiler():
        pytest.skip("no C compiler")
    found = adam_kernel()
    assert found is not None, "it does not build, or its results are not torch's"
    return found


@pytest.fixture
def rebuilt() -> Iterator[None]:
    """The kernel is looked for anew, in this test and after it."""
    adam_kernel.cache_clear()
    yield
    adam_kernel.cache_clear()


def random(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    master, exp_avg, exp_avg_sq, grad = (torch.randn(count, generator=generator) for _ in range(4))
    return [master, exp_avg, exp_avg_sq.abs(), grad]


def assert_step(
    kernel: AdamKernel,
    tensors: list[list[Tensor]],
    *,
    decoupled: bool,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    step: int = 3,
    threads: int = 1,
    **options: Any,
) -> None:
    """One step of all weights, whose gradients come in `dtype` and whose shadows are bfloat16."""
    options = OPTIONS | options
    theirs = [[tensor.clone() for tensor in row] for row in tensors]
    shadows = [torch.empty(len(row[0]), dtype=torch.bfloat16) for row in tensors]
    rows = [
        AdamWeight(*row[:3], row[3].to(dtype), shadow, step=step, decoupled=decoupled, grad_scale=scale, **options)
        for row, shadow in zip(tensors, shadows, strict=True)
    ]
    kernel(rows, threads)
    fused: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    for ours, row, shadow in zip(tensors, theirs, shadows, strict=True):
        grad = row[3].to(dtype).float()
        if scale != 1.0:
            grad = grad * scale
        state = torch.tensor(float(step))
        fused([row[0]], [grad], [row[1]], [row[2]], [], [state], amsgrad=False, maximize=False, **options)
        for index, (one, other) in enumerate(zip(ours[:3], row[:3], strict=True)):
            assert torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)), f"size {len(one)}, tensor {index}"
            assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(shadow.isnan(), ours[0].isnan())
        assert torch.equal(shadow.nan_to_num(nan=7.0), ours[0].bfloat16().nan_to_num(nan=7.0))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_size_is_stepped_as_by_torch_and_no_element_is_left_out(
    kernel: AdamKernel, decoupled: bool, dtype: torch.dtype, threads: int
) -> None:
    tensors = [random(size, size) for size in SIZES]
    before = torch.cat([row[1] for row in tensors])
    assert_step(kernel, tensors, decoupled=decoupled, dtype=dtype, threads=threads)
    assert int((torch.cat([row[1] for row in tensors]) == before).sum()) < 10  # by chance


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.0},
        {"scale": 0.37},
        {"beta1": 0.3},
        {"beta1": 0.5, "beta2": 0.5},
        {"beta1": 0.0},
        {"lr": 0.0},
        {"step": 1},
        {"step": 1_000_000, "beta2": 0.999},
        {"eps": 0.0},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_to_torch(kernel: AdamKernel, decoupled: bool, options: dict[str, Any]) -> None:
    assert_step(kernel, [random(1000, 1), random(13, 2)], decoupled=decoupled, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, float("nan"), 0.0])
def test_gradients_that_are_not_finite_spread_as_in_torch(kernel: AdamKernel, dtype: torch.dtype, scale: float) -> None:
    row = random(259, 3)
    for index, value in ((0, "nan"), (7, "inf"), (100, "-inf"), (257, "nan"), (258, "inf")):
        row[3][index] = float(value)
    row[3][30], row[3][31], row[3][32] = 1e38, 1e-45, -0.0
    assert_step(kernel, [row], decoupled=True, dtype=dtype, scale=scale)


def test_without_a_compiler_the_kernel_is_missing_and_the_log_says_so_once(
    rebuilt: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/nonexistent")
    with caplog.at_level(logging.WARNING):
        assert adam_kernel() is None
        assert adam_kernel() is None
    (message,) = caplog.messages
    assert "no compiled kernel for Adam" in message
    assert "/nonexistent" in message


def test_a_compiler_that_fails_is_reported_with_what_it_said(
    rebuilt: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho it is broken >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert adam_kernel() is None
    assert "it is broken" in caplog.text
    assert not any((tmp_path / "cache").rglob("*.so"))


def test_without_a_cache_folder_the_kernel_is_built_elsewhere_and_leaves_nothing(
    kernel: AdamKernel, rebuilt: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(compiled.tempfile, "tempdir", str(tmp_path))
    assert adam_kernel() is not None
    assert not list(tmp_path.glob("ramtorch_core-*"))


def test_a_damaged_library_in_the_cache_is_built_anew(
    kernel: AdamKernel, rebuilt: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "whole"))
    assert adam_kernel() is not None
    (library,) = tmp_path.rglob("*.so")
    damaged = tmp_path / "damaged" / "ramtorch_core" / library.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "damaged"))
    adam_kernel.cache_clear()
    assert adam_kernel() is not None
    assert damaged.stat().st_size == library.stat().st_size


@pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD")
def test_threads_start_whatever_thread_local_memory_there_is_and_none_is_needed(
    kernel: AdamKernel, tmp_path: Path
) -> None:
    source, library = tmp_path / "threads.c", tmp_path / "threads.so"
    source.write_text(THREADS)
    subprocess.run([*compiled.compiler(), "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", UPDATE, library],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["3 [0.5]", "0 [0.5]"]


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_shadows_are_written_wherever_they_begin_and_nothing_beside_them(kernel: AdamKernel, offset: int) -> None:
    for count in (1, 15, 2047, 2048, 2049, 16383, 16384, 16385, 3 * 65536 + 5):
        *now, grad = random(count, count)
        place = torch.full((offset + count + 8,), 7.0, dtype=torch.bfloat16)
        shadow = place[offset : offset + count]
        kernel([AdamWeight(*now, grad, shadow, step=3, decoupled=True, **OPTIONS)], 2)
        assert torch.equal(shadow, now[0].bfloat16())
        assert (place[:offset] == 7.0).all()
        assert (place[offset + count :] == 7.0).all()


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
)
@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1, 2), (2,)])
def test_what_is_overwritten_is_kept_and_changes_nothing_else(
    kernel: AdamKernel, dtypes: tuple[torch.dtype, torch.dtype], wanted: tuple[int, ...]
) -> None:
    for count in (1, 15, 2047, 2048, 2049, 65536, 65537, 3 * 65536 + 5):
        master, exp_avg, exp_avg_sq, grad = random(count, count)
        now = [master.to(dtypes[0]), exp_avg.to(dtypes[1]), exp_avg_sq.to(dtypes[1])]
        alone, before = [tensor.clone() for tensor in now], [tensor.clone() for tensor in now]
        places = [torch.full((count + 8,), 7.0, dtype=tensor.dtype) for tensor in now]
        kept = tuple(place[:count] if i in wanted else None for i, place in enumerate(places))
        options: dict[str, Any] = OPTIONS | {"step": 3, "decoupled": True, "key": 12345}
        kernel([AdamWeight(*now, grad, None, kept=kept, **options)], 2)
        kernel([AdamWeight(*alone, grad, None, **options)], 2)
        for i, place in enumerate(places):
            assert torch.equal(now[i], alone[i])
            assert torch.equal(place[:count], before[i] if i in wanted else torch.full_like(before[i], 7.0))
            assert (place[count:] == 7.0).all()
