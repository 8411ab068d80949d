"""Facts that ranks tell each other outside of steps: plain Python values over the control group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from gpipe_cli.pipeline import ProcessGroups

T = TypeVar("T")


def from_first(groups: ProcessGroups | None, make: Callable[[], T]) -> T:
    """`make()` runs on the first rank alone, every rank gets its result; its exception ends the run."""
    if groups is None:
        return make()
    first = dist.get_rank() == groups.ranks[0]
    box: list[Any] = [make() if first else None]
    dist.broadcast_object_list(box, src=groups.ranks[0], group=groups.control)
    result: T = box[0]
    return result


def from_last(groups: ProcessGroups | None, value: T | None) -> T:
    """The last rank's value, on every rank."""
    box: list[Any] = [value]
    if groups is not None:
        dist.broadcast_object_list(box, src=groups.ranks[-1], group=groups.control)
    result: T = box[0]
    return result


def from_all(groups: ProcessGroups | None, value: T) -> list[T]:
    """Every rank's value, in the order of the stages."""
    if groups is None:
        return [value]
    values: list[Any] = [None] * len(groups.ranks)
    dist.all_gather_object(values, value, group=groups.control)
    return values
