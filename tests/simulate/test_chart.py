"""Charts: what the text shows, and that a PNG is written."""

import sys

import pytest

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.plan.schedule import staggered_1b1f
from ramtorch_core.simulate import (
    ChunkCost,
    Optimizer,
    PipelinePlan,
    StreamingPlan,
    Timeline,
    simulate_pipeline,
    simulate_streaming,
)
from ramtorch_core.simulate.chart import COLOURS, NAMES, plot, table, text_chart
from ramtorch_core.simulate.clock import Kind


def streamed() -> Timeline:
    chunks = [ChunkCost(forward=2, backward=4, transfer=3)] * 3
    return simulate_streaming(chunks, StreamingPlan(window=2, checkpoint=False), steps=1).timeline


def test_text_shows_spans_stalls_and_the_length() -> None:
    assert text_chart(streamed(), width=46).splitlines() == [
        "compute |~~~~~~F0--~~F1--~~F2--B2------B1------B0------|",
        "    H2D |t0----t1----t2----            t0----          |",
        "         0                                         23 s",
        "~ stall: waits for a copy or an update   . bubble: waits for another stage",
    ]


def test_text_shows_bubbles_of_a_pipeline() -> None:
    result = simulate_pipeline(staggered_1b1f(2, 2), [[ChunkCost(forward=1, backward=2)]] * 2, PipelinePlan())
    assert text_chart(result.timeline, width=36).splitlines()[:2] == [
        "GPU 0 compute |0F0-0F1-........0B0-----....0B1-----|",
        "GPU 1 compute |....1F0-1B0-----1F1-1B1-----........|",
    ]


def test_a_span_that_is_too_short_for_its_label_shows_a_letter() -> None:
    assert text_chart(streamed(), width=23).splitlines()[0] == "compute |~~~F-~F-~F-B2--B1--B0--|"


def test_a_table_aligns_its_columns() -> None:
    assert table([{"window": "1", "seconds": "10.5"}, {"window": "12", "seconds": "9"}]) == (
        "window  seconds\n     1     10.5\n    12        9"
    )
    assert table([]) == ""


def test_every_kind_of_span_has_a_name_and_a_colour_of_its_own() -> None:
    kinds = set(Kind) - {Kind.JOIN}
    assert COLOURS.keys() == NAMES.keys() == kinds
    assert len(set(COLOURS.values())) == len(kinds) - 1  # B and I, which never occur together


def test_a_png_is_written(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    chunk = ChunkCost(forward=1, backward=2, transfer=1, gradient=1, update=1)
    line = simulate_streaming([chunk] * 4, StreamingPlan(optimizer=Optimizer.OVERLAPPED)).timeline
    plot(line, str(tmp_path / "chart.png"), "a title")
    content = (tmp_path / "chart.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert 5_000 < len(content) < 200_000


def test_a_chart_that_cannot_be_written_is_an_error_with_its_path(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match=r"cannot be written to .*missing/chart\.png"):
        plot(streamed(), str(tmp_path / "missing" / "chart.png"))


def test_without_matplotlib_the_remedy_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match="pip install"):
        plot(streamed(), "unused.png")


def test_of_spans_too_narrow_for_an_outline_the_colours_are_seen(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    plan = StreamingPlan(microbatches=200, checkpoint=False)
    line = simulate_streaming([ChunkCost(forward=2, backward=2)] * 2, plan, steps=1).timeline
    plot(line, str(tmp_path / "chart.png"))
    pixels = imread(tmp_path / "chart.png")[..., :3]
    row = pixels[len(pixels) // 4]
    seen = [(abs(row - to_rgb(COLOURS[kind])).max(axis=1) < 0.2).mean() for kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert min(seen) > 0.2
