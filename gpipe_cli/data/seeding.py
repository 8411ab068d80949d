"""Counted randomness for data: every draw is a function of (seed, epoch, sample), of no state that is carried along.

So the order of an epoch and the augmentation of a sample do not depend on the number of worker processes, on what was
drawn before, or on the batch at which a resumed run starts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from its parts; different parts give unrelated seeds, the same parts always the same one."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the global CPU generators of torch, numpy and random with `seed` (63 bits; numpy takes the lower 32)."""
    # torch.manual_seed would also queue a call for CUDA, with a stack trace: slow, and nothing draws there.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def generators_restored() -> Iterator[None]:
    """On leaving, the global CPU generators of torch, numpy and random are as they were on entering."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
