"""Batches in SPMD: the first stage's rank loads pictures and labels, the last stage's rank is sent the labels.

Every rank walks through the same steps; the others get None, so labels always belong to the pictures of their step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import islice, repeat
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from gpipe_cli.pipeline import Pipeline, ProcessGroups

Batch = tuple[Tensor | None, Tensor | None]  # pictures on the first stage's rank, labels on the last stage's


def training_batches(
    pipe: Pipeline, loader: Iterable[tuple[Tensor, Tensor]] | None, num_batches: int, *, channels_last: bool
) -> Iterator[Batch]:
    """The next `num_batches` batches; `loader` on the first stage's rank, None elsewhere.

    Going through all of them ends the loader's iteration, and its processes, here: left to the garbage collector, that
    would swallow a Ctrl-C that arrives meanwhile.
    """
    source: Iterator[tuple[Tensor | None, Tensor | None]] = iter(repeat((None, None)) if loader is None else loader)
    try:
        for images, labels in islice(source, num_batches):
            yield _in_layout(images, channels_last), _deliver(pipe, labels)
    finally:
        if isinstance(source, Generator):
            source.close()


def evaluation_batches(
    pipe: Pipeline,
    groups: ProcessGroups | None,
    loader: Iterable[tuple[Tensor, Tensor]] | None,
    *,
    channels_last: bool,
) -> Iterator[Batch]:
    """All batches of `loader`, however many there are: before each one the first stage's rank says that it comes."""
    source = iter(loader) if loader is not None else None
    while True:
        batch = next(source, None) if source is not None else None
        if not _comes(groups, batch is not None):
            return
        images, labels = batch if batch is not None else (None, None)
        yield _in_layout(images, channels_last), _deliver(pipe, labels)


def _deliver(pipe: Pipeline, labels: Tensor | None) -> Tensor | None:
    delivered = pipe.deliver_targets(labels)
    assert delivered is None or isinstance(delivered, Tensor)
    return delivered


def _in_layout(images: Tensor | None, channels_last: bool) -> Tensor | None:
    if images is None or not channels_last or images.dim() != 4:
        return images
    return images.contiguous(memory_format=torch.channels_last)


def _comes(groups: ProcessGroups | None, here: bool) -> bool:
    if groups is None:
        return here
    flag = torch.tensor([int(here)])
    dist.broadcast(flag, src=groups.ranks[0], group=groups.control)
    return bool(flag)
