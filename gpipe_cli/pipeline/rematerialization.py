"""What `remat=auto` keeps: the micro-batches whose activations fit into a memory budget.

Counted, not tried: a candidate is what the schedule holds at its worst moment, by the same rule as the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .footprint import Footprint, rank_bytes
from .policies import keeping_all, rank_operations
from .schedule import Schedule, max_held_micro_batches
from .simulate import Held, of_micro_batch, peak_memory


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is kept, and what it comes to.

    ``kept``: see make_schedule, an entry per stage. ``rank_bytes``: memory of each rank with it; ``least_bytes``: with
    everything recomputed (remat=full), which is more than there is where nothing fits.
    """

    kept: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    least_bytes: tuple[int, ...]


def keep_what_fits(
    stages: Sequence[Footprint] | Sequence[Sequence[Footprint]],
    schedule: Schedule,
    bytes_per_parameter: float,
    memory_bytes: Sequence[float],
) -> Decision:
    """The most that every rank can keep with ``memory_bytes`` each for weights, optimizer, inputs and activations.

    ``stages``: as costs for :func:`simulate`, one for each stage or such a sequence for each micro-batch.
    ``schedule`` is that of the mini-batch, whatever its ``remat``. One micro-batch more on any stage would be too much
    for its rank, or all are kept already. A rank that has too little even for remat=full keeps nothing.
    """
    kept = [0] * schedule.num_stages
    used, least = [], []
    for rank, (numbers, memory) in enumerate(zip(schedule.stages_of_rank, memory_bytes, strict=True)):
        each = [of_micro_batch(stages, m) for m in range(schedule.num_micro_batches)]
        of_rank = {tuple(of_all[number] for number in numbers) for of_all in each}
        constant = max(rank_bytes(own, bytes_per_parameter, 0) for own in of_rank)  # the largest micro-batch's
        chosen = most_kept(schedule, rank, stages, memory - constant)
        for stage, count in chosen.items():
            kept[stage] = count
        used.append(constant + _peak(schedule, rank, stages, chosen))
        least.append(constant + _peak(schedule, rank, stages, dict.fromkeys(numbers, 0)))
    return Decision(kept=tuple(kept), rank_bytes=tuple(used), least_bytes=tuple(least))


def most_kept(
    schedule: Schedule, rank: int, stages: Sequence[Held] | Sequence[Sequence[Held]], room_bytes: float
) -> dict[int, int]:
    """By stage of ``rank``, how many micro-batches' activations it can hold while all of the rank's take no more than
    ``room_bytes`` at any time: as many on each stage as on the others, then more where they still fit."""
    numbers = schedule.stages_of_rank[rank]
    in_flight = {stage: max_held_micro_batches(keeping_all(schedule.operations[rank]), stage) for stage in numbers}

    def fits(candidate: Mapping[int, int]) -> bool:
        return _peak(schedule, rank, stages, candidate) <= room_bytes

    def level(count: int) -> dict[int, int]:
        return {stage: min(count, in_flight[stage]) for stage in numbers}

    kept = level(_largest(0, max(in_flight.values()), lambda count: fits(level(count))))
    for stage in numbers:
        kept[stage] = _largest(kept[stage], in_flight[stage], lambda count: fits({**kept, stage: count}))  # noqa: B023
    return kept


def _peak(
    schedule: Schedule, rank: int, stages: Sequence[Held] | Sequence[Sequence[Held]], kept: Mapping[int, int]
) -> int:
    return peak_memory(rank_operations(schedule, rank, kept), stages)[0]


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from ``low`` to ``high`` that fits, ``low`` if none does; what is above one that does not fit
    does not fit either."""
    if low < high and fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
