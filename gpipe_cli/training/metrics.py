"""Exact evaluation counts: every sample once, whatever the batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class EvalResult:
    """Fractions in [0, 1] and the mean cross-entropy without smoothing over `num_samples` samples.

    `top5` counts the top min(5, classes).
    """

    top1: float
    top5: float
    loss: float
    num_samples: int

    @property
    def score(self) -> float:
        """Larger is better."""
        return self.top1

    def metrics(self) -> dict[str, float]:
        """The row of metrics.jsonl."""
        return {"top1": self.top1, "top5": self.top5, "eval_loss": self.loss, "num_eval": self.num_samples}

    def sentence(self) -> str:
        """The same for the screen."""
        return (
            f"top-1 {100 * self.top1:5.2f} %, top-5 {100 * self.top5:5.2f} %, loss {self.loss:.4f} "
            f"on {self.num_samples:,} held-out samples"
        )


class Accuracy:
    """Counts right answers and sums the loss over batches of any size, on their device, without synchronising."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    @torch.no_grad()
    def update(self, outputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> None:
        """Add a batch. `outputs`: logits `(N, C)`, or a tuple that begins with them; `targets`: `(N,)` int64."""
        logits = (outputs if isinstance(outputs, Tensor) else outputs[0]).double()
        column = targets.unsqueeze(1)
        own = logits.gather(1, column)
        classes = torch.arange(logits.shape[1], device=logits.device)
        # The place of the right class, ties going to the lower index on every device, as argmax does on the CPU.
        place = ((logits > own) | ((logits == own) & (classes < column))).sum(dim=1)
        # Comparisons with NaN are false, which would make a NaN row right.
        place = place.masked_fill(logits.isnan().any(dim=1), logits.shape[1])
        batch = torch.stack(
            [
                (place < 1).sum().double(),
                (place < min(5, logits.shape[1])).sum().double(),
                F.cross_entropy(logits, targets, reduction="sum"),
                torch.tensor(float(len(targets)), dtype=torch.float64, device=logits.device),
            ]
        )
        self._counts = batch if self._counts is None else self._counts + batch

    def counts(self) -> Tensor:
        """float64 `(4,)`: right at 1, right at 5, loss sum, samples. Counts of several ranks may be added."""
        return torch.zeros(4, dtype=torch.float64) if self._counts is None else self._counts

    def result(self) -> EvalResult:
        """The fractions. Synchronises once. Raises ValueError when nothing was counted."""
        return result_of(self.counts().tolist())


def result_of(counts: Sequence[float]) -> EvalResult:
    """Fractions of the four numbers of `Accuracy.counts()`, or of their sums over ranks."""
    right1, right5, loss_sum, num_samples = counts
    if num_samples == 0:
        raise ValueError("no sample was evaluated")
    return EvalResult(
        top1=right1 / num_samples, top5=right5 / num_samples, loss=loss_sum / num_samples, num_samples=int(num_samples)
    )
