"""The evolved cells AmoebaNet-B and AmoebaNet-D as data.

Source: the authors' TPU code, tensorflow/tpu `models/official/amoeba_net/model_specs.py`. The parameter counts of the
GPipe paper (arXiv 1811.06965: 82M for AmoebaNet-D (18, 208) to 1.8B for (72, 512), 557M for AmoebaNet-B (18, 512))
confirm the tables, except for the operations without parameters, the pools.

The separable 5x5 of B's reduction cell is named dilated in the published cell; the authors' code builds it undilated,
and so do we.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_PAIRS = 5


@dataclass(frozen=True)
class CellGenotype:
    """One cell: `operations[j]` acts on state `inputs[j]`; state 2 + i is the sum of operations 2i and 2i + 1.

    State 0 is the cell's own input, state 1 the previous cell's. The cell's output concatenates the states whose `used`
    flag is 0. Raises ValueError where the three tuples do not describe such a cell.
    """

    operations: tuple[str, ...]
    inputs: tuple[int, ...]
    used: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = (len(self.operations), len(self.inputs), len(self.used))
        if lengths != (2 * NUM_PAIRS, 2 * NUM_PAIRS, NUM_PAIRS + 2):
            raise ValueError(f"a cell has 10 operations, 10 inputs and 7 used flags, got {lengths}")
        for index, state in enumerate(self.inputs):
            if not 0 <= state < 2 + index // 2:
                raise ValueError(f"operation {index} reads state {state}, which is not known before it")

    @property
    def outputs(self) -> tuple[int, ...]:
        """The states that the cell's output concatenates, in order."""
        return tuple(state for state, used in enumerate(self.used) if not used)


@dataclass(frozen=True)
class Genotype:
    """A network's two kinds of cell: stride 1 and stride 2."""

    normal: CellGenotype
    reduction: CellGenotype


GENOTYPES = {
    "B": Genotype(
        normal=CellGenotype(
            operations=("1x1", "max3", "none", "sep3", "1x1", "sep3", "1x1", "none", "avg3", "1x1"),
            inputs=(1, 1, 1, 0, 1, 0, 2, 2, 1, 5),
            used=(0, 1, 1, 0, 0, 1, 0),
        ),
        reduction=CellGenotype(
            operations=("max2", "max3", "none", "3x3", "sep5", "max3", "none", "sep3", "avg3", "1x1"),
            inputs=(0, 0, 2, 1, 2, 2, 3, 1, 4, 3),
            used=(1, 1, 1, 1, 1, 0, 0),
        ),
    ),
    "D": Genotype(
        normal=CellGenotype(
            operations=("1x1", "max3", "none", "1x7_7x1", "1x1", "1x7_7x1", "max3", "none", "avg3", "1x1"),
            inputs=(1, 1, 1, 0, 0, 0, 2, 2, 1, 5),
            used=(0, 1, 1, 0, 0, 1, 0),
        ),
        reduction=CellGenotype(
            operations=("max2", "max3", "none", "3x3", "1x7_7x1", "max3", "none", "max2", "avg3", "1x1"),
            inputs=(0, 0, 2, 1, 2, 2, 3, 1, 2, 3),
            used=(1, 1, 1, 1, 0, 0, 0),
        ),
    ),
}
