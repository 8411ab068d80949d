"""The plot of the speed-up."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

from gpipe_cli.reporting.paper import TABLE2
from gpipe_cli.reporting.speedup import Speed, _ours, _reported, plot_speedup

SPEEDS = [
    Speed(curve="remat full", partitions=k, micro_batches=m, samples_per_s=10.0 * k * m) for k in (1, 2) for m in (1, 4)
]


def test_the_slowest_corner_counts_as_one() -> None:
    assert _ours(SPEEDS, "remat full") == {1: [(1, 1.0), (2, 2.0)], 4: [(1, 4.0), (2, 8.0)]}


def test_it_is_drawn_when_there_are_two_numbers_of_partitions(tmp_path: Path) -> None:
    assert plot_speedup(tmp_path / "speedup.png", SPEEDS, "title")
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_many_panels_wrap_into_rows(tmp_path: Path) -> None:
    def size(num_curves: int) -> tuple[int, int]:
        speeds = [replace(speed, curve=f"curve {number}") for number in range(num_curves) for speed in SPEEDS]
        assert plot_speedup(tmp_path / "speedup.png", speeds, "title")
        width, height = struct.unpack(">II", (tmp_path / "speedup.png").read_bytes()[16:24])
        return width, height

    (width, height), wrapped = size(2), size(6)  # two panels of what others reported come on top
    assert wrapped == (width, 2 * height)


def test_there_is_no_picture_without_anything_to_compare(tmp_path: Path) -> None:
    assert not plot_speedup(tmp_path / "speedup.png", SPEEDS[:2], "title")
    assert list(tmp_path.iterdir()) == []


def test_what_is_reported_beside_ours_is_that_of_the_network(tmp_path: Path) -> None:
    assert _reported(TABLE2, "transformer")[32] == [(2, 1.8), (4, 3.4), (8, 6.3)]
    assert _reported(TABLE2, "amoebanet")[32] == [(2, 1.21), (4, 1.84), (8, 3.48)]
    assert plot_speedup(tmp_path / "speedup-text.png", SPEEDS, "title", "transformer")
