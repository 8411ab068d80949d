from __future__ import annotations

import numpy as np
import pytest
import torch

from gpipe_cli.data.text import TextBlocks
from gpipe_cli.data.text_loaders import text_eval_loader, text_train_loader
from gpipe_cli.errors import ConfigError


@pytest.fixture
def blocks() -> TextBlocks:
    return TextBlocks(np.arange(4 * 22 + 1, dtype=np.uint8), seq_len=4)


def first_tokens(loader: object) -> list[list[int]]:
    return [inputs[:, 0].tolist() for inputs, _ in loader]  # type: ignore[attr-defined]


def test_training_batches_are_whole_and_shuffled(blocks: TextBlocks) -> None:
    loader = text_train_loader(blocks, batch_size=5, workers=0, seed=0, epoch=0)
    batches = list(loader)
    assert len(loader) == len(batches) == 4
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (5, 4)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches]).tolist()
    assert len(set(starts)) == 20
    assert starts != sorted(starts)


def test_the_order_is_a_function_of_seed_and_epoch(blocks: TextBlocks) -> None:
    orders = [
        first_tokens(text_train_loader(blocks, batch_size=5, workers=0, seed=seed, epoch=epoch))
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] != orders[3] != orders[0]


def test_a_resumed_epoch_goes_on_where_it_stopped(blocks: TextBlocks) -> None:
    whole = text_train_loader(blocks, batch_size=5, workers=0, seed=0, epoch=3)
    rest = text_train_loader(blocks, batch_size=5, workers=0, seed=0, epoch=3, start_batch=2)
    assert first_tokens(rest) == first_tokens(whole)[2:]


def test_batches_do_not_depend_on_the_number_of_workers(blocks: TextBlocks) -> None:
    alone, helped = (
        first_tokens(text_train_loader(blocks, batch_size=5, workers=workers, seed=0, epoch=0)) for workers in (0, 2)
    )
    assert alone == helped


def test_loading_leaves_the_global_generator_alone(blocks: TextBlocks) -> None:
    before = torch.get_rng_state()
    list(text_train_loader(blocks, batch_size=5, workers=0, seed=0, epoch=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_sees_every_block_once_in_order(blocks: TextBlocks) -> None:
    loader = text_eval_loader(blocks, batch_size=8, workers=0)
    assert len(loader) == 3
    assert [start for batch in first_tokens(loader) for start in batch] == [4 * index for index in range(22)]


def test_a_batch_larger_than_the_text_is_one_line(blocks: TextBlocks) -> None:
    with pytest.raises(ConfigError, match=r"^batch_size=23: the text has only 22 training blocks of 4 tokens"):
        text_train_loader(blocks, batch_size=23, workers=0, seed=0, epoch=0)
