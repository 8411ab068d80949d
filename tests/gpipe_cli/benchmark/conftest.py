"""What tests of the bench share: its smallest settings, and networks of one's own to put into it."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.compose import load

TINY = (
    "image_size=8", "batch_size=8", "num_classes=4", "steps=2", "rounds=2", "threads=1", "device=cpu", "baseline=null",
    "progress=none", "model.layers=2", "model.filters=4", "model.split_cells=false",
)  # fmt: skip
# The same for a network that reads text.
TINY_TEXT = (
    *TINY[1:2], *TINY[3:8], "model=transformer", "model.layers=2", "model.width=8", "model.num_heads=2",
    "model.ff_width=16", "model.vocab_size=11", "model.seq_len=6",
)  # fmt: skip


@pytest.fixture
def text_config() -> Callable[..., Any]:
    """`text_config("partitions=2", …)`: settings of `gpipe bench` with a tiny Transformer."""
    return lambda *words: load("bench", [*TINY_TEXT, *words])


@pytest.fixture
def config() -> Callable[..., Any]:
    """`config("partitions=2", …)`: settings of `gpipe bench`, tiny but for these words."""
    return lambda *words: load("bench", [*TINY, *words])


@pytest.fixture
def users_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`users_config(source, *words)`: the same with the network that the function `layers` of a module returns."""

    def make(source: str, *words: str) -> Any:
        name = f"network_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(str(tmp_path))
        tiny = [word for word in TINY if not word.startswith("model.")]
        return load("bench", [*tiny, "model=module", f"model.factory={name}:layers", *words])

    yield make
    for name in [name for name in sys.modules if name.startswith("network_test")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def no_joined_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a torchrun started elsewhere must not be joined."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name in os.environ:
            monkeypatch.delenv(name)
