"""What lies on the disk: plain tensors that torch alone can read; nothing foreign is ever run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.errors import CheckpointError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.checkpoints import find_latest, load


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def _replace_metadata(path: Path, content: bytes) -> None:
    """Put another metadata file into a checkpoint, with a manifest that vouches for all its files."""
    (path / ".metadata").write_bytes(content)
    manifest = json.loads((path / "facts.json").read_text())
    manifest["files"] = {name: (path / name).stat().st_size for name in manifest["files"]}
    manifest["metadata_sha256"] = hashlib.sha256(content).hexdigest()
    (path / "facts.json").write_text(json.dumps(manifest))


def test_foreign_pickle_as_metadata_is_refused_and_not_run(made: Any, tmp_path: Path) -> None:
    path = made.save(tmp_path / "run", 1)
    for content in (pickle.dumps(_Bomb(tmp_path / "ran")), pickle.dumps(os.system), b"\x80\x04K", b"text"):
        _replace_metadata(path, content)
        with pytest.raises(CheckpointError, match=r"refused|is not the metadata of a checkpoint") as caught:
            load(path)
        assert "\n" not in str(caught.value)
        assert find_latest(tmp_path / "run") is None
    assert not (tmp_path / "ran").exists()


def test_foreign_pickle_as_tensor_is_refused_and_not_run(made: Any, tmp_path: Path) -> None:
    path = made.save(tmp_path / "run", 1)
    torch.save(_Bomb(tmp_path / "ran"), tmp_path / "bomb.pt")
    bomb, data = (tmp_path / "bomb.pt").read_bytes(), path / "__0_0.distcp"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "cell0.weight")
    place.offset, place.length = data.stat().st_size, len(bomb)
    data.write_bytes(data.read_bytes() + bomb)
    _replace_metadata(path, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="Weights only load failed") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_metadata_holds_no_local_path(made: Any, tmp_path: Path) -> None:
    path = made.save(tmp_path, 1)
    assert str(tmp_path).encode() not in b"".join(file.read_bytes() for file in path.iterdir())


READER = """
import io
import sys
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

folder = sys.argv[1]
reader = FileSystemReader(folder)
metadata = reader.read_metadata()
tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype)
           for key, entry in metadata.state_dict_metadata.items()}
dcp.load(tensors, storage_reader=reader, no_dist=True)
torch.save(tensors, sys.argv[2])
assert not any(name.partition(".")[0] in ("gpipe_cli", "omegaconf") for name in sys.modules)
for place in metadata.storage_data.values():  # what DCP reads, once more by hand
    with open(f"{folder}/{place.relative_path}", "rb") as file:
        file.seek(place.offset)
        stored = io.BytesIO(file.read(place.length))
    assert isinstance(torch.load(stored, weights_only=True), torch.Tensor)
"""


def test_torch_alone_reads_the_tensors_which_are_plain(made: Any, tmp_path: Path) -> None:
    path = made.save(tmp_path / "run", 4)
    words = [sys.executable, "-I", "-W", "ignore", "-c", READER, str(path), str(tmp_path / "read.pt")]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=100)
    read = torch.load(tmp_path / "read.pt", weights_only=True)
    expected = made.tensors(4)
    assert {key for key in read if not key.startswith("checkpoint/")} == expected.keys()
    assert all(torch.equal(read[key], tensor) for key, tensor in expected.items())


def test_no_source_loads_pickles_of_any_class() -> None:
    package = Path(checkpoints.__file__).parents[1]
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    assert len(sources) > 50
    assert [path for path, text in sources.items() if "weights_only=False" in text] == []
