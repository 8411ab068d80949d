"""Tensors of a checkpoint through torch.distributed.checkpoint (DCP), without the dangers of its metadata file.

DCP reads its tensors with `weights_only=True` but its `.metadata` with plain `pickle.load`, which runs whatever the
file says; here an unpickler reads it that knows a few classes. Written metadata names no local path.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gpipe_cli.errors import CheckpointError

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
}


def write_tensors(
    directory: Path,
    final: Path,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    *,
    alone: bool,
    cancelled: threading.Event | None = None,
) -> None:
    """Write this rank's `tensors` into `directory`; a collective of `group`, unless `alone`.

    Raises CheckpointError, about the checkpoint `final`, on every rank when one of them cannot write, or does not go
    on writing because `cancelled` is set.
    """
    with _one_line_errors(final):
        writer = _PlainWriter(directory, cancelled)
        dcp_save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)


def accept_no_process_group() -> None:
    """Silence DCP's warning that it works without a process group, which is meant here.

    For good, not for a while: the filters belong to all threads, and one that restores them would undo another's
    change. Called by the thread that starts the writing, too, as that one may be about to change them.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def read_tensors(path: Path, metadata: Metadata, wanted: list[str]) -> dict[str, Tensor]:
    """Read the tensors called `wanted` of the checkpoint at `path`, on the CPU, in this process alone.

    Raises CheckpointError for what is missing, cannot be read, or has changed since it was written.
    """
    tensors = {}
    for key in wanted:
        stored = metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(path, f"damaged: its metadata has no tensor {key}")
        tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
    if tensors:
        with _one_line_errors(path):
            dcp_load(tensors, storage_reader=_CheckedReader(path, metadata), no_dist=True)
        _check_sums(path, metadata, tensors.keys())
    return tensors


def _check_sums(path: Path, metadata: Metadata, keys: Collection[str]) -> None:
    """Every tensor is stored as a zip archive with check sums, which torch writes but does not look at."""
    for index, place in metadata.storage_data.items():
        if index.fqn in keys:
            with (path / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
            try:
                intact = zipfile.ZipFile(io.BytesIO(content)).testzip() is None
            except zipfile.BadZipFile:
                intact = False
            if not intact:
                problem = f"damaged: {place.relative_path} has changed since it was written; use an earlier checkpoint"
                raise CheckpointError(path, problem)


def read_metadata(path: Path) -> Metadata:
    """The metadata of the checkpoint at `path`. Raises CheckpointError for any other pickle; nothing of it is run."""
    file = path / ".metadata"
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except _ForeignClassError as error:
        raise CheckpointError(
            path, f"{file.name} names {error}, which no checkpoint of gpipe holds; refused"
        ) from error
    except OSError as error:
        raise CheckpointError(path, f"{file.name}: {one_line(error)}") from error
    except Exception as error:  # a damaged pickle can raise almost anything
        raise CheckpointError(path, f"{file.name} is not the metadata of a checkpoint") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(path, f"{file.name} is not the metadata of a checkpoint")
    return metadata


def one_line(error: BaseException) -> str:
    """The reason of an error without its file names and line breaks."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Turn DCP's report of every rank's traceback into the first cause on one line."""
    accept_no_process_group()
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if not isinstance(cause, Exception):
            raise cause from None  # Ctrl-C is not a bad checkpoint
        raise CheckpointError(path, f"rank {rank}: {one_line(cause)}") from error


class _PlainWriter(FileSystemWriter):
    """DCP's writer of one file a rank, whose metadata does not name the directory that it is about to leave."""

    def __init__(self, directory: Path, cancelled: threading.Event | None) -> None:
        # Nothing is copied ahead: the copying would make a CUDA context on the first GPU in every writing thread.
        super().__init__(directory, sync_files=True, per_thread_copy_ahead=0)
        if cancelled is not None:
            self.fs = _CancelledFiles(cancelled)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _CancelledFiles(FileSystem):
    """Files to which nothing more is written once `cancelled` is set."""

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with io.BufferedWriter(_CancelledFile(path, mode, self._cancelled)) as stream:
            yield stream


class _CancelledFile(io.FileIO):
    def __init__(self, path: str | os.PathLike[str], mode: str, cancelled: threading.Event) -> None:
        super().__init__(path, mode)
        self._cancelled = cancelled

    def write(self, data: Any) -> int:
        if self._cancelled.is_set():
            raise InterruptedError("the save was given up")
        return super().write(data)


class _CheckedReader(FileSystemReader):
    """DCP's reader, given metadata that `read_metadata` has read."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


class _ForeignClassError(Exception):
    pass


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11 pickles a member of an enumeration as getattr(class, name)
        raise _ForeignClassError(f"{module}.{name}")


def _member(owner: object, name: str) -> Any:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    if owner is not _MEM_FORMAT_ENCODING:
        raise _ForeignClassError(f"getattr of {owner!r}")
    return _MEM_FORMAT_ENCODING[name]
