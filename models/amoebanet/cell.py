"""An AmoebaNet cell, and drop path.

A cell reads (previous, current) and hands on (current, own output); whatever else travels in the tuple passes through.
All users of a cell's output begin with a ReLU - the next two cells, the auxiliary head, the classifier - so the cell
applies it, once: what it hands on is max(x, 0). The stem's output is as it is, for the first cell takes it unchanged as
its state 1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .genotypes import CellGenotype
from .operations import FactorizedReduction, Norm, Rectified, build_operation, pointwise


class DropPath(nn.Module):
    """Drops whole samples of (N, C, H, W) in training and scales the others by 1 / keep probability.

    `set_progress` lets the drop probability grow with the training from 0 to `drop_prob`, the authors' linear schedule.
    Raises ValueError for a probability outside [0, 1).
    """

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        if not 0.0 <= drop_prob < 1.0:
            raise ValueError(f"drop_path={drop_prob}: expected a probability of at least 0 and below 1")
        self.final_drop_prob = drop_prob
        self.drop_prob = drop_prob

    def set_progress(self, fraction: float) -> None:
        """Sets the drop probability for the share of the training that is done, 0 to 1."""
        self.drop_prob = self.final_drop_prob * min(max(fraction, 0.0), 1.0)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0.0:
            return input
        keep_prob = 1.0 - self.drop_prob
        # Drawn in float32 whatever the activations are: bfloat16 has too few values between 0 and 1.
        draws = torch.rand(input.shape[0], 1, 1, 1, device=input.device)
        return input * ((draws < keep_prob) / keep_prob).to(input.dtype)

    def extra_repr(self) -> str:
        return f"final_drop_prob={self.final_drop_prob}"


class _RectifiedConcat(torch.autograd.Function):
    """relu(cat(states, dim=1)), whose backward gives every state a dense gradient of its own.

    Autograd's would give it a slice of the gradient of the whole, on which batch norm's backward is ten times slower
    (CPU, channels-last).
    """

    @staticmethod
    def forward(ctx: Any, *states: Tensor) -> Tensor:
        output = torch.cat(states, dim=1).relu_()
        ctx.save_for_backward(output)
        ctx.widths = [state.shape[1] for state in states]
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        (output,) = ctx.saved_tensors
        grads = torch.split(grad_outputs[0], ctx.widths, dim=1)
        parts = torch.split(output, ctx.widths, dim=1)
        return tuple(torch.ops.aten.threshold_backward(grad, part, 0) for grad, part in zip(grads, parts, strict=True))


def rectified_concat(states: list[Tensor]) -> Tensor:
    """relu(cat(states, dim=1)) of tensors (N, C_i, H, W); the widest dtype wins."""
    dtype = functools.reduce(torch.promote_types, [state.dtype for state in states])
    output: Tensor = _RectifiedConcat.apply(*(state.to(dtype) for state in states))
    return output


class Cell(nn.Module):
    """One cell: (previous, current, ...) to (current, output, ...); the first cell takes one tensor, the stem's output.

    The arguments are the channels of the two inputs (`previous_channels` None for the first cell), the `filters` of
    every state, whether the cell reduces (halves the size) and whether the one before it did, so that `previous` is
    twice as large as `current`. The output has `filters` channels for each of the genotype's outputs.
    """

    def __init__(
        self,
        genotype: CellGenotype,
        previous_channels: int | None,
        current_channels: int,
        filters: int,
        *,
        reduction: bool,
        after_reduction: bool,
        drop_path: float,
        norm: Norm,
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.current = pointwise(current_channels, filters, norm)
        self.previous: nn.Module = nn.Identity()
        channels = [filters, current_channels if previous_channels is None else filters]
        if previous_channels is not None and after_reduction:
            self.previous = FactorizedReduction(previous_channels, filters, norm)
        elif previous_channels is not None and previous_channels != filters:
            self.previous = pointwise(previous_channels, filters, norm)
        channels += [filters] * (len(genotype.used) - 2)

        self.operations = nn.ModuleList()
        for name, state in zip(genotype.operations, genotype.inputs, strict=True):
            stride = 2 if reduction and state < 2 else 1
            self.operations.append(build_operation(name, channels[state], filters, stride, norm))
        # A state that the output needs in another size or width. It happens to no state of B and D.
        self.matches = nn.ModuleDict()
        for state in genotype.outputs:
            if reduction and state < 2:
                self.matches[str(state)] = FactorizedReduction(channels[state], filters, norm)
            elif channels[state] != filters:
                self.matches[str(state)] = pointwise(channels[state], filters, norm)
        self.drop_path = DropPath(drop_path)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        previous, current, *rest = (inputs, F.relu(inputs)) if isinstance(inputs, Tensor) else inputs
        states: list[Tensor] = [self.current(current), self.previous(previous)]
        rectified: dict[int, Tensor] = {}

        def rectify(state: int) -> Tensor:
            if state not in rectified:
                rectified[state] = F.relu(states[state])
            return rectified[state]

        def operate(index: int) -> Tensor:
            operation, state = self.operations[index], self.genotype.inputs[index]
            output: Tensor = operation(rectify(state) if isinstance(operation, Rectified) else states[state])
            return output if self.genotype.operations[index] == "none" else self.drop_path(output)

        for index in range(0, len(self.operations), 2):
            states.append(operate(index) + operate(index + 1))
        for state, match in self.matches.items():
            states[int(state)] = match(rectify(int(state)))
        output = rectified_concat([states[state] for state in self.genotype.outputs])
        return current, output, *rest
