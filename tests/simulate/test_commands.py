"""The command lines: tables, sweeps, JSON, charts, and errors without a traceback."""

import json
import runpy
import sys

import pytest

from ramtorch_core.simulate import offload_command, pipeline_offload_command, schedule_command

COMMANDS = {
    "offload_simulator": offload_command.main,
    "schedule_simulator": schedule_command.main,
    "pipeline_offload_simulator": pipeline_offload_command.main,
}


@pytest.fixture
def run(capsys):
    def call(line: str) -> str:
        program, *arguments = line.split()
        assert COMMANDS[program](arguments) == 0
        return capsys.readouterr().out

    return call


def test_the_streaming_simulator_sweeps_the_window_by_itself(run) -> None:
    lines = run("offload_simulator --layers 24 --tf 1.0 --tb 2.0 --th2d 0.5").splitlines()
    assert lines[0] == "pin=0, activations=checkpoint"
    assert lines[2].split() == ["window", "seconds", "GPU", "stall", "H2D", "transfers", "chunks"]
    assert [line.split()[0] for line in lines[3:7]] == ["1", "2", "3", "4"]
    assert any(line.startswith("compute |") for line in lines)


def test_lists_make_every_combination(run) -> None:
    found = json.loads(
        run("offload_simulator --layers 4 --window 1,2 --pin 0,first2 --tf 1,2 --microbatches 1,2 --json")
    )
    assert len(found["rows"]) == 16
    knobs = ("window", "pin", "tf", "microbatches")
    assert {tuple(row[knob] for knob in knobs) for row in found["rows"]} == {
        (w, p, t, m) for w in (1, 2) for p in (0, "first2") for t in ("1", "2") for m in (1, 2)
    }
    assert found["rows"][found["fastest"]]["seconds"] == min(row["seconds"] for row in found["rows"])


@pytest.mark.parametrize("program", COMMANDS)
def test_json_has_figures_and_a_timeline_and_nothing_else(run, program: str) -> None:
    found = json.loads(run(f"{program} --json"))
    assert {"rows", "fastest", "timeline"} <= found.keys()
    assert all(0 <= row["GPU"] <= 1 and row["seconds"] > 0 for row in found["rows"])
    span = found["timeline"]["spans"][0]
    assert span.keys() == {"resource", "label", "kind", "start", "end"}


