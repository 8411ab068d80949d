"""Files are whole or unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_cli.reporting.atomic import replace_file, replace_text


def test_failed_write_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "table.md"
    replace_text(path, "before\n")

    def fails(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_file(path, fails)
    assert path.read_text() == "before\n"
    assert list(path.parent.iterdir()) == [path]
