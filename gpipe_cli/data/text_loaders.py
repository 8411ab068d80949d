"""Batches of text blocks, with the properties of the picture loaders (loaders.py): the order of an epoch is a function
of (seed, epoch), and a batch depends neither on the number of workers nor on where a resumed run starts.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from gpipe_cli.data.loaders import BatchIndices, BatchLoader, LoadedBatch
from gpipe_cli.data.seeding import derive_seed
from gpipe_cli.data.text import TextBlocks
from gpipe_cli.errors import ConfigError


def text_train_loader(
    blocks: TextBlocks, *, batch_size: int, workers: int, seed: int, epoch: int, start_batch: int = 0
) -> BatchLoader:
    """Shuffled batches of an epoch: inputs and targets, each (batch_size, seq_len) int64.

    The last partial batch is dropped; batches before `start_batch` are skipped. Raises ConfigError when there are fewer
    blocks than one batch.
    """
    if batch_size > len(blocks):
        problem = f"the text has only {len(blocks)} training blocks of {blocks.seq_len} tokens; use at most that"
        raise ConfigError("batch_size", batch_size, problem)
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    order = torch.randperm(len(blocks), generator=generator)
    batches = BatchIndices(order[: len(order) // batch_size * batch_size], batch_size, start_batch)
    return _loader(blocks, batches, workers)


def text_eval_loader(blocks: TextBlocks, *, batch_size: int, workers: int) -> BatchLoader:
    """Every block exactly once, in order, shapes as text_train_loader, the last batch partial."""
    return _loader(blocks, BatchIndices(torch.arange(len(blocks)), batch_size, 0), workers)


def _loader(blocks: TextBlocks, batches: BatchIndices, workers: int) -> BatchLoader:
    samples = _Blocks(blocks)
    return BatchLoader(samples, batches, workers=workers, skipped=None, may_drop_batches=False)  # type: ignore[arg-type]


class _Blocks(Dataset[LoadedBatch]):
    """Whole batches of blocks."""

    skip_unreadable = False

    def __init__(self, blocks: TextBlocks) -> None:
        self.blocks = blocks

    def __getitems__(self, indices: list[int]) -> LoadedBatch:
        inputs, targets = zip(*(self.blocks[index] for index in indices), strict=True)
        return LoadedBatch(torch.stack(inputs), torch.stack(targets), ())
