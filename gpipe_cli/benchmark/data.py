"""A mini-batch to compute on, made once and outside of the measured time: random pictures and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from gpipe_cli.benchmark.grid import Case

# The same data on every rank and for every baseline.
_SEED = 20190301


def sample_shape(samples: int, image_size: int) -> tuple[int, ...]:
    """Shape of the network's input for so many samples: pictures (N, 3, H, W)."""
    return (samples, 3, image_size, image_size)


def mini_batch(case: Case, num_classes: int) -> tuple[Tensor, Tensor]:
    """Inputs, float32 (N, 3, H, W), and targets, int64 (N,)."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    inputs = torch.randn(sample_shape(case.batch_size, case.image_size), generator=generator)
    targets = torch.randint(num_classes, (case.batch_size,), generator=generator)
    return inputs, targets
