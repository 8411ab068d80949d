"""Whole checkpoints or none: written aside, synced, then renamed; loadable at any number of partitions.

`torch.distributed.checkpoint` (DCP) stores the tensors by global name, one file a rank. Around it stand the
promises that it does not make: a checkpoint with its final name is complete and from one step, a killed or failed
save loses nothing (`checkpoint_saving`), and loading runs no foreign pickle (DCP's own metadata file is an unrestricted
pickle; see `checkpoint_storage`). `checkpoint_files` says what a checkpoint looks like on the disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from gpipe_cli.errors import CheckpointError
from gpipe_cli.training import checkpoint_files as files
from gpipe_cli.training import checkpoint_storage as storage
from gpipe_cli.training.checkpoint_saving import save
from gpipe_cli.training.optimizer_state import optimizer_tensors, restore_optimizer

__all__ = [
    "check_whole",
    "find_latest",
    "keys",
    "load",
    "load_facts",
    "optimizer_tensors",
    "passed_over",
    "resolve",
    "restore_optimizer",
    "save",
]


def find_latest(directory: Path) -> Path | None:
    """The newest whole checkpoint in `directory`, or None. Unfinished and damaged ones are passed over."""
    return next((path for path in files.newest_first(directory) if files.damage(path) is None), None)


def passed_over(checkpoint: Path) -> list[str]:
    """A line for each damaged checkpoint beside `checkpoint` that is newer: what `find_latest` left out, and why."""
    newer = [path for path in files.newest_first(checkpoint.parent) if files.step_of(path) > files.step_of(checkpoint)]
    found = [(path, files.damage(path)) for path in newer]
    return [str(CheckpointError(path, f"passed over, {problem}")) for path, problem in found if problem is not None]


def resolve(path: Path) -> Path:
    """The checkpoint that a user means by `path`: itself, or the newest whole one of a run or checkpoints directory.

    Raises CheckpointError where there is none, or where the named one is damaged.
    """
    if not path.exists():
        raise CheckpointError(path, "no such checkpoint or run directory")
    if not path.is_dir():
        raise CheckpointError(
            path, "is a file, not a checkpoint: name a run directory or a step-… directory written by gpipe"
        )
    if (path / files.FACTS_FILE).exists() or files.has_final_name(path):
        check_whole(path)
        return path
    latest = find_latest(path / "checkpoints") or find_latest(path)
    if latest is None:
        if any(path.glob("seed-*/checkpoints")):
            raise CheckpointError(path, "holds runs of several seeds; name one of them, the folder seed-N in it")
        raise CheckpointError(path, "holds no whole checkpoint")
    return latest


def check_whole(path: Path) -> None:
    """Raise CheckpointError, which says what is wrong, unless `path` is a whole checkpoint. Reads little of it."""
    damage = files.damage(path)
    if damage is not None:
        raise CheckpointError(path, damage)


def load(path: Path, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the tensors called `keys` (None: all), on the CPU, in this process alone: any rank may ask for any keys.

    Raises CheckpointError for a damaged checkpoint, a foreign pickle or a key that the checkpoint lacks.
    """
    check_whole(path)
    metadata = storage.read_metadata(path)
    stored = metadata.state_dict_metadata
    wanted = [key for key in stored if not key.startswith(files.MARK)] if keys is None else list(keys)
    missing = sorted(set(wanted) - stored.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(path, f"lacks {missing[0]}{more}: it was written for another model or other settings")
    return storage.read_tensors(path, metadata, wanted)


def keys(path: Path) -> list[str]:
    """Names of all tensors in the checkpoint. Raises CheckpointError as `load` does."""
    check_whole(path)
    return [key for key in storage.read_metadata(path).state_dict_metadata if not key.startswith(files.MARK)]


def load_facts(path: Path) -> dict[str, Any]:
    """The facts given to `save`. Raises CheckpointError where they are missing or not readable."""
    return dict(files.read_manifest(path)["facts"])
