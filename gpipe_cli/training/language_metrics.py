"""Exact evaluation of a language model: every token once, whatever the batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_cli.training.language_loss import build_language_loss


@dataclass(frozen=True)
class LanguageResult:
    """What a held-out text costs the model.

    `loss`: mean cross-entropy in nats a token; `perplexity`: exp of it; `bits_per_byte`: bits a byte of the text, the
    figure that does not depend on the tokenizer; `top1`: share of tokens predicted right.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    top1: float
    num_tokens: int

    @property
    def score(self) -> float:
        """Larger is better."""
        return -self.loss

    def metrics(self) -> dict[str, float]:
        """The row of metrics.jsonl."""
        return {
            "top1": self.top1,
            "eval_loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "num_eval": self.num_tokens,
        }

    def sentence(self) -> str:
        """The same for the screen."""
        return (
            f"{self.bits_per_byte:.3f} bits per byte, perplexity {self.perplexity:.4g}, loss {self.loss:.4f} "
            f"on {self.num_tokens:,} held-out tokens"
        )


class TokenCounts:
    """Sums loss and right answers over batches of any size, on their device, without synchronising."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._loss_fn = build_language_loss()

    @torch.no_grad()
    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (N, T, V), targets (N, T) int64."""
        right = (logits.argmax(dim=-1) == targets) & ~logits.isnan().any(dim=-1)
        num_tokens = torch.tensor(float(targets.numel()), dtype=torch.float64, device=logits.device)
        batch = torch.stack([self._loss_fn(logits, targets).double() * num_tokens, right.sum().double(), num_tokens])
        self._counts = batch if self._counts is None else self._counts + batch

    def counts(self) -> Tensor:
        """float64 (3,): loss sum in nats, right tokens, tokens. Counts of several ranks may be added."""
        return torch.zeros(3, dtype=torch.float64) if self._counts is None else self._counts


def language_result(counts: Sequence[float], bytes_per_token: float) -> LanguageResult:
    """The result of the three numbers of `TokenCounts.counts()`, or of their sums over ranks.

    `bytes_per_token`: mean over the held-out text (1 for bytes). Raises ValueError when nothing was counted.
    """
    loss_sum, num_right, num_tokens = counts
    if num_tokens == 0:
        raise ValueError("no token was evaluated")
    loss = loss_sum / num_tokens
    return LanguageResult(
        loss=loss,
        perplexity=perplexity_of(loss),
        bits_per_byte=bits_per_byte_of(loss, bytes_per_token),
        top1=num_right / num_tokens,
        num_tokens=int(num_tokens),
    )


def perplexity_of(loss: float) -> float:
    """exp of the loss in nats a token; infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte_of(loss: float, bytes_per_token: float) -> float:
    """Bits a byte of text from the loss in nats a token and the mean number of bytes that a token stands for."""
    return loss / math.log(2) / bytes_per_token
