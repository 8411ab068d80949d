"""Data set settings and small class folders for the tests of gpipe_cli.data."""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from gpipe_cli.config import DatasetConfig
from gpipe_cli.data.datasets import prepare
from gpipe_cli.data.info import DataInfo
from gpipe_cli.data.loaders import train_loader
from gpipe_cli.errors import ConfigError


@pytest.fixture
def settings() -> Callable[..., DatasetConfig]:
    """`settings("folder", path=…)`: no augmentation, and pixels of 0..255 unless a test asks for more."""

    def make(name: str, **changes: Any) -> DatasetConfig:
        values = {"image_size": 8, "augment": "none", "mean": (0.0,) * 3, "std": (1 / 255,) * 3, **changes}
        if "path" in values:
            values["path"] = str(values["path"])
        return DatasetConfig(name=name, **values)

    return make


@pytest.fixture
def write_tree(tmp_path: Path) -> Callable[..., Path]:
    """`write_tree({"train/a": 3, "val/a": 1})`: that many 8x8 PNG files, of a colour that differs from file to file."""

    def write(num_pictures: dict[str, int], root: Path | None = None, size: tuple[int, int] = (8, 8)) -> Path:
        root = root or tmp_path / "tree"
        shade = 0
        for folder, number in num_pictures.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for index in range(number):
                Image.new("RGB", size, (shade % 256, shade // 256, 7)).save(root / folder / f"{index:04}.png")
                shade += 1
        return root

    return write


class Counted(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of one pixel that hold their index; remembers what was asked for."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.asked = num_samples, []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.asked.append(index)
        return torch.full((3, 1, 1), index, dtype=torch.uint8), index


@pytest.fixture
def counted() -> type[Counted]:
    return Counted


@pytest.fixture
def train(settings: Callable) -> Callable[..., Any]:
    """`train(dataset, …)`: train_loader over a data set of our own; pictures of one pixel, batches of 4."""

    def make(dataset: Any, **changes: Any) -> Any:
        info = DataInfo("ours", len(dataset), len(dataset), ("a", "b"))
        arguments = {"image_size": 1, "batch_size": 4, "workers": 0, "seed": 0, "epoch": 0, **changes}
        return train_loader(settings("synthetic"), info, dataset=dataset, **arguments)

    return make


class Served(http.server.ThreadingHTTPServer):
    """A server on 127.0.0.1 that gives `files` by name and counts the requests; it answers once it is started."""

    def __init__(self, files: dict[str, bytes]) -> None:
        served, self.files, self.num_requests = self, files, 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.num_requests += 1
                body = served.files[self.path.rpartition("/")[2]]
                self.send_response(200)
                self.send_header("Content-Length", str(len(body) + served.num_bytes_lost))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """No log on the test's output."""

        self.num_bytes_lost = 0  # the connection ends so much too early
        self._running = False
        super().__init__(("127.0.0.1", 0), Handler)  # from here on clients may connect; they wait for serve_forever

    def start(self) -> None:
        self._running = True
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def close(self) -> None:
        if self._running:
            self.shutdown()
        self.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, bytes]], Served]]:
    """`serve({"a.tar.gz": content})`: a server with these files, not yet running."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers: list[Served] = []

    def make(files: dict[str, bytes]) -> Served:
        servers.append(Served(files))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def make_tar() -> Callable[..., bytes]:
    """`make_tar({"folder/name": content}, "gz")`: an archive with these files."""

    def make(files: dict[str, bytes], compression: str = "") -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=f"w:{compression}") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return buffer.getvalue()

    return make


@pytest.fixture
def md5() -> Callable[[bytes], str]:
    return lambda content: hashlib.md5(content).hexdigest()


@pytest.fixture
def refused() -> Callable[..., str]:
    """`refused(config)`: the one line with which the data set is refused."""

    def refuse(config: DatasetConfig, seed: int = 0) -> str:
        with pytest.raises(ConfigError) as caught:
            prepare(config, seed)
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refuse


@pytest.fixture
def left_in() -> Callable[[Path], set[str]]:
    """`left_in(folder)`: what it holds, besides the lock."""
    return lambda folder: {path.name for path in folder.iterdir()} - {".gpipe-lock"}
