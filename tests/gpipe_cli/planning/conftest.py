"""Small networks, hardware with round numbers, and configurations of `gpipe plan`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.compose import load
from gpipe_cli.planning.hardware import Hardware

COUNTS = pytest.StashKey[dict[object, object]]()
TINY = (
    "model=amoebanet", "model.split_cells=false", "model.layers=3", "model.filters=8", "model.stem=small",
    "image_size=16", "num_classes=10",
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def plan_config() -> Callable[..., Any]:
    """The configuration of `gpipe plan` for a small network on a P40, with further settings."""
    return lambda *words: load("plan", [*TINY, "batch_size=16", "hardware=p40", *words])


@pytest.fixture
def round_hardware() -> Hardware:
    """1000 operations or 10 bytes a second, no overhead; 5 bytes a second over the link after 2 seconds."""
    return Hardware(
        name="round", flops_per_s=1000.0, bytes_per_s=10.0, stream_bytes_per_s=10.0, overhead_s=0.0,
        link_bytes_per_s=5.0, link_latency_s=2.0, memory_bytes=1e6,
    )  # fmt: skip


@pytest.fixture
def linears() -> list[tuple[str, Callable[[], nn.Module]]]:
    """Eight equal layers of width 4, each a linear map and a tanh."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    return [(f"block_{index}", partial(block)) for index in range(8)]


@pytest.fixture
def counted_once(monkeypatch, request):
    """Networks that an earlier test has counted are not counted again."""
    from gpipe_cli.planning import network

    counts = request.session.stash.setdefault(COUNTS, {})
    count = network._counted

    def counted(config, layers):
        on_cpu = config.hardware.name == "cpu"
        key = (repr(config.model), config.image_size, config.num_classes, config.precision, on_cpu)
        if key not in counts:
            counts[key] = count(config, layers)
        return counts[key]

    monkeypatch.setattr(network, "_counted", counted)
