"""examples/quickstart.py is short and learns."""

import re
from pathlib import Path

import pytest
import quickstart


@pytest.mark.timeout(180)
def test_loss_falls_to_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart.main(steps=81)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 10


def test_it_fits_on_a_page() -> None:
    assert len(Path(quickstart.__file__).read_text().splitlines()) < 40
