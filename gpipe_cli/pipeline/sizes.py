"""How many samples of a mini-batch each micro-batch gets. No torch here.

Even sizes are the paper's. Tapered ones begin and end small: the last stage waits for the first micro-batch, and at the
end for the gradients of the last one to travel back, so these two decide how long the bubble is; those between are
larger in turn, and their number stays. Sizes follow from the numbers of samples and micro-batches alone, never from the
number of stages, so that tapering does not make the result depend on it.
"""

from __future__ import annotations

from fractions import Fraction

# The first and last micro-batch beside the largest, and over which parts of the micro-batches sizes rise and fall: of
# these shapes the one with which eager_1f1b is fastest on average, simulated for 2 to 8 stages and 4 to 48
# micro-batches. A rise can be steeper than a fall: a backward pass on the way to the first stage must not hold up the
# next, which is half as long again at most (forward : backward = 1 : 2).
_ENDS, _RISE, _FALL = Fraction(1, 3), Fraction(1, 4), Fraction(1, 2)


def split_sizes(num_samples: int, num_micro_batches: int, tapered: bool = False) -> tuple[int, ...]:
    """Samples of each micro-batch, at least one while there are enough; zeros when samples are too few.

    Even ones differ by at most one, the first being the larger; ``tapered`` ones by what rounding leaves of
    :func:`relative_sizes`.
    """
    if not tapered or num_samples < num_micro_batches:
        base, extra = divmod(num_samples, num_micro_batches)
        return tuple(base + (index < extra) for index in range(num_micro_batches))
    # One each, and what remains by largest remainders of what is still wanted.
    wanted = [max(Fraction(0), size * num_samples / num_micro_batches - 1) for size in _tapered(num_micro_batches)]
    remaining = num_samples - num_micro_batches
    shares = [share * remaining / sum(wanted) if remaining else Fraction(0) for share in wanted]
    sizes = [1 + int(share) for share in shares]
    by_remainder = sorted(range(num_micro_batches), key=lambda index: (int(shares[index]) - shares[index], index))
    for index in by_remainder[: num_samples - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


def relative_sizes(num_micro_batches: int, tapered: bool = False) -> tuple[float, ...]:
    """What the sizes tend to for many samples; their mean is 1."""
    return tuple(map(float, _tapered(num_micro_batches))) if tapered else (1.0,) * num_micro_batches


def _tapered(num_micro_batches: int) -> list[Fraction]:
    rise, fall = _RISE * num_micro_batches, _FALL * num_micro_batches
    heights = [
        min(
            Fraction(1),
            _ENDS + (1 - _ENDS) * index / rise,
            _ENDS + (1 - _ENDS) * (num_micro_batches - 1 - index) / fall,
        )
        for index in range(num_micro_batches)
    ]
    total = sum(heights)
    return [height * num_micro_batches / total for height in heights]
