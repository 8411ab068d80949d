"""The mini-batch that is computed on."""

from __future__ import annotations

import torch

from gpipe_cli.benchmark.data import mini_batch, sample
from gpipe_cli.benchmark.grid import grid


def test_pictures_have_a_label_each(config) -> None:
    [case] = grid(config("partitions=1", "micro_batches=1", "remat=none"))
    inputs, labels = mini_batch(case)
    assert (inputs.shape, inputs.dtype) == ((8, 3, 8, 8), torch.float32)
    assert (labels.shape, labels.dtype, set(labels.tolist()) <= set(range(4))) == ((8,), torch.int64, True)


def test_tokens_have_a_token_each_and_are_below_the_vocabulary(text_config) -> None:
    [case] = grid(text_config("partitions=1", "micro_batches=1", "remat=none"))
    inputs, targets = mini_batch(case)
    for tokens in (inputs, targets):
        assert (tokens.shape, tokens.dtype) == ((8, 6), torch.int64)
        assert 0 <= tokens.min() <= tokens.max() < 11
    assert not torch.equal(inputs, targets)


def test_it_is_the_same_every_time_and_stands_in_without_data(config, text_config) -> None:
    for settings in (config, text_config):
        [case] = grid(settings("partitions=1", "micro_batches=1", "remat=none"))
        assert all(map(torch.equal, mini_batch(case), mini_batch(case)))
        inputs, _ = mini_batch(case)
        stand_in = sample(case, 8)
        assert (stand_in.device.type, stand_in.shape, stand_in.dtype) == ("meta", inputs.shape, inputs.dtype)


def test_a_users_network_that_reads_text_gets_tokens(users_config) -> None:
    settings = users_config("layers = None", "model.seq_len=5", "num_classes=7", "image_size=null")
    case = grid(settings)[0]
    assert (case.seq_len, case.image_size, case.num_classes) == (5, None, 7)
    assert mini_batch(case)[0].shape == (8, 5)
