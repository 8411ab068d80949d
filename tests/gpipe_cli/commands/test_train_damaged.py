"""A disk that fails, and checkpoints that something has damaged: one line, and no good checkpoint is lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.training import checkpoints

RUN = ("epochs=2", "run_dir=run", "keep_checkpoints=3", "lr_schedule=constant")
STEPS = [f"step-0000000{step}" for step in (2, 4)]


@pytest.fixture(scope="module")
def finished(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs over two partitions, with a checkpoint of each; tests work on copies."""
    folder = tmp_path_factory.mktemp("finished")
    assert gpipe.train(folder, *gpipe.tiny, *RUN, "partitions=2").exit_code == 0
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "folder")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def truncate(checkpoint: Path) -> None:
    data = checkpoint / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:1000])


def mix(checkpoint: Path) -> None:
    shutil.copy(checkpoint.with_name(STEPS[0]) / "__1_0.distcp", checkpoint)


def put_pickle(checkpoint: Path) -> None:
    content = pickle.dumps(os.system)
    (checkpoint / ".metadata").write_bytes(content)
    manifest = json.loads((checkpoint / "facts.json").read_text())
    manifest["files"][".metadata"] = len(content)
    manifest["metadata_sha256"] = hashlib.sha256(content).hexdigest()
    (checkpoint / "facts.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (truncate, "damaged: __1_0.distcp has 1000 bytes and should have "),
        (mix, "damaged: its files come from different saves; use an earlier checkpoint"),
        (put_pickle, ".metadata names posix.system, which no checkpoint of gpipe holds; refused"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over_in_its_run(
    gpipe: Any, folder: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(folder / "run" / "checkpoints" / STEPS[1])
    before = contents(folder)
    named = gpipe.train(folder, f"resume=run/checkpoints/{STEPS[1]}", "epochs=3", "partitions=1")
    assert named.exit_code == 1
    assert named.error.startswith(f"run/checkpoints/{STEPS[1]}: {problem}")
    assert contents(folder) == before
    found = gpipe.train(folder, "resume=run", "partitions=1")
    assert found.exit_code == 0, found.stderr
    told = found.stderr.splitlines()
    assert any(line.startswith(f"run/checkpoints/{STEPS[1]}: passed over, {problem}") for line in told)
    assert f"resumed from run/checkpoints/{STEPS[0]}: 2 steps done" in told
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == STEPS


def test_a_run_without_a_whole_checkpoint_says_so(gpipe: Any, folder: Path) -> None:
    for step in STEPS:
        truncate(folder / "run" / "checkpoints" / step)
    before = contents(folder)
    ended = gpipe.train(folder, "resume=run", "epochs=3", "partitions=1")
    assert (ended.exit_code, ended.error) == (1, "run: holds no whole checkpoint")
    assert contents(folder) == before


@pytest.mark.parametrize("words", [(), ("partitions=2",)], ids=["one process", "two"])
def test_a_disk_that_fills_up_ends_the_run_and_leaves_the_earlier_checkpoint(
    gpipe: Any, folder: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure of a save shows while training goes on, not only at its end."""

    fsync = os.fsync

    def full(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():  # the one that writes checkpoints
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    before = contents(folder / "run" / "checkpoints")
    monkeypatch.setattr(os, "fsync", full)  # ranks are forked from this process
    ended = gpipe.train(folder, "resume=run", "epochs=200", *(words or ("partitions=1",)))
    assert ended.exit_code == 1
    assert ended.error == "run/checkpoints/step-00000006: rank 0: No space left on device"
    assert contents(folder / "run" / "checkpoints") == before
    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] < 400
    monkeypatch.undo()
    again = gpipe.train(folder, "resume=run", "epochs=3")
    assert again.exit_code == 0, again.stderr
    latest = checkpoints.find_latest(folder / "run" / "checkpoints")
    assert latest is not None
    assert latest.name == "step-00000006"
