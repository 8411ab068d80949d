"""Counted randomness: what is drawn depends on counters, never on what was drawn before.

Whoever draws in layer l for micro-batch m in step t of replica r draws from a generator seeded by (seed, r, t, m, l).
Recomputation therefore draws the same values with no saved state, and neither the number of partitions nor the place
of the cut matters. torch's default generators are used, because that is what layers draw from; the caller's states are
put back.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Streams keep draws of different purpose apart even where their counters coincide.
INITIALISATION, TRAINING, EVALUATION = 0, 1, 2


def derive_seed(*counters: int) -> int:
    """A seed in [0, 2**63) from any number of 64-bit counters; equal counters give equal seeds on every machine."""
    packed = struct.pack(f"<{len(counters)}q", *counters)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Whatever happens inside, torch's CPU generator and the one of ``device`` are as before afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's CPU generator and the one of ``device``; no other device is touched."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)
