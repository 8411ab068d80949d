"""What goes wrong while loading: one line with the path or the remedy, or pictures left out and counted."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from gpipe_cli.data.datasets import prepare
from gpipe_cli.data.loaders import SkippedPictures, eval_loader, train_loader
from gpipe_cli.errors import ConfigError, DataError, GpipeError


class Killed(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


class Defective(Killed):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise ZeroDivisionError("a bug")


@pytest.fixture
def damaged_tree(write_tree: Callable) -> Path:
    """40 training pictures, three of them unreadable, and 9 held-out ones, of which the last is."""
    root = write_tree({"train/a": 20, "train/b": 20, "val/a": 4, "val/b": 5})
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(root / "train/a/0003.jpg")
    half = (root / "train/a/0003.jpg").read_bytes()
    (root / "train/a/0003.png").unlink()
    (root / "train/a/0003.jpg").write_bytes(half[: len(half) // 2])
    (root / "train/a/0010.png").write_bytes(b"")
    (root / "train/b/0007.png").write_text("<html><body>gone</body></html>")
    (root / "val/b/0004.png").write_bytes(b"")
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_picture_stops_the_run_with_its_path_in_one_line(
    settings: Callable, damaged_tree: Path, workers: int
) -> None:
    config = settings("folder", path=damaged_tree)
    loader = train_loader(config, prepare(config, 0), image_size=8, batch_size=8, workers=workers, seed=0, epoch=0)
    with pytest.raises(DataError) as caught:
        list(loader)
    broken = ("train/a/0003.jpg", "train/a/0010.png", "train/b/0007.png")
    assert caught.value.path in {str(damaged_tree / name) for name in broken}
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_pictures_are_reported_once_and_not_counted(
    settings: Callable, damaged_tree: Path, workers: int
) -> None:
    config = settings("folder", path=damaged_tree, corrupt="skip")
    info = prepare(config, 0)
    lines: list[str] = []
    skipped = SkippedPictures(lines.append)
    arguments = {"image_size": 8, "workers": workers, "seed": 0, "skipped": skipped}
    for epoch in range(2):
        batches = list(train_loader(config, info, batch_size=10, epoch=epoch, **arguments))
        assert len(batches) == 4
        assert sum(len(labels) for _, labels in batches) == 37
        assert all(len(images) == len(labels) for images, labels in batches)
    assert len(lines) == 4
    for name in ("train/a/0003.jpg", "train/a/0010.png", "train/b/0007.png"):
        assert sum(str(damaged_tree / name) in line for line in lines) == 1
    assert lines[-1].endswith(": 3")
    # The held-out picture that is unreadable is alone in the last batch: no batch is left of it.
    evaluated = list(eval_loader(config, info, batch_size=8, **arguments))
    assert [len(labels) for _, labels in evaluated] == [8]
    assert lines[-1].endswith(": 4")


def test_a_training_batch_without_any_readable_picture_stops_the_run(settings: Callable, damaged_tree: Path) -> None:
    config = settings("folder", path=damaged_tree, corrupt="skip")
    loader = train_loader(config, prepare(config, 0), image_size=8, batch_size=1, workers=0, seed=0, epoch=0)
    with pytest.raises(DataError, match="no other picture of its training batch"):
        list(loader)


def test_a_killed_loader_process_is_one_line_with_the_remedy(train: Callable) -> None:
    with pytest.raises(GpipeError, match=r"workers=2: a loader process was killed.*workers=0"):
        list(train(Killed(), workers=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bug_in_a_data_set_keeps_its_type_and_traceback(train: Callable, workers: int) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        list(train(Defective(), workers=workers))


@pytest.mark.parametrize("dataset", [Killed(), Defective()])
def test_no_loader_process_outlives_a_failure(train: Callable, dataset: Killed) -> None:
    with pytest.raises((GpipeError, ZeroDivisionError)) as caught:
        list(train(dataset, workers=2))
    assert caught.tb is not None  # held, and with it every frame of the failed iteration
    assert multiprocessing.active_children() == []


def test_no_loader_process_outlives_an_epoch_that_is_left_early(train: Callable, counted: Callable) -> None:
    for _ in train(counted(20), workers=2):
        break
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_ctrl_c_while_a_loader_process_is_forked_is_not_lost(train: Callable, counted: Callable, moment: str) -> None:
    armed = [True]  # a hook cannot be taken back

    def interrupt() -> None:
        if armed and os.getpid() == here:
            armed.clear()
            signal.raise_signal(signal.SIGINT)

    here = os.getpid()
    os.register_at_fork(**{moment: interrupt})  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        list(train(counted(20), workers=1))
    assert not armed
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_fewer_samples_than_a_batch_are_refused(train: Callable, counted: Callable) -> None:
    with pytest.raises(ConfigError, match="batch_size=4: ours has only 3 training samples"):
        train(counted(3))


def test_pictures_added_during_a_run_are_noticed(settings: Callable, write_tree: Callable) -> None:
    root = write_tree({"train/a": 8, "val/a": 1})
    config = settings("folder", path=root)
    info = prepare(config, 0)
    write_tree({"train/a": 9}, root=root)
    with pytest.raises(DataError, match="9 train samples now, 8 when the run began"):
        train_loader(config, info, image_size=8, batch_size=4, workers=0, seed=0, epoch=0)
