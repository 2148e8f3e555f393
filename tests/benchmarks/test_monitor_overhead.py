"""The comparison of watched with plain steps, and the direct measurement beside it, run at a tiny size on the CPU."""

import monitor_overhead
import pytest


def test_the_monitors_cost_is_measured_in_turns_and_directly(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"layers": 1, "width": 512, "batch": 1, "seq": 8, "steps": 3, "rounds": 2, "every": 1, "device": "cpu"}
    report = monitor_overhead.main([f"--{flag}={value}" for flag, value in small.items()])
    assert [[len(laps) for laps in runs] for runs in report["seconds"].values()] == [[2, 2], [2, 2]]
    assert report["spread"][0] <= report["overhead"] <= report["spread"][1]
    direct, said = report["direct"], capsys.readouterr().out
    assert report["verdict"] in said
    assert f"{direct['share']:.3%} of a plain step" in said
    assert direct["hooks"] > 0
    assert direct["ranges"] > 0
    assert direct["ranges_per_step"] >= 2 * 2, "transfers, gradients and updates of two chunks"
    spent = direct["hooks"] + direct["ranges"]
    assert direct["share"] == pytest.approx(spent / report["median_seconds"]["plain"])


@pytest.mark.parametrize(
    ("watched", "judged"),
    [
        ([1.10, 1.12, 1.11], "it costs time"),
        ([1.0, 1.02, 1.01], "no cost can be told from noise"),
        ([0.98, 1.2, 1.2], "rounds contradict each other"),
    ],
)
def test_the_monitors_cost_is_judged_by_the_noise_of_plain_runs(watched: list[float], judged: str) -> None:
    found = monitor_overhead.compare([[1.0], [1.01], [0.99]], [[seconds] for seconds in watched])
    assert judged in found["verdict"]
    assert found["noise"] == pytest.approx(1.01 / 0.99 - 1)


def test_calls_count_for_the_steps_in_which_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.5, 4.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr(monitor_overhead.time, "perf_counter", lambda: next(clock))
    spent = monitor_overhead.Spent()
    for _ in range(4):
        assert spent.timed(lambda value: value)(3) == 3
    assert spent.per_step([2.0, 5.0, 8.0]) == (2.5 / 2, 2 / 2)
