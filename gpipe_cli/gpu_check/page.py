"""results/gpu.md: what was found on a GPU, or that nothing was measured yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.gpu_check.record import FAILED, NOT_MEASURED, REPORTED, Part, Row, Section
from gpipe_cli.reporting.atomic import replace_text

COMMAND = "make gpu-check"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What the page was made with."""

    machine: str
    libraries: str
    date: str
    versions: Mapping[str, str]
    duration_s: float


def write_page(path: Path, sections: Sequence[Section], origin: Origin) -> None:
    """Put the page of a run in the place of the one before, whole or not at all. Raises OSError."""
    replace_text(path, page(sections, origin))


def page(sections: Sequence[Section], origin: Origin) -> str:
    """The page of a run, as Markdown."""
    rows = [row for section in sections for row in section.rows]
    failed, missing = (sum(row.outcome == outcome for row in rows) for outcome in (FAILED, NOT_MEASURED))
    lines = [
        *_heading(),
        f"- machine: {origin.machine}",
        f"- {origin.libraries}; {', '.join(f'{name} {version}' for name, version in origin.versions.items())}",
        f"- date: {origin.date}; command: `{COMMAND}`; duration: {origin.duration_s:.0f} s",
        f"- rows: {len(rows)}, of which {failed} failed and {missing} were not measured",
    ]
    for section in sections:
        lines += ["", *_section(section.part, section.rows), "", f"This section took {section.duration_s:.0f} s."]
    return "\n".join(lines) + "\n"


def blank_page(parts: Sequence[Part]) -> str:
    """The page before the first run."""
    lines = [*_heading(), f"**Not measured.** `{COMMAND}`, on a machine with a CUDA GPU, replaces this page."]
    for part in parts:
        lines += ["", *_section(part, []), "", f"Not measured: `{COMMAND}`"]
    return "\n".join(lines) + "\n"


def _heading() -> list[str]:
    return [
        "# One GPU",
        "",
        f"What `{COMMAND}` finds on a machine with one CUDA GPU. Rows of the outcome `{REPORTED}` are others' figures, "
        "and what is called predicted comes from `gpipe plan`; all else is measured on the machine that is named here.",
        "",
    ]


def _section(part: Part, rows: Sequence[Row]) -> list[str]:
    lines = [f"## {part.title}", "", part.introduction]
    shown = [*part.reported, *rows]
    if not shown:
        return lines
    columns = ["", *part.columns, "outcome"]
    lines += ["", _line(columns), "|" + "---|" * len(columns)]
    lines += [_line([row.label, *(row.cells.get(name, "") for name in part.columns), row.verdict]) for row in shown]
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
