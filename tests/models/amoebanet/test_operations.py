"""Every operation by its output and gradients, in float64, against loops over pixels."""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from gpipe_cli.models.amoebanet.operations import (
    OPERATION_NAMES,
    AvgPool,
    Conv,
    FactorizedReduction,
    MaxPool,
    Rectified,
    build_operation,
)
from torch import Tensor, nn

NORM = partial(nn.BatchNorm2d, eps=1e-3)
SIZES = [(6, 6), (7, 7), (8, 5), (5, 4), (2, 3), (1, 1)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def random_input(channels: int, size: tuple[int, int], layout: torch.memory_format) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, channels, *size, dtype=torch.float64).to(memory_format=layout).requires_grad_()


def assert_same(actual: Tensor, expected: Tensor, *variables: Tensor) -> None:
    """Equal outputs, and equal gradients of all variables for one random output gradient."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad((actual * weights).sum(), variables)
    expected_grads = torch.autograd.grad((expected * weights).sum(), variables)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", ["avg3", "max2", "max3"])
def test_pool_equals_loop_over_pixels(
    references: ModuleType, name: str, stride: int, size: tuple[int, int], layout: torch.memory_format
) -> None:
    x = random_input(4, size, layout)
    module = build_operation(name, 4, 4, stride, NORM)
    assert_same(module(x), references.pool(x, int(name[3:]), stride, name[:3]), x)


def test_max_pool_ignores_padding_where_all_values_are_negative() -> None:
    x = torch.full((1, 1, 4, 4), -5.0)
    for kernel, stride in [(3, 1), (3, 2), (2, 1), (2, 2)]:
        assert MaxPool(kernel, stride)(x).unique().tolist() == [-5.0]


def test_avg_pool_divides_by_the_values_inside_the_picture() -> None:
    x = torch.ones(1, 1, 5, 4)
    for stride in (1, 2):
        assert AvgPool(stride)(x).unique().tolist() == [1.0]


def test_stride_two_pools_of_an_even_picture_begin_at_its_first_pixel() -> None:
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert MaxPool(3, 2)(x).flatten().tolist() == [10.0, 11.0, 14.0, 15.0]
    assert MaxPool(2, 2)(x).flatten().tolist() == [5.0, 7.0, 13.0, 15.0]
    assert AvgPool(2)(x).flatten().tolist() == [5.0, 6.5, 11.0, 12.5]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("kernel", "stride", "groups"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 1), (2, 2), 1),
        ((3, 3), (1, 1), 1),
        ((3, 3), (2, 2), 1),
        ((1, 7), (1, 2), 1),
        ((7, 1), (2, 1), 1),
        ((3, 3), (2, 2), 4),
        ((5, 5), (2, 2), 4),
    ],
)
def test_convolution_pads_like_tensorflow(
    references: ModuleType,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    groups: int,
    size: tuple[int, int],
    layout: torch.memory_format,
) -> None:
    x = random_input(4, size, layout)
    module = Conv(4, 8 if groups == 1 else 4, kernel, stride, groups).double()
    expected = references.conv(x, module.weight, stride, groups)
    assert_same(module(x), expected, x, module.weight)


def test_convolution_without_padding_equals_loop_over_pixels(references: ModuleType) -> None:
    x = random_input(4, (8, 7), torch.contiguous_format)
    module = Conv(4, 2, 4, 2, same=False).double()
    assert_same(module(x), references.conv(x, module.weight, (2, 2), same=False), x, module.weight)


def test_even_kernel_with_same_padding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernel=2: expected odd sizes"):
        Conv(4, 4, 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_factorized_reduction_takes_both_diagonal_pixels(
    references: ModuleType, size: tuple[int, int], layout: torch.memory_format
) -> None:
    x = random_input(4, size, layout)
    module = FactorizedReduction(4, 6, NORM).double()
    expected = references.factorized_reduction(x, module)
    assert_same(module(F.relu(x)), expected, x, *module.parameters())
    assert module(F.relu(x)).shape[2:] == (math.ceil(size[0] / 2), math.ceil(size[1] / 2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(6, 6), (7, 4)])
@pytest.mark.parametrize(("in_channels", "stride"), [(8, 1), (8, 2), (6, 1), (6, 2)])
@pytest.mark.parametrize("name", OPERATION_NAMES)
def test_operation_equals_its_definition(
    references: ModuleType, name: str, in_channels: int, stride: int, size: tuple[int, int], layout: torch.memory_format
) -> None:
    x = random_input(in_channels, size, layout)
    module = build_operation(name, in_channels, 8, stride, NORM).double()
    for parameter in module.parameters():  # gammas and betas that matter
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    output = module(F.relu(x) if isinstance(module, Rectified) else x)
    assert_same(output, references.operation(name, x, module, stride), x, *module.parameters())
    assert output.shape == (3, 8, math.ceil(size[0] / stride), math.ceil(size[1] / stride))


def test_operation_below_four_filters_has_no_bottleneck(references: ModuleType) -> None:
    x = random_input(3, (5, 6), torch.contiguous_format)
    for name in ("3x3", "1x7_7x1"):
        module = build_operation(name, 3, 3, 2, NORM).double()
        assert_same(module(F.relu(x)), references.operation(name, x, module, 2), x, *module.parameters())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", OPERATION_NAMES)
def test_operation_keeps_the_channels_last_layout(name: str, stride: int) -> None:
    module = build_operation(name, 8, 8, stride, NORM).to(memory_format=torch.channels_last)
    output = module(torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last))
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_unknown_operation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"operation 'min3': expected one of none, 1x1, 3x3"):
        build_operation("min3", 8, 8, 1, NORM)


@pytest.mark.parametrize(
    ("module", "fan_out"),
    [(Conv(256, 64), 64), (Conv(64, 32, (1, 7)), 32 * 7), (Conv(512, 512, 3, groups=512), 9)],
)
def test_weights_start_as_a_truncated_normal_scaled_by_fan_out(module: Conv, fan_out: int) -> None:
    std = math.sqrt(2.6 / fan_out)
    weight = module.weight.detach()
    assert weight.abs().max() <= 2 * std
    assert weight.abs().max() > 1.8 * std
    assert weight.var().item() == pytest.approx(2.0 / fan_out, rel=0.08)
    assert abs(weight.mean().item()) < 0.08 * std
