"""benchmarks/peers.py runs from end to end on a CPU, and reports what it measured and what it could not."""

import json
import subprocess
import sys
from pathlib import Path

import feeds
import limits
import matplotlib.image
import peers
import peers_table
import pytest
import reference
import systems
import torch

SMALL = "--device cpu --layers 1 --width 128 --length 32 --batch-tokens 32 --tokens 32,64 --steps 2 --warm-up 1"
VARIANT = "ours:resident_below=0,window=1"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_system_gets_a_row_with_figures_or_a_reason(tmp_path: Path) -> None:
    """Accumulated batches, a variant, a system that needs a GPU, one that is missing and one that fails."""
    chosen = [VARIANT, "engine:resident_below=0", "resident", "fsdp", "ramtorch-1.6.4", "ours:nonsense=1"]
    command = [sys.executable, peers.__file__, *SMALL.split(), "--systems", *chosen]
    command += ["--ramtorch-1.6.4", str(tmp_path), "--json", str(tmp_path / "out.json")]
    command += ["--chart", str(tmp_path / "out.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    report = json.loads((tmp_path / "out.json").read_text())
    assert report["limits"]["host"] > 0
    rows = {(row["system"], row["tokens"]): row for row in report["summary"]}
    assert list(rows) == [(system, tokens) for tokens in (32, 64) for system in chosen]
    reasons = {
        "fsdp": "Lightning's FSDP needs a GPU",
        "ramtorch-1.6.4": f"no ramtorch in {tmp_path}",
        "ours:nonsense=1": "TypeError: OffloadStrategy.__init__() got an unexpected keyword argument 'nonsense'",
    }
    for (system, tokens), row in rows.items():
        assert row.get("reason") == reasons.get(system)
        if system in reasons:
            assert "seconds" not in row
            continue
        assert row["measured_steps"] == 2
        assert row["tokens_per_second"] == tokens / row["seconds"]
        assert row["host_bytes"] > 0
        assert row["losses"] == rows["resident", tokens]["losses"]  # on a CPU to the last bit
        assert len(row["losses"]) == 3
        assert row["steps_before"] == (0 if tokens == 32 else 3)
    assert list(rows[VARIANT, 32]["ratios"]) == ["engine:resident_below=0", "resident"]
    assert set(rows[VARIANT, 32]["rates"]) == {"h2d", "d2h", "host"}
    assert rows["resident", 32]["rates"] == {}

    for text in ("32 tokens per step", "64 tokens per step", "s/step", "seconds over those of", *reasons.values()):
        assert text in done.stdout
    assert matplotlib.image.imread(tmp_path / "out.png").std() > 0


def test_a_run_over_its_time_limit_is_ended_and_says_so() -> None:
    found = peers.Peers(peers.parse(["--time-limit", "0.5"])).run(["-c", "import time; time.sleep(60)"], {})
    assert found == ("", "it took longer than 0 s")


def test_no_run_starts_when_the_budget_is_used_up() -> None:
    found = peers.Peers(peers.parse(["--budget", "0"])).run(["-c", "raise SystemExit"], {})
    assert found == ("", "the budget of 0 s was used up")


@pytest.mark.parametrize(
    ("status", "errors", "reason"),
    [
        (0, "a warning\n", ""),
        (1, "Traceback\n  line\ntorch.OutOfMemoryError: CUDA out of memory\nlater noise\n", "torch.OutOfMemoryError"),
        (-9, "", "killed by signal 9; it printed nothing"),
    ],
)
def test_a_failure_is_told_by_its_last_error(status: int, errors: str, reason: str) -> None:
    assert peers.failure(status, errors).startswith(reason)
    assert bool(peers.failure(status, errors)) == bool(reason)


def test_sizes_above_a_batch_are_split_into_batches() -> None:
    assert feeds.size_of(65536, 2048, 16384) == feeds.Size(rows=8, length=2048, batches=4)
    assert feeds.size_of(2048, 2048, 16384) == feeds.Size(rows=1, length=2048, batches=1)
    with pytest.raises(ValueError, match="3000 tokens are not 1 batches of whole sequences of 2048"):
        feeds.size_of(3000, 2048, 16384)


def test_deepspeed_gets_a_run_per_number_of_batches_and_others_one_for_all() -> None:
    sizes = [feeds.size_of(tokens, 2048, 16384) for tokens in (2048, 16384, 65536)]
    assert peers.jobs("ours:pin=2", sizes) == [sizes]
    assert peers.jobs("deepspeed", sizes) == [sizes[:2], sizes[2:]]


def test_options_are_keyword_arguments_as_python_writes_them() -> None:
    found = systems.parse_options("pin=[0, 3],activations=keep,stream_dtype=torch.bfloat16,window=3")
    assert found == {"pin": [0, 3], "activations": "keep", "stream_dtype": torch.bfloat16, "window": 3}
    assert systems.parse_options("") == {}
    with pytest.raises(ValueError, match="key=value"):
        systems.parse_options("pin")


def test_parameters_are_counted_without_building_the_stack() -> None:
    modules = reference.build(2, 128)
    assert reference.count_parameters(2, 128) == sum(p.numel() for m in modules for p in m.parameters())


def test_needed_bytes_grow_with_the_crossings() -> None:
    assert limits.needed_bytes(10, 1) == {"h2d": 40, "d2h": 20, "host": 340}
    assert limits.needed_bytes(10, 4) == {"h2d": 160, "d2h": 40, "host": 480}
    assert limits.needed_bytes(10, 1, moment=2) == {"h2d": 40, "d2h": 20, "host": 260}


def test_a_row_is_the_median_over_all_rounds_and_names_a_round_that_failed() -> None:
    common = {"system": "ours", "tokens": 100, "warm_up": 1}
    figures = {"batches": 1, "device_bytes": 5, "host_bytes": 7, "losses": [2.0], "steps_before": 0, "streamed": 10}
    runs = [
        {**common, "round": 0, "laps": [9.0, 1.0, 2.0], **figures},
        {**common, "round": 1, "reason": "it took too long"},
        {**common, "round": 2, "laps": [9.0, 3.0, 8.0], **figures, "device_bytes": 6},
    ]
    (row,) = peers_table.summarize(runs, {"h2d": 80.0, "d2h": None, "host": 340.0}, 1000)
    assert (row["seconds"], row["mean"], row["measured_steps"], row["rounds"]) == (2.5, 3.5, 4, 2)
    assert (row["device_bytes"], row["host_bytes"], row["reason"]) == (6, 7, "it took too long")
    assert row["rates"] == {"h2d": 16.0, "d2h": 8.0, "host": 136.0}
    assert row["shares"] == {"h2d": 0.2, "host": 0.4}
