"""Made-up mini-batches of the right shape and type, for counting, measuring and benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor


def made_up_inputs(
    num_samples: int,
    *,
    image_size: int | None = None,
    seq_len: int | None = None,
    num_tokens: int = 1,
    generator: torch.Generator | None,
) -> Tensor:
    """Token ids (N, T) int64 below `num_tokens` where there is a `seq_len`, else pictures (N, 3, H, W) float32.

    Drawn from the generator; without one they have no data (meta device).
    """
    device = "meta" if generator is None else generator.device
    if seq_len is not None:
        return torch.randint(num_tokens, (num_samples, seq_len), generator=generator, device=device)
    assert image_size is not None
    return torch.randn(num_samples, 3, image_size, image_size, generator=generator, device=device)


def made_up_targets(inputs: Tensor, num_classes: int, generator: torch.Generator) -> Tensor:
    """A class for each picture (N,), or for each token the one that follows (N, T); int64."""
    shape = inputs.shape[:1] if inputs.is_floating_point() else inputs.shape
    return torch.randint(num_classes, shape, generator=generator, device=generator.device)
