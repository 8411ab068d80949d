"""Going on with a run: the settings that it was started with, and what was typed on top of them.

No torch here: which checkpoint is whole is decided later, by those who read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpipe_cli.catalogue import group_choices
from gpipe_cli.errors import ConfigError
from gpipe_cli.overrides import Setting
from gpipe_cli.reporting.run_directory import read_config

# What makes a run the run it is: changing it would be another training under the old one's name.
FIXED = ("command", "model", "seed", "batch_size")


def stored_settings(composed: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """The settings of the run that `resume` names, with the typed `settings` put over them.

    Raises ConfigError when there is no such run, or when what was typed would make it another one.
    """
    run_dir = _find_run(composed)
    stored = read_config(run_dir)
    if stored is None:
        raise ConfigError("resume", composed["resume"], f"{run_dir} holds no config.yaml: name a run folder of gpipe")
    merged = dict(stored)
    for setting in settings:
        group, _, name = setting.key.partition(".")
        if setting.key in group_choices():
            if group in merged and merged[group].get("name") != composed[group]["name"]:
                merged[group] = composed[group]
        elif name:
            merged[group] = {**merged[group], name.split(".")[0]: composed[group][name.split(".")[0]]}
        else:
            merged[group] = composed[group]
    for key in FIXED:
        if merged.get(key) != stored.get(key):
            was, now = _difference(stored[key], merged[key], key)
            raise ConfigError("resume", composed["resume"], f"the run has {was}, not {now}; start a new run for that")
    typed = {setting.key for setting in settings}
    named = str(composed["resume"])
    merged["resume"] = named if named != "auto" else str(run_dir)
    merged["run_dir"] = composed["run_dir"] if "run_dir" in typed else str(run_dir)
    return merged


def changed_settings(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for every setting that differs from the run so far, `key: old -> new`."""
    quiet = {"resume", "run_dir", "epochs", "steps"}  # said by the run itself
    lines = []
    for key, value in now.items():
        before = stored.get(key)
        if key in quiet or _plain(before) == _plain(value):
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            lines += [f"{key}.{line}" for line in changed_settings(before, value)]
        else:
            lines.append(f"{key}: {before} -> {value}")
    return lines


def _find_run(composed: Mapping[str, Any]) -> Path:
    resume = str(composed["resume"])
    if resume == "auto":
        return _newest_run(composed)
    path = Path(resume)
    if not path.exists():
        raise ConfigError("resume", resume, "there is no such run folder or checkpoint")
    for folder in (path, *path.resolve().parents[:2]):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError("resume", resume, "holds no run: name a run folder (with config.yaml) or a checkpoint in one")


def _newest_run(composed: Mapping[str, Any]) -> Path:
    runs = Path(composed["results_dir"]) / "runs"
    found = []
    for folder in runs.iterdir() if runs.is_dir() else ():
        stored = read_config(folder)
        if stored is not None and any(folder.glob("checkpoints/step-*")):
            same = all(stored.get(group, {}).get("name") == composed[group]["name"] for group in ("model", "dataset"))
            if same and stored.get("command") == composed.get("command", "train"):
                found.append(((folder / "config.yaml").stat().st_mtime, folder))
    if not found:
        kind = f"model={composed['model']['name']} dataset={composed['dataset']['name']}"
        raise ConfigError("resume", "auto", f"no run of {kind} with a checkpoint below {runs}; leave resume out")
    return max(found)[1]


def _difference(stored: object, merged: object, key: str) -> tuple[str, str]:
    if isinstance(stored, Mapping) and isinstance(merged, Mapping):
        for name in merged:
            if stored.get(name) != merged[name]:
                return f"{key}.{name}={stored.get(name)}", f"{key}.{name}={merged[name]}"
    return f"{key}={stored}", f"{key}={merged}"


def _plain(value: object) -> object:
    """Tuples and lists say the same."""
    return list(value) if isinstance(value, tuple) else value
