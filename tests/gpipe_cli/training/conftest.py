"""A session at its smallest, in this process or in each of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gpipe_cli.compose import load
from gpipe_cli.distributed.launch import RankContext
from gpipe_cli.training.session import Session, build_session


@pytest.fixture(scope="session")
def make_session(gpipe: Any) -> Callable[..., Session]:
    """``make_session(*words)``: the session of this rank for the smallest run with these settings."""

    def make(*words: str, base: tuple[str, ...] = gpipe.tiny) -> Session:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        context = RankContext(rank=rank, world_size=size, local_rank=rank, device="cpu", num_threads=1)
        return build_session(load("train", [*base, *words]), context)

    return make
