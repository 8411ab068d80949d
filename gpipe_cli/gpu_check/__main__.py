"""`python -m gpipe_cli.gpu_check`, which is `make gpu-check`: all checks on one CUDA GPU, then results/gpu.md.

`--dry-run` walks through the same code at tiny sizes, on a CPU unless `--device cuda` is given as well. Its output goes
to the screen only: nothing of it is a result. Exit codes: 0 no row failed, 1 a row failed, 2 refused before anything
was done, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpipe_cli.errors import ConfigError, GpipeError, TrainingError
from gpipe_cli.gpu_check.page import Origin, write_page
from gpipe_cli.gpu_check.record import FAILED, NOT_MEASURED, Part, Row, Section

if TYPE_CHECKING:
    from gpipe_cli.gpu_check.runner import Runner
    from gpipe_cli.gpu_check.sizes import Sizes

PAGE = "gpu.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _options(argv)
    try:
        return _dry_run(options.device) if options.dry_run else _run(Path(options.results_dir))
    except GpipeError as error:
        print(f"gpu-check: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("gpu-check: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """One line for what cannot be understood, as everywhere in gpipe."""

    def error(self, message: str) -> NoReturn:
        print(f"gpu-check: error: {message}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m gpipe_cli.gpu_check", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--results-dir", default="results", help=f"folder of {PAGE} (default: results)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, to the screen only: no result")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what a dry run computes on (default: cpu)")
    options = parser.parse_args(argv)
    if options.device is not None and not options.dry_run:
        parser.error("--device is for --dry-run: results are measured on a CUDA GPU only")
    return options


def _run(results_dir: Path) -> int:
    path = results_dir / PAGE
    _check_gpu(f"{path} is left as it is")
    if results_dir.exists() and not results_dir.is_dir():
        raise ConfigError("--results-dir", str(results_dir), "is no folder; give another one")
    from gpipe_cli.gpu_check.sizes import FULL
    from gpipe_cli.reporting.environment import versions

    began = time.monotonic()
    sections, runner = _measure("cuda:0", FULL)
    origin = Origin(
        machine=runner.facts.device if runner.facts is not None else "a CUDA GPU that could not be used",
        libraries=runner.facts.libraries if runner.facts is not None else "unknown CUDA",
        date=time.strftime("%Y-%m-%d"),
        versions=versions(),
        duration_s=time.monotonic() - began,
    )
    try:
        write_page(path, sections, origin)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror or error}") from error
    print(f"{_summary(sections)}; in {origin.duration_s:.0f} s; page {path}")
    return _exit_code(sections)


def _dry_run(device: str | None) -> int:
    from gpipe_cli.gpu_check.sizes import TINY

    if device == "cuda":
        _check_gpu("a dry run on a CPU needs none")
    print("dry run at tiny sizes: nothing below is a result, and nothing is written")
    sections, _ = _measure("cuda:0" if device == "cuda" else "cpu", TINY)
    print(f"dry run: {_summary(sections)}; nothing was written")
    return _exit_code(sections)


def _check_gpu(consequence: str) -> None:
    from gpipe_cli.distributed.devices import count_gpus

    if count_gpus() == 0:
        raise ConfigError(None, None, f"no CUDA GPU that PyTorch can use was found; {consequence}")


def _measure(device: str, sizes: Sizes) -> tuple[list[Section], Runner]:
    from gpipe_cli.gpu_check.parts import all_parts
    from gpipe_cli.gpu_check.runner import Runner

    runner = Runner(device, sizes, Screen().show)
    return runner.run(all_parts(sizes)), runner


class Screen:
    """Rows as they come, below the title of their part."""

    def __init__(self) -> None:
        self._part: Part | None = None

    def show(self, part: Part, row: Row) -> None:
        if part is not self._part:
            print(part.title, flush=True)
            self._part = part
        cells = ", ".join(f"{name}: {value}" for name, value in row.cells.items() if value)
        print(f"  {row.label}: {row.verdict}{f' ({cells})' if cells else ''}", flush=True)


def _summary(sections: Sequence[Section]) -> str:
    rows = [row for section in sections for row in section.rows]
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in (FAILED, NOT_MEASURED)}
    return f"{len(rows)} rows, {counts[FAILED]} failed, {counts[NOT_MEASURED]} not measured"


def _exit_code(sections: Sequence[Section]) -> int:
    return int(any(row.outcome == FAILED for section in sections for row in section.rows))


if __name__ == "__main__":
    sys.exit(main())
