"""What the parts of the check are, and what comes of them: plain records that travel between processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_cli.gpu_check.place import Place

# What became of a row. One that did not fit into the time, or needs a larger GPU, is no failure, but says so.
# REPORTED rows are others' figures, with their source.
PASSED, MEASURED, FAILED, NOT_MEASURED, REPORTED = "passed", "measured", "failed", "not measured", "reported"

Cells = Mapping[str, str]  # column heading -> what stands there


class CheckFailed(Exception):
    """What was checked does not hold: the argument says what was found and what was expected, in one line."""


class NotMeasured(Exception):
    """The row cannot be had here, by no fault: the argument says why, in one line."""


@dataclass(frozen=True)
class Check:
    """One row to be: its label, and what computes its cells on the device. `run` raises CheckFailed or NotMeasured."""

    label: str
    run: Callable[[Place], Cells]


@dataclass(frozen=True)
class Row:
    """A check that was tried, or not. `reason`: why it failed or was not measured; of a reported row, the source."""

    label: str
    outcome: str
    cells: Cells = field(default_factory=dict)
    reason: str = ""

    @property
    def verdict(self) -> str:
        """The outcome with its reason."""
        return f"{self.outcome}: {self.reason}" if self.reason else self.outcome


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of the page: `good` is what a row without an error is called, `limit_s` its share of the time.
    `reported`: rows of others that stand beside ours, measured or not."""

    name: str
    title: str
    introduction: str
    columns: tuple[str, ...]
    good: str
    limit_s: float
    checks: tuple[Check, ...]
    reported: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part that was run: its rows, and the seconds that it took."""

    part: Part
    rows: Sequence[Row]
    duration_s: float


def first_line(error: BaseException) -> str:
    """An exception in one line of at most 200 characters; its kind is named unless the text was written to be read."""
    from gpipe_cli.errors import GpipeError

    lines: list[Any] = str(error).strip().splitlines()
    text = " ".join(str(lines[0]).split()) if lines else ""
    if not isinstance(error, (CheckFailed, GpipeError)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
