"""benchmarks/pipeline.py runs from end to end on CPUs: every system does the same work, and says so if it cannot."""

import argparse
from pathlib import Path

import pipeline
import pytest
from pipeline_work import Work, add_flags, works

SMALL = ["--devices", "4", "--device", "cpu", "--layers", "7", "--width", "128", "--seq", "16", "--steps", "2"]


def parsed(*arguments: str) -> list[Work]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return works(parser.parse_args(arguments))


@pytest.mark.parametrize("devices", [3, 4, 8])
def test_stages_are_equal_on_more_than_two_devices(devices: int) -> None:
    """Counted in modules that compute: all but the embedding, which is the first."""
    for work in parsed("--devices", str(devices), "--microbatches", "8,16"):
        assert work.batch == 2 * work.microbatches
        for per_device in (1, 2):
            sizes = [sum(module > 0 for module in part) for part in work.parts(per_device * devices)]
            assert sizes == [4 // per_device] * (per_device * devices)


def test_two_devices_get_the_stack_of_all_other_benchmarks() -> None:
    (work,) = parsed()
    assert (work.layers, work.width, work.vocabulary, work.batch, work.microbatches) == (12, 4096, 32000, 16, 8)
    assert work.parts(2)[1][0] == 7
    assert Work.read(str(work)) == work


def test_bits_are_compared_for_as_many_devices_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.main(["bits", "--devices", "2", "--device", "cpu", "--width", "128", "--seq", "8"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 * (1 + len(pipeline.OURS))
    assert all('"equal": true' in row for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_system_takes_the_same_steps_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = ["single", "torch", "torch_zbv", "1f1b", "zbv", "1f1b_streamed", "trainer", "ramtorch", "nonsense"]
    rows = pipeline.main([*systems, *SMALL, "--microbatches", "4,8"])
    assert [(row["microbatches"], row["system"]) for row in rows] == [(m, system) for m in (4, 8) for system in systems]
    for row in rows:
        if row["system"] in ("ramtorch", "nonsense"):
            assert ("--ramtorch PATH" if row["system"] == "ramtorch" else "no pipeline schedule") in row["reason"]
        else:
            assert row["losses"] == pytest.approx(
                rows[0 if row["microbatches"] == 4 else len(systems)]["losses"], abs=2e-4
            )
    shown = capsys.readouterr().out
    assert "over single" in shown
    assert "pass --ramtorch PATH, an unpacked wheel" in shown
