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
    """Inputs of the network, drawn from the generator; without one they have no data (see `made_up_inputs`)."""
    from gpipe_cli.training.made_up import made_up_inputs

    return made_up_inputs(
        num_samples,
        image_size=case.image_size,
        seq_len=case.seq_len,
        num_tokens=case.num_classes,
        generator=generator,
    )


def mini_batch(case: Case) -> tuple[Tensor, Tensor]:
    """Inputs, and int64 targets: a label for each picture (N,), or for each token the one that follows (N, T)."""
    import torch

    from gpipe_cli.training.made_up import made_up_targets

    generator = torch.Generator().manual_seed(_SEED)
    inputs = sample(case, case.batch_size, generator)
    return inputs, made_up_targets(inputs, case.num_classes, generator)