@pytest.mark.parametrize("program", COMMANDS)
def test_a_png_is_drawn_on_request(run, program: str, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "gantt.png"
    assert f"chart written to {path}" in run(f"{program} --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("program", COMMANDS)
def test_the_module_runs(program: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"ramtorch_core.{program}", run_name="__main__", alter_sys=True)
    assert stop.value.code == 0
    assert f"python -m ramtorch_core.{program}" in capsys.readouterr().out


def test_chunks_may_differ(run, tmp_path) -> None:
    path = tmp_path / "chunks.json"
    entries = [
        {"name": "embedding", "parameters": 1e6, "forward": 1, "backward": 2},
        {"name": "blocks", "count": 3, "forward": 2, "backward": 4, "transfer": 1},
    ]
    path.write_text(json.dumps(entries))
    by_file = run(f"offload_simulator --chunks {path} --window 2 --activations keep --json")
    by_flags = run(
        "offload_simulator --layers 4 --tf 1:2:2:2 --tb 2:4:4:4 --th2d 0:1:1:1 --window 2 --activations keep --json"
    )
    assert json.loads(by_file)["rows"][0]["seconds"] == json.loads(by_flags)["rows"][0]["seconds"] >= 21


def test_times_follow_from_parameters_and_the_machine(run) -> None:
    line = "offload_simulator --layers 4 --parameters 500M --h2d 50 --d2h 25 --host-update 0.4 --optimizer published"
    found = json.loads(run(f"{line} --tf 0.1 --tb 0.2 --window 1 --steps 1 --json"))
    durations = {span["kind"]: span["end"] - span["start"] for span in found["timeline"]["spans"]}
    assert durations["transfer"] == pytest.approx(1e9 / 50e9)
    assert durations["gradient"] == pytest.approx(2e9 / 25e9)
    assert durations["update"] == pytest.approx(0.2)
    assert found["rows"][0]["weight bytes"] == 1e9


def test_updates_wait_for_the_norm_where_gradients_are_clipped(run) -> None:
    line = "offload_simulator --layers 3 --td2h 1 --tupdate 4 --window 2 --optimizer joined --steps 1 --json"
    free, clipped = (json.loads(run(f"{line}{more}"))["rows"][0]["seconds"] for more in ("", " --clip"))
    assert clipped == 3 + 3 * 3 + 1 + 3 * 4 > free


def test_rows_that_do_not_fit_are_marked_and_never_the_fastest(run) -> None:
    found = json.loads(run("offload_simulator --weight-bytes 3G --gpu-memory 8 --th2d 1 --window 1,2,3,4 --json"))
    assert [row["fits"] for row in found["rows"]] == ["yes", "yes", "no", "no"]
    assert found["fastest"] == 1


def test_streamed_stages_that_do_not_fit_are_marked_and_never_the_fastest(run) -> None:
    line = "pipeline_offload_simulator --layers 8 --p 2 --m 4 --schedule gpipe --weight-bytes 1G --th2d 5 --window 0,2"
    found = json.loads(run(f"{line} --gpu-memory 3 --json"))
    assert [row["fits"] for row in found["rows"]] == ["no", "yes"]
    assert found["rows"][0]["seconds"] < found["rows"][1]["seconds"]
    assert found["fastest"] == 1
    assert [row["weight bytes"] for row in found["rows"]] == [4e9, 2e9]


@pytest.mark.parametrize("program", COMMANDS)
def test_times_too_short_to_be_divided_by_are_drawn(run, program: str) -> None:
    assert "compute |" in run(f"{program} --tf 1e-320 --tb 1e-320")


def test_knobs_are_chosen_on_request(run) -> None:
    machine = "--h2d 50 --d2h 50 --host-update 0.3 --gpu-memory 8"
    line = (
        f"offload_simulator --choose --layers 8 --parameters 200M --tf 0.01 --tb 0.02 --optimizer overlapped {machine}"
    )
    text = run(line)
    assert "limited by: " in text
    assert "would buy" in text
    found = json.loads(run(f"{line} --json"))
    assert found["choice"]["peak_bytes"] <= 8e9
    assert found["choice"]["seconds"] == found["rows"][0]["seconds"]


def test_the_schedule_simulator_compares_schedules_also_the_teaching_one(run) -> None:
    rows = json.loads(run("schedule_simulator --p 4 --m 8 --json"))["rows"]
    seconds = {row["schedule"]: row["seconds"] for row in rows}
    assert seconds["zb_h1"] < seconds["staggered_1b1f"] == seconds["gpipe"] < seconds["uniform_1f1b"]


def test_1f1b_is_another_name_of_staggered_1b1f(run) -> None:
    rows = json.loads(run("schedule_simulator --schedule 1f1b,staggered_1b1f --json"))["rows"]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--v 2,3 --vshape", ["interleaved 2", "zbv 2", "interleaved 3"]),
        (
            "--v 1,2 --m 1",
            ["gpipe 1", "uniform_1f1b 1", "staggered_1b1f 1", "eager_1f1b 1", "zb_h1 1", "interleaved 2"],
        ),
        ("--schedule interleaved,zbv", ["interleaved 2", "zbv 2"]),
        ("--schedule 1f1b,interleaved --v 1,3", ["staggered_1b1f 1", "interleaved 1", "interleaved 3"]),
        ("--schedule gpipe --vshape", ["gpipe 1", "zbv 2"]),
    ],
)
def test_stages_per_gpu_are_those_of_interleaved_and_a_v_is_added(run, flags: str, expected: list[str]) -> None:
    rows = json.loads(run(f"schedule_simulator {flags} --json"))["rows"]
    assert [f"{row['schedule']} {row['v']}" for row in rows] == expected


def test_a_table_of_ones_own_is_walked(run, tmp_path) -> None:
    path = tmp_path / "table.txt"
    path.write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    row = json.loads(run(f"schedule_simulator --table {path} --tf 1:2 --tb 2:4 --json"))["rows"][0]
    assert (row["p"], row["m"]) == (2, 2)
    assert row["peak microbatches"] == [2, 1]
    assert row["seconds"] == 1 + 2 * 6 + 2


