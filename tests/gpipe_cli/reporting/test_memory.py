"""The table of memory: ours beside the paper's Table 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_cli.reporting.memory import TABLE, update_memory
from gpipe_cli.reporting.tables import read


def test_the_papers_table_1_and_torchgpipes_figures_stand_beside_ours(tmp_path: Path) -> None:
    update_memory(
        tmp_path, {"kind": "measured", "machine": "here", "configuration": "a", "activation_bytes": 5_000_000}
    )
    rows = read(tmp_path, TABLE)
    named = {(row["name"], row["device"]): row for row in rows if row["model"] == "amoebanet-D"}
    assert named["Pipeline-8", "TPUv2, 8 GB"]["activation_bytes"] == "26240000000"
    assert named["Naive-1", "P40"]["outcome"] == "out of memory"
    assert rows[-1]["kind"] == "measured"
    [largest] = [row for row in rows if row["name"] == "Pipeline-128"]
    assert (largest["seq_len"], largest["batch_size"], largest["image_size"]) == ("1024", "32", "")
    # What the paper prints as 937.9 GB are GiB: 12 bytes times 83.9 billion parameters.
    assert int(largest["parameter_memory_bytes"]) == pytest.approx(12 * 83.9e9, rel=1e-3)
    assert "| 5 |" in (tmp_path / "memory.md").read_text().splitlines()[-1]
