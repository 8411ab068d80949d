"""Every error that a user can cause, in one short hierarchy.

`str(error)` is the one line that the command prints after "gpipe: error: "; `exit_code` is what it exits with. The
facts are attributes, and every class survives pickling because errors travel from worker processes to the launcher.
Anything that is not a GpipeError is a bug and keeps its traceback.
"""

from __future__ import annotations

from pathlib import Path

_MAX_VALUE_LENGTH = 80  # a longer value would push the reason off the line


class GpipeError(Exception):
    """Base class; `str(error)` is one printable line."""

    exit_code = 1

    def __str__(self) -> str:
        return _one_line(" ".join(str(argument) for argument in self.args))


class ConfigError(GpipeError):
    """A setting that cannot be used, found before any work begins.

    `key` is the dotted setting (None when no single one is to blame), `value` what was given, `problem` what is allowed
    and what to do.
    """

    exit_code = 2

    def __init__(self, key: str | None, value: object, problem: str) -> None:
        super().__init__(key, value, problem)
        self.key, self.value, self.problem = key, value, problem

    def __str__(self) -> str:
        if self.key is None:
            word = _shorten(str(self.value) or "''")  # as it stood on the command line
            return _one_line(self.problem if self.value is None else f"{word}: {self.problem}")
        return _one_line(f"{self.key}={as_typed(self.value)}: {self.problem}")


class DataError(GpipeError):
    """A data file found bad during the run: `path` and the `problem`."""

    def __init__(self, path: str | Path, problem: str) -> None:
        super().__init__(str(path), problem)
        self.path, self.problem = str(path), problem

    def __str__(self) -> str:
        return _one_line(f"{self.path}: {self.problem}")


class TrainingError(GpipeError):
    """Training cannot go on, for example because the loss is not a number."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class OutOfMemoryError(GpipeError):
    """A device's memory is too small: `device` and the `problem`."""

    def __init__(self, device: str, problem: str) -> None:
        super().__init__(device, problem)
        self.device, self.problem = device, problem

    def __str__(self) -> str:
        return _one_line(f"out of memory on {self.device}: {self.problem}")


class CheckpointError(GpipeError):
    """A checkpoint that cannot be written, or read, or trusted: `path` and the `problem`."""

    def __init__(self, path: str | Path, problem: str) -> None:
        super().__init__(str(path), problem)
        self.path, self.problem = str(path), problem

    def __str__(self) -> str:
        return _one_line(f"{self.path}: {self.problem}")


class RankFailedError(GpipeError):
    """A rank died and took the run down: `rank` and the `message` of the first cause."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, message)
        self.rank, self.message = rank, message

    def __str__(self) -> str:
        return _one_line(f"rank {self.rank}: {self.message}")


def as_typed(value: object) -> str:
    """A value the way a user types it (`null`, `true`, `5`, `'5'` for the text, `[3,2]`), at most 80 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        text = "[" + ",".join(as_typed(item) for item in value) + "]"
    elif isinstance(value, dict):
        text = "{" + ",".join(f"{key}:{as_typed(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, float):
        text = repr(value).removesuffix(".0")
    elif isinstance(value, str) and _reads_as_other(value):
        text = f"'{value}'"
    else:
        text = str(value)
    return _shorten(text)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_LENGTH else text[: _MAX_VALUE_LENGTH - 1] + "…"


def _reads_as_other(text: str) -> bool:
    """Whether a text would be read as a number, a truth value or null without its quotes."""
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false", "null")
    return True


def _one_line(text: str) -> str:
    return " ".join(text.split())
