"""Batches: every sample once, the same for any number of workers and after a resume, labels with their pictures."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from gpipe_cli.data.datasets import open_split, prepare
from gpipe_cli.data.info import DataInfo
from gpipe_cli.data.loaders import eval_loader, train_loader
from gpipe_cli.errors import ConfigError

Batch = tuple[torch.Tensor, torch.Tensor]


class Draws(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of one pixel: a draw from torch, from NumPy and from random."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draws = [int(torch.randint(256, ())), np.random.randint(256), random.randrange(256)]
        return torch.tensor(draws, dtype=torch.uint8).view(3, 1, 1), index


def equal(left: list[Batch], right: list[Batch]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in pairs)


def shown(batches: Any) -> list[int]:
    return [label for _, labels in batches for label in labels.tolist()]


def test_training_batches_are_whole_and_their_number_is_known(settings: Callable) -> None:
    config = settings("digits", augment="light")
    info = prepare(config, 0)
    loader = train_loader(config, info, image_size=16, batch_size=64, workers=0, seed=0, epoch=0)
    batches = list(loader)
    assert len(loader) == len(batches) == info.num_train // 64
    for images, labels in batches:
        assert (images.shape, images.dtype) == ((64, 3, 16, 16), torch.float32)
        assert (labels.shape, labels.dtype) == ((64,), torch.int64)


def test_an_epoch_shows_each_sample_at_most_once_in_an_order_of_its_own(train: Callable, counted: Callable) -> None:
    orders = [shown(train(counted(22), seed=seed, epoch=epoch)) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert all(len(set(order)) == 20 for order in orders)
    assert orders[0] == orders[1]
    assert orders[0] != sorted(orders[0])
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_shows_every_sample_once_in_order(settings: Callable, counted: Callable, workers: int) -> None:
    info = DataInfo("ours", 11, 11, ("a",))
    arguments = {"image_size": 1, "batch_size": 4, "workers": workers, "seed": 0, "dataset": counted(11)}
    loader = eval_loader(settings("synthetic", augment="standard"), info, **arguments)
    batches = list(loader)
    assert [len(labels) for _, labels in batches] == [4, 4, 3]
    assert len(loader) == 3
    assert shown(batches) == list(range(11))


@pytest.mark.parametrize("augment", ["light", "standard"])
def test_batches_do_not_depend_on_the_number_of_workers(settings: Callable, augment: str) -> None:
    config = settings("synthetic", augment=augment, size=40, image_size=16)
    arguments = {"image_size": 16, "batch_size": 8, "seed": 3, "epoch": 2}
    batches = [list(train_loader(config, prepare(config, 3), workers=workers, **arguments)) for workers in (0, 1, 2)]
    assert equal(batches[0], batches[1])
    assert equal(batches[0], batches[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_goes_on_with_the_same_batches(settings: Callable, workers: int) -> None:
    config = settings("synthetic", augment="light", size=40, image_size=16)
    arguments = {"image_size": 16, "batch_size": 8, "seed": 3, "epoch": 2, "workers": workers}
    whole = list(train_loader(config, prepare(config, 3), **arguments))
    torch.rand(7)
    resumed = train_loader(config, prepare(config, 3), start_batch=3, **arguments)
    assert equal(list(resumed), whole[3:])
    assert len(resumed) == len(whole) == 5  # of the epoch
    assert list(train_loader(config, prepare(config, 3), start_batch=5, **arguments)) == []


def test_batches_before_the_start_are_not_loaded(train: Callable, counted: Callable) -> None:
    dataset = counted(20)
    assert len(shown(train(dataset, start_batch=3))) == len(dataset.asked) == 8


def test_every_sample_of_every_epoch_is_augmented_in_its_own_way(settings: Callable) -> None:
    config = settings("folder", augment="standard")
    info = DataInfo("ours", 1, 1, ("a",))
    picture = torch.arange(3 * 16 * 16).view(3, 16, 16).to(torch.uint8)
    seen = set()
    for epoch in range(8):
        loader = train_loader(
            config, info, image_size=16, batch_size=1, workers=0, seed=0, epoch=epoch, dataset=[(picture, 0)]
        )
        seen.add(next(iter(loader))[0].numpy().tobytes())
    assert len(seen) > 5


@pytest.mark.parametrize("workers", [0, 4])
def test_random_draws_of_all_three_generators_differ_between_samples(train: Callable, workers: int) -> None:
    def drawn(**changes: int) -> list[tuple[float, ...]]:
        loader = train(Draws(16), workers=workers, **changes)
        by_label = {int(y): tuple(x.flatten().tolist()) for xs, ys in loader for x, y in zip(xs, ys, strict=True)}
        return [by_label[label] for label in range(16)]

    triples = drawn()
    assert len(set(triples)) == 16
    for generator in range(3):
        assert len({triple[generator] for triple in triples}) > 10
    assert drawn() == triples
    assert not set(drawn(epoch=1)) & set(triples)
    assert not set(drawn(seed=1)) & set(triples)


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_does_not_disturb_the_draws_of_the_training_process(train: Callable, workers: int) -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), np.random.rand(), random.random()

    def restart() -> None:
        torch.manual_seed(5), np.random.seed(5), random.seed(5)

    restart()
    expected = [draws() for _ in range(5)]
    restart()
    assert [draws() for _ in train(Draws(20), workers=workers)] == expected


def test_labels_come_from_the_same_samples_as_the_pictures(settings: Callable, tmp_path: Path) -> None:
    """Three shuffled epochs with random crops by worker processes: each picture is filled with its label."""
    for split in ("train", "val"):
        for label in range(4):
            (tmp_path / split / str(label)).mkdir(parents=True)
            for index in range(5):
                shape = (70 + 3 * index, 80)
                Image.new("RGB", shape, (label,) * 3).save(tmp_path / split / str(label) / f"{index}.png")
    config = settings("folder", path=tmp_path, augment="standard")
    info = prepare(config, 0)
    arguments = {"image_size": 64, "batch_size": 4, "workers": 2, "seed": 0}
    loaders = [train_loader(config, info, epoch=epoch, **arguments) for epoch in range(3)]
    for loader in [*loaders, eval_loader(config, info, **arguments)]:
        for images, labels in loader:
            assert torch.allclose(images, labels.view(-1, 1, 1, 1).expand_as(images).float(), atol=1e-5)


def test_reading_again_from_memory_gives_the_same_batches(settings: Callable, write_tree: Callable) -> None:
    config = settings("folder", path=write_tree({"train/a": 20, "val/a": 1}), augment="standard")
    dataset = open_split(config, "train", 0)
    arguments = {"image_size": 16, "batch_size": 5, "seed": 0, "epoch": 0, "dataset": dataset}
    batches = [list(train_loader(config, prepare(config, 0), workers=workers, **arguments)) for workers in (2, 0, 2)]
    assert equal(batches[0], batches[1])
    assert equal(batches[0], batches[2])


def test_workers_start_inside_a_rank_that_is_itself_a_child_process(train: Callable, counted: Callable) -> None:
    context = multiprocessing.get_context("fork")

    def count(daemon: bool) -> str:
        receiver, sender = context.Pipe(duplex=False)

        def child() -> None:
            try:
                sender.send(str(len(shown(train(counted(20), workers=2)))))
            except ConfigError as error:
                sender.send(str(error))

        process = context.Process(target=child, daemon=daemon)
        process.start()
        assert receiver.poll(60)
        result = receiver.recv()
        process.join(60)
        assert process.exitcode == 0
        return result

    assert count(daemon=False) == "20"
    assert "workers=2: this process may not start others" in count(daemon=True)
