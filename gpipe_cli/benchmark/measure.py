"""Timing of steps on all ranks, and what the times of several rounds say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from gpipe_cli.benchmark.subjects import Subject
    from gpipe_cli.pipeline import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class Spell:
    """Consecutive steps on this rank: seconds of each, from the moment when all ranks began it to the moment when all
    had done it; the seconds that this rank waited in all of them (None: not known); and counts of the last one."""

    step_times_s: tuple[float, ...]
    wait_s: float | None
    num_bytes_sent: int | None
    num_rematerializations: int | None


class Stopwatch:
    """Measures a subject's steps; every rank has one, and they work together."""

    def __init__(self, subject: Subject, groups: ProcessGroups | None, device: torch.device) -> None:
        self._subject, self._groups, self._device = subject, groups, device

    def run(self, num_steps: int) -> Spell:
        """Make so many steps. Collective."""
        times, waits = [], []
        facts = None
        self._together()
        began = time.perf_counter()
        for _ in range(num_steps):
            facts = self._subject.step()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            own = time.perf_counter()
            self._together()
            ended = time.perf_counter()
            times.append(ended - began)
            # Whoever has done his part early waits for the others, as he does for a tensor.
            waits.append(None if facts.wait_s is None else facts.wait_s + ended - own)
            began = ended
        known = [wait for wait in waits if wait is not None]
        return Spell(
            step_times_s=tuple(times),
            wait_s=sum(known) if len(known) == num_steps else None,
            num_bytes_sent=facts.num_bytes_sent if facts is not None else None,
            num_rematerializations=facts.num_rematerializations if facts is not None else None,
        )

    def _together(self) -> None:
        if self._groups is not None:
            dist.barrier(group=self._groups.control)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median of step times with their quartiles, in seconds; of fewer than four times, with the extremes."""

    median_s: float
    low_s: float
    high_s: float


def spread(step_times_s: Sequence[float]) -> Spread:
    """Median and spread of at least one time."""
    median = statistics.median(step_times_s)
    if len(step_times_s) < 4:
        return Spread(median_s=median, low_s=min(step_times_s), high_s=max(step_times_s))
    low, _, high = statistics.quantiles(step_times_s, n=4, method="inclusive")
    return Spread(median_s=median, low_s=low, high_s=high)


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float | None:
    """How many times as fast we are: the median, over the rounds that both were measured in, of the ratio of median
    step times. A drift of the machine from round to round cancels."""
    ratios = [
        statistics.median(other) / statistics.median(own)
        for own, other in zip(ours, theirs, strict=False)
        if own and other
    ]
    return statistics.median(ratios) if ratios else None
