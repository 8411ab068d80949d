"""Batches for training and evaluation: torch's DataLoader with an order and seeds of our own.

The order of an epoch is a function of (seed, epoch). Before a sample is loaded and augmented, the generators of torch,
numpy and random are seeded by (seed, epoch, sample), and put back afterwards. So a batch does not depend on the number
of workers nor on where a resumed run starts, and loading never disturbs the draws of the training process.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from gpipe_cli.config import DatasetConfig
from gpipe_cli.data.datasets import Split, open_split
from gpipe_cli.data.info import DataInfo
from gpipe_cli.data.seeding import derive_seed, generators_restored, seed_generators
from gpipe_cli.data.transforms import Transform, build_transform
from gpipe_cli.errors import ConfigError, DataError, GpipeError


class SkippedPictures:
    """Unreadable pictures that were left out (dataset.corrupt=skip); each is reported once.

    Share one of these between the loaders of a run. `report` gets a line for each path and, at the end of a pass that
    met new ones, the total; by default lines go to the logger "gpipe".
    """

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self.report = report or logging.getLogger("gpipe").warning
        self.paths: set[str] = set()

    def add(self, error: DataError) -> None:
        if error.path not in self.paths:
            self.paths.add(error.path)
            self.report(f"left out: {error}")


def train_loader(
    config: DatasetConfig,
    info: DataInfo,
    *,
    image_size: int,
    batch_size: int,
    workers: int,
    seed: int,
    epoch: int,
    start_batch: int = 0,
    dataset: Dataset[Any] | None = None,
    skipped: SkippedPictures | None = None,
) -> BatchLoader:
    """Shuffled batches of an epoch: images (batch_size, 3, image_size, image_size) float32, labels (batch_size,) int64.

    The last partial batch is dropped: len() is num_train // batch_size. Batches before `start_batch` are skipped
    without loading their pictures. Pass the `dataset` of an earlier epoch (open_split) to keep its decoded pictures.

    Raises ConfigError when there are fewer samples than one batch; while iterating, DataError with the path of a
    picture that cannot be read (with corrupt=skip its batch is smaller, and a batch may not lose all its pictures).
    """
    if batch_size > info.num_train:
        problem = f"{info.name} has only {info.num_train} training samples; use at most that"
        raise ConfigError("batch_size", batch_size, problem)
    samples = _Samples(
        _opened(config, "train", info, seed, dataset),
        build_transform(config, image_size, train=True),
        seed=derive_seed("train", seed, epoch),
        skip_unreadable=config.corrupt == "skip",
    )
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    order = torch.randperm(info.num_train, generator=generator)
    batches = BatchIndices(order[: len(order) // batch_size * batch_size], batch_size, start_batch)
    return BatchLoader(samples, batches, workers=workers, skipped=skipped, may_drop_batches=False)


def eval_loader(
    config: DatasetConfig,
    info: DataInfo,
    *,
    image_size: int,
    batch_size: int,
    workers: int,
    seed: int,
    split: Split = "eval",
    dataset: Dataset[Any] | None = None,
    skipped: SkippedPictures | None = None,
) -> BatchLoader:
    """Batches of a split, every sample exactly once, in order, not augmented; shapes as train_loader, the last partial.

    len() is the number of batches, ceil(samples / batch_size). With corrupt=skip a batch without any readable picture
    is left out. Raises as train_loader.
    """
    samples = _Samples(
        _opened(config, split, info, seed, dataset),
        build_transform(config, image_size, train=False),
        seed=derive_seed("eval", seed),
        skip_unreadable=config.corrupt == "skip",
    )
    num_samples = info.num_train if split == "train" else info.num_eval
    batches = BatchIndices(torch.arange(num_samples), batch_size, 0)
    return BatchLoader(samples, batches, workers=workers, skipped=skipped, may_drop_batches=True)


class LoadedBatch(NamedTuple):
    """What travels from a worker: images and labels of the readable samples, and what was wrong with the others."""

    images: torch.Tensor | None
    labels: torch.Tensor
    unreadable: tuple[DataError, ...]


class _Samples(Dataset[LoadedBatch]):
    """Loads and transforms whole batches, each sample under its own seed."""

    def __init__(self, dataset: Dataset[Any], transform: Transform, *, seed: int, skip_unreadable: bool) -> None:
        self.dataset, self.transform = dataset, transform
        self.seed, self.skip_unreadable = seed, skip_unreadable

    def __getitems__(self, indices: list[int]) -> LoadedBatch:
        images, labels, unreadable = [], [], []
        with generators_restored():
            for index in indices:
                seed_generators(derive_seed(self.seed, index))
                try:
                    picture, label = self.dataset[index]
                except DataError as error:
                    # Returned, not raised: torch would wrap it in a traceback of the worker.
                    unreadable.append(error)
                    if self.skip_unreadable:
                        continue
                    break
                images.append(self.transform.augment(picture))
                labels.append(label)
            batch = self.transform.normalize(torch.stack(images)) if images else None
        return LoadedBatch(batch, torch.tensor(labels, dtype=torch.int64), tuple(unreadable))


class BatchIndices:
    """Indices of each batch, from `start` on; a batch sampler for DataLoader."""

    def __init__(self, order: torch.Tensor, batch_size: int, start: int) -> None:
        self.batches, self.start = torch.split(order, batch_size), start

    def __len__(self) -> int:
        return len(self.batches) - self.start

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches[self.start :]:
            yield batch.tolist()


class BatchLoader:
    """Iterable of (images, labels). len() counts the whole pass, including batches before the one it starts at."""

    def __init__(
        self,
        samples: _Samples,
        batches: BatchIndices,
        *,
        workers: int,
        skipped: SkippedPictures | None,
        may_drop_batches: bool,
    ) -> None:
        if workers and multiprocessing.current_process().daemon:
            raise ConfigError("workers", workers, "this process may not start others (it is a daemon); use workers=0")
        self._samples, self._batches, self._workers = samples, batches, workers
        self._skipped = SkippedPictures() if skipped is None else skipped
        self._may_drop_batches = may_drop_batches

    def __len__(self) -> int:
        return len(self._batches.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        num_known = len(self._skipped.paths)
        batches = self._start()
        killed = False
        try:
            for batch in batches:
                images = self._checked(batch)
                if images is not None:
                    yield images, batch.labels
        except RuntimeError as error:
            killed = "DataLoader worker" in str(error)
            if not killed:
                raise
        finally:
            # torch ends the workers when the iterator is collected, which a traceback delays: end them now.
            end_workers = getattr(batches, "_shutdown_workers", None)
            if end_workers is not None:
                end_workers()
        if killed:
            problem = "a loader process was killed, often for lack of memory or of room in /dev/shm"
            raise GpipeError(f"workers={self._workers}: {problem}; use fewer workers or workers=0")
        if len(self._skipped.paths) > num_known:
            total = len(self._skipped.paths)
            self._skipped.report(f"unreadable pictures left out so far (dataset.corrupt=skip): {total}")

    def _start(self) -> Iterator[LoadedBatch]:
        with _interrupts_wait(), warnings.catch_warnings():
            # More workers than cores is the user's choice, and workers are forked knowingly (they compute nothing in
            # parallel, and run no code of the parent's threads).
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            loader: DataLoader[LoadedBatch] = DataLoader(
                self._samples,
                batch_sampler=self._batches,
                collate_fn=_unchanged,
                num_workers=self._workers,
                # fork: starts in milliseconds and shares the cache of decoded pictures.
                multiprocessing_context="fork" if self._workers else None,
                # Its own generator, or the loader would draw from the global one of the training process.
                generator=torch.Generator(),
            )
            return iter(loader)

    def _checked(self, batch: LoadedBatch) -> torch.Tensor | None:
        if batch.unreadable and not self._samples.skip_unreadable:
            raise batch.unreadable[0]
        for error in batch.unreadable:
            self._skipped.add(error)
        if batch.images is not None or self._may_drop_batches:
            return batch.images
        first = batch.unreadable[0]
        raise DataError(first.path, f"{first.problem}; and no other picture of its training batch can be read")


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """A Ctrl-C that arrives meanwhile is raised at the end, and the processes forked meanwhile leave it to this one.

    Python drops an exception that is raised in a hook of fork(), and a worker that ends first would look like a
    failure. Where the signal itself ends the process, as in the ranks of a pipeline, there is nothing to wait for.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        signal.raise_signal(signal.SIGINT)


def _unchanged(batch: Any) -> Any:  # _Samples makes whole batches: nothing is left to collate
    return batch


def _opened(config: DatasetConfig, split: Any, info: DataInfo, seed: int, dataset: Dataset[Any] | None) -> Dataset[Any]:
    dataset = open_split(config, split, seed) if dataset is None else dataset
    num_prepared = info.num_train if split == "train" else info.num_eval
    if len(dataset) != num_prepared:  # type: ignore[arg-type]
        problem = f"holds {len(dataset)} {split} samples now, {num_prepared} when the run began"  # type: ignore[arg-type]
        raise DataError(config.path or config.name, f"{problem}; do not change the data during a run")
    return dataset
