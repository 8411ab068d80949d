"""A cell by its output and gradients against a plain one, and drop path by its statistics."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from gpipe_cli.models.amoebanet.cell import Cell, DropPath, rectified_concat
from gpipe_cli.models.amoebanet.genotypes import GENOTYPES, CellGenotype
from torch import Tensor, nn

NORM = partial(nn.BatchNorm2d, eps=1e-3)


def build_cell(
    genotype: CellGenotype,
    previous_channels: int | None = 12,
    *,
    reduction: bool = False,
    after_reduction: bool = False,
    drop_path: float = 0.0,
) -> Cell:
    torch.manual_seed(0)
    return Cell(
        genotype,
        previous_channels,
        12,
        8,
        reduction=reduction,
        after_reduction=after_reduction,
        drop_path=drop_path,
        norm=NORM,
    ).double()


def random_state(channels: int, height: int, width: int) -> Tensor:
    state = torch.randn(2, channels, height, width, dtype=torch.float64)
    return state.to(memory_format=torch.channels_last).requires_grad_()


def assert_same_as_reference(
    cell: Cell, references: ModuleType, previous: Tensor, current: Tensor, reduction: bool
) -> None:
    expected = references.relu(references.cell(cell, previous, current, reduction))
    passed, output = cell((F.relu(previous), F.relu(current)))
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(passed, F.relu(current), rtol=0, atol=0)
    weights = torch.randn_like(expected)
    variables = (previous, current, *cell.parameters())
    grads = torch.autograd.grad((output * weights).sum(), variables)
    expected_grads = torch.autograd.grad((expected * weights).sum(), variables)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("size", [(6, 6), (5, 7)])
@pytest.mark.parametrize("after_reduction", [False, True])
@pytest.mark.parametrize("kind", ["normal", "reduction"])
@pytest.mark.parametrize("variant", ["B", "D"])
def test_cell_equals_its_definition(
    variant: str, kind: str, after_reduction: bool, size: tuple[int, int], references: ModuleType
) -> None:
    reduction = kind == "reduction"
    cell = build_cell(getattr(GENOTYPES[variant], kind), reduction=reduction, after_reduction=after_reduction)
    previous_size = (2 * size[0] - 1, 2 * size[1]) if after_reduction else size
    previous, current = random_state(12, *previous_size), random_state(12, *size)
    assert_same_as_reference(cell, references, previous, current, reduction)


@pytest.mark.parametrize("kind", ["normal", "reduction"])
@pytest.mark.parametrize("variant", ["B", "D"])
def test_first_cell_takes_its_input_unchanged_as_state_1(variant: str, kind: str, references: ModuleType) -> None:
    cell = build_cell(getattr(GENOTYPES[variant], kind), None, reduction=kind == "reduction")
    stem = random_state(12, 6, 5)
    expected = references.relu(references.cell(cell, stem, stem, kind == "reduction"))
    passed, output = cell(stem)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(passed, F.relu(stem))
    (grad,) = torch.autograd.grad(output.square().sum(), stem)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), stem)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-7, atol=1e-8)


def test_previous_of_the_same_width_is_not_converted() -> None:
    assert list(build_cell(GENOTYPES["D"].normal, 8).previous.parameters()) == []
    assert list(build_cell(GENOTYPES["D"].normal, 12).previous.parameters()) != []


def test_cell_passes_on_what_else_travels_in_the_tuple() -> None:
    cell = build_cell(GENOTYPES["D"].normal)
    previous, current, logits = random_state(12, 4, 4), random_state(12, 4, 4), torch.randn(2, 5)
    outputs = cell((previous, current, logits))
    assert len(outputs) == 3
    assert outputs[0] is current
    assert outputs[2] is logits


@pytest.mark.parametrize("size", [(6, 6), (5, 7)])
def test_output_state_of_another_size_is_reduced(size: tuple[int, int], references: ModuleType) -> None:
    genotype = dataclasses.replace(GENOTYPES["D"].reduction, used=(0, 0, 1, 1, 1, 1, 0))
    cell = build_cell(genotype, reduction=True)
    previous, current = F.relu(random_state(12, *size)), F.relu(random_state(12, *size))
    output = cell((previous, current))[1]
    state_0 = references.norm(references.conv(current, cell.current.conv.weight), cell.current.norm)
    state_1 = references.norm(references.conv(previous, cell.previous.conv.weight), cell.previous.norm)
    for index, state in enumerate((state_0, state_1)):
        reduced = references.relu(references.factorized_reduction(state, cell.matches[str(index)]))
        torch.testing.assert_close(output[:, 8 * index : 8 * index + 8], reduced, rtol=1e-9, atol=1e-9)
    assert output.shape == (2, 24, (size[0] + 1) // 2, (size[1] + 1) // 2)


def test_output_state_of_another_width_is_converted() -> None:
    genotype = dataclasses.replace(GENOTYPES["D"].normal, used=(1, 0, 1, 1, 1, 1, 0))
    assert build_cell(genotype, None)(random_state(12, 4, 4))[1].shape == (2, 16, 4, 4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_rectified_concat_equals_relu_of_the_concatenation(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    states = [torch.randn(2, c, 3, 4).to(memory_format=layout).requires_grad_() for c in (2, 3, 1)]
    output, expected = rectified_concat(states), torch.cat(states, dim=1).relu()
    assert torch.equal(output, expected)
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad((output * weights).sum(), states)
    expected_grads = torch.autograd.grad((expected * weights).sum(), states)
    for grad, expected_grad, state in zip(grads, expected_grads, states, strict=True):
        assert torch.equal(grad, expected_grad)
        assert grad.stride() == state.stride()


def test_rectified_concat_of_mixed_precision_keeps_the_wider_type() -> None:
    states = [torch.randn(1, 2, 2, 2, dtype=dtype).requires_grad_() for dtype in (torch.bfloat16, torch.float32)]
    output = rectified_concat(states)
    output.sum().backward()
    assert output.dtype == torch.float32
    assert [state.grad.dtype for state in states if state.grad is not None] == [torch.bfloat16, torch.float32]


def test_drop_path_drops_whole_samples_and_scales_the_others() -> None:
    torch.manual_seed(0)
    output = DropPath(0.25)(torch.ones(4000, 3, 2, 2))
    samples = output.flatten(1)
    assert torch.equal(samples.amin(1), samples.amax(1))
    kept = samples[:, 0] != 0
    torch.testing.assert_close(samples[kept, 0], torch.full((int(kept.sum()),), 1 / 0.75))
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.03)
    assert output.mean().item() == pytest.approx(1.0, abs=0.04)


def test_drop_path_grows_with_progress_and_stays_at_its_final_value() -> None:
    torch.manual_seed(0)
    drop_path, ones = DropPath(0.5), torch.ones(4000, 1, 1, 1)
    for fraction, expected in [(0.0, 0.0), (0.5, 0.25), (1.0, 0.5), (1.5, 0.5)]:
        drop_path.set_progress(fraction)
        assert (drop_path(ones) == 0).double().mean().item() == pytest.approx(expected, abs=0.03)


def test_drop_path_does_nothing_in_evaluation_and_draws_nothing_when_off() -> None:
    ones = torch.ones(100, 1, 1, 1)
    assert torch.equal(DropPath(0.9).eval()(ones), ones)
    state = torch.get_rng_state()
    assert torch.equal(DropPath(0.0)(ones), ones)
    assert torch.equal(torch.get_rng_state(), state)


def test_drop_path_keeps_bfloat16() -> None:
    assert DropPath(0.5)(torch.ones(4, 1, 1, 1, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("drop_prob", [-0.1, 1.0])
def test_drop_path_refuses_what_is_no_probability(drop_prob: float) -> None:
    with pytest.raises(ValueError, match=f"drop_path={drop_prob}: expected a probability"):
        DropPath(drop_prob)


def test_drop_path_spares_none_and_hits_every_other_operation() -> None:
    """One pair per state, `none` left: with all paths dropped, each state is its left input, state 1, untouched."""
    for name in ("1x1", "3x3", "1x7_7x1", "sep3", "sep5", "avg3", "max2", "max3"):
        genotype = CellGenotype(("none", name) * 5, (1, 1, 2, 1, 3, 1, 4, 1, 5, 1), (1, 1, 1, 1, 1, 1, 0))
        cell = build_cell(genotype, 8, drop_path=1 - 1e-12)
        previous, current = F.relu(random_state(8, 4, 4)), random_state(12, 4, 4)
        torch.testing.assert_close(cell((previous, current))[1], previous, rtol=0, atol=0)
        assert not torch.equal(cell.eval()((previous, current))[1], previous)


def test_operations_of_a_cell_are_dropped_independently() -> None:
    genotype = CellGenotype(("avg3", "avg3") * 5, (1, 1, 2, 2, 3, 3, 4, 4, 5, 5), (1, 1, 0, 1, 1, 1, 0))
    cell = build_cell(genotype, 8, drop_path=0.5)
    previous = torch.ones(400, 8, 1, 1, dtype=torch.float64)
    current = torch.ones(400, 12, 1, 1, dtype=torch.float64)
    state_2 = cell((previous, current))[1][:, 0].flatten()  # left and right, each 0 or 1 / keep
    shares = [(state_2 == value).double().mean().item() for value in (0.0, 2.0, 4.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.08)
