"""examples/digits.py reaches the accuracy that it promises."""

from pathlib import Path

import digits
import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_accuracy_on_the_test_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert digits.main(["--out", str(tmp_path)]) >= 0.97
    assert "test accuracy: 9" in capsys.readouterr().out
    assert (tmp_path / "best.ckpt").is_file()


def test_no_image_is_in_two_parts() -> None:
    parts = digits.load_data()
    images = [tuple(image.tolist()) for part in parts.values() for image, _ in part]
    assert [len(part) for part in parts.values()] == [1257, 180, 360]
    assert len(set(images)) == len(images)
