"""Whole checkpoints or none: written aside, synced, then renamed; loadable at any number of partitions.

`torch.distributed.checkpoint` (DCP) stores the tensors by global name, one file a rank. Around it stand the
promises that it does not make: a checkpoint with its final name is complete and from one step, a killed or failed
save loses nothing, and loading runs no foreign pickle (DCP's own metadata file is an unrestricted pickle; see
`checkpoint_storage`).

    checkpoints/step-00000123/           a whole checkpoint
        facts.json                       the caller's facts; size of every file, digest of the metadata
        .metadata  __0_0.distcp  ...     DCP's files
    checkpoints/.tmp-...                 a save that did not finish, or a deletion; removed by the next save
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_cli.errors import CheckpointError
from gpipe_cli.training.optimizer_state import optimizer_tensors, restore_optimizer

__all__ = [
    "check_whole",
    "find_latest",
    "keys",
    "load",
    "load_facts",
    "optimizer_tensors",
    "resolve",
    "restore_optimizer",
    "save",
]

FORMAT = 1
_FACTS_FILE = "facts.json"
_METADATA_FILE = ".metadata"  # DCP's name for it
_TEMPORARY = ".tmp-"
# ".old" is a whole checkpoint whose step is being saved anew; it is gone when the new one has its name.
_FINISHED = re.compile(r"step-(\d{8,})(\.old)?")
# Every rank's file carries (step, number of the save), so that files of two saves cannot pass for one checkpoint.
_MARK = "checkpoint/rank"

T = TypeVar("T")


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    *,
    keep: int,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint of all ranks and return its path, `directory/step-<step>`. Call it on every rank.

    Checkpoints of later steps, left by a run that went on from an earlier one, are removed once this one is whole.

    Args:
        directory: holds the run's checkpoints, on a file system that all ranks see.
        step: optimizer steps done.
        tensors: this rank's tensors; keys are unique over the ranks. Values must be finite: the caller checks.
        facts: plain JSON types (no NaN); rank 0's are written.
        keep: this many of the newest whole checkpoints stay, 1 or more.
        process_group: group for the coordination, which needs a CPU backend under NCCL. None: the default group where
            torch.distributed is initialised, else this process alone.

    Raises CheckpointError on every rank when one of them cannot write; earlier checkpoints stay as they were.
    """
    from gpipe_cli.training import checkpoint_storage as storage

    if keep < 1:
        raise ValueError(f"keep must be 1 or more, not {keep}")
    ranks = _Ranks(process_group)
    final = directory / f"step-{step:08d}"
    temporary = directory / f"{_TEMPORARY}{final.name}"
    save_number = ranks.on_first(final, lambda: _prepare(directory, temporary, facts))
    mark = torch.tensor([step, save_number], dtype=torch.int64)
    try:
        alone = ranks.size == 1
        storage.write_tensors(temporary, final, {**tensors, f"{_MARK}{ranks.rank}": mark}, ranks.group, alone=alone)
        ranks.on_first(final, lambda: _finish(temporary, final, step, save_number, ranks.size, facts, keep))
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def find_latest(directory: Path) -> Path | None:
    """The newest whole checkpoint in `directory`, or None. Unfinished and damaged ones are passed over."""
    return next((path for path in _newest_first(directory) if _damage(path) is None), None)


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
    if (path / _FACTS_FILE).exists() or _FINISHED.fullmatch(path.name):
        check_whole(path)
        return path
    latest = find_latest(path / "checkpoints") or find_latest(path)
    if latest is None:
        raise CheckpointError(path, "holds no whole checkpoint")
    return latest


def check_whole(path: Path) -> None:
    """Raise CheckpointError, which says what is wrong, unless `path` is a whole checkpoint. Reads little of it."""
    damage = _damage(path)
    if damage is not None:
        raise CheckpointError(path, damage)


