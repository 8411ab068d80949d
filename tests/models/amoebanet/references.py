"""Plain definitions to compare with: loops over output pixels, no torch pooling, convolution or norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def windows(size: int, kernel: int, stride: int, same: bool = True) -> list[list[tuple[int, int]]]:
    """For each output index along an axis: the pairs (offset in the kernel, input index) inside the picture."""
    if same:
        count = math.ceil(size / stride)
        front = max((count - 1) * stride + kernel - size, 0) // 2
    else:
        count, front = (size - kernel) // stride + 1, 0
    return [
        [(k, i * stride - front + k) for k in range(kernel) if 0 <= i * stride - front + k < size] for i in range(count)
    ]


def pool(x: Tensor, kernel: int, stride: int, kind: str) -> Tensor:
    rows = windows(x.shape[2], kernel, stride)
    columns = windows(x.shape[3], kernel, stride)
    lines = []
    for row in rows:
        line = []
        for column in columns:
            values = torch.stack([x[:, :, i, j] for _, i in row for _, j in column])
            line.append(values.sum(0) / len(values) if kind == "avg" else values.max(0).values)
        lines.append(torch.stack(line, dim=-1))
    return torch.stack(lines, dim=-2)


def conv(x: Tensor, weight: Tensor, stride: tuple[int, int] = (1, 1), groups: int = 1, same: bool = True) -> Tensor:
    rows = windows(x.shape[2], weight.shape[2], stride[0], same)
    columns = windows(x.shape[3], weight.shape[3], stride[1], same)
    per_group = weight.shape[0] // groups
    lines = []
    for row in rows:
        line = []
        for column in columns:
            total = x.new_zeros(x.shape[0], weight.shape[0])
            for a, i in row:
                for b, j in column:
                    inputs = x[:, :, i, j].reshape(x.shape[0], groups, -1)
                    kernels = weight[:, :, a, b].reshape(groups, per_group, -1)
                    total = total + (inputs[:, :, None, :] * kernels[None]).sum(-1).flatten(1)
            line.append(total)
        lines.append(torch.stack(line, dim=-1))
    return torch.stack(lines, dim=-2)


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def norm(x: Tensor, module: nn.Module) -> Tensor:
    """Batch norm in training: the batch's own mean and biased variance."""
    assert isinstance(module, nn.BatchNorm2d)
    count = x.shape[0] * x.shape[2] * x.shape[3]
    mean = x.sum(dim=(0, 2, 3)) / count
    centred = x - mean[:, None, None]
    variance = (centred**2).sum(dim=(0, 2, 3)) / count
    scale = module.weight / (variance + module.eps) ** 0.5
    return centred * scale[:, None, None] + module.bias[:, None, None]


def factorized_reduction(x: Tensor, module: nn.Module) -> Tensor:
    """Of the state itself: ReLU first."""
    x = relu(x)
    height, width = math.ceil(x.shape[2] / 2), math.ceil(x.shape[3] / 2)
    shifted = x.new_zeros(*x.shape[:2], 2 * height, 2 * width)
    shifted[:, :, : x.shape[2] - 1, : x.shape[3] - 1] = x[:, :, 1:, 1:]
    first = conv(x[:, :, ::2, ::2], module.path1.weight)
    second = conv(shifted[:, :, ::2, ::2], module.path2.weight)
    return norm(torch.cat([first, second], dim=1), module.norm)


def operation(name: str, x: Tensor, module: nn.Module, stride: int) -> Tensor:
    """The operation as the paper's code defines it, its first ReLU included, with the weights of `module`."""
    layers = dict(module.named_children())
    if name == "1x1" or (name == "none" and layers):
        return norm(conv(relu(x), layers["conv"].weight, (stride, stride)), layers["norm"])
    if name == "none":
        return x
    if name in ("avg3", "max2", "max3"):
        x = pool(x, int(name[3:]), stride, name[:3])
        return norm(conv(x, layers["conv"].weight), layers["norm"]) if layers else x
    if name in ("sep3", "sep5"):
        for index in (1, 2):
            weight = layers[f"depthwise{index}"].weight
            x = conv(relu(x), weight, (stride, stride) if index == 1 else (1, 1), groups=weight.shape[0])
            x = norm(conv(x, layers[f"pointwise{index}"].weight), layers[f"norm{index}"])
        return x
    strides = {"3x3": [(stride, stride)], "1x7_7x1": [(1, stride), (stride, 1)]}[name]
    if "reduce" in layers:
        x = norm(conv(relu(x), layers["reduce"].weight), layers["reduce_norm"])
    for index, step in enumerate(strides, start=1):
        x = norm(conv(relu(x), layers[f"conv{index}"].weight, step), layers[f"norm{index}"])
    if "expand" in layers:
        x = norm(conv(relu(x), layers["expand"].weight), layers["expand_norm"])
    return x


def cell(module: nn.Module, previous: Tensor, current: Tensor, reduction: bool) -> Tensor:
    """A cell's output before the ReLU of its readers, from its inputs before theirs; no operation shares a ReLU."""
    genotype = module.genotype
    states = [norm(conv(relu(current), module.current.conv.weight), module.current.norm)]
    if hasattr(module.previous, "path1"):
        states.append(factorized_reduction(previous, module.previous))
    elif hasattr(module.previous, "conv"):
        states.append(norm(conv(relu(previous), module.previous.conv.weight), module.previous.norm))
    else:
        states.append(previous)
    for pair in range(5):
        outputs = []
        for index in (2 * pair, 2 * pair + 1):
            state = genotype.inputs[index]
            stride = 2 if reduction and state < 2 else 1
            outputs.append(operation(genotype.operations[index], states[state], module.operations[str(index)], stride))
        states.append(outputs[0] + outputs[1])
    return torch.cat([states[state] for state in range(7) if not genotype.used[state]], dim=1)
