"""Where the sequence of layers is cut: contiguous partitions whose largest cost is as small as possible.

The slowest partition sets the pace of a pipeline, so the cut minimises the largest partition cost, exactly. (The paper,
section 2.2, minimises the variance of the costs, which is a stand-in for the same aim.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise


def cut(costs: Sequence[float], num_partitions: int, weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """Number of layers per partition: contiguous, in order, none empty, the largest summed cost minimal.

    ``weights``: how often a partition does its layers' work, relative to the others (a last stage that recomputes
    nothing can host more). Dynamic programming over (partitions, layers) with a binary search for the last cut:
    O(K L log L) unless the weights of the first partitions differ, then O(K L^2). Raises ValueError for more
    partitions than layers, or costs that are negative or not finite.
    """
    num_layers = len(costs)
    if not 1 <= num_partitions <= num_layers:
        raise ValueError(
            f"num_partitions={num_partitions}: {num_layers} layers can be cut into 1 to {num_layers} partitions"
        )
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"cost of layer {index} is {cost}: costs must be finite and not negative")
    factors = [1.0] * num_partitions if weights is None else list(weights)
    total = [0.0, *accumulate(float(cost) for cost in costs)]
    # best[i]: smallest possible largest cost of the first i layers in k partitions
    best = [factors[0] * cost for cost in total]
    last_cuts: list[list[int]] = []
    for k in range(2, num_partitions + 1):
        factor = factors[k - 1]
        # With equal weights so far, best[j] grows with j while the last partition's cost shrinks: the optimum lies
        # where they cross. With unequal ones every place for the last cut is tried.
        crossing = len(set(factors[: k - 1])) == 1
        extended = [math.inf] * (num_layers + 1)
        last_cut = [0] * (num_layers + 1)
        for i in range(k, num_layers + 1):
            candidates: Iterable[int] = range(k - 1, i)
            if crossing:
                low, high = k - 1, i - 1
                while low < high:
                    middle = (low + high) // 2
                    if best[middle] >= factor * (total[i] - total[middle]):
                        high = middle
                    else:
                        low = middle + 1
                candidates = range(max(k - 1, low - 1), low + 1)
            value, j = min((max(best[j], factor * (total[i] - total[j])), j) for j in candidates)
            extended[i], last_cut[i] = value, j
        best = extended
        last_cuts.append(last_cut)
    ends = [num_layers]
    for last_cut in reversed(last_cuts):
        ends.append(last_cut[ends[-1]])
    starts = [0, *reversed(ends)]
    return tuple(b - a for a, b in pairwise(starts))


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
