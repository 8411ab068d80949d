"""Losses of image classification for the last stage: the mean over the samples it is given."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Outputs = Tensor | tuple[Tensor, ...]
LossFn = Callable[[Outputs, Tensor], Tensor]


def build_loss(label_smoothing: float, aux_weight: float) -> LossFn:
    """The training loss: cross-entropy of the logits plus `aux_weight` times that of the auxiliary logits.

    The loss takes outputs, logits `(N, C)` or the pair (logits, auxiliary logits), and targets `(N,)` int64, and
    returns the mean over the N samples as a scalar, in float32 or wider. Smoothing applies to both terms, and the
    weight is 0.4 in the reference (tensorflow/tpu, amoeba_net, `model_builder.build_softmax_loss`).
    """

    def loss_fn(outputs: Outputs, targets: Tensor) -> Tensor:
        if isinstance(outputs, Tensor):
            return _cross_entropy(outputs, targets, label_smoothing)
        logits, aux_logits = outputs
        main = _cross_entropy(logits, targets, label_smoothing)
        return main + aux_weight * _cross_entropy(aux_logits, targets, label_smoothing)

    return loss_fn


def _cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    if logits.element_size() < 4:
        logits = logits.float()
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
