"""A backward pass in two halves: the gradients of inputs first, those of weights when there is time for them.

The stage before waits for the gradients of a stage's inputs, nobody for those of its weights (Qi et al. 2023, arXiv
2401.10241). So in a pass under :class:`Deferral` the products with weights, where most of the work is, give only the
former in the backward pass, and what the latter need waits until :meth:`Deferral.run`. They are the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NUM_AXES = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_OPERANDS = ((0, "input"), (1, "weight"))
# Notes that the gradients of a weight and perhaps a bias are wanted: (gradient of the output, input).
_Later: TypeAlias = Callable[[Tensor, Tensor], None]


class Deferral(TorchFunctionMode):
    """While active, F.linear and convolutions leave the gradients of weights that are trained to :meth:`run`.

    All else, such as batch norm's few weights, is left to the backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Tensor] = []  # numbers whose backward passes give the gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _operands(func, args, kwargs) is None:
            return func(*args, **kwargs)
        return self._linear(*args, **kwargs) if func is F.linear else self._convolution(func, *args, **kwargs)

    def run(self) -> None:
        """Adds the gradients that wait to the weights' ``.grad``."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            torch.autograd.backward(waiting)

    def discard(self) -> None:
        """Forgets what waits."""
        self._waiting.clear()

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        input, weight, bias = _cast(input, weight, bias)

        def later(grad: Tensor, input: Tensor) -> None:
            self._waiting.append(_LinearWeights.apply(grad, input, weight, bias))

        output: Tensor = _Linear.apply(input, weight.detach(), _detached(bias), later)
        return output

    def _convolution(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        input, weight, bias = _cast(input, weight, bias)
        axes = _NUM_AXES[func]
        numbers = (_each(stride, axes), _each(padding, axes), _each(dilation, axes), False, (0,) * axes, groups)

        def later(grad: Tensor, input: Tensor) -> None:
            self._waiting.append(_ConvolutionWeights.apply(grad, input, weight, bias, numbers))

        output: Tensor = _Convolution.apply(input, weight.detach(), _detached(bias), numbers, later)
        return output


class Products(TorchFunctionMode):
    """Notes what a :class:`Deferral` would hold: for every product with a weight its input, and its output for the
    gradient, which is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if (operands := _operands(func, args, kwargs)) is not None:
            self.inputs.append(operands[0])
            self.outputs.append(output)
        return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, later: _Later) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.later = later
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        _note(ctx.later, grad_outputs[0], input)
        return grad_outputs[0].matmul(weight), None, None, None


class _LinearWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(grad, input)
        ctx.has_bias = bias is not None
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        del grad_outputs  # of a number that stands for the sums to be done
        grad, input = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        bias_gradient = grad.sum(tuple(range(grad.dim() - 1))) if ctx.has_bias and grad.dim() > 1 else grad
        return None, None, rows.t().mm(input.reshape(-1, input.shape[-1])), bias_gradient if ctx.has_bias else None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, numbers: Any, later: _Later) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.numbers, ctx.later = numbers, later
        output: Tensor = torch.ops.aten.convolution(input, weight, bias, *numbers)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        _note(ctx.later, grad_outputs[0], input)
        gradients = torch.ops.aten.convolution_backward(
            grad_outputs[0], input, weight, None, *ctx.numbers, (True, False, False)
        )
        return gradients[0], None, None, None, None


class _ConvolutionWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, numbers: Any) -> Tensor:
        ctx.save_for_backward(grad, input, weight)
        ctx.numbers, ctx.has_bias = numbers, bias is not None
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        del grad_outputs
        grad, input, weight = ctx.saved_tensors
        sizes = [weight.shape[0]] if ctx.has_bias else None
        gradients = torch.ops.aten.convolution_backward(
            grad, input, weight.detach(), sizes, *ctx.numbers, (False, True, ctx.has_bias)
        )
        return None, None, gradients[1], gradients[2], None


def _note(later: _Later, grad: Tensor, input: Tensor) -> None:
    with torch.enable_grad():  # what waits is held by autograd, which counts it as it does activations
        later(grad.detach(), input.detach())


def _operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Input and weight of a product whose backward pass has two halves; None for anything else.

    Convolutions of a single picture, and with padding by name, are left to the backward pass.
    """
    if func is not F.linear and func not in _NUM_AXES:
        return None
    input, weight = (args[place] if place < len(args) else kwargs[name] for place, name in _OPERANDS)
    if not (torch.is_grad_enabled() and input.requires_grad and weight.requires_grad):
        return None
    padding = args[4] if len(args) > 4 else kwargs.get("padding", 0)
    if func is not F.linear and (input.dim() != weight.dim() or isinstance(padding, str)):
        return None
    return input, weight


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _cast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As autocast would, which does not see into functions with backward passes of their own."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return input, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _each(value: int | tuple[int, ...], num_axes: int) -> tuple[int, ...]:
    """A setting for every axis."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * num_axes if len(values) == 1 else values
