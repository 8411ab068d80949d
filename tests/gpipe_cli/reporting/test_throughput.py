"""The table of throughput: ours beside the paper's and torchgpipe's."""

from __future__ import annotations

from pathlib import Path

from gpipe_cli.reporting.tables import read
from gpipe_cli.reporting.throughput import TABLE, each, megabytes, per_rank, update_throughput

ROW = {
    "model": "amoebanet-D", "layers": 6, "filters": 64, "image_size": 224, "batch_size": 32, "partitions": 2,
    "micro_batches": 8, "remat": "full", "schedule": "gpipe", "samples_per_s": 6.82, "step_time_s": 4.692,
    "bubble_fraction_per_rank": "0.1 0.12", "kind": "measured", "machine": "this one", "configuration": "a",
}  # fmt: skip


def test_our_row_stands_behind_the_papers_and_torchgpipes(tmp_path: Path) -> None:
    update_throughput(tmp_path, ROW)
    rows = read(tmp_path, TABLE)
    assert [row["kind"] for row in rows] == ["reported"] * (len(rows) - 1) + ["measured"]
    paper = {(r["source"], r["model"], r["partitions"], r["micro_batches"]): r for r in rows[:-1]}
    table2 = paper["Huang et al. 2019, arXiv 1811.06965, table 2", "amoebanet-D", "8", "32"]
    assert (table2["speedup"], table2["speedup_over"]) == ("3.48", "K=2 M=1")
    assert paper["torchgpipe, docs/benchmarks.rst", "amoebanet-D", "2", "1"]["samples_per_s"] == "26.7"


def test_the_page_shows_milliseconds_and_percent(tmp_path: Path) -> None:
    update_throughput(tmp_path, ROW)
    line = (tmp_path / "throughput.md").read_text().splitlines()[-1]
    assert "| 6.82 |  | 4692 |" in line
    assert "| 10.00 12.00 |" in line


def test_simulated_and_measured_rows_of_a_configuration_stand_side_by_side(tmp_path: Path) -> None:
    update_throughput(tmp_path, ROW)
    update_throughput(tmp_path, {**ROW, "kind": "simulated"})
    update_throughput(tmp_path, {**ROW, "machine": "another"})
    assert len([row for row in read(tmp_path, TABLE) if row["kind"] != "reported"]) == 3


def test_numbers_a_rank_are_one_cell() -> None:
    assert per_rank([1, 2.5]) == "1 2.5"
    assert per_rank([1, None]) is None
    assert per_rank(None) is None
    assert each(megabytes)("1000000 2500000") == "1 2.5"


def test_the_announcements_transformer_is_among_what_is_reported(tmp_path: Path) -> None:
    update_throughput(tmp_path, ROW)
    [claim] = [row for row in read(tmp_path, TABLE) if row["speedup"] == "11.0"]
    assert (claim["model"], claim["layers"]) == ("transformer", "156")
    assert (claim["partitions"], claim["device"]) == ("16", "TPUv3")
    assert claim["speedup_over"] == "not stated"
    assert "announcement" in claim["source"]


def test_text_is_shown_in_tokens(tmp_path: Path) -> None:
    update_throughput(tmp_path, {**ROW, "image_size": None, "seq_len": 128, "tokens_per_s": 873.0})
    assert "| 6.82 | 873 | 4692 |" in (tmp_path / "throughput.md").read_text().splitlines()[-1]
