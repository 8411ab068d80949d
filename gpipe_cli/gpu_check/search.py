"""The largest of ordered candidates that fits, with as few trials as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """Positions of the largest candidate known to fit and of the smallest known not to; -1 and the number of
    candidates where there is none. The search is complete when they are neighbours."""

    fits: int
    too_large: int

    @property
    def is_complete(self) -> bool:
        return self.too_large - self.fits == 1


def largest_that_fits(candidates: Sequence[T], start: int, fits: Callable[[T], bool | None]) -> Found:
    """Candidates are in growing order: whatever is larger than one that does not fit does not fit either.

    From `start` in steps of 1, 2, 4, ... until the answer changes, then by halves. `fits` returns None to end the
    search early.
    """
    low, high, stride, position = -1, len(candidates), 1, start
    while high - low > 1:
        answer = fits(candidates[position])
        if answer is None:
            break
        if answer:
            low = position
        else:
            high = position
        if low == -1:
            position, stride = max(high - stride, 0), 2 * stride
        elif high == len(candidates):
            position, stride = min(low + stride, high - 1), 2 * stride
        else:
            position = (low + high) // 2
    return Found(low, high)
