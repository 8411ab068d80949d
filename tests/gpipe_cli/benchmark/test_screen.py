"""The table on the screen."""

from __future__ import annotations

from gpipe_cli.benchmark.grid import grid
from gpipe_cli.benchmark.measure import Spell
from gpipe_cli.benchmark.results import Comparison, Result
from gpipe_cli.benchmark.screen import ScreenTable
from gpipe_cli.benchmark.worker import End, Ready


def result_of(case) -> Result:
    spell = Spell(step_times_s=(0.5, 0.5), wait_s=0.25, num_bytes_sent=1, num_rematerializations=0)
    ready = Ready(
        balance=(3, 3), kept=None, num_parameters=9, device="cpu", world_size=2, num_threads=1, layout="channels-last"
    )
    end = End(
        peak_memory_bytes=[9, 9], activation_bytes=[2_500_000, 1_000_000], events=[[], []], parameter_memory_bytes=1
    )
    return Result(case=case, ready=ready, spells=[[spell, spell]], end=end)


def test_a_line_has_the_numbers_under_their_titles(config) -> None:
    [case] = grid(config("partitions=2", "micro_batches=4", "remat=full"))
    table = ScreenTable([case])
    header, row = table.header, table.row(result_of(case), Comparison(speedup=1.5, over="K=1 M=4"))
    assert header.split()[:4] == ["by", "K", "M", "remat"]
    assert row.split() == [
        "gpipe",
        "2",
        "4",
        "full",
        "channels-last",
        "16",
        "500",
        "(500-500)",
        "25+25",
        "2.5+1",
        "1.50",
    ]
    assert header.endswith("speed-up")
    assert len(row) == len(header)


def test_what_is_the_same_everywhere_or_not_measured_has_no_column(config) -> None:
    plain = ScreenTable(grid(config("partitions=2", "micro_batches=4", "remat=full"))).header
    assert "schedule" not in plain
    assert "x " not in plain
    both = ScreenTable(grid(config("partitions=2", "micro_batches=4", "remat=full", "schedule=[gpipe,1f1b]"))).header
    assert "schedule" in both
    assert "sizes" not in both
    even, tapered = grid(config("partitions=2", "micro_batches=4", "remat=full", "taper=[false,true]"))
    table = ScreenTable([even, tapered])
    assert "sizes" in table.header
    rows = [table.row(result_of(case), Comparison()) for case in (even, tapered)]
    assert ["tapered" in row for row in rows] == [False, True]


def test_text_is_counted_in_tokens_and_has_no_layout(text_config, config) -> None:
    [case] = grid(text_config("partitions=2", "micro_batches=4", "remat=full"))
    table = ScreenTable([case])
    assert "tokens/s" in table.header
    assert "layout" not in table.header
    assert table.row(result_of(case), Comparison()).split()[4:6] == ["16", "96"]  # 8 samples of 6 tokens in 0.5 s
    assert "tokens/s" not in ScreenTable(grid(config())).header
