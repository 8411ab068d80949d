"""CIFAR from a small archive in its true layout: installed whole, once, or refused in one line."""

from __future__ import annotations

import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from gpipe_cli.data.datasets import open_split, prepare
from gpipe_cli.distributed.mesh import make_mesh
from gpipe_cli.training.communication import from_first

torchvision_sets = pytest.importorskip("torchvision.datasets", reason="torchvision is not installed")

ARCHIVE = "cifar-10-python.tar.gz"


class OldPickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes arrays as the NumPy of 2009 did: dtype flags are 0 and 1, as in the real archives."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, np.dtype):
            kind, align, copy, state = *value.__reduce__()[1], value.__reduce__()[2]
            return np.dtype, (kind, int(align), int(copy)), state
        return NotImplemented


def old_pickle(content: object) -> bytes:
    buffer = io.BytesIO()
    OldPickler(buffer, protocol=2).dump(content)
    return buffer.getvalue()


@pytest.fixture
def cifar(serve: Callable, make_tar: Callable, md5: Callable, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchvision's CIFAR10 over an archive of 5 x 4 training and 6 test pictures, behind a server not yet running."""
    rng = np.random.default_rng(0)
    cls = torchvision_sets.CIFAR10
    files = {}
    for name, number in [*((entry[0], 4) for entry in cls.train_list), (cls.test_list[0][0], 6)]:
        pixels = rng.integers(0, 256, (number, 3072), dtype=np.uint8)
        files[name] = old_pickle({"data": pixels, "labels": [index % 10 for index in range(number)]})
    files["batches.meta"] = old_pickle({"label_names": [f"thing{label}" for label in range(10)]})
    archive = make_tar({f"{cls.base_folder}/{name}": content for name, content in files.items()}, "gz")
    server = serve({cls.filename: archive})
    monkeypatch.setattr(cls, "url", server.url(cls.filename))
    monkeypatch.setattr(cls, "tgz_md5", md5(archive))
    monkeypatch.setattr(cls, "train_list", [[entry[0], md5(files[entry[0]])] for entry in cls.train_list])
    monkeypatch.setattr(cls, "test_list", [[cls.test_list[0][0], md5(files[cls.test_list[0][0]])]])
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": md5(files["batches.meta"])})
    return server


def test_download_is_verified_unpacked_and_read(
    cifar: Any, settings: Callable, tmp_path: Path, left_in: Callable
) -> None:
    cifar.start()
    config = settings("cifar10", path=tmp_path / "new" / "data", download=True)
    info = prepare(config, 0)
    assert (info.num_train, info.num_eval, info.classes[3]) == (20, 6, "thing3")
    picture, label = open_split(config, "eval", 0)[5]
    assert (picture.size, picture.mode, label) == ((32, 32), "RGB", 5)
    assert left_in(tmp_path / "new" / "data") == {"cifar-10-batches-py"}
    assert prepare(config, 0) == info
    assert cifar.num_requests == 1


def test_four_processes_at_once_make_one_request(cifar: Any, settings: Callable, tmp_path: Path) -> None:
    config = settings("cifar10", path=tmp_path, download=True)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=prepare, args=(config, 0)) for _ in range(4)]
    for process in processes:
        process.start()
    cifar.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert cifar.num_requests == 1


def prepared_on_a_rank(config: Any) -> list[int]:
    info = from_first(make_mesh(dist.get_world_size(), 1).process_groups(), lambda: prepare(config, 0))
    return [info.num_train, len(open_split(config, "train", 0)), len(open_split(config, "eval", 0))]


def test_one_of_four_ranks_downloads_and_all_read(
    cifar: Any, settings: Callable, tmp_path: Path, run_ranks: Callable
) -> None:
    """pytorch/tutorials#3065, mmpretrain#1188: all ranks wrote and unpacked the same archive together."""
    cifar.start()
    assert run_ranks(4, prepared_on_a_rank, settings("cifar10", path=tmp_path, download=True)) == [[20, 20, 6]] * 4
    assert cifar.num_requests == 1


