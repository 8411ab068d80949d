"""Names and manifest of a checkpoint on the disk: what tells a whole one from a damaged one, and changes that are safe.

    step-00000123/                       a whole checkpoint
        facts.json                       the manifest: the caller's facts; size of every file, digest of the metadata
        .metadata  __0_0.distcp  ...     files of torch.distributed.checkpoint
    .tmp-...                             a save that did not finish, or a deletion; removed by the next save

Whatever has a final name is whole, or was damaged from outside.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpipe_cli.errors import CheckpointError
from gpipe_cli.training import checkpoint_storage as storage

FORMAT = 1
TEMPORARY = ".tmp-"
FACTS_FILE = "facts.json"
# Every rank's file carries (step, number of the save), so that files of two saves cannot pass for one checkpoint.
MARK = "checkpoint/rank"
_METADATA_FILE = ".metadata"  # DCP's name for it
# ".old" is a whole checkpoint whose step is being saved anew; it is gone when the new one has its name.
_FINISHED = re.compile(r"step-(\d{8,})(\.old)?")


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies once it is whole."""
    return directory / f"step-{step:08d}"


def has_final_name(path: Path) -> bool:
    """Whether the name is that of a finished checkpoint."""
    return _FINISHED.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """The step that a final name tells."""
    return int(path.stem.removeprefix("step-"))


def newest_first(directory: Path) -> list[Path]:
    """Everything in `directory` that has a final name, whole or not, the latest step first."""
    named = [path for path in (directory.iterdir() if directory.is_dir() else ()) if has_final_name(path)]
    return sorted(named, key=lambda path: (step_of(path), path.suffix != ".old"), reverse=True)


def seal(folder: Path, step: int, save_number: int, num_ranks: int, facts: Mapping[str, Any]) -> None:
    """Write the manifest over the files in `folder`: with it, and once it has a final name, the checkpoint is whole."""
    manifest = {
        "format": FORMAT,
        "step": step,
        "save_number": save_number,
        "num_ranks": num_ranks,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        "metadata_sha256": _digest(folder / _METADATA_FILE),
        "facts": dict(facts),
    }
    with (folder / FACTS_FILE).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(folder)


def give_name(temporary: Path, final: Path) -> None:
    """Rename a sealed folder to its final name, in place of an earlier checkpoint of that name if need be.

    Killed at any moment, it leaves a whole checkpoint of the step under one final name or the other.
    """
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        remove(old)
        os.rename(final, old)
    os.rename(temporary, final)
    sync_directory(final.parent)
    remove(old)


def remove(path: Path) -> None:
    """Delete a checkpoint so that, killed at any moment, it leaves no half of one under a final name."""
    if path.exists():
        doomed = path.with_name(f"{TEMPORARY}deleted-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> None:
    """Delete what saves and deletions that were cut short have left in `directory`."""
    for leftover in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)


def sync_directory(path: Path) -> None:
    """Have the disk remember which names the directory holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint at `path`, or None. Costs a stat and a small read a file."""
    try:
        manifest = read_manifest(path)
        for name, size in manifest["files"].items():
            if not (path / name).is_file():
                return f"damaged: {name} is missing; use an earlier checkpoint"
            found = (path / name).stat().st_size
            if found != size:
                return f"damaged: {name} has {found} bytes and should have {size}; use an earlier checkpoint"
        if _digest(path / _METADATA_FILE) != manifest["metadata_sha256"]:
            return f"damaged: {_METADATA_FILE} belongs to another checkpoint; use an earlier one"
        metadata = storage.read_metadata(path)
        marks = storage.read_tensors(path, metadata, [f"{MARK}{rank}" for rank in range(manifest["num_ranks"])])
        expected = [manifest["step"], manifest["save_number"]]
        if any(mark.tolist() != expected for mark in marks.values()):
            return "damaged: its files come from different saves; use an earlier checkpoint"
    except CheckpointError as error:
        return error.problem
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`. Raises CheckpointError where it is missing or not readable."""
    try:
        text = (path / FACTS_FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(path, f"not a whole checkpoint: {FACTS_FILE}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"damaged: {FACTS_FILE} is not text") from error
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
        raise CheckpointError(path, f"damaged: {FACTS_FILE} is not a manifest written by gpipe") from error
    return dict(manifest)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(path, f"{error.strerror}") from error
