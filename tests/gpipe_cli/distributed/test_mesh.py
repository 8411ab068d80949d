"""Which ranks form a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpipe_cli.distributed.mesh import make_mesh


@pytest.mark.parametrize(
    ("world_size", "num_replicas", "pipelines"),
    [(1, 1, ((0,),)), (4, 1, ((0, 1, 2, 3),)), (4, 2, ((0, 1), (2, 3))), (3, 3, ((0,), (1,), (2,)))],
)
def test_neighbours_in_a_pipeline_are_neighbours_in_the_world(
    world_size: int, num_replicas: int, pipelines: tuple[tuple[int, ...], ...]
) -> None:
    mesh = make_mesh(world_size, num_replicas)
    assert mesh.pipelines == pipelines
    for replica, ranks in enumerate(pipelines):
        assert [mesh.replica_of(rank) for rank in ranks] == [replica] * len(ranks)


def test_replicas_must_share_the_ranks_evenly() -> None:
    with pytest.raises(ValueError, match="5 ranks cannot be shared by 2 replicas"):
        make_mesh(5, 2)


def test_a_rank_alone_needs_no_groups() -> None:
    assert make_mesh(1, 1).process_groups() is None


def members(num_replicas: int) -> list[int]:
    groups = make_mesh(4, num_replicas).process_groups()
    assert groups is not None
    return list(groups.ranks)


def test_every_rank_gets_the_groups_of_its_own_pipeline(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(4, members, 2) == [[0, 1], [0, 1], [2, 3], [2, 3]]