def load(path: Path, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the tensors called `keys` (None: all), on the CPU, in this process alone: any rank may ask for any keys.

    Raises CheckpointError for a damaged checkpoint, a foreign pickle or a key that the checkpoint lacks.
    """
    from gpipe_cli.training import checkpoint_storage as storage

    check_whole(path)
    metadata = storage.read_metadata(path)
    stored = metadata.state_dict_metadata
    wanted = [key for key in stored if not key.startswith(_MARK)] if keys is None else list(keys)
    missing = sorted(set(wanted) - stored.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(path, f"lacks {missing[0]}{more}: it was written for another model or other settings")
    return storage.read_tensors(path, metadata, wanted)


def keys(path: Path) -> list[str]:
    """Names of all tensors in the checkpoint. Raises CheckpointError as `load` does."""
    from gpipe_cli.training import checkpoint_storage as storage

    check_whole(path)
    return [key for key in storage.read_metadata(path).state_dict_metadata if not key.startswith(_MARK)]


def load_facts(path: Path) -> dict[str, Any]:
    """The facts given to `save`. Raises CheckpointError where they are missing or not readable."""
    return dict(_read_manifest(path)["facts"])


def _prepare(directory: Path, temporary: Path, facts: Mapping[str, Any]) -> int:
    """Clear what an earlier save left behind, make the temporary directory, and number this save."""
    json.dumps(facts, allow_nan=False)  # a bug in the caller is to show before anything is written
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)
    temporary.mkdir()
    return secrets.randbits(62)


def _finish(
    temporary: Path, final: Path, step: int, save_number: int, num_ranks: int, facts: Mapping[str, Any], keep: int
) -> None:
    """Seal the temporary directory with its manifest, give it its name, and drop the checkpoints beyond `keep`."""
    manifest = {
        "format": FORMAT,
        "step": step,
        "save_number": save_number,
        "num_ranks": num_ranks,
        "files": {file.name: file.stat().st_size for file in sorted(temporary.iterdir())},
        "metadata_sha256": _digest(temporary / _METADATA_FILE),
        "facts": dict(facts),
    }
    with (temporary / _FACTS_FILE).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(temporary)
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        _remove(old)
        os.rename(final, old)
    os.rename(temporary, final)
    _sync_directory(final.parent)
    _remove(old)
    num_whole = 0
    for path in _newest_first(final.parent):
        # Later steps are of a run that was taken up again from before them: they are no part of this one.
        if _step_of(path) > step or num_whole >= keep:
            _remove(path)
        elif _damage(path) is None:
            num_whole += 1


def _remove(path: Path) -> None:
    """Delete a checkpoint so that, killed at any moment, it leaves no half of one under a final name."""
    if path.exists():
        doomed = path.with_name(f"{_TEMPORARY}deleted-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def _newest_first(directory: Path) -> list[Path]:
    named = [path for path in (directory.iterdir() if directory.is_dir() else ()) if _FINISHED.fullmatch(path.name)]
    return sorted(named, key=lambda path: (_step_of(path), path.suffix != ".old"), reverse=True)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _damage(path: Path) -> str | None:
    """What is wrong with the checkpoint at `path`, or None. Costs a stat and a small read a file."""
    from gpipe_cli.training import checkpoint_storage as storage

    try:
        manifest = _read_manifest(path)
        for name, size in manifest["files"].items():
            if not (path / name).is_file():
                return f"damaged: {name} is missing; use an earlier checkpoint"
            found = (path / name).stat().st_size
            if found != size:
                return f"damaged: {name} has {found} bytes and should have {size}; use an earlier checkpoint"
        if _digest(path / _METADATA_FILE) != manifest["metadata_sha256"]:
            return f"damaged: {_METADATA_FILE} belongs to another checkpoint; use an earlier one"
        metadata = storage.read_metadata(path)
        marks = storage.read_tensors(path, metadata, [f"{_MARK}{rank}" for rank in range(manifest["num_ranks"])])
        expected = [manifest["step"], manifest["save_number"]]
        if any(mark.tolist() != expected for mark in marks.values()):
            return "damaged: its files come from different saves; use an earlier checkpoint"
    except CheckpointError as error:
        return error.problem
    return None


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = (path / _FACTS_FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(path, f"not a whole checkpoint: {_FACTS_FILE}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"damaged: {_FACTS_FILE} is not text") from error
    try:
        manifest = json.loads(text)
        types = {
            "step": int,
            "save_number": int,
            "num_ranks": int,
            "files": dict,
            "metadata_sha256": str,
            "facts": dict,
        }
        if manifest["format"] != FORMAT:
            raise CheckpointError(path, f"has format {manifest['format']}; this version of gpipe reads format {FORMAT}")
        if any(not isinstance(manifest[key], kind) for key, kind in types.items()):
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(path, f"damaged: {_FACTS_FILE} is not a manifest written by gpipe") from error
    return dict(manifest)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(path, f"{error.strerror}") from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Ranks:
    """The processes that share a checkpoint: one, or the members of a process group."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.group = process_group
        initialised = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(process_group) if initialised else 1
        self.rank = dist.get_rank(process_group) if initialised else 0

    def on_first(self, path: Path, action: Callable[[], T]) -> T:
        """Run `action` on the first rank; all ranks get its result, or its CheckpointError. Also a barrier."""
        from gpipe_cli.training import checkpoint_storage as storage

        outcome: list[Any] = [None, None]
        cause: Exception | None = None
        if self.rank == 0:
            try:
                outcome[0] = action()
            except Exception as error:  # whatever it is, the other ranks must not wait for it
                cause = error
                outcome[1] = (
                    error if isinstance(error, CheckpointError) else CheckpointError(path, storage.one_line(error))
                )
        if self.size > 1:
            first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast_object_list(outcome, src=first, group=self.group)
        if cause is not None and not isinstance(cause, (OSError, CheckpointError)):
            raise cause  # a bug, with its traceback
        if outcome[1] is not None:
            raise outcome[1] from cause
        return cast(T, outcome[0])
