"""TensorBoard events, for those who have the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpipe_cli.errors import ConfigError
from gpipe_cli.reporting.tensorboard import TensorBoard


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard itself
def test_numbers_of_a_row_become_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the optional package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.write({"step": 3, "loss": 0.5, "note": "text", "top1": None})
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5)]


def test_missing_package_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ConfigError, match=r"tensorboard=true: needs the package tensorboard: pip install"):
        TensorBoard(tmp_path)
