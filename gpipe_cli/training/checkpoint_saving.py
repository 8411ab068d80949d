"""Writing a checkpoint of all ranks: aside, synced, sealed, then renamed; a killed or failed save loses nothing."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_cli.errors import CheckpointError, GpipeError
from gpipe_cli.reporting.run_directory import one_line_if_not_written
from gpipe_cli.training import checkpoint_files as files
from gpipe_cli.training import checkpoint_storage as storage

T = TypeVar("T")


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    *,
    keep: int,
    best: Path | None = None,
    process_group: dist.ProcessGroup | None = None,
    cancelled: threading.Event | None = None,
) -> Path:
    """Write a checkpoint of all ranks and return its path, `directory/step-<step>`. Call it on every rank.

    Checkpoints of later steps, left by a run that went on from an earlier one, are removed once this one is whole.

    Args:
        directory: holds the run's checkpoints, on a file system that all ranks see.
        step: optimizer steps done.
        tensors: this rank's tensors; keys are unique over the ranks. Values must be finite: the caller checks.
        facts: plain JSON types (no NaN); rank 0's are written.
        keep: this many of the newest whole checkpoints stay, 1 or more.
        best: a folder in which the checkpoint is kept as well, and alone, by hard links: no second copy.
        process_group: group for the coordination, which needs a CPU backend under NCCL. None: the default group where
            torch.distributed is initialised, else this process alone.
        cancelled: once it is set, this rank writes no more, which fails the save.

    Raises CheckpointError on every rank when one of them cannot write; earlier checkpoints stay as they were.
    TrainingError when only `best` cannot be written: the checkpoint itself is whole then.
    """
    if keep < 1:
        raise ValueError(f"keep must be 1 or more, not {keep}")
    ranks = _Ranks(process_group)
    save = _Save(directory=directory, step=step, facts=facts, keep=keep, best=best)
    save_number = ranks.on_first(save.final, save.prepare)
    mark = torch.tensor([step, save_number], dtype=torch.int64)
    try:
        storage.write_tensors(
            save.temporary,
            save.final,
            {**tensors, f"{files.MARK}{ranks.rank}": mark},
            ranks.group,
            alone=ranks.size == 1,
            cancelled=cancelled,
        )
        ranks.on_first(save.final, lambda: save.finish(save_number, ranks.size))
    except GpipeError:
        if ranks.rank == 0:
            shutil.rmtree(save.temporary, ignore_errors=True)
        raise
    return save.final


def keep_as_best(checkpoint: Path, best: Path, name: str) -> None:
    """Keep the sealed `checkpoint` as `best/<name>` too, by hard links, in place of all others there. One rank.

    Raises TrainingError when it cannot be written.
    """
    with one_line_if_not_written(best):
        best.mkdir(exist_ok=True)
        files.remove_leftovers(best)
        linked = best / f"{files.TEMPORARY}{name}"
        shutil.copytree(checkpoint, linked, copy_function=_link_or_copy)
        files.sync_directory(linked)
        files.give_name(linked, best / name)
        for other in files.newest_first(best):
            if other.name != name:
                files.remove(other)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
    return target


@dataclass(frozen=True, kw_only=True)
class _Save:
    """What one rank does for all: before the tensors are written, and after."""

    directory: Path
    step: int
    facts: Mapping[str, Any]
    keep: int
    best: Path | None

    @property
    def final(self) -> Path:
        return files.path_of(self.directory, self.step)

    @property
    def temporary(self) -> Path:
        return self.directory / f"{files.TEMPORARY}{self.final.name}"

    def prepare(self) -> int:
        """Clear what an earlier save left behind, make the temporary directory, and number this save."""
        json.dumps(self.facts, allow_nan=False)  # a bug in the caller is to show before anything is written
        self.directory.mkdir(parents=True, exist_ok=True)
        files.remove_leftovers(self.directory)
        self.temporary.mkdir()
        return secrets.randbits(62)

    def finish(self, save_number: int, num_ranks: int) -> None:
        """Seal the temporary directory, give it its name, and drop the checkpoints beyond `keep`."""
        files.seal(self.temporary, self.step, save_number, num_ranks, self.facts)
        try:
            # First the best: a run killed in between trains this step again and keeps it as the best again. The other
            # way round, the checkpoint would know of a best that was never kept.
            if self.best is not None:
                keep_as_best(self.temporary, self.best, self.final.name)
        finally:
            files.give_name(self.temporary, self.final)
        num_whole = 0
        for path in files.newest_first(self.directory):
            # Later steps are of a run that was taken up again from before them: they are no part of this one.
            if files.step_of(path) > self.step or num_whole >= self.keep:
                files.remove(path)
            elif files.damage(path) is None:
                num_whole += 1


class _Ranks:
    """The processes that share a checkpoint: one, or the members of a process group."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.group = process_group
        initialised = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(process_group) if initialised else 1
        self.rank = dist.get_rank(process_group) if initialised else 0

    def on_first(self, path: Path, action: Callable[[], T]) -> T:
        """Run `action` on the first rank; all ranks get its result, or its GpipeError. Also a barrier.

        Another error of the action is told to the other ranks as a CheckpointError about `path`.
        """
        outcome: list[Any] = [None, None]
        cause: Exception | None = None
        if self.rank == 0:
            try:
                outcome[0] = action()
            except Exception as error:  # whatever it is, the other ranks must not wait for it
                cause = error
                own = isinstance(error, GpipeError)
                outcome[1] = error if own else CheckpointError(path, storage.one_line(error))
        if self.size > 1:
            first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast_object_list(outcome, src=first, group=self.group)
        if cause is not None and not isinstance(cause, (OSError, GpipeError)):
            raise cause  # a bug, with its traceback
        if outcome[1] is not None:
            raise outcome[1] from (cause if outcome[1] is not cause else None)
        return cast(T, outcome[0])
