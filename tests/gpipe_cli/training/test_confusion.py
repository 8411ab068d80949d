"""Counts by class: exact, and in agreement with the accuracy."""

from __future__ import annotations

import math

import pytest
import torch

from gpipe_cli.training.confusion import Confusion
from gpipe_cli.training.metrics import Accuracy

LOGITS = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 5.0], [math.nan, 0.0, 1.0]])
TARGETS = torch.tensor([0, 2, 0, 2, 0])


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_rows_are_true_classes_and_columns_predicted_ones(batch: int) -> None:
    confusion = Confusion(3)
    for outputs, targets in zip(LOGITS.split(batch), TARGETS.split(batch), strict=True):
        confusion.update((outputs, outputs * 0), targets)
    assert confusion.counts().tolist() == [[2, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]]


def test_nothing_counted_is_zero_everywhere() -> None:
    assert Confusion(2).counts().tolist() == [[0, 0, 0], [0, 0, 0]]


def test_the_diagonal_is_what_the_accuracy_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    # Few different values, so that many are equal; a NaN and an infinity.
    logits = torch.randint(0, 3, (64, 5), generator=generator).float()
    logits[3, 2], logits[5, 1], logits[6] = math.nan, math.inf, -math.inf
    targets = torch.randint(0, 5, (64,), generator=generator)
    accuracy, confusion = Accuracy(), Confusion(5)
    accuracy.update(logits, targets)
    confusion.update(logits, targets)
    counts = confusion.counts()
    assert int(counts.diagonal().sum()) == int(accuracy.counts()[0])
    assert counts.sum(dim=1).tolist() == torch.bincount(targets, minlength=5).tolist()
