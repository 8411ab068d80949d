"""CIFAR and ImageNet from small archives in their true layout: installed whole, once, or refused in one line."""

from __future__ import annotations

import hashlib
import http.server
import io
import multiprocessing
import pickle
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe_cli.data.datasets import open_split, prepare
from gpipe_cli.errors import ConfigError

torchvision_sets = pytest.importorskip("torchvision.datasets", reason="torchvision is not installed")


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


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


class Served(http.server.ThreadingHTTPServer):
    """A server on 127.0.0.1 that gives one body for any path and counts the requests."""

    def __init__(self, body: bytes) -> None:
        served, self.body, self.num_requests = self, body, 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.num_requests += 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(served.body)))
                self.end_headers()
                self.wfile.write(served.body)

            def log_message(self, *_: object) -> None:
                """No log on the test's output."""

        super().__init__(("127.0.0.1", 0), Handler)  # from here on clients may connect; they wait for serve_forever

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/cifar.tar.gz"


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """torchvision's CIFAR10 over an archive of 5 x 4 training and 6 test pictures, behind a server not yet running."""
    rng = np.random.default_rng(0)
    cls = torchvision_sets.CIFAR10
    files = {}
    for name, number in [*((entry[0], 4) for entry in cls.train_list), (cls.test_list[0][0], 6)]:
        pixels = rng.integers(0, 256, (number, 3072), dtype=np.uint8)
        files[name] = old_pickle({"data": pixels, "labels": [index % 10 for index in range(number)]})
    files["batches.meta"] = old_pickle({"label_names": [f"thing{label}" for label in range(10)]})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            add(tar, f"{cls.base_folder}/{name}", content)
    with Served(buffer.getvalue()) as server:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(cls, "url", server.url)
        monkeypatch.setattr(cls, "tgz_md5", md5(server.body))
        monkeypatch.setattr(cls, "train_list", [[entry[0], md5(files[entry[0]])] for entry in cls.train_list])
        monkeypatch.setattr(cls, "test_list", [[cls.test_list[0][0], md5(files[cls.test_list[0][0]])]])
        monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": md5(files["batches.meta"])})
        yield server
        if server.num_requests:
            server.shutdown()


def start(server: Served) -> None:
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


def refused(config: object) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(config, 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".gpipe-lock"}


def test_download_is_verified_unpacked_and_read(cifar: Served, settings: Callable, tmp_path: Path) -> None:
    start(cifar)
    config = settings("cifar10", path=tmp_path / "new" / "data", download=True)
    info = prepare(config, 0)
    assert (info.num_train, info.num_eval, info.classes[3]) == (20, 6, "thing3")
    picture, label = open_split(config, "eval", 0)[5]
    assert (picture.size, picture.mode, label) == ((32, 32), "RGB", 5)
    assert left_in(tmp_path / "new" / "data") == {"cifar-10-batches-py"}
    assert prepare(config, 0) == info
    assert cifar.num_requests == 1


def test_four_processes_at_once_make_one_request(cifar: Served, settings: Callable, tmp_path: Path) -> None:
    config = settings("cifar10", path=tmp_path, download=True)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=prepare, args=(config, 0)) for _ in range(4)]
    for process in processes:
        process.start()
    start(cifar)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert cifar.num_requests == 1


def test_archive_that_lies_there_is_unpacked_without_the_network(
    cifar: Served, settings: Callable, tmp_path: Path
) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(cifar.body)
    assert prepare(settings("cifar10", path=tmp_path), 0).num_train == 20
    assert cifar.num_requests == 0


def test_missing_data_without_download_name_both_remedies_and_write_nothing(
    cifar: Served, settings: Callable, tmp_path: Path
) -> None:
    message = refused(settings("cifar10", path=tmp_path / "data"))
    assert f"dataset.path={tmp_path / 'data'}: no cifar-10-batches-py/data_batch_1 there" in message
    assert "dataset.download=true" in message
    assert f"cifar-10-python.tar.gz from {cifar.url}" in message
    assert not (tmp_path / "data").exists()


def test_damaged_file_is_named_and_replaced_by_a_download(cifar: Served, settings: Callable, tmp_path: Path) -> None:
    start(cifar)
    prepare(settings("cifar10", path=tmp_path, download=True), 0)
    victim = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    victim.write_bytes(victim.read_bytes()[:100])
    assert "cifar-10-batches-py/data_batch_3 fails its MD5 check" in refused(settings("cifar10", path=tmp_path))
    assert prepare(settings("cifar10", path=tmp_path, download=True), 0).num_train == 20
    assert left_in(tmp_path) == {"cifar-10-batches-py"}


