"""What every layer costs: counted on the meta device without computing anything, or measured on the device.

Counting runs the layers on meta tensors, so a network of any size is costed in no memory. Floating-point operations
follow torch.utils.flop_counter; bytes are those of every operation's inputs and outputs, which is what bounds layers
such as batch normalisation and pools; how many operations they start rules small layers. Measuring leaves no trace: it
works on copies of what it could change.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from .layers import Layers, named_layers
from .microbatch import Value, flatten, unflatten
from .randomness import preserved_generators
from .recording import does_work

# What one core of a current server CPU computes (about 97 GFLOP/s) while it moves a byte (8 GB/s, its neighbour busy
# too) and while it starts an operation (6.7 us). Only ratios between layers matter for the cut.
FLOPS_PER_BYTE = 12.0
FLOPS_PER_OPERATION = 650e3

NUM_WARMUPS = 2  # passes over a group of layers that do not count,
LONGEST_S = 10.0  # and seconds after which, beyond two passes, there are no more
GROUP_BYTES = 2**30  # weights of the layers that are timed together on a CPU


@dataclass(frozen=True)
class LayerCost:
    """Costs of a layer's forward pass on one micro-batch."""

    name: str
    num_parameters: int
    num_flops: int
    num_bytes_moved: int
    num_operations: int
    num_bytes_out: int

    @property
    def work(self) -> float:
        """The cost by which a network is cut, see `combined_work`."""
        return combined_work(self.num_flops, self.num_bytes_moved, self.num_operations)


def combined_work(num_flops: float, num_bytes_moved: float, num_operations: float) -> float:
    """What a core does for a layer, in floating-point operations of the same duration."""
    return num_flops + FLOPS_PER_BYTE * num_bytes_moved + FLOPS_PER_OPERATION * num_operations


def count_costs(layers: Layers, sample: Value) -> tuple[LayerCost, ...]:
    """Costs of every layer for a micro-batch like ``sample``, whose values are not looked at.

    Raises whatever a layer raises that cannot run on meta tensors.
    """
    tensors, is_tuple = flatten(sample, "the sample")
    value = unflatten([tensor.to("meta") for tensor in tensors], is_tuple)
    costs = []
    with preserved_generators(torch.device("cpu")), torch.no_grad():
        for index, layer in enumerate(named_layers(layers)):
            module = layer.build_without_data(index)
            # A module that exists already keeps its weights: stand-ins of the same shapes take their place.
            stand_ins = {
                name: torch.empty_like(tensor, device="meta")
                for name, tensor in (*module.named_parameters(), *module.named_buffers())
            }
            traffic = _Traffic()
            with FlopCounterMode(display=False) as flops, traffic:
                value = torch.func.functional_call(module, stand_ins, (value,))
            out, _ = flatten(value, f"layer {layer.name!r}")
            costs.append(
                LayerCost(
                    layer.name,
                    sum(parameter.numel() for parameter in module.parameters()),
                    int(flops.get_total_flops()),
                    traffic.num_bytes,
                    traffic.num_operations,
                    sum(tensor.nbytes for tensor in out),
                )
            )
    return tuple(costs)


def measure_layers(
    layers: Layers, sample: Value, device: torch.device, num_repeats: int = 10, seed: int = 0
) -> tuple[float, ...]:
    """Median seconds of each layer's forward and backward pass on ``sample``, after the first ones.

    As in training: gradients accumulate, and what needs none gets none. On a GPU one layer at a time is on the device.
    On a CPU consecutive ones with GROUP_BYTES of weights run together, forward and then backward: where a layer finds
    its data, and whether its memory is new, makes up to a half of its time there. Modules given as such keep weights,
    buffers, gradients, modes and random states.
    """
    tensors, is_tuple = flatten(sample, "the sample")
    values: Value = unflatten([tensor.to(device) for tensor in tensors], is_tuple)
    largest_bytes = GROUP_BYTES if device.type == "cpu" else 0
    waiting = deque(enumerate(named_layers(layers)))
    seconds: list[float] = []
    with preserved_generators(device):
        while waiting:
            group: list[nn.Module] = []
            num_bytes = 0
            while waiting and (not group or num_bytes < largest_bytes):
                index, layer = waiting.popleft()
                group.append(layer.build(index, seed))
                num_bytes += sum(parameter.nbytes for parameter in group[-1].parameters())
            times, values = _time_together(group, values, device, num_repeats)
            seconds += times
    return tuple(seconds)


def _time_together(
    modules: Sequence[nn.Module], value: Value, device: torch.device, num_repeats: int
) -> tuple[list[float], Value]:
    """Median seconds of each module's passes, and the last one's outputs; the modules stay as they are."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_untouched(module))
            module.to(device).train()
        runs: list[list[float]] = []
        end = time.perf_counter() + LONGEST_S
        while len(runs) < 2 or (len(runs) < NUM_WARMUPS + num_repeats and time.perf_counter() < end):
            times, outputs = _time_once(modules, value, device)
            runs.append(times)
    warm = runs[min(NUM_WARMUPS, len(runs) - 1) :]
    return [statistics.median(of_module) for of_module in zip(*warm, strict=True)], outputs


def _time_once(modules: Sequence[nn.Module], value: Value, device: torch.device) -> tuple[list[float], Value]:
    """Seconds of each module's passes, and the last one's outputs; values require gradients where training's do."""
    clock = partial(_time, device)
    seconds: list[float] = []
    passed: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []  # each module's inputs and outputs
    with torch.enable_grad():
        for module in modules:
            inputs, is_tuple = flatten(value, "the input")
            entries = unflatten([leaf.clone() for leaf in inputs], is_tuple)
            began = clock()
            out, is_tuple = flatten(module(entries), "the layer")
            seconds.append(clock() - began)
            passed.append((inputs, out))
            value = unflatten([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in out], is_tuple)
        gradients: list[Tensor | None] = [torch.ones_like(tensor) for tensor in out]
        while passed:
            inputs, out = passed.pop()
            pairs = [(root, g) for root, g in zip(out, gradients, strict=True) if root.requires_grad and g is not None]
            began = clock()
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
            seconds[len(passed)] += clock() - began
            gradients = [leaf.grad for leaf in inputs]
            for leaf in inputs:
                leaf.grad = None
    return seconds, value


def _time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _untouched(module: nn.Module) -> Any:
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}
    modes = [(child, child.training) for child in module.modules()]
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
        for child, training in modes:
            child.training = training


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that do work, and the bytes of the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        if does_work(func):
            self.num_operations += 1
            self.num_bytes += sum(item.nbytes for item in tree_iter((args, kwargs, out)) if isinstance(item, Tensor))
        return out
