"""Pictures and labels of one step belong together, wherever the ranks are (deepspeedai/DeepSpeed#3131)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpipe_cli.training.batches import evaluation_batches, training_batches
from gpipe_cli.training.session import Session


def sources(num_batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of two, one and two samples, whose pictures are filled with their label."""
    labels = [torch.tensor([index, index + 10][: 1 + index % 2]) for index in range(num_batches)]
    return [(label.float().view(-1, 1, 1, 1).expand(-1, 3, 8, 8), label) for label in labels]


def walk(make_session: Callable[..., Session], channels_last: bool) -> Any:
    session = make_session("partitions=4")
    pipe = session.pipe
    loader = sources(3) if pipe.is_first else None
    training = list(training_batches(pipe, loader, 3, channels_last=channels_last))
    evaluation = list(evaluation_batches(pipe, session.groups, loader, channels_last=channels_last))
    if session.groups is not None:
        dist.barrier()  # a run's pipeline outlives what it sends; here the first rank would be done at once
    return {"training": training, "evaluation": evaluation}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_labels_reach_the_last_rank_in_step_with_the_pictures(
    run_ranks: Callable[..., list[Any]], make_session: Callable[..., Session], num_ranks: int
) -> None:
    ranks = run_ranks(num_ranks, walk, make_session, True)
    for kind in ("training", "evaluation"):
        for rank, found in enumerate(ranks):
            assert len(found[kind]) == 3
            for (images, labels), (source, expected) in zip(found[kind], sources(3), strict=True):
                assert (images is None) == (rank != 0)
                assert (labels is None) == (rank != num_ranks - 1)
                assert images is None or torch.equal(images, source)
                assert labels is None or torch.equal(labels, expected)


def test_no_batch_too_many_is_loaded_and_ctrl_c_while_the_loader_ends_is_not_lost(
    make_session: Callable[..., Session],
) -> None:
    loaded = []

    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        try:
            for number, batch in enumerate(sources(3)):
                loaded.append(number)
                yield batch
        finally:
            raise KeyboardInterrupt

    batches = training_batches(make_session().pipe, loader(), 2, channels_last=False)
    next(batches)
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert loaded == [0, 1]


@pytest.mark.parametrize("channels_last", [True, False])
def test_pictures_get_the_memory_format_of_the_network(
    make_session: Callable[..., Session], channels_last: bool
) -> None:
    loader = [(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))]
    ((images, _),) = training_batches(make_session().pipe, loader, 1, channels_last=channels_last)
    assert images is not None
    assert images.is_contiguous(memory_format=torch.channels_last) == channels_last
