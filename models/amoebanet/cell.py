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

from .genotypes import NUM_PAIRS, CellGenotype
from .operations import FactorizedReduction, Norm, Rectified, build_operation, pointwise

# Operations that take a state as it is; the others begin with a ReLU.
PLAIN = ("none", "max2", "max3", "avg3")


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

    `pairs` makes it a part of a cell, so that a network can be cut within: a part that does not begin at pair 0 takes
    (current, what it needs of earlier states, ...), which is what the part before it hands on.
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
        pairs: range = range(NUM_PAIRS),
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.pairs = pairs
        channels = [filters, current_channels if previous_channels is None else filters]
        channels += [filters] * (len(genotype.used) - 2)
        if pairs.start == 0:
            self.current = pointwise(current_channels, filters, norm)
            self.previous: nn.Module = nn.Identity()
            if previous_channels is not None and after_reduction:
                self.previous = FactorizedReduction(previous_channels, filters, norm)
            elif previous_channels is not None and previous_channels != filters:
                self.previous = pointwise(previous_channels, filters, norm)

        operations: dict[int, nn.Module] = {}
        for index in range(2 * pairs.start, 2 * pairs.stop):
            state = genotype.inputs[index]
            stride = 2 if reduction and state < 2 else 1
            operations[index] = build_operation(genotype.operations[index], channels[state], filters, stride, norm)
        self.operations = nn.ModuleDict({str(index): operation for index, operation in operations.items()})
        self.matches = nn.ModuleDict()
        if pairs.stop == NUM_PAIRS:
            # A state that the output needs in another size or width. It happens to no state of B and D.
            for state in genotype.outputs:
                if reduction and state < 2:
                    self.matches[str(state)] = FactorizedReduction(channels[state], filters, norm)
                elif channels[state] != filters:
                    self.matches[str(state)] = pointwise(channels[state], filters, norm)
        self.drop_path = DropPath(drop_path)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states: dict[int, Tensor] = {}
        rectified: dict[int, Tensor] = {}
        if self.pairs.start == 0:
            previous, current, *rest = (inputs, F.relu(inputs)) if isinstance(inputs, Tensor) else inputs
            states[0], states[1] = self.current(current), self.previous(previous)
        else:
            current, *carried = inputs
            needed = _needed_from(self.genotype, self.pairs.start)
            for (state, is_rectified), tensor in zip(needed, carried, strict=False):
                (rectified if is_rectified else states)[state] = tensor
            rest = carried[len(needed) :]

        def rectify(state: int) -> Tensor:
            if state not in rectified:
                rectified[state] = F.relu(states[state])
            return rectified[state]

        def operate(index: int) -> Tensor:
            operation, state = self.operations[str(index)], self.genotype.inputs[index]
            output: Tensor = operation(rectify(state) if isinstance(operation, Rectified) else states[state])
            return output if self.genotype.operations[index] == "none" else self.drop_path(output)

        for pair in self.pairs:
            states[2 + pair] = operate(2 * pair) + operate(2 * pair + 1)
        if self.pairs.stop < NUM_PAIRS:
            handed_on = _needed_from(self.genotype, self.pairs.stop)
            return (
                current,
                *(rectify(state) if is_rectified else states[state] for state, is_rectified in handed_on),
                *rest,
            )
        for name, match in self.matches.items():
            states[int(name)] = match(rectify(int(name)))
        output = rectified_concat([states[state] for state in self.genotype.outputs])
        return current, output, *rest


@functools.cache
def _needed_from(genotype: CellGenotype, pair: int) -> tuple[tuple[int, bool], ...]:
    """What the operations from `pair` on and the output need of the states before it: (state, whether rectified).

    Both forms of a state where both are needed: the ReLU is taken once, in the part that has the state.
    """
    known = range(2 + pair)
    needed = {(state, False) for state in genotype.outputs if state in known}
    for index in range(2 * pair, 2 * NUM_PAIRS):
        name, state = genotype.operations[index], genotype.inputs[index]
        if state in known:
            needed.add((state, name not in PLAIN))
            if name == "none" and state < 2:  # may have become a convolution, which begins with a ReLU
                needed.add((state, True))
    return tuple(sorted(needed))