def test_damaged_archive_is_named(cifar: Served, settings: Callable, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(cifar.body[:-20])
    assert "cifar-10-python.tar.gz fails its MD5 check" in refused(settings("cifar10", path=tmp_path))


def test_download_of_other_bytes_is_refused_and_leaves_nothing(
    cifar: Served, settings: Callable, tmp_path: Path
) -> None:
    cifar.body = cifar.body[:-20]
    start(cifar)
    message = refused(settings("cifar10", path=tmp_path, download=True))
    assert f"downloading {cifar.url} failed: what came fails its MD5 check" in message
    assert left_in(tmp_path) == set()


def test_unreachable_server_is_one_line(
    cifar: Served, settings: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(b"") as closed:
        monkeypatch.setattr(torchvision_sets.CIFAR10, "url", closed.url)
    message = refused(settings("cifar10", path=tmp_path, download=True))
    assert "downloading" in message
    assert "put cifar-10-python.tar.gz into" in message
    assert left_in(tmp_path) == set()


def test_unwritable_folder_is_one_line(cifar: Served, settings: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot write there" in refused(settings("cifar10", path=tmp_path / "file" / "data", download=True))


@pytest.fixture
def imagenet_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Training and validation archives with two classes, as distributed: a tar of tars, and pictures in a row."""
    from torchvision.datasets import imagenet

    wnids = ["n01440764", "n02084071"]
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "jpeg")
    picture = buffer.getvalue()
    meta = dict(imagenet.ARCHIVE_META)
    with tarfile.open(tmp_path / meta["train"][0], "w") as train:
        for wnid in wnids:
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for index in range(3):
                    add(tar, f"{wnid}_{index}.JPEG", picture)
            add(train, f"{wnid}.tar", inner.getvalue())
    with tarfile.open(tmp_path / meta["val"][0], "w") as val:
        for index in range(4):
            add(val, f"ILSVRC2012_val_{index:08}.JPEG", picture)
    for split in ("train", "val"):
        meta[split] = (meta[split][0], md5((tmp_path / meta[split][0]).read_bytes()))
    monkeypatch.setattr(imagenet, "ARCHIVE_META", meta)
    # What the devkit archive becomes: names of the classes, and the class of each validation picture.
    torch.save(({wnid: (wnid,) for wnid in wnids}, [wnids[1], wnids[0], wnids[1], wnids[1]]), tmp_path / "meta.bin")
    return tmp_path


def test_imagenet_archives_are_unpacked_into_class_folders(imagenet_archives: Path, settings: Callable) -> None:
    config = settings("imagenet", path=imagenet_archives)
    info = prepare(config, 0)
    assert (info.num_train, info.num_eval, info.classes) == (6, 4, ("n01440764", "n02084071"))
    assert open_split(config, "eval", 0).labels == [0, 1, 1, 1]
    assert not list(imagenet_archives.glob(".unpacking*"))
    for archive in imagenet_archives.glob("*.tar"):
        archive.unlink()
    assert prepare(config, 0) == info  # unpacked once, the archives are not needed


def test_damaged_imagenet_archive_leaves_no_half_split(imagenet_archives: Path, settings: Callable) -> None:
    archive = imagenet_archives / "ILSVRC2012_img_train.tar"
    archive.write_bytes(archive.read_bytes()[:-1])
    assert "unpacking train/ failed: the archive fails its MD5 check" in refused(
        settings("imagenet", path=imagenet_archives)
    )
    assert not (imagenet_archives / "train").exists()


def test_missing_imagenet_archives_are_named(settings: Callable, tmp_path: Path) -> None:
    message = refused(settings("imagenet", path=tmp_path))
    for name in ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"):
        assert name in message
    assert not left_in(tmp_path)
    assert "dataset.path=null" in refused(settings("imagenet"))


def test_imagenet_that_is_already_unpacked_needs_no_archive(settings: Callable, write_tree: Callable) -> None:
    root = write_tree({"train/n01440764": 2, "train/n02084071": 1, "val/n02084071": 1})
    assert prepare(settings("imagenet", path=root), 0).num_train == 3
