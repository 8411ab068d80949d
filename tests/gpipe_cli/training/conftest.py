"""A session at its smallest, in this process or in each of several ranks; checkpoints whose content is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_cli.compose import load
from gpipe_cli.distributed.launch import RankContext
from gpipe_cli.training import checkpoints
from gpipe_cli.training.session import Session, build_session


@pytest.fixture(scope="session")
def make_session(gpipe: Any) -> Callable[..., Session]:
    """``make_session(*words)``: the session of this rank for the smallest run with these settings."""

    def make(*words: str, base: tuple[str, ...] = gpipe.tiny) -> Session:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        context = RankContext(rank=rank, world_size=size, local_rank=rank, device="cpu", num_threads=1)
        return build_session(load("train", [*base, *words]), context)

    return make


class MadeCheckpoints:
    """Saves checkpoints without a network: every key and value is a function of the step, so that a mixture shows."""

    facts: ClassVar[dict[str, Any]] = {
        "epoch": 2,
        "lr": 0.125,
        "classes": ["cat", "dög"],
        "config": {"model": None, "balance": [1, 2]},
    }

    @staticmethod
    def tensors(step: int, layers: int = 4) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer in range(layers):
            found[f"cell{layer}.weight"] = torch.full((3, 2, 2, 2), float(step)).to(memory_format=torch.channels_last)
            found[f"cell{layer}.num_batches_tracked"] = torch.tensor(step)
            found[f"optimizer/cell{layer}.weight/step:int"] = torch.tensor(step, dtype=torch.int64)
            found[f"ema/cell{layer}.weight"] = torch.full((2, 5), step / 3, dtype=torch.float64).t()
            found[f"cell{layer}.half"] = torch.full((2,), step, dtype=torch.bfloat16)
        return found

    def save(self, directory: Path, step: int, keep: int = 2, best: Path | None = None) -> Path:
        facts = {**self.facts, "step": step}
        return checkpoints.save(directory, step, self.tensors(step), facts, keep=keep, best=best)

    def assert_holds(self, path: Path, step: int) -> None:
        loaded, expected = checkpoints.load(path), self.tensors(step)
        assert loaded.keys() == expected.keys()
        for key, tensor in expected.items():
            assert loaded[key].dtype == tensor.dtype
            assert torch.equal(loaded[key], tensor), key
        assert checkpoints.load_facts(path)["step"] == step

    @staticmethod
    def names(directory: Path) -> list[str]:
        return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="session")
def made() -> MadeCheckpoints:
    return MadeCheckpoints()
