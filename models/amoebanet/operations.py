"""The operations of an AmoebaNet cell, and the layers that they are made of.

As in the authors' code (tensorflow/tpu `models/official/amoeba_net/network_utils.py`), with TensorFlow's SAME padding:
an axis of n values gives ceil(n / stride), and odd padding has its larger half at the bottom and the right.

Every operation with a convolution begins with a ReLU. It is left to the caller here (class `Rectified`), because
several operations read the same state and one ReLU serves them all.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..products import product

Norm = Callable[[int], nn.Module]

OPERATION_NAMES = ("none", "1x1", "3x3", "1x7_7x1", "sep3", "sep5", "avg3", "max2", "max3")


@torch.no_grad()
def truncated_normal_(tensor: Tensor, std: float) -> None:
    """Fills the tensor from a normal distribution of deviation `std` cut at two deviations, as TensorFlow's.

    By the inverse of the distribution, one draw a value: torch's own draws again until all values fit, which tensors
    without data (FakeTensor) cannot tell.
    """
    bound = math.erf(math.sqrt(2.0))
    tensor.uniform_(-bound, bound).erfinv_().mul_(std * math.sqrt(2.0))


def init_weight(weight: Tensor, groups: int = 1) -> None:
    """Draws a weight (out, in / groups, ...) from a truncated normal of variance 2 / fan-out.

    TensorFlow's `contrib.layers.variance_scaling_initializer(mode="FAN_OUT")`: the fan-out of a depthwise kernel counts
    the one filter of its channel, and 1.3 makes up for the variance lost by cutting at two standard deviations.
    """
    fan_out = weight.shape[0] // groups * math.prod(weight.shape[2:])
    truncated_normal_(weight, math.sqrt(1.3 * 2.0 / fan_out))


class Conv(nn.Conv2d):
    """Convolution without bias, SAME padding as TensorFlow's: (N, C, H, W) to (N, out, ceil(H / s), ceil(W / s)).

    `same=False` pads nothing (VALID). Raises ValueError for an even kernel with SAME padding.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        groups: int = 1,
        same: bool = True,
    ) -> None:
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        if same and not all(k % 2 for k in size):
            raise ValueError(f"kernel={kernel}: expected odd sizes with SAME padding")
        self._pad = (size[0] // 2, size[1] // 2) if same else (0, 0)
        super().__init__(in_channels, out_channels, size, stride, self._pad, groups=groups, bias=False)
        self._is_product = size == (1, 1) and self.stride == (1, 1) and groups == 1

    def reset_parameters(self) -> None:
        init_weight(self.weight, self.groups)

    def forward(self, input: Tensor) -> Tensor:
        if self._is_product and input.device.type == "cpu" and input.is_contiguous(memory_format=torch.channels_last):
            # The same sums as a matrix product over the channels. On one thread torch's 1x1 convolution is slower: it
            # clears every gradient before it writes it.
            return product(input.permute(0, 2, 3, 1), self.weight.flatten(1)).permute(0, 3, 1, 2)
        # Symmetric padding is SAME for stride 1 and for odd sizes. An even size under stride 2 wants one less in front.
        shift = [
            int(stride == 2 and pad > 0 and size % 2 == 0)
            for stride, pad, size in zip(self.stride, self._pad, input.shape[2:], strict=True)
        ]
        if not any(shift):
            return super().forward(input)
        padded = F.pad(input, (0, shift[1], 0, shift[0]))
        padding = (self._pad[0] - shift[0], self._pad[1] - shift[1])
        return F.conv2d(padded, self.weight, None, self.stride, padding, 1, self.groups)


class MaxPool(nn.Module):
    """Largest value of each kernel x kernel window, SAME padding, which never wins: H to ceil(H / s), W alike."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, input: Tensor) -> Tensor:
        if self.stride == 1 and self.kernel == 2:
            return F.max_pool2d(F.pad(input, (0, 1, 0, 1), value=-math.inf), 2, 1)
        # Where the padding is larger behind than in front, ceil_mode lets the last window hang over the edge: no copy.
        before = [_padding_before(size, self.kernel, self.stride) for size in input.shape[2:]]
        return F.max_pool2d(input, self.kernel, self.stride, before, ceil_mode=True)

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, stride={self.stride}"


class AvgPool(nn.Module):
    """Mean of each 3 x 3 window's values that are not padding, SAME padding: H to ceil(H / s), W alike."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, input: Tensor) -> Tensor:
        before = [_padding_before(size, 3, self.stride) for size in input.shape[2:]]
        return F.avg_pool2d(input, 3, self.stride, before, ceil_mode=True, count_include_pad=False)

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


def _padding_before(size: int, kernel: int, stride: int) -> int:
    """Values that TensorFlow's SAME padding puts before an axis of `size` values."""
    return max((math.ceil(size / stride) - 1) * stride + kernel - size, 0) // 2


class Rectified(nn.Sequential):
    """Layers that expect max(x, 0) of the state x they act on."""


class _DiagonalPhases(torch.autograd.Function):
    """The pixels at even rows and columns, and those at odd ones, of (N, C, H, W): twice H to ceil(H / 2), W alike.

    Beyond the edge there are zeros.
    Slicing does the same, but autograd would build a gradient of the full size for each slice and add them up.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, Tensor]:
        is_channels_last = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
        ctx.memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
        ctx.shape = input.shape
        even, odd = input[:, :, ::2, ::2], input[:, :, 1::2, 1::2]
        if even.shape != odd.shape:
            odd = F.pad(odd, (0, even.shape[3] - odd.shape[3], 0, even.shape[2] - odd.shape[2]))
        return even.contiguous(memory_format=ctx.memory_format), odd.contiguous(memory_format=ctx.memory_format)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        even, odd = grad_outputs
        height, width = ctx.shape[2:]
        grad = torch.empty(ctx.shape, dtype=even.dtype, device=even.device, memory_format=ctx.memory_format).zero_()
        grad[:, :, ::2, ::2] = even
        grad[:, :, 1::2, 1::2] = odd[:, :, : height // 2, : width // 2]
        return grad


class FactorizedReduction(nn.Module):
    """Halves H and W, rounding up, in two paths: H to ceil(H / 2), W alike, in to out channels. Expects max(x, 0).

    A 1x1 convolution of every second pixel gives half of the channels, one of the pixels diagonally behind them the
    other half; then batch norm.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        super().__init__()
        half = out_channels // 2
        self.path1 = Conv(in_channels, half)
        self.path2 = Conv(in_channels, out_channels - half)
        self.norm = norm(out_channels)

    def forward(self, input: Tensor) -> Tensor:
        even, odd = _DiagonalPhases.apply(input)
        output: Tensor = self.norm(torch.cat([self.path1(even), self.path2(odd)], dim=1))
        return output


def pointwise(in_channels: int, out_channels: int, norm: Norm, stride: int = 1) -> Rectified:
    """1x1 convolution and batch norm, after a ReLU."""
    return Rectified(OrderedDict(conv=Conv(in_channels, out_channels, stride=stride), norm=norm(out_channels)))


def separable(in_channels: int, out_channels: int, kernel: int, stride: int, norm: Norm) -> Rectified:
    """Twice depthwise kernel x kernel, pointwise, batch norm, each after a ReLU; the first depthwise has the stride."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["depthwise1"] = Conv(in_channels, in_channels, kernel, stride, groups=in_channels)
    layers["pointwise1"] = Conv(in_channels, out_channels)
    layers["norm1"] = norm(out_channels)
    layers["relu"] = nn.ReLU(inplace=True)
    layers["depthwise2"] = Conv(out_channels, out_channels, kernel, groups=out_channels)
    layers["pointwise2"] = Conv(out_channels, out_channels)
    layers["norm2"] = norm(out_channels)
    return Rectified(layers)


def bottleneck(
    in_channels: int, out_channels: int, kernels: tuple[tuple[int, int], ...], stride: int, norm: Norm
) -> Rectified:
    """1x1 to a quarter of the filters, a convolution per kernel, 1x1 back; each after a ReLU and before a batch norm.

    A kernel of 1 along an axis does not stride along it. Below four filters there is no bottleneck, as in the authors'
    code.
    """
    width = out_channels // 4
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = in_channels
    if width:
        layers["reduce"], layers["reduce_norm"] = Conv(in_channels, width), norm(width)
        channels = width
    for index, kernel in enumerate(kernels, start=1):
        if layers:
            layers[f"relu{index}"] = nn.ReLU(inplace=True)
        strides = (stride if kernel[0] > 1 else 1, stride if kernel[1] > 1 else 1)
        layers[f"conv{index}"] = Conv(channels, width or out_channels, kernel, strides)
        layers[f"norm{index}"] = norm(width or out_channels)
        channels = width or out_channels
    if width:
        layers["expand_relu"] = nn.ReLU(inplace=True)
        layers["expand"], layers["expand_norm"] = Conv(width, out_channels), norm(out_channels)
    return Rectified(layers)


def build_operation(name: str, in_channels: int, filters: int, stride: int, norm: Norm) -> nn.Module:
    """The module of the operation `name`; one of class `Rectified` expects max(x, 0) of its state x, the others x.

    Raises ValueError for an unknown name.
    """
    if name == "1x1" or (name == "none" and (stride > 1 or in_channels != filters)):
        return pointwise(in_channels, filters, norm, stride)
    if name == "none":
        return nn.Identity()
    if name == "3x3":
        return bottleneck(in_channels, filters, ((3, 3),), stride, norm)
    if name == "1x7_7x1":
        return bottleneck(in_channels, filters, ((1, 7), (7, 1)), stride, norm)
    if name in ("sep3", "sep5"):
        return separable(in_channels, filters, int(name[3:]), stride, norm)
    if name in ("avg3", "max2", "max3"):
        pool = AvgPool(stride) if name == "avg3" else MaxPool(int(name[3:]), stride)
        if in_channels == filters:
            return pool
        return nn.Sequential(OrderedDict(pool=pool, conv=Conv(in_channels, filters), norm=norm(filters)))
    raise ValueError(f"operation {name!r}: expected one of {', '.join(OPERATION_NAMES)}")
