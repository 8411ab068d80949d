"""The cells as data, against the tables of the authors' code."""

from __future__ import annotations

import dataclasses

import pytest
from gpipe_cli.models.amoebanet.genotypes import GENOTYPES, CellGenotype
from gpipe_cli.models.amoebanet.operations import OPERATION_NAMES


@pytest.mark.parametrize(
    ("variant", "kind", "outputs"),
    [
        ("B", "normal", (0, 3, 4, 6)),
        ("B", "reduction", (5, 6)),
        ("D", "normal", (0, 3, 4, 6)),
        ("D", "reduction", (4, 5, 6)),
    ],
)
def test_cell_outputs_the_states_flagged_unused(variant: str, kind: str, outputs: tuple[int, ...]) -> None:
    cell = getattr(GENOTYPES[variant], kind)
    assert cell.outputs == outputs
    assert set(cell.operations) <= set(OPERATION_NAMES)


@pytest.mark.parametrize(
    ("variant", "kind", "sums"),
    [
        ("B", "normal", "1x1(1)+max3(1) none(1)+sep3(0) 1x1(1)+sep3(0) 1x1(2)+none(2) avg3(1)+1x1(5)"),
        ("B", "reduction", "max2(0)+max3(0) none(2)+3x3(1) sep5(2)+max3(2) none(3)+sep3(1) avg3(4)+1x1(3)"),
        ("D", "normal", "1x1(1)+max3(1) none(1)+1x7_7x1(0) 1x1(0)+1x7_7x1(0) max3(2)+none(2) avg3(1)+1x1(5)"),
        ("D", "reduction", "max2(0)+max3(0) none(2)+3x3(1) 1x7_7x1(2)+max3(2) none(3)+max2(1) avg3(2)+1x1(3)"),
    ],
)
def test_states_are_the_sums_of_the_published_cell(variant: str, kind: str, sums: str) -> None:
    cell = getattr(GENOTYPES[variant], kind)
    terms = [f"{name}({state})" for name, state in zip(cell.operations, cell.inputs, strict=True)]
    assert " ".join(f"{left}+{right}" for left, right in zip(terms[::2], terms[1::2], strict=True)) == sums


@pytest.mark.parametrize("variant", ["B", "D"])
@pytest.mark.parametrize("kind", ["normal", "reduction"])
def test_used_flag_says_whether_a_later_operation_reads_a_computed_state(variant: str, kind: str) -> None:
    cell = getattr(GENOTYPES[variant], kind)
    for state in range(2, 7):
        if not cell.used[state]:
            continue
        assert state in cell.inputs


def test_operation_on_a_state_not_yet_computed_is_refused() -> None:
    cell = GENOTYPES["D"].normal
    with pytest.raises(ValueError, match="operation 2 reads state 3"):
        dataclasses.replace(cell, inputs=(1, 1, 3, 0, 0, 0, 2, 2, 1, 5))


def test_wrong_number_of_operations_is_refused() -> None:
    with pytest.raises(ValueError, match="10 operations, 10 inputs and 7 used flags"):
        CellGenotype(operations=("none",) * 8, inputs=(0,) * 8, used=(1,) * 6)
