"""Counts of an evaluation are exact for any batches and ranks (pytorch/pytorch#25162, roboflow/rf-detr#1507)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.training.evaluation import evaluate
from gpipe_cli.training.picture_task import PictureTask
from gpipe_cli.training.session import Session

# The picture says which class the network will answer: its first pixel, 0..2 of three classes.
READS_THE_ANSWER = """
    import torch
    from torch import nn

    class Answers(nn.Module):
        def forward(self, x):
            return 2.0 * nn.functional.one_hot((x[:, 0, 0, 0] * 255).round().long() % 3, 3).float()

    def layers():
        return [("look", nn.Identity), ("answer", Answers), ("pass", nn.Identity)]
"""
ANSWERS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
LABELS = [0, 1, 2, 0, 1, 2, 0, 2, 1, 2, 0]  # seven of eleven


class Asked(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(ANSWERS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8), ANSWERS[index], dtype=torch.uint8), LABELS[index]


def count(make_session: Callable[..., Session], words: tuple[str, ...]) -> dict[str, Any]:
    session = make_session(*words, "dataset.num_classes=3", "dataset.mean=[0,0,0]", "dataset.std=[1,1,1]", base=())
    task = PictureTask(session.config, dataclasses.replace(session.info, num_eval=11))
    task.splits["eval"] = Asked()
    before = torch.random.get_rng_state()
    result = dataclasses.asdict(evaluate(dataclasses.replace(session, task=task)))  # type: ignore[call-overload]
    assert torch.equal(before, torch.random.get_rng_state())
    return result


@pytest.mark.parametrize(("num_ranks", "eval_batch_size"), [(1, 1), (1, 4), (1, 11), (1, 50), (2, 4), (3, 4), (3, 11)])
def test_every_sample_counts_once(
    run_ranks: Callable[..., list[Any]],
    make_session: Callable[..., Session],
    gpipe: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    eval_batch_size: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        *gpipe.tiny_module, gpipe.network(tmp_path, READS_THE_ANSWER), "partitions=3", "balance=[1,1,1]",
        f"eval_batch_size={eval_batch_size}",
    )  # fmt: skip
    loss = math.log(math.exp(2) + 2) - 2 * 7 / 11
    for result in run_ranks(num_ranks, count, make_session, words):
        assert result == {"top1": 7 / 11, "top5": 1.0, "loss": pytest.approx(loss, rel=1e-6), "num_samples": 11}