@pytest.mark.parametrize("program", COMMANDS)
def test_json_says_what_is_used_of_pcie_and_of_the_hosts_memory(run, program: str) -> None:
    for row in json.loads(run(f"{program} --json"))["rows"]:
        assert {row[name] for name in ("H2D", "D2H", "host memory", "PCIe both ways")} == {0.0}  # no limit was given


def test_the_table_of_streamed_stages_shows_what_is_used_of_pcie_and_of_the_hosts_memory(run) -> None:
    machine = "--parameters 200M --tf 0.02 --tb 0.04 --h2d 50 --d2h 50 --both-ways 80 --host-memory 100"
    lines = run(f"pipeline_offload_simulator --layers 8 --p 2 --schedule 1f1b {machine}").splitlines()
    assert "H2D   D2H  host memory  PCIe both ways" in lines[2]


def test_streamed_stages_show_stalls_and_bubbles(run) -> None:
    rows = json.loads(
        run("pipeline_offload_simulator --layers 8 --p 2 --m 4 --schedule 1f1b --window 0,1 --th2d 1 --json")
    )
    resident, streamed = rows["rows"]
    assert resident["stall"] == 0
    assert streamed["stall"] > 0
    assert streamed["seconds"] > resident["seconds"]
    assert (resident["chunks"], streamed["chunks"]) == (4, 1)
    assert {"bubble", "stall"} <= {gap["cause"] for gap in rows["timeline"]["gaps"]} | {"stall"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("offload_simulator --tf -1", "--tf -1: it cannot be negative"),
        ("offload_simulator --th2d -1,2", "--th2d -1: it cannot be negative"),
        ("offload_simulator --window 0", "window=0: at least 1 slot is needed"),
        ("offload_simulator --pin -1", "pin=-1"),
        ("offload_simulator --layers 0", "layers=0"),
        ("offload_simulator --steps 0", "steps=0: a whole number of at least 1"),
        ("offload_simulator --microbatches 0", "microbatches=0"),
        ("offload_simulator --tf 1:2", "--tf has 2 values for 24 chunks"),
        ("offload_simulator --tf nan", "--tf nan: it must be finite"),
        ("offload_simulator --h2d 0", "h2d=0"),
        ("offload_simulator --width 3", "width=3"),
        ("offload_simulator --choose --width 3", "width=3"),
        ("offload_simulator --choose --plot no/such/folder.png", "cannot be written"),
        ("schedule_simulator --tf 1e308", "add up to more than a number can hold"),
        ("offload_simulator --weight-bytes 5G --gpu-memory 4", "fits into 4.00 GB of GPU memory: the smallest"),
        ("offload_simulator --choose --weight-bytes 5G --gpu-memory 4", "about 5.00 GB are needed"),
        ("offload_simulator --choose --tf 1,2", "--choose needs one value of --tf"),
        ("offload_simulator --chunks missing.json", "missing.json cannot be read"),
        ("offload_simulator --chunks c.json --layers 24", "--layers is ignored beside --chunks: leave one out"),
        ("offload_simulator --chunks c.json --weight-bytes 5", "--weight-bytes is ignored beside --chunks"),
        ("offload_simulator --chunks c.json --parameters 5", "--parameters is ignored beside --chunks"),
        ("pipeline_offload_simulator --chunks c.json --tf 1", "--tf is ignored beside --chunks"),
        ("offload_simulator --choose --window 2", "--window is ignored beside --choose"),
        ("offload_simulator --choose --pin 0", "--pin is ignored beside --choose"),
        ("offload_simulator --choose --activations keep", "--activations is ignored beside --choose"),
        ("offload_simulator --choose --steps 1", "--steps is ignored beside --choose"),
        ("schedule_simulator --table t.txt --p 4", "--p is ignored beside --table"),
        ("schedule_simulator --table t.txt --m 8", "--m is ignored beside --table"),
        ("pipeline_offload_simulator --table t.txt --schedule gpipe", "--schedule is ignored beside --table"),
        ("offload_simulator --extra-bytes -5", "extra_bytes=-5"),
        ("offload_simulator --kept-bytes 1e308 --activations keep", "the bytes add up to more than a number can hold"),
        ("offload_simulator --batches 0", "batches=0: a whole number of at least 1"),
        ("offload_simulator --clip --ahead 1.5", "ahead=1.5: a number between 0 and 1"),
        ("offload_simulator --ahead 0.25", "add --clip"),
        ("schedule_simulator --m 0", "m=0: a whole number of at least 1 is needed"),
        ("schedule_simulator --p 0", "p=0: a whole number of at least 1 is needed"),
        ("schedule_simulator --p 1M --m 1M", "2,000,000,000,000 ops is too large"),
        ("offload_simulator --layers 1G", "layers=1,000,000,000: at most"),
        ("offload_simulator --microbatches 1G", "microbatches=1000000000 and 3 steps are"),
        ("offload_simulator --layers 4 --width 1G", "width=1000000000: a chart has at most"),
        ("pipeline_offload_simulator --layers 9000", "layers=9000 for the 4 stages"),
        ("offload_simulator --gpu-memory inf", "gpu_memory=inf: it must be positive and finite"),
        ("schedule_simulator --comm inf", "--comm inf: it must be finite"),
        ("schedule_simulator --comm=--", "--comm=--: write --flag value"),
        ("schedule_simulator --tb -2", "--tb -2: it cannot be negative"),
        ("schedule_simulator --tf 1:2", "--tf has 2 values for 4 GPUs"),
        ("schedule_simulator --comm -1", "--comm -1: it cannot be negative"),
        ("schedule_simulator --v 0", "v=0"),
        ("schedule_simulator --v 2 --schedule gpipe", "only interleaved takes them"),
        ("schedule_simulator --weight-share 2", "weight_share=2.0"),
        ("schedule_simulator --table missing.txt", "missing.txt cannot be read"),
        ("pipeline_offload_simulator --layers 3 --p 4", "3 chunks for the 4 stages"),
        (
            "pipeline_offload_simulator --weight-bytes 5G --gpu-memory 4",
            "fits into 4.00 GB of GPU memory: the smallest",
        ),
        ("pipeline_offload_simulator --window -1", "window=-1"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(line: str, message: str, capsys) -> None:
    program, *arguments = line.split()
    assert COMMANDS[program](arguments) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith(f"{program}: ")
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("offload_simulator --window x", "'x' is no number"),
        ("offload_simulator --window 1.5", "'1.5' is no whole number"),
        ("offload_simulator --activations kept", "'kept' is none of keep, checkpoint"),
        ("offload_simulator --plot chart.pdf", "'chart.pdf': charts are PNG"),
        ("schedule_simulator --plot=", "'': charts are PNG"),
        ("schedule_simulator --schedule 2f2b", "'2f2b' is none of"),
    ],
)
def test_a_word_that_is_no_value_is_refused_with_the_flag(line: str, message: str, capsys) -> None:
    program, *arguments = line.split()
    with pytest.raises(SystemExit) as stop:
        COMMANDS[program](arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must hold a list of objects"),
        ("{", "cannot be read as JSON"),
        ('[{"forward": 1}]', "entry 0: backward is missing"),
        ('[{"forward": 1, "backward": 1, "weights": 3}]', "'weights' is unknown"),
        ('[{"forward": "1", "backward": 1}]', "forward='1' is no number"),
        ('[{"forward": 1, "backward": 1, "count": 0}]', "count=0"),
        ('[{"forward": 1, "backward": 1, "count": 1.5}]', "count=1.5"),
        ('[{"forward": 1, "backward": 1, "count": "2"}]', "count='2' is no number"),
        ('[{"forward": 1, "backward": -1}]', "backward=-1"),
    ],
)
def test_a_file_of_chunks_that_cannot_work_is_refused(content: str, message: str, tmp_path, capsys) -> None:
    path = tmp_path / "chunks.json"
    path.write_text(content)
    assert offload_command.main(["--chunks", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_table_that_cannot_run_is_refused_with_its_grid(tmp_path, capsys) -> None:
    path = tmp_path / "table.txt"
    path.write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n")
    assert schedule_command.main(["--table", str(path)]) == 2
    assert ">0B0<" in capsys.readouterr().err
