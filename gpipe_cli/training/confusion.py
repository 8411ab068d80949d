"""Which class was taken for which: exact counts, whatever the batches."""

from __future__ import annotations

import torch
from torch import Tensor


class Confusion:
    """Counts answers by true class and predicted class, on the device of the outputs, without synchronising.

    A row per true class and a column per predicted class; one more column holds the samples whose outputs are not
    numbers, which are nobody's.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._counts: Tensor | None = None

    @torch.no_grad()
    def update(self, outputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> None:
        """Add a batch. `outputs`: logits `(N, C)`, or a tuple that begins with them; `targets`: `(N,)` int64."""
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        if self._counts is None:
            shape = (self.num_classes, self.num_classes + 1)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=logits.device)
        classes = torch.arange(self.num_classes, device=logits.device)
        # Of equals the lowest class on every device, as in Accuracy; NaN equals nothing, not even its own maximum.
        likeliest = logits == logits.amax(dim=1, keepdim=True)
        predicted = torch.where(likeliest, classes, self.num_classes).amin(dim=1)
        cells = targets * (self.num_classes + 1) + predicted
        self._counts.view(-1).index_add_(0, cells, torch.ones_like(cells))

    def counts(self) -> Tensor:
        """int64 `(C, C + 1)` on the CPU: true class by predicted class, then not a number. Synchronises."""
        if self._counts is None:
            return torch.zeros((self.num_classes, self.num_classes + 1), dtype=torch.int64)
        return self._counts.cpu()