def test_archive_that_lies_there_is_unpacked_without_the_network(
    cifar: Any, settings: Callable, tmp_path: Path
) -> None:
    (tmp_path / ARCHIVE).write_bytes(cifar.files[ARCHIVE])
    assert prepare(settings("cifar10", path=tmp_path), 0).num_train == 20
    assert cifar.num_requests == 0


def test_missing_data_without_download_name_both_remedies_and_write_nothing(
    cifar: Any, settings: Callable, tmp_path: Path, refused: Callable
) -> None:
    message = refused(settings("cifar10", path=tmp_path / "data"))
    assert f"dataset.path={tmp_path / 'data'}: no cifar-10-batches-py/data_batch_1 there" in message
    assert "dataset.download=true" in message
    assert f"cifar-10-python.tar.gz from {cifar.url(ARCHIVE)}" in message
    assert not (tmp_path / "data").exists()


def test_damaged_file_is_named_and_replaced_by_a_download(
    cifar: Any, settings: Callable, tmp_path: Path, refused: Callable, left_in: Callable
) -> None:
    cifar.start()
    prepare(settings("cifar10", path=tmp_path, download=True), 0)
    victim = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    victim.write_bytes(victim.read_bytes()[:100])
    assert "cifar-10-batches-py/data_batch_3 fails its MD5 check" in refused(settings("cifar10", path=tmp_path))
    assert prepare(settings("cifar10", path=tmp_path, download=True), 0).num_train == 20
    assert left_in(tmp_path) == {"cifar-10-batches-py"}


def test_damaged_archive_is_named(cifar: Any, settings: Callable, tmp_path: Path, refused: Callable) -> None:
    (tmp_path / ARCHIVE).write_bytes(cifar.files[ARCHIVE][:-20])
    assert "cifar-10-python.tar.gz fails its MD5 check" in refused(settings("cifar10", path=tmp_path))


def test_download_of_other_bytes_is_refused_and_leaves_nothing(
    cifar: Any, settings: Callable, tmp_path: Path, refused: Callable, left_in: Callable
) -> None:
    cifar.files[ARCHIVE] = cifar.files[ARCHIVE][:-20]
    cifar.start()
    message = refused(settings("cifar10", path=tmp_path, download=True))
    assert f"downloading {cifar.url(ARCHIVE)} failed: what came fails its MD5 check" in message
    assert left_in(tmp_path) == set()


def test_download_that_breaks_off_is_refused_and_leaves_nothing(
    cifar: Any, settings: Callable, tmp_path: Path, refused: Callable, left_in: Callable
) -> None:
    cifar.num_bytes_lost = 1000
    cifar.start()
    message = refused(settings("cifar10", path=tmp_path, download=True))
    assert f"downloading {cifar.url(ARCHIVE)} failed: the connection ended after" in message
    assert left_in(tmp_path) == set()


def test_what_a_killed_run_left_is_removed_by_the_next(
    cifar: Any, settings: Callable, tmp_path: Path, left_in: Callable
) -> None:
    (tmp_path / ".unpacking-killed").mkdir()
    (tmp_path / ".unpacking-killed" / ARCHIVE).write_bytes(b"half")
    cifar.start()
    prepare(settings("cifar10", path=tmp_path, download=True), 0)
    assert left_in(tmp_path) == {"cifar-10-batches-py"}


def test_unreachable_server_is_one_line(
    cifar: Any, settings: Callable, tmp_path: Path, refused: Callable, left_in: Callable
) -> None:
    cifar.close()
    message = refused(settings("cifar10", path=tmp_path, download=True))
    assert "downloading" in message
    assert "put cifar-10-python.tar.gz into" in message
    assert left_in(tmp_path) == set()


def test_unwritable_folder_is_one_line(cifar: Any, settings: Callable, tmp_path: Path, refused: Callable) -> None:
    (tmp_path / "file").touch()
    assert "cannot write there" in refused(settings("cifar10", path=tmp_path / "file" / "data", download=True))
