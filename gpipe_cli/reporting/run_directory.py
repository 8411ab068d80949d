"""The folder of a run: its name, its configuration, and finding an earlier one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigError
from gpipe_cli.reporting.atomic import replace_text


def new_run_directory(results_dir: Path, command: str, model: str, dataset: str) -> Path:
    """Make `results_dir/runs/<date>-<command>-<model>-<dataset>-<n>` with the first n that is free, and return it.

    Making the folder is what claims the name, so runs that start at the same moment get different ones.
    """
    runs = results_dir / "runs"
    stem = f"{time.strftime('%Y-%m-%d')}-{command}-{model}-{dataset}"
    number = 1
    while True:
        path = runs / f"{stem}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def given_run_directory(path: Path, *, resumed: bool) -> Path:
    """A folder that the user chose: made if need be. Raises ConfigError when it holds another run."""
    if path.exists() and not path.is_dir():
        raise ConfigError("run_dir", path, "is a file; name a folder")
    if not resumed and (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").stat().st_size > 0:
        raise ConfigError("run_dir", path, f"already holds a run; choose another folder, or resume={path} to go on")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Write `run_dir/config.yaml`, the resolved configuration."""
    from omegaconf import OmegaConf

    replace_text(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(config))))


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
    if not isinstance(config, dict):
        raise ConfigError("resume", run_dir, "its config.yaml holds no settings")
    return config
