"""A mini-batch to compute on, made once and outside of the measured time: random pictures and labels, or tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gpipe_cli.benchmark.grid import Case

# The same data on every rank and for every baseline.
_SEED = 20190301


def sample(case: Case, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Inputs of the network: token ids (N, T) int64 for one that reads text, else pictures (N, 3, H, W) float32.

    Drawn from the generator; without one they have no data (meta device).
    """
    import torch

    device = "meta" if generator is None else "cpu"
    if case.seq_len is not None:
        return torch.randint(case.num_classes, (num_samples, case.seq_len), generator=generator, device=device)
    assert case.image_size is not None
    return torch.randn(num_samples, 3, case.image_size, case.image_size, generator=generator, device=device)


def mini_batch(case: Case) -> tuple[Tensor, Tensor]:
    """Inputs, and int64 targets: a label for each picture (N,), or for each token the one that follows (N, T)."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    inputs = sample(case, case.batch_size, generator)
    shape = (case.batch_size,) if case.seq_len is None else (case.batch_size, case.seq_len)
    return inputs, torch.randint(case.num_classes, shape, generator=generator)
