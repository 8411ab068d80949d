"""Accuracies: exact counts, whatever the batches, ties and NaN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpipe_cli.training.metrics import Accuracy, result_of


def of_batches(logits: torch.Tensor, targets: torch.Tensor, batch_size: int) -> Accuracy:
    accuracy = Accuracy()
    for images, labels in zip(logits.split(batch_size), targets.split(batch_size), strict=True):
        accuracy.update(images, labels)
    return accuracy


@pytest.mark.parametrize("batch_size", [1, 4, 11])
def test_accuracy_does_not_depend_on_the_batches(batch_size: int) -> None:
    torch.manual_seed(0)
    targets = torch.arange(11) % 8
    logits = F.one_hot(targets, 8).float() * 3
    logits[7:] = logits[7:].roll(1, dims=1)  # 7 of 11 are right
    result = of_batches(logits, targets, batch_size).result()
    assert (result.top1, result.num_samples) == (7 / 11, 11)
    assert result.loss == pytest.approx(F.cross_entropy(logits.double(), targets).item(), abs=1e-7)


def test_counts_of_ranks_add_up() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(11, 8), torch.arange(11) % 8
    parts = [of_batches(logits[:4], targets[:4], 4), of_batches(logits[4:], targets[4:], 3), Accuracy()]
    together = result_of(torch.stack([part.counts() for part in parts]).sum(0).tolist())
    whole = of_batches(logits, targets, 11).result()
    assert (together.top1, together.top5, together.num_samples) == (whole.top1, whole.top5, whole.num_samples)
    assert together.loss == pytest.approx(whole.loss, abs=1e-12)


def test_top_5_counts_the_five_best() -> None:
    logits = torch.arange(8.0).repeat(8, 1)
    result = of_batches(logits, torch.arange(8), 3).result()
    assert (result.top1, result.top5) == (1 / 8, 5 / 8)


@pytest.mark.parametrize("classes", [1, 2, 5])
def test_top_5_of_five_classes_or_fewer_is_always_right(classes: int) -> None:
    accuracy = of_batches(torch.randn(6, classes), torch.arange(6) % classes, 2)
    assert accuracy.result().top5 == 1


def test_a_network_that_says_the_same_of_everything_is_right_for_one_class_only() -> None:
    result = of_batches(torch.zeros(20, 10), torch.arange(20) % 10, 7).result()
    assert (result.top1, result.top5) == (1 / 10, 1 / 2)


def test_nan_is_never_right() -> None:
    logits = torch.tensor([[float("nan"), 0.0], [1.0, float("nan")], [1.0, 0.0]])
    result = of_batches(logits, torch.zeros(3, dtype=torch.int64), 2).result()
    assert (result.top1, result.top5, result.num_samples) == (1 / 3, 1 / 3, 3)


def test_outputs_may_be_a_tuple_that_begins_with_the_logits() -> None:
    accuracy = Accuracy()
    accuracy.update((torch.eye(3), torch.zeros(3, 3)), torch.arange(3))
    assert accuracy.result().top1 == 1


def test_nothing_counted_is_no_accuracy() -> None:
    with pytest.raises(ValueError, match="no sample"):
        Accuracy().result()
