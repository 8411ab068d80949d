"""Where the sequence of layers is cut: contiguous partitions whose largest cost is as small as possible.

The slowest partition sets the pace of a pipeline, so the cut minimises the largest partition cost, exactly. (The paper,
section 2.2, minimises the variance of the costs, which is a stand-in for the same aim.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise


def cut(costs: Sequence[float], num_partitions: int, weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """Number of layers per partition: contiguous, in order, none empty, the largest summed cost minimal.

    ``weights``: how often a partition does its layers' work, relative to the others (a last stage that recomputes
    nothing can host more). Dynamic programming over (partitions, layers), each partition's end only where the others
    leave it: O(K L) for equal weights, often far less. Raises ValueError for more partitions than layers, or costs that
    are negative or not finite.
    """
    num_layers = len(costs)
    if not 1 <= num_partitions <= num_layers:
        raise ValueError(
            f"num_partitions={num_partitions}: {num_layers} layers can be cut into 1 to {num_layers} partitions"
        )
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"cost of layer {index} is {cost}: costs must be finite and not negative")
    factors = [1.0] * num_partitions if weights is None else [float(weight) for weight in weights]
    total = [0.0, *accumulate(float(cost) for cost in costs)]
    bound = _smallest_bound(total, factors)
    while True:
        largest, ends = _cut_within(total, factors, bound)
        if largest <= bound:
            return tuple(b - a for a, b in pairwise((0, *ends)))
        bound = min(largest, 2 * bound)  # with unequal weights, the bound is only a start


def _smallest_bound(total: Sequence[float], factors: Sequence[float]) -> float:
    """The smallest largest cost with which partitions reach the last layer, if weights do not get in one's way."""
    low, high = 0.0, max(factors) * total[-1]
    while low < (middle := (low + high) / 2) < high:
        if _last_ends(total, factors, middle)[-1] == len(total) - 1:
            high = middle
        else:
            low = middle
    return high


def _last_ends(total: Sequence[float], factors: Sequence[float], bound: float) -> list[int]:
    """No cut whose costs are at most `bound` has its partitions end behind these layers."""
    ends = [0]
    num_layers, num_partitions = len(total) - 1, len(factors)
    for k, factor in enumerate(factors, start=1):
        room = bound / factor if factor else math.inf
        end = bisect_right(total, total[ends[-1]] + room) - 1
        ends.append(min(end, num_layers - (num_partitions - k)))
    return ends[1:]


def _cut_within(total: Sequence[float], factors: Sequence[float], bound: float) -> tuple[float, list[int]]:
    """The best of all cuts whose costs are at most `bound`: its largest cost, and where its partitions end.

    The largest cost is infinite, or above the bound, when there is none.
    """
    num_layers = len(total) - 1
    loose = bound * (1 + 1e-9)  # sums are rounded
    highs = [0, *_last_ends(total, factors, loose)]
    backwards = [total[-1] - cost for cost in reversed(total)]
    lows = [num_layers - end for end in (0, *_last_ends(backwards, factors[::-1], loose))][::-1]
    # best[i]: smallest possible largest cost of the first i layers in k partitions
    best = [0.0, *[math.inf] * num_layers]
    last_cuts: list[list[int]] = []
    for k, factor in enumerate(factors, start=1):
        # With equal weights so far, best[j] grows with j while the last partition's cost shrinks: the optimum lies
        # where they cross, and that moves on as i grows. With unequal ones every place for the last cut is tried.
        first, last = max(lows[k - 1], k - 1), highs[k - 1]
        crosses = len(set(factors[: k - 1])) <= 1
        crossing = first
        extended = [math.inf] * (num_layers + 1)
        last_cut = [0] * (num_layers + 1)
        for i in range(max(lows[k], first + 1), highs[k] + 1):
            end = min(last + 1, i - 1)
            candidates: Iterable[int] = range(first, end + 1)
            if crosses:
                while crossing < end and best[crossing] < factor * (total[i] - total[crossing]):
                    crossing += 1
                candidates = (crossing - 1, crossing) if crossing > first else (crossing,)
            for j in candidates:
                largest = max(best[j], factor * (total[i] - total[j]))
                if largest < extended[i]:
                    extended[i], last_cut[i] = largest, j
        best = extended
        last_cuts.append(last_cut)
    ends = [num_layers]
    for last_cut in reversed(last_cuts[1:]):
        ends.append(last_cut[ends[-1]])
    return best[num_layers], ends[::-1]


def check_balance(balance: Sequence[int], num_layers: int, num_partitions: int) -> tuple[int, ...]:
    """A cut given by the user, checked; raises ValueError with the numbers in conflict and a way out."""
    sizes = tuple(int(size) for size in balance)
    advice = "give one positive number of layers for each partition, or leave balance out"
    if len(sizes) != num_partitions:
        raise ValueError(f"balance={list(sizes)}: {len(sizes)} entries for {num_partitions} partitions; {advice}")
    if any(size < 1 for size in sizes):
        raise ValueError(f"balance={list(sizes)}: a partition without layers; {advice}")
    if sum(sizes) != num_layers:
        raise ValueError(f"balance={list(sizes)}: sums to {sum(sizes)}, the network has {num_layers} layers; {advice}")
    return sizes


def layer_ranges(balance: Sequence[int]) -> tuple[range, ...]:
    """The global layer indices of each partition."""
    ends = list(accumulate(balance))
    return tuple(range(end - size, end) for end, size in zip(ends, balance, strict=True))
