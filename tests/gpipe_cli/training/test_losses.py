"""The losses against their formulas."""

from __future__ import annotations

import torch

from gpipe_cli.training.losses import build_loss


def smoothed(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    classes = logits.shape[1]
    wanted = torch.full_like(logits, smoothing / classes)
    wanted[torch.arange(len(targets)), targets] += 1 - smoothing
    return -(wanted * logits.log_softmax(1)).sum(1).mean()


def test_loss_is_the_smoothed_cross_entropy_with_the_auxiliary_term() -> None:
    torch.manual_seed(0)
    logits, aux_logits = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    targets = torch.tensor([0, 6, 3, 3, 1])
    loss_fn = build_loss(label_smoothing=0.1, aux_weight=0.4)
    torch.testing.assert_close(loss_fn(logits, targets), smoothed(logits, targets, 0.1))
    both = smoothed(logits, targets, 0.1) + 0.4 * smoothed(aux_logits, targets, 0.1)
    torch.testing.assert_close(loss_fn((logits, aux_logits), targets), both)


def test_low_precision_logits_are_summed_in_float32() -> None:
    loss = build_loss(0.0, 0.4)(torch.zeros(3, 10, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor(10.0).log())
