"""Cross-entropy of a language model for the last stage: the mean over the tokens it is given.

Logits are by far the largest tensor of a language model (32,000 numbers a token), and torch's cross-entropy holds three
of that size at its peak: the logarithm of the softmax, kept for the backward pass, and two gradients, all in float32
even where the logits are bfloat16. Here the backward pass works from the logits themselves, chunk by chunk of tokens:
the peak is the logits, their gradient and one chunk, counted two thirds of torch's in float32 and one third in
bfloat16. Micro-batches pass one after another, so no more than one micro-batch's are ever there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LossFn = Callable[[Any, Tensor], Tensor]

# Elements of a chunk in the logits' wider type: 16 MiB in float32, far below a micro-batch of a large vocabulary.
CHUNK_ELEMENTS = 2**22


def build_language_loss(label_smoothing: float = 0.0, chunk_elements: int = CHUNK_ELEMENTS) -> LossFn:
    """The loss of logits (N, T, V) and targets (N, T) int64: the mean over all N * T tokens, a scalar.

    All sequences have T tokens, so the mean over tokens is the mean over samples. Computed in float32 or wider.
    `label_smoothing`: share of the target spread evenly over the vocabulary.
    """

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, -2)
        num_tokens = max(1, chunk_elements // flat.shape[1])
        loss: Tensor = _CrossEntropy.apply(flat, targets.flatten(), label_smoothing, num_tokens)
        return loss

    return loss_fn


class CountedLanguageLoss(nn.Module):
    """The loss as a layer over logits (N, T, V), of whatever targets: for counting what it costs (`count_network`)."""

    def forward(self, logits: Tensor) -> Tensor:
        targets = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        return build_language_loss(chunk_elements=logits.numel())(logits, targets)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and one number a token; the gradient is softmax minus target, over the number of tokens."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, chunk: int) -> Tensor:
        normalizers, losses = [], []
        for part, target in zip(torch.split(logits, chunk), torch.split(targets, chunk), strict=True):
            wide = _wide(part)
            normalizer = wide.logsumexp(dim=1)
            aim = wide.gather(1, target.unsqueeze(1)).squeeze(1)
            if smoothing:
                aim = (1 - smoothing) * aim + smoothing * wide.mean(dim=1)
            normalizers.append(normalizer)
            losses.append(normalizer - aim)
        ctx.save_for_backward(logits, targets, torch.cat(normalizers))
        ctx.smoothing, ctx.chunk = smoothing, chunk
        return torch.cat(losses).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, normalizers = ctx.saved_tensors
        chunk, smoothing = ctx.chunk, ctx.smoothing
        scale = loss_gradient / len(targets)
        gradient = torch.empty_like(logits)
        parts = (torch.split(tensor, chunk) for tensor in (logits, targets, normalizers, gradient))
        for part, target, normalizer, result in zip(*parts, strict=True):
            wide = result if result.dtype == normalizer.dtype else torch.empty_like(result, dtype=normalizer.dtype)
            torch.sub(part, normalizer.unsqueeze(1), out=wide).exp_()
            if smoothing:
                wide.sub_(smoothing / wide.shape[1])
            wide.scatter_add_(1, target.unsqueeze(1), wide.new_full((len(target), 1), smoothing - 1)).mul_(scale)
            if wide is not result:
                result.copy_(wide)
        return gradient, None, None, None


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.element_size() < 4 else logits
