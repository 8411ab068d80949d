"""The page never shows as measured what was not, and says what a run found."""

from __future__ import annotations

import re
from pathlib import Path

from gpipe_cli.gpu_check.page import Origin, blank_page, page, write_page
from gpipe_cli.gpu_check.parts import all_parts
from gpipe_cli.gpu_check.record import FAILED, MEASURED, NOT_MEASURED, Check, Part, Row, Section
from gpipe_cli.gpu_check.sizes import FULL

ROOT = Path(__file__).parents[3]
ORIGIN = Origin(
    machine="A GPU, 8.0 GB", libraries="CUDA 13.0", date="2026-01-02", versions={"torch": "2.14"}, duration_s=99.6
)


def nothing(place: object) -> dict[str, str]:
    raise AssertionError


def some_part(*labels: str) -> Part:
    return Part(
        name="some", title="Some part", introduction="What it is.", columns=("a", "b"), good=MEASURED, limit_s=1.0,
        checks=tuple(Check(label, nothing) for label in labels), reported=(Row("theirs", "reported", {"a": "7"}, "X"),),
    )  # fmt: skip


def test_before_the_first_run_every_section_says_not_measured_and_shows_only_what_others_report() -> None:
    parts = all_parts(FULL)
    text = blank_page(parts)
    sections = re.split(r"^## ", text, flags=re.M)
    assert len(sections) == 1 + len(parts)
    for section in sections:
        assert "ot measured" in section
        assert "make gpu-check" in section
    tables = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("|  |")]
    assert tables
    assert all("| reported: " in line for line in tables)


def test_the_page_in_results_is_that_of_a_run_or_the_one_before_the_first() -> None:
    text = (ROOT / "results" / "gpu.md").read_text(encoding="utf-8")
    assert "- date: " in text or text == blank_page(all_parts(FULL))


def test_a_run_gives_machine_versions_date_command_and_every_row_with_its_outcome(tmp_path: Path) -> None:
    rows = [
        Row("one", MEASURED, {"a": "1", "b": "2"}),
        Row("two", FAILED, {}, "no | way"),
        Row("three", NOT_MEASURED, {}, "no time was left"),
    ]
    path = tmp_path / "results" / "gpu.md"
    write_page(path, [Section(some_part("one", "two", "three"), rows, 12.4)], ORIGIN)
    text = path.read_text(encoding="utf-8")
    assert text == page([Section(some_part("one", "two", "three"), rows, 12.4)], ORIGIN)
    assert [entry.name for entry in path.parent.iterdir()] == ["gpu.md"]
    assert "| one | 1 | 2 | measured |" in text
    assert "| two |  |  | failed: no \\| way |" in text
    assert "| three |  |  | not measured: no time was left |" in text
    assert "| theirs | 7 |  | reported: X |" in text
    for fact in (
        "A GPU, 8.0 GB", "CUDA 13.0; torch 2.14", "2026-01-02", "`make gpu-check`", "duration: 100 s", "took 12 s",
        "rows: 3, of which 1 failed and 1 were not measured",
    ):  # fmt: skip
        assert fact in text


def test_all_parts_together_stay_below_eight_minutes() -> None:
    assert sum(part.limit_s for part in all_parts(FULL)) <= 450
