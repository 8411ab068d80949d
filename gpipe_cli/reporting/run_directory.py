"""The folder of a run: its name, its configuration, and finding an earlier one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigError, TrainingError
from gpipe_cli.reporting.atomic import replace_text

_GROUPS_OF_TRAINING = ("model", "dataset", "optimizer", "lr_schedule")


def claim_run_directory(
    given: str | None, results_dir: str | Path, command: str, model: str, dataset: str, checkpoint: Path | None = None
) -> Path:
    """The folder that the user has given, or else a new one below the results. Raises ConfigError as both do."""
    if given is None:
        return new_run_directory(Path(results_dir), command, model, dataset)
    return given_run_directory(Path(given), checkpoint=checkpoint)


def new_run_directory(results_dir: Path, command: str, model: str, dataset: str) -> Path:
    """Make `results_dir/runs/<date>-<command>-<model>-<dataset>-<n>` with the first n that is free, and return it.

    Making the folder is what claims the name, so runs that start at the same moment get different ones.
    Raises ConfigError when it cannot be made.
    """
    runs = results_dir / "runs"
    stem = f"{time.strftime('%Y-%m-%d')}-{command}-{model}-{dataset}"
    number = 1
    with _usable("results_dir", results_dir):
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            path = runs / f"{stem}-{number}"
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
            else:
                return path


def given_run_directory(path: Path, *, checkpoint: Path | None) -> Path:
    """A folder that the user chose: made if need be. `checkpoint`: what the run goes on from.

    Raises ConfigError when it holds another run than that of the checkpoint, or cannot be made.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError("run_dir", path, "is a file; name a folder")
    metrics = path / "metrics.jsonl"
    own = checkpoint is not None and holds_checkpoint(path, checkpoint)
    if not own and metrics.exists() and metrics.stat().st_size > 0:
        hint = "" if checkpoint is not None else f", or resume={path} to go on"
        raise ConfigError("run_dir", path, f"already holds a run; choose another folder{hint}")
    with _usable("run_dir", path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def holds_checkpoint(run_dir: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint lies in the folder of this run."""
    return run_dir.resolve() in checkpoint.resolve().parents


def check_tables_can_be_written(results_dir: Path) -> None:
    """Raise ConfigError now, not when a long training is over, if the tables' folder cannot be written or made."""
    nearest = next(path for path in (results_dir, *results_dir.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError("results_dir", results_dir, f"{nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError("results_dir", results_dir, f"{nearest} cannot be written; name another folder")


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Write `run_dir/config.yaml`, the resolved configuration. Raises ConfigError when it cannot be written."""
    from omegaconf import OmegaConf

    with _usable("run_dir", run_dir):
        replace_text(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(config))))


@contextmanager
def one_line_if_not_written(path: Path) -> Iterator[None]:
    """For what is written while a run goes on or ends: an OSError becomes a TrainingError that names the file."""
    try:
        yield
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else path
        raise TrainingError(f"{named}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _usable(key: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(key, folder, f"cannot be written: {error.strerror}; name another folder") from error


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """The configuration that a run was started with; None where there is none. Raises ConfigError if it is damaged."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = run_dir / "config.yaml"
    if not path.is_file():
        return None
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError("resume", run_dir, f"its config.yaml cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(config, dict) or not isinstance(config.get("command"), str):
        raise ConfigError("resume", run_dir, "its config.yaml holds no settings")
    missing = [group for group in _GROUPS_OF_TRAINING if not isinstance(config.get(group), dict)]
    if config["command"] == "train" and missing:
        raise ConfigError("resume", run_dir, f"its config.yaml is damaged: the group {missing[0]} is missing")
    return config
