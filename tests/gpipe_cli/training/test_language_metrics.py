from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from gpipe_cli.training.language_metrics import TokenCounts, bits_per_byte_of, language_result, perplexity_of


def test_counts_do_not_depend_on_the_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 6, 20, generator=generator)
    targets = torch.randint(20, (7, 6), generator=generator)
    counts = TokenCounts()
    for part, target in zip(logits.split([4, 2, 1]), targets.split([4, 2, 1]), strict=True):
        counts.update(part, target)
    result = language_result(counts.counts().tolist(), bytes_per_token=3.5)
    loss = float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert result.num_tokens == 42
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(loss / math.log(2) / 3.5, rel=1e-6)
    assert result.top1 == pytest.approx(float((logits.argmax(2) == targets).float().mean()))


def test_uniform_logits_over_bytes_cost_eight_bits() -> None:
    counts = TokenCounts()
    counts.update(torch.zeros(2, 3, 256), torch.tensor([[0, 1, 2], [3, 4, 5]]))
    result = language_result(counts.counts().tolist(), bytes_per_token=1.0)
    assert result.bits_per_byte == pytest.approx(8.0)
    assert result.perplexity == pytest.approx(256.0, rel=1e-5)


def test_logits_that_are_not_numbers_are_never_right() -> None:
    counts = TokenCounts()
    counts.update(torch.full((1, 2, 4), math.nan), torch.zeros(1, 2, dtype=torch.int64))
    assert language_result(counts.counts().tolist(), 1.0).top1 == 0.0


def test_nothing_counted_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token was evaluated"):
        language_result(TokenCounts().counts().tolist(), 1.0)


def test_an_immense_loss_has_infinite_perplexity() -> None:
    assert perplexity_of(1e6) == math.inf
    assert bits_per_byte_of(math.log(2), 1.0) == 1.0
