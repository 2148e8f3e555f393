"""examples/offload_vs_resident.py finds no difference in any bit, and would say so if there were one."""

from pathlib import Path
from typing import Any

import matplotlib.image
import offload_vs_resident
import pytest
import torch
from torch import nn


@pytest.mark.timeout(180)
def test_streamed_weights_are_bit_identical(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "folder" / "chart.png"
    offload_vs_resident.main(["--steps", "3", "--batch", "2", "--out", str(chart)])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[0] for row in rows[2:5]] == ["resident", "streamed, keep", "streamed, checkpoint"]
    assert [row.rsplit("  ")[-1].strip() for row in rows[2:5]] == ["the reference", "bit-identical", "bit-identical"]
    assert matplotlib.image.imread(chart).std() > 0.01, "the chart is blank"


def test_compiled_blocks_are_bit_identical_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []
    compiled = []  # graphs so far, after each system

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def counting(train: Any) -> Any:
        def run(*arguments: Any) -> Any:
            torch.compiler.reset()
            result = train(*arguments)
            compiled.append(len(graphs))
            return result

        return run

    compile_in_place = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_in_place(module, backend=backend))
    for name in ("train_resident", "train_streamed"):
        monkeypatch.setattr(offload_vs_resident, name, counting(getattr(offload_vs_resident, name)))
    offload_vs_resident.main(["--compile", "--steps", "2", "--batch", "2", "--out", str(tmp_path / "chart.png")])
    torch.compiler.reset()
    rows = capsys.readouterr().out.splitlines()
    assert [row.rsplit("  ")[-1].strip() for row in rows[2:5]] == ["the reference", "bit-identical", "bit-identical"]
    assert 0 < compiled[0] < compiled[1] < compiled[2]


def test_difference_is_the_largest_of_all_weights() -> None:
    def result(*weights: float) -> offload_vs_resident.Result:
        return offload_vs_resident.Result(1.0, 2.0, None, [torch.tensor([weight]) for weight in weights])

    assert offload_vs_resident.difference(result(1.0, 2.0), result(1.0, 2.0)) == "bit-identical"
    assert offload_vs_resident.difference(result(1.0, 2.0), result(1.5, 2.25)) == "5.0e-01"
    assert offload_vs_resident.difference(result(1.0), None) == "nothing to compare with"


def test_chart_of_a_gpu_run_has_a_panel_for_memory(tmp_path: Path) -> None:
    results = {
        "resident": offload_vs_resident.Result(0.6, 1.4, 46 * 10**9, []),
        "streamed, checkpoint": offload_vs_resident.Result(0.7, 1.5, 11 * 10**9, []),
    }
    offload_vs_resident.draw(results, "GPT 3b on cuda", tmp_path / "chart.png")
    assert matplotlib.image.imread(tmp_path / "chart.png").shape[1] > 1000
